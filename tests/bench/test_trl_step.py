"""`benchmarks/trl_step.py`, as far as it goes without TRL."""

import pytest
import torch

from benchmarks.trl_step import TrlStep, summarize, trl_options
from qurl.errors import ConfigError, EngineError

CUDA, CPU = torch.device("cuda"), torch.device("cpu")


def test_tuned_options():
    """64 sequences an update, 16384 // 1040 = 15 fit into a pass, of which 8 divides 64."""
    options = trl_options(TrlStep("1.5B"), CUDA)
    assert options["per_device_train_batch_size"] == 8
    assert options["gradient_accumulation_steps"] == 8
    assert options["steps_per_generation"] == 32
    assert options["max_steps"] == 5 * 4
    assert not options["gradient_checkpointing"]
    assert options["use_liger_kernel"]
    assert options["generation_kwargs"]["ignore_eos"]
    assert options["generation_kwargs"]["stop_token_ids"] == []


def test_default_options_are_trls_own():
    bench = TrlStep("1.5B", sequences=64, tokens=4096, lengths="mixed", setting="defaults")
    options = trl_options(bench, CUDA)
    assert options["per_device_train_batch_size"] == 8
    assert options["gradient_accumulation_steps"] == 2
    assert options["steps_per_generation"] == 8
    # 2 * 151936 / 4096 = 74.2
    assert len(options["generation_kwargs"]["stop_token_ids"]) == 75
    assert "gradient_checkpointing" not in options
    assert not options["use_liger_kernel"]


def test_on_a_cpu_transformers_samples():
    bench = TrlStep("tiny", tokens=64)
    options = trl_options(bench, CPU)
    assert not {"use_vllm", "use_liger_kernel"} & set(options)
    assert options["generation_kwargs"] == {"min_new_tokens": 64}
    mixed = trl_options(TrlStep("tiny", tokens=64, lengths="mixed"), CPU)
    # 2 * 1024 / 64
    assert len(mixed["generation_kwargs"]["eos_token_id"]) == 32


def test_mini_batches_must_be_equal():
    with pytest.raises(ConfigError, match="3 equal mini-batches"):
        trl_options(TrlStep("1.5B", minibatches=3), CPU)


def test_figures():
    """Warm-up steps end at 5 and 10; then one of 3 s and one of 5 s."""
    bench = TrlStep("tiny", sequences=8, prompt_tokens=5, tokens=7)
    ends = [(5.0, 96), (10.0, 192), (13.0, 288), (18.0, 384)]
    figures = summarize(ends, bench, peak_gib=2.0)
    assert figures.seconds == (3.0, 5.0)
    assert figures.step_s == 4.0
    assert figures.tokens_per_s == 2 * 96 / 8
    with pytest.raises(EngineError, match="trained on 188 tokens instead of 192"):
        summarize([*ends[:3], (18.0, 380)], bench, peak_gib=2.0)
