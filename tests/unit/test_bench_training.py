"""`qurl bench train` and `qurl bench step`: arms, products by hand, checks, and real runs."""

import dataclasses
import gc
import json
import math

import pytest
import torch

from qurl.bench.arms import Arm, BatchBench, parse_keys
from qurl.bench.limits import SPEEDS, Products
from qurl.bench.profile import Kernel, exclusive_times, read_trace, summarize_kernels
from qurl.bench.shapes import SHAPES
from qurl.bench.step import (
    WARM_UP,
    LetterTask,
    StepBench,
    check_row,
    end_ids,
    plan_step,
    run_step,
    run_trl,
    summarize_steps,
)
from qurl.bench.train import (
    TrainBench,
    Trial,
    build_learner,
    check_update,
    plan_arms,
    prepare,
    run_train,
)
from qurl.cli import main
from qurl.errors import ConfigError, EngineError, TrainingError
from qurl.tasks.tokenizer import build_tokenizer
from qurl.trainer.policy import Policy

CPU = torch.device("cpu")
H200 = SPEEDS["NVIDIA H200"]
SMALL = {
    **{"model": "tiny", "device": "cpu", "sequences": 8, "group": 4},
    **{"prompt_tokens": 5, "tokens": 7, "minibatches": 2, "repeats": 1},
}


@pytest.fixture(autouse=True)
def _no_git(monkeypatch):
    """What is tested does not depend on the checkout."""
    monkeypatch.setattr("qurl.run.machine.source_commit", lambda: "abc")


# Arms


@pytest.mark.parametrize(
    ("name", "quant", "num_narrow"),
    [
        ("none", {"format": "none"}, 0),
        ("int8+kv", {"format": "int8", "kv": "fp8"}, 0),
        ("fp8-block", {"format": "fp8-block"}, 0),
        ("fp8-unified", {"format": "fp8", "unified": True}, 1),
        ("int8-unified-dgrad", {"format": "int8", "unified": True, "backward": "dgrad"}, 2),
        (
            "fp8-block-unified-all+kv",
            {"format": "fp8-block", "unified": True, "backward": "all", "kv": "fp8"},
            3,
        ),
    ],
)
def test_arms(name, quant, num_narrow):
    arm = Arm.of(name)
    assert arm.quant == quant
    assert arm.num_narrow == num_narrow
    assert arm.is_unified == (num_narrow > 0)


@pytest.mark.parametrize("name", ["", "int9", "fp8+unified", "fp8-dgrad", "int8+kv-unified"])
def test_an_arm_that_is_none(name):
    with pytest.raises(ConfigError, match="is not an arm"):
        Arm.of(name)


def test_the_config_of_an_arm():
    bench = BatchBench(**SMALL, keys="optim.lr=1e-5, correction.level=sequence,threads=2")
    config = bench.config(Arm.of("int8+kv"), save={"keep": 0})
    assert (config.batch.problems, config.batch.minibatches) == (2, 2)
    assert (config.sampling.group_size, config.sampling.max_tokens) == (4, 7)
    assert (config.algo.advantage, config.algo.kl_coef) == ("grpo", 0)
    assert (config.quant.format, config.quant.kv) == ("int8", "fp8")
    assert (config.optim.lr, config.correction.level, config.threads) == (1e-5, "sequence", 2)
    assert config.save.keep == 0
    with pytest.raises(ConfigError, match=r"optim.rate = 1 is not a key; \[optim\] has lr"):
        dataclasses.replace(bench, keys="optim.rate=1").config(Arm.of("none"))
    with pytest.raises(ConfigError, match=r"algo.kl_in_reward = true.*arm none"):
        dataclasses.replace(bench, keys="algo.kl_in_reward=true").config(Arm.of("none"))
    with pytest.raises(ConfigError, match=r"'lr' is not of the form section\.key=value"):
        parse_keys("lr")


def test_training_arms_begin_with_bf16(monkeypatch):
    monkeypatch.setattr(BatchBench, "config", lambda self, arm: None)
    bench = TrainBench(**SMALL, arms="fp8-unified, none,fp8-unified-all,none")
    names = [arm.name for arm, _ in plan_arms(bench, CPU)]
    assert names == ["none", "fp8-unified", "fp8-unified-all"]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["train", "--arms", "int3"], "'int3' is not an arm"),
        (["train", "--arms", "none-unified"], "quant.unified = true needs quant.format"),
        (["train", "--model", "8B"], "'8B' is not one of tiny"),
        (["train", "--profile", "5", "--device", "cpu"], "--profile needs a GPU"),
        (["train", "--sequences", "12"], "--sequences 12 must be a multiple of --group 8"),
        (["step", "--prompt-tokens", "0"], "--prompt-tokens 0 must be at least 1"),
        (["step", "--minibatches", "0"], "batch.minibatches = 0"),
        (["step", "--arms", "none,int3"], "'int3' is not an arm"),
        (["step", "--lengths", "long"], "'long' is not one of equal, mixed"),
        (["step", "--repeats", "0"], "--repeats 0 must be at least 1"),
        (["step", "--keys", "quant.x=1"], "quant.x = 1 is not a key"),
    ],
)
def test_refusals(args, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["bench", *args]) == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


