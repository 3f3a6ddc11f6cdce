"""`benchmarks/vllm_rollout.py`, as far as it goes without vLLM."""

import json
import sys
import types
from pathlib import Path

import pytest
import torch

from benchmarks.vllm_rollout import VllmContender, fill_codes_, import_vllm, kv_bytes, plan_vllm
from qurl.bench.judge import check_completions
from qurl.bench.rollout import RolloutBench
from qurl.bench.shapes import SHAPES
from qurl.bench.workload import WORKLOADS, Setup, Workload
from qurl.errors import ConfigError, EngineError
from qurl.run.export import describe_codes
from qurl.types import Completion


@pytest.mark.parametrize(
    ("flags", "message"),
    [({"quant": "int4"}, "not --quant int4"), ({"quant": "none,int8"}, "one quant and one kv")],
)
def test_refusals(flags, message):
    with pytest.raises(ConfigError, match=message):
        plan_vllm(RolloutBench(**flags))


def test_one_setup_and_its_workloads():
    setup, workloads = plan_vllm(RolloutBench("7B", quant="fp8", kv="fp8", workload="A,B"))
    assert setup == Setup("vllm", SHAPES["7B"], "fp8", "fp8")
    assert [w.name for w in workloads] == ["A", "B"]


def test_vllm_contender(monkeypatch):
    """What it is asked for, of a stand-in that notes it."""
    asked = {}

    class LLM:
        def __init__(self, **options):
            config = json.loads((Path(options["model"]) / "config.json").read_text())
            asked.update(options, config=config)

        def apply_model(self, function):
            asked["filled"] = function

        def generate(self, prompts, params, use_tqdm):
            step = {5: types.SimpleNamespace(logprob=-1.5)}
            output = types.SimpleNamespace(token_ids=(5, 5), logprobs=[step, step])
            asked.update(prompts=prompts, params=params)
            return [types.SimpleNamespace(outputs=[output] * params["n"]) for _ in prompts]

    stand_in = types.SimpleNamespace(LLM=LLM, SamplingParams=lambda **given: given)
    monkeypatch.setitem(sys.modules, "vllm", stand_in)
    environment = {"VLLM_HOST_IP": "10.0.0.1"}
    monkeypatch.setattr("os.environ", environment)
    contender = VllmContender(Setup("vllm", SHAPES["7B"], "int8", "fp8"), [WORKLOADS["A"]])
    assert environment["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    assert environment["VLLM_HOST_IP"] == "10.0.0.1"
    workload = Workload("x", 2, 3, 4, new_tokens=2)
    problems = workload.problems(100, seed=0)
    result = contender.generate(problems, workload.params(0))
    groups = contender.read(result)
    check_completions(groups, workload)
    assert groups[1][2] == Completion([5, 5], [-1.5, -1.5], "", "length")
    assert asked["prompts"][1] == {"prompt_token_ids": list(problems[1].prompt_ids)}
    assert asked["params"]["ignore_eos"]
    assert asked["params"]["logprobs"] == 0
    assert asked["config"]["quantization_config"] == describe_codes("int8", ["lm_head"])
    assert asked["config"]["hidden_size"] == 3584
    assert asked["filled"] is fill_codes_
    assert asked["kv_cache_dtype"] == "fp8"
    assert asked["max_num_seqs"] == 256
    assert asked["max_model_len"] == 1536
    assert asked["load_format"] == "dummy"
    # 1.1 * 256 sequences * 1536 tokens * 28,672 numbers of a byte each
    assert asked["kv_cache_memory_bytes"] == int(1.1 * 256 * 1536 * 28_672)


def test_kv_bytes_of_the_largest_workload():
    workloads = [WORKLOADS["B"], WORKLOADS["C"]]
    assert kv_bytes(SHAPES["7B"], "none", workloads) == int(1.1 * 64 * 8704 * 57_344)


def test_kv_bytes_are_those_of_whole_blocks():
    """17 tokens take two blocks of 16."""
    assert kv_bytes(SHAPES["7B"], "fp8", [Workload("x", 2, 3, 9, 8)]) == int(1.1 * 6 * 32 * 28_672)


def test_vllm_that_cannot_be_imported(tmp_path, monkeypatch):
    (tmp_path / "vllm.py").write_text("import no_such_package_of_vllm", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "vllm", raising=False)
    with pytest.raises(EngineError, match=r"cannot be imported: .*no_such_package_of_vllm"):
        import_vllm()


def test_codes_are_filled():
    module = torch.nn.Module()
    module.codes = torch.nn.Parameter(torch.zeros(64, 64, dtype=torch.int8), requires_grad=False)
    module.scale = torch.nn.Parameter(torch.ones(64))
    fill_codes_(module)
    assert 25 < module.codes.float().std() < 40
    assert torch.equal(module.scale, torch.ones(64))