# Products and kernels


def test_products_by_hand():
    """1.5B: body 28 * 46,792,704 = 1,310,195,712 weights, head 151936 * 1536 = 233,373,696.

    256 sequences of 16 + 1024 tokens. At 790 TFLOP/s the update takes 3.2045 s; with the linears at
    twice that, 0.5552 s of attention and head remain beside 1.3246 s.
    """
    products = Products.of(SHAPES["1.5B"], 256, 16, 1024)
    assert products.linears == 2 * 256 * 1040 * 1_310_195_712
    assert products.attention == 28 * 256 * (1040 * 1041 // 2) * (2 * 2 * 12 * 128)
    assert products.head == 2 * 256 * 1024 * 233_373_696
    assert products.flops_of_update / 790e12 == pytest.approx(3.2045, rel=1e-4)
    assert products.update_limit(H200, 0) == pytest.approx(3.2045, rel=1e-4)
    assert products.update_limit(H200, 3) == pytest.approx(1.3246 + 0.5552, rel=1e-4)
    steps = [products.update_limit(H200, n) for n in range(4)]
    assert steps[0] - steps[1] == pytest.approx(products.linears / 1580e12)
    assert steps[1] - steps[2] == pytest.approx(products.linears / 1580e12)


def test_products_are_what_torch_counts():
    """Of a packed forward and backward of two sequences; the head scores completions only."""
    from torch.utils.flop_counter import FlopCounterMode

    bench = TrainBench(**{**SMALL, "sequences": 2, "group": 2, "minibatches": 1})
    trial = Trial(bench, bench.config(Arm.of("none")), SHAPES["tiny"], CPU)
    trainable = prepare(trial.learner, trial.learner.recompute(trial.batch, step=0))
    with FlopCounterMode(display=False) as counter:
        trial.learner.update(trainable, step=0)
    counts = counter.get_flop_counts()["Global"]
    num_counted = sum(n for op, n in counts.items() if "attention" not in str(op))
    products = Products.of(SHAPES["tiny"], 2, 5, 7)
    again = products.head  # the backward computes the logits again
    assert num_counted == 3 * (products.linears + products.head) + again


def test_overlapping_kernels_count_once():
    """b starts while a runs, c lies within b: 10 + 5 + 0, which is the time that anything ran."""
    kernels = [Kernel("a", 0, 10), Kernel("b", 5, 10), Kernel("c", 6, 3), Kernel("d", 20, 1)]
    assert exclusive_times(kernels) == [10, 5, 0, 1]


def test_kernels_by_time():
    """Busy from 0 to 15 and from 20 to 40 of 40 us: a 10 + 20, b 5, c 0."""
    kernels = [Kernel("a", 0, 10), Kernel("b", 5, 10), Kernel("c", 6, 3), Kernel("a", 20, 20)]
    profile = summarize_kernels(kernels, num_top=2)
    assert profile.span_ms == pytest.approx(0.04)
    assert profile.busy_share == pytest.approx(35 / 40)
    first, second = profile.top
    assert first == {
        **{"name": "a", "launches": 2},
        **{"milliseconds": pytest.approx(0.03), "share": pytest.approx(30 / 35)},
    }
    assert (second["name"], second["launches"]) == ("b", 1)
    assert str(profile).splitlines()[0] == "  87.5% of 0.0 ms busy"


def test_trace():
    events = [
        {"cat": "kernel", "name": "b", "ts": 7.5, "dur": 2},
        {"cat": "cpu_op", "name": "aten::mm", "ts": 0, "dur": 2},
        {"ph": "M", "name": "process_name"},
        {"cat": "gpu_memcpy", "name": "Memcpy HtoD", "ts": 1, "dur": 0.5},
    ]
    kernels = read_trace(json.dumps({"traceEvents": events}))
    assert kernels == [Kernel("Memcpy HtoD", 1.0, 0.5), Kernel("b", 7.5, 2.0)]


# Training


def test_train_on_a_cpu(tmp_path, capsys):
    """Two arms that train alike: without -unified, a format is the engine's alone."""
    out = tmp_path / "train.json"
    run_train(TrainBench(**{**SMALL, "repeats": 2}, arms="none,int8", out=out))
    header, *rows, saved = capsys.readouterr().out.splitlines()
    assert header.split()[:3] == ["model", "arm", "batch"]
    assert [row.split()[:3] for row in rows] == [["tiny", a, "8x5+7"] for a in ("none", "int8")]
    assert saved == f"saved to {out}"
    results = json.loads(out.read_text())["results"]
    assert list(results) == ["tiny none 8x5+7", "tiny int8 8x5+7"]
    for [entry] in results.values():
        figures, settings = entry["figures"], entry["settings"]
        seconds = sum(figures["update_seconds"]) / 2
        assert figures["update_s"] == pytest.approx(seconds)
        assert figures["prox_s"] == pytest.approx(sum(figures["prox_seconds"]) / 2)
        assert figures["tokens_per_s"] == pytest.approx(96 / seconds)
        num_flops = 6 * SHAPES["tiny"].num_parameters * 96
        assert figures["tflops_6nd"] == pytest.approx(num_flops / seconds / 1e12)
        products = Products.of(SHAPES["tiny"], 8, 5, 7).flops_of_update
        assert figures["tflops"] == pytest.approx(products / seconds / 1e12)
        assert figures["limit_share"] == pytest.approx(figures["limit_s"] / seconds)
        assert figures["peak_gib"] is None
        assert settings["minibatches"] == 2
        assert "profile" not in entry
    first, second = (entry["figures"]["grad_norm"] for [entry] in results.values())
    assert 0 < first == second


def test_a_trial_trains_on_what_the_policy_would_sample():
    """The mismatch is 1 and the ratio too before the first update: every token has a gradient."""
    bench = TrainBench(**SMALL)
    trial = Trial(bench, bench.config(Arm.of("none")), SHAPES["tiny"], CPU)
    trainable = prepare(trial.learner, trial.learner.recompute(trial.batch, step=0))
    assert torch.allclose(trainable.weight, trainable.mask, atol=1e-4)
    assert torch.allclose(trainable.logp_behav, trainable.logp_prox, atol=1e-4)
    assert trainable.mask.sum(1).tolist() == [7.0] * 8
    assert (trainable.advantages.abs() > 0.5).float().equal(trainable.mask)
    assert trainable.group.tolist() == [0] * 4 + [1] * 4


def test_every_arm_starts_from_the_same_weights():
    config = TrainBench(**SMALL).config(Arm.of("none"))
    first, second = (build_learner(config, SHAPES["tiny"], CPU, seed=3) for _ in range(2))
    for a, b in zip(first.policy.model.parameters(), second.policy.model.parameters(), strict=True):
        assert torch.equal(a, b)
        assert a.requires_grad


def test_a_wrong_update_is_not_measured(tmp_path, monkeypatch):
    good = {"actor/pg_loss": 0.1, "actor/grad_norm": 2.0}
    check_update(good)
    check_update(good, 2.9)
    for expected in (3.1, 1.3):
        with pytest.raises(TrainingError, match="updates with wrong gradients are not timed"):
            check_update(good, expected)
    with pytest.raises(TrainingError, match="updates with wrong gradients are not timed"):
        check_update(good | {"actor/grad_norm": 0.0})
    with pytest.raises(TrainingError, match="actor/pg_loss of the update is not finite"):
        check_update(good | {"actor/pg_loss": math.nan})
    norms = iter([1.0, 1.0, 5.0])
    broken = lambda learner, batch, step: (batch, {"actor/grad_norm": next(norms)})  # noqa: E731
    monkeypatch.setattr("qurl.trainer.learner.Learner.update", broken)
    out = tmp_path / "train.json"
    with pytest.raises(TrainingError, match="gradient norm is 5 where the first arm has 1"):
        run_train(TrainBench(**SMALL, arms="none,int8", out=out))
    assert list(json.loads(out.read_text())["results"]) == ["tiny none 8x5+7"]


# Steps


def test_steps_on_a_cpu(tmp_path, capsys, monkeypatch):
    """Equal and mixed lengths, from the same folder."""
    monkeypatch.setattr("qurl.train.report", lambda run: None)  # takes longer than all the rest
    out = tmp_path / "step.json"
    run_step(StepBench(**SMALL, arms="int8", lengths="equal,mixed", out=out))
    header, *rows, saved = capsys.readouterr().out.splitlines()
    assert header.split()[:4] == ["model", "arm", "batch", "lengths"]
    assert [row.split()[:4] for row in rows] == [
        ["tiny", "int8", "8x5+7", lengths] for lengths in ("equal", "mixed")
    ]
    assert saved == f"saved to {out}"
    results = json.loads(out.read_text())["results"]
    assert list(results) == ["tiny int8 8x5+7 equal", "tiny int8 8x5+7 mixed"]
    equal, mixed = (entry["figures"] for [entry] in results.values())
    for figures in (equal, mixed):
        assert figures["seconds"] == [figures["step_s"]]
        assert sum(figures["parts"].values()) == pytest.approx(figures["step_s"])
        assert list(figures["parts"]) == ["rollout", "prox", "update", "sync", "rest"]
        assert all(seconds > 0 for seconds in figures["parts"].values())
    assert equal["tokens_per_s"] == pytest.approx(96 / equal["step_s"])
    assert 8 * 6 <= mixed["tokens_per_s"] * mixed["step_s"] < 90
    gc.collect()
    assert not [x for x in gc.get_objects() if type(x) is Policy]  # no arm keeps its memory


def test_ends_of_mixed_lengths():
    """2 * 151936 / 1024 = 296.75 tokens end a completion."""
    ids = end_ids(SHAPES["1.5B"], 1024, "mixed")
    assert len(ids) == 297
    assert max(ids) == 151935
    assert end_ids(SHAPES["1.5B"], 1024, "equal") == []


def test_letters():
    task = LetterTask(build_tokenizer(), num_tokens=6, seed=1)
    assert len(task[3].prompt_ids) == 6
    assert task.tokenizer.decode(task[3].prompt_ids) == task.text(3)
    assert task.text(3) == LetterTask(task.tokenizer, 6, seed=1).text(3) != task.text(4)


def test_parts_of_a_step():
    """Two warm-up steps end at 9 and 10; then 5 s and 7 s, of which parts take 4 and 5."""
    row = {"timing_s/prox": 1.0, "timing_s/update": 1.0, "timing_s/sync": 0.5}
    rows = [
        {**row, "timing_s/rollout": seconds, "perf/rollout_tokens": 100.0}
        for seconds in (50.0, 50.0, 1.5, 2.5)
    ]
    rows[-1]["perf/max_memory_allocated_gb"] = 3.5
    assert WARM_UP == 2
    figures = summarize_steps([9.0, 10.0, 15.0, 22.0], rows, num_prompt_tokens=20)
    assert figures.seconds == (5.0, 7.0)
    assert figures.step_s == 6.0
    parts = {"rollout": 2.0, "prox": 1.0, "update": 1.0, "sync": 0.5, "rest": 1.5}
    assert figures.parts == parts
    assert figures.tokens_per_s == 240 / 12
    assert figures.peak_gib == 3.5


def test_a_step_that_learns_nothing_is_not_measured():
    row = {"actor/pg_loss": 0.0, "actor/grad_norm": 1.0, "perf/rollout_tokens": 56.0}
    check_row(row, 56)
    check_row(row, None)
    with pytest.raises(EngineError, match="56 tokens were sampled instead of 57"):
        check_row(row, 57)
    for norm in (0.0, math.nan):
        with pytest.raises(TrainingError, match="a step must learn"):
            check_row(row | {"actor/grad_norm": norm}, 56)


def test_trl_that_is_missing(tmp_path, monkeypatch):
    bench = StepBench(**SMALL, against="trl")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"trl cannot be found.*pip install 'trl'"):
        plan_step(bench)
    with monkeypatch.context() as patch:
        patch.setattr("qurl.bench.step.pick_device", lambda name: torch.device("cuda"))
        with pytest.raises(ConfigError, match=r"trl and vllm cannot be found.*trl\[vllm,liger\]"):
            plan_step(bench)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="call it in a checkout"):
        plan_step(bench)


def test_trl_is_run_with_the_same_flags(monkeypatch, capsys, tmp_path):
    import subprocess

    import tyro

    from benchmarks.trl_step import TrlStep

    commands = []
    done = subprocess.CompletedProcess([], 1)
    monkeypatch.setattr("subprocess.run", lambda command, check: commands.append(command) or done)
    bench = StepBench(**SMALL, arms="none", keys="optim.lr=1e-5")
    run_trl(bench, SHAPES["tiny"], tmp_path / "m", "mixed", "tuned", tmp_path / "o.json")
    assert "trl-tuned failed" in capsys.readouterr().err
    [[_, *module_and_flags]] = commands
    assert module_and_flags[:2] == ["-m", "benchmarks.trl_step"]
    given = tyro.cli(TrlStep, args=module_and_flags[2:])
    assert given == TrlStep(
        **SMALL,
        **{"arms": "none", "keys": "optim.lr=1e-5", "lengths": "mixed", "setting": "tuned"},
        **{"folder": tmp_path / "m", "out": tmp_path / "o.json"},
    )
