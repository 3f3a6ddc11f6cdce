"""`qurl bench`: limits worked out by hand, shapes, records, tables, refusals, and one real run."""

import dataclasses
import json
import math
import re
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch
import tyro

from qurl.bench import run_bench
from qurl.bench.judge import as_sampled, check_completions, logprob_gap, score_completion
from qurl.bench.limits import SPEEDS, Storage, find_speed, rollout_limit, step_limit, sync_bytes
from qurl.bench.record import Record, paused_gc
from qurl.bench.rollout import RolloutBench, plan, run_rollout
from qurl.bench.shapes import SHAPES, build_model, split_list
from qurl.bench.step import StepBench
from qurl.bench.sync import SyncBench, run_sync
from qurl.bench.train import TrainBench
from qurl.bench.workload import WORKLOADS, Setup, Workload
from qurl.cli import main
from qurl.errors import ConfigError, EngineError
from qurl.rollout import build_engine
from qurl.rollout.canary import score_with
from qurl.run.machine import source_commit
from qurl.run.shape import measure
from qurl.types import Completion

CPU = torch.device("cpu")
ROOT = Path(__file__).parents[2]
H200 = SPEEDS["NVIDIA H200"]
BF16 = Storage.of("none", "none", "cuda")
W8 = Storage.of("int8", "none", "cuda")
W8_KV8 = Storage.of("fp8", "fp8", "cuda")
SMALL = Workload("small", num_prompts=2, group_size=2, prompt_tokens=5, new_tokens=6)


@pytest.fixture(autouse=True)
def _no_git(monkeypatch):
    """What is tested does not depend on the checkout."""
    monkeypatch.setattr("qurl.run.machine.source_commit", lambda: "abc")


@pytest.fixture(scope="module")
def tiny():
    return build_model(SHAPES["tiny"], CPU)


# Limits


@pytest.mark.parametrize(
    ("model", "context", "batch", "bf16", "w8", "w8_kv8"),
    [
        ("1.5B", 1024, 64, 1.15, 0.85, 0.63),
        ("1.5B", 1024, 256, 2.75, 2.32, 1.45),
        ("1.5B", 1024, 1024, 11.0, 9.30, 5.80),
        ("1.5B", 8192, 64, 4.21, 3.91, 2.16),
        ("1.5B", 8192, 256, 15.0, 14.6, 7.57),
        ("7B", 1024, 64, 4.16, 2.64, 2.21),
        ("7B", 1024, 256, 8.08, 5.96, 4.22),
        ("7B", 1024, 1024, 32.3, 23.9, 16.9),
        ("7B", 8192, 64, 10.3, 8.76, 5.27),
        ("7B", 8192, 256, 32.6, 30.4, 16.5),
    ],
)
def test_step_limits_of_the_h200(model, context, batch, bf16, w8, w8_kv8):
    """Milliseconds, calculated apart from the code and rounded."""
    for storage, expected in ((BF16, bf16), (W8, w8), (W8_KV8, w8_kv8)):
        milliseconds = 1e3 * step_limit(SHAPES[model], storage, H200, batch, context)
        assert milliseconds == pytest.approx(expected, rel=5e-3)


def test_step_limit_by_hand():
    """7B in INT8, one sequence of one token: bound by bytes, (6.525e9 + 2 * 0.545e9) / 4.3e12.

    Body per layer: qkv 3584 * 4608, o 3584 * 3584, three of 3584 * 18944: 233,046,016; 28 of them
    6,525,288,448. Head 152064 * 3584 = 544,997,376. A key and value 2 * 28 * 4 * 128 * 2 = 57,344.
    """
    shape = SHAPES["7B"]
    assert shape.num_quantized == 6_525_288_448
    assert shape.num_head == 544_997_376
    assert shape.kv_numbers_per_token * BF16.kv == 57_344
    num_bytes = 6_525_288_448 + 2 * 544_997_376 + 57_344
    assert step_limit(shape, W8, H200, 1, 1) == pytest.approx(num_bytes / 4.3e12)


def test_rollout_limit_is_the_sum_of_its_steps():
    workload = WORKLOADS["A"]
    contexts = range(512, 512 + 1024)
    steps = [step_limit(SHAPES["7B"], W8, H200, 256, context) for context in contexts]
    assert rollout_limit(SHAPES["7B"], W8, H200, workload) == pytest.approx(sum(steps))


def test_sync_limit_by_hand():
    """From BF16 three bytes a weight, from FP32 five; then embedding and head are copied too."""
    shape = SHAPES["7B"]
    assert sync_bytes(shape, W8, 2) == 3 * shape.num_quantized
    assert sync_bytes(shape, W8, 2) / H200.bandwidth == pytest.approx(4.55e-3, rel=1e-3)
    others = 7_615_616_512 - shape.num_quantized
    assert sync_bytes(shape, W8, 4) == 5 * shape.num_quantized + 6 * others
    assert sync_bytes(shape, BF16, 2) == 4 * shape.num_quantized


def test_storage_on_a_cpu_is_fp32():
    assert Storage.of("int8", "none", "cpu") == Storage(4, 4, 4, is_narrow=False)


def test_speed_of_a_device_that_is_not_in_the_table():
    speed = find_speed(CPU)
    assert 1e8 < speed.bandwidth < 1e13
    assert 1e8 < speed.flops_wide < 1e15
    assert speed.flops_narrow == speed.flops_wide


# Shapes and workloads


@pytest.mark.parametrize(
    ("name", "num_parameters"),
    [
        ("0.5B", 494_032_768),
        ("1.5B", 1_543_714_304),
        ("3B", 3_085_938_688),
        ("7B", 7_615_616_512),
        ("14B", 14_770_033_664),
        ("32B", 32_763_876_352),
        ("72B", 72_706_203_648),
    ],
)
def test_shapes_are_those_of_qwen(name, num_parameters):
    """The numbers of the published checkpoints."""
    shape = SHAPES[name]
    assert shape.num_parameters == num_parameters
    model = build_model(shape, torch.device("meta"), torch.bfloat16)
    assert sum(p.numel() for p in model.parameters()) == num_parameters
    assert dataclasses.replace(measure(model), name=name) == shape
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize(
    ("name", "products"),
    [
        ("0.5B", ((1152, 896), (896, 896), (9728, 896), (896, 4864))),
        ("1.5B", ((2048, 1536), (1536, 1536), (17920, 1536), (1536, 8960))),
        ("3B", ((2560, 2048), (2048, 2048), (22016, 2048), (2048, 11008))),
        ("7B", ((4608, 3584), (3584, 3584), (37888, 3584), (3584, 18944))),
        ("14B", ((7168, 5120), (5120, 5120), (27648, 5120), (5120, 13824))),
        ("32B", ((7168, 5120), (5120, 5120), (55296, 5120), (5120, 27648))),
        ("72B", ((10240, 8192), (8192, 8192), (59136, 8192), (8192, 29568))),
    ],
)
def test_products_of_a_layer(name, products):
    roles = ("qkv", "o", "gate_up", "down")
    assert SHAPES[name].products == dict(zip(roles, products, strict=True))


def test_model(tiny):
    assert sum(p.numel() for p in tiny.parameters()) == SHAPES["tiny"].num_parameters
    assert dataclasses.replace(measure(tiny), name="tiny") == SHAPES["tiny"]
    weights = dict(tiny.named_parameters())
    assert {p.dtype for p in weights.values()} == {torch.float32}
    bias = weights["model.layers.0.self_attn.q_proj.bias"]
    assert 0.01 < bias.std() < 0.03
    assert 0.019 < weights["model.layers.1.mlp.down_proj.weight"].std() < 0.021
    again = dict(build_model(SHAPES["tiny"], CPU).named_parameters())
    assert all(torch.equal(p, again[name]) for name, p in weights.items())
    other = dict(build_model(SHAPES["tiny"], CPU, seed=1).named_parameters())
    assert not torch.equal(bias, other["model.layers.0.self_attn.q_proj.bias"])


def test_building_a_model_leaves_the_random_state_alone():
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    build_model(SHAPES["tiny"], CPU, seed=1)
    assert torch.equal(torch.rand(3), expected)


def test_workloads():
    a, b, c = (WORKLOADS[name] for name in ("A", "B", "C"))
    assert (a.num_sequences, a.num_new_tokens) == (256, 262_144)
    assert (c.num_sequences, c.prompt_tokens, c.new_tokens) == (64, 512, 8192)
    assert WORKLOADS["Cp"].new_tokens == 4096
    custom = b.resized(num_prompts=None, group_size=2, prompt_tokens=None, new_tokens=7)
    assert custom == Workload("8x2:512+7", 8, 2, 512, 7)
    assert b.resized(num_prompts=8).name == "B"


def test_problems():
    problems = SMALL.problems(1024, seed=3)
    assert [len(p.prompt_ids) for p in problems] == [5, 5]
    assert all(0 <= token < 1024 for p in problems for token in p.prompt_ids)
    assert SMALL.problems(1024, seed=3) == problems
    assert SMALL.problems(1024, seed=4) != problems
    params = SMALL.params(seed=3)
    assert (params.temperature, params.group_size, params.max_tokens) == (1.0, 2, 6)
    assert params.ignore_eos


def test_garbage_collection_pauses():
    import gc

    assert gc.isenabled()
    with paused_gc():
        assert not gc.isenabled()
    assert gc.isenabled()


# Records and flags


def test_a_record_never_loses_a_result(tmp_path):
    path = tmp_path / "deep" / "rollout.json"
    Record("rollout", path, CPU).add("a", figures={"x": 1})
    record = Record("rollout", path, CPU)
    record.add("b", figures={"x": 2})
    record.add("a", figures={"x": 3})
    content = json.loads(path.read_text())
    assert content["bench"] == "rollout"
    assert [entry["figures"]["x"] for entry in content["results"]["a"]] == [1, 3]
    assert [entry["figures"]["x"] for entry in content["results"]["b"]] == [2]
    entry = content["results"]["a"][0]
    assert entry["machine"]["commit"] == "abc"
    assert entry["machine"]["versions"]["torch"] == torch.__version__
    assert entry["machine"]["device"].startswith("CPU")
    assert re.match(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00$", entry["date"])


def test_a_record_is_strict_json(tmp_path):
    path = tmp_path / "audit.json"
    Record("audit", path, CPU).add("a", figures={"bias": (math.nan, -math.inf, 0.5)})

    def refuse(name):
        raise AssertionError(f"{name} is no JSON")

    content = json.loads(path.read_text(), parse_constant=refuse)
    assert content["results"]["a"][0]["figures"]["bias"] == [None, None, 0.5]


def test_a_record_that_cannot_be_written_costs_no_measurement():
    with pytest.raises(ConfigError, match=r"--out /proc/sync.json cannot be written"):
        Record("sync", Path("/proc/sync.json"), CPU)


def test_two_commands_may_add_to_one_record(tmp_path):
    first, second = (Record("sync", tmp_path / "sync.json", CPU) for _ in range(2))
    first.add("a", x=1)
    second.add("b", x=2)
    assert json.loads((tmp_path / "sync.json").read_text())["results"].keys() == {"a", "b"}


@pytest.mark.parametrize("content", ["{}", "[1]", '{"bench": "sync", "results": {}}', "no json"])
def test_a_file_of_another_kind_is_left_alone(tmp_path, content):
    path = tmp_path / "rollout.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match=r"rollout\.json"):
        Record("rollout", path, CPU)
    assert path.read_text() == content


def test_the_default_record_is_named_after_the_bench(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Record("sync", None, CPU).add("a")
    assert (tmp_path / "benchmarks" / "results" / "sync.json").exists()


@pytest.mark.parametrize(("script", "expected"), [("echo 0123+", "0123+"), ("exit 128", None)])
def test_commit(tmp_path, monkeypatch, script, expected):
    """Asked of a stand-in for git, in a repository and outside of one."""
    git = tmp_path / "git"
    git.write_text(f"#!/bin/sh\n{script}\n")
    git.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert source_commit() == expected


def test_commit_without_git(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert source_commit() is None


def test_lists():
    assert split_list("quant", "none, int8,none", ("none", "int8")) == ["none", "int8"]
    with pytest.raises(ConfigError, match="--quant none,int9: 'int9' is not one of none, int8"):
        split_list("quant", "none,int9", ("none", "int8"))
    with pytest.raises(ConfigError, match="'' is not one of tiny"):
        split_list("model", "")


# Right or wrong


def sampled(model, workload, quant="none"):
    engine = build_engine("hf", model, quant=quant)
    problems = workload.problems(SHAPES["tiny"].vocabulary, seed=0)
    rollouts = engine.generate(problems, workload.params(0))
    return problems, [list(r.completions) for r in rollouts]


def gap_of(model, problems, groups, quant="none"):
    return logprob_gap(model, Setup("hf", SHAPES["tiny"], quant, "none"), problems, groups)


def test_four_bits_are_judged_by_the_engines_weights(tiny):
    before = {name: x.clone() for name, x in tiny.state_dict().items()}
    problems, groups = sampled(tiny, SMALL, "nvfp4")
    with as_sampled(tiny, "nvfp4"):
        assert gap_of(tiny, problems, groups, "nvfp4") < 1e-5
    assert all(torch.equal(x, before[name]) for name, x in tiny.state_dict().items())
    assert gap_of(tiny, problems, groups, "int4") > 1e-3, "without them"


def test_scores_are_the_models(tiny):
    (problem, _), ((completion, _), _) = sampled(tiny, SMALL)
    ids = [*problem.prompt_ids, *completion.token_ids]
    expected = score_with(tiny, ids)[len(problem.prompt_ids) - 1 :]
    assert torch.allclose(score_completion(tiny, problem, completion), expected, atol=1e-5)


@pytest.mark.parametrize(("quant", "largest"), [("none", 1e-5), ("int8", 0.02), ("fp8", 0.08)])
def test_a_sound_engine_passes(tiny, quant, largest):
    problems, groups = sampled(tiny, dataclasses.replace(SMALL, new_tokens=16), quant)
    gap = gap_of(tiny, problems, groups, quant)
    assert 0 <= gap < largest
    assert (gap > 1e-4) == (quant != "none")


def with_logprobs(groups, change):
    return [
        [dataclasses.replace(c, logprobs=change(list(c.logprobs))) for c in group]
        for group in groups
    ]


@pytest.mark.parametrize("quant", ["none", "int8"])
def test_an_engine_with_other_weights_fails(tiny, quant):
    """On random weights every log-prob lies near -log V: the format's bound alone lets it pass."""
    problems, groups = sampled(build_model(SHAPES["tiny"], CPU, seed=1), SMALL, quant)
    with pytest.raises(EngineError, match="engines with wrong log-probs are not timed"):
        gap_of(tiny, problems, groups, quant)


def test_an_engine_that_is_wrong_at_the_end_fails(tiny):
    problems, groups = sampled(tiny, dataclasses.replace(SMALL, new_tokens=16))
    assert gap_of(tiny, problems, with_logprobs(groups, list)) < 1e-5
    late = with_logprobs(groups, lambda x: x[:-4] + [v - 0.3 for v in x[-4:]])
    with pytest.raises(EngineError, match="log-probs differ"):
        gap_of(tiny, problems, late)


def test_nan_fails(tiny):
    problems, groups = sampled(tiny, SMALL)
    with pytest.raises(EngineError, match="log-probs differ"):
        gap_of(tiny, problems, with_logprobs(groups, lambda x: [math.nan, *x[1:]]))


def test_completions_are_counted():
    good = Completion([1] * 6, [-1.0] * 6, "", "length")
    check_completions([[good, good], [good, good]], SMALL)
    short = Completion([1] * 5, [-1.0] * 5, "", "length")
    with pytest.raises(EngineError, match=r"4 completions of 6 tokens.* 4 with 23 tokens"):
        check_completions([[good, short], [good, good]], SMALL)
    with pytest.raises(EngineError, match=r"4 completions of 6 tokens.* 3 with 18 tokens"):
        check_completions([[good], [good, good]], SMALL)
    bad = Completion([1] * 6, [-math.inf] * 6, "", "length")
    with pytest.raises(EngineError, match="not finite"):
        check_completions([[good, good], [good, bad]], SMALL)


# The command


def flags(**given):
    return [word for name, value in given.items() for word in (f"--{name}", str(value))]


def test_bench_help(capsys):
    assert main(["bench"]) == 0
    printed = capsys.readouterr().out
    assert main(["bench", "--help"]) == 0
    assert capsys.readouterr().out == printed
    assert printed.startswith("usage: qurl bench rollout|sync|train|step")


@pytest.mark.parametrize(
    ("kind", "bench"),
    [("rollout", RolloutBench), ("sync", SyncBench), ("train", TrainBench), ("step", StepBench)],
)
def test_help_explains_every_flag(kind, bench, capsys):
    with pytest.raises(SystemExit) as stop:
        run_bench([kind, "--help"])
    assert stop.value.code == 0
    printed = capsys.readouterr().out
    for field in dataclasses.fields(bench):
        assert f"--{field.name.replace('_', '-')}" in printed


def test_help_of_the_benchmarks_needs_no_torch():
    code = (
        "import sys; from qurl.cli import main; main(['bench']); "
        "assert not {'torch', 'tyro', 'numpy'} & set(sys.modules)"
    )
    env = {"PYTHONPATH": str(ROOT / "src"), "PATH": ""}
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, env=env)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["speed"], "qurl bench speed: there are rollout, sync, train, step"),
        (["rollout", "--model", "8B"], "'8B' is not one of tiny, 0.5B"),
        (["rollout", "--quant", "int8,int3"], "'int3' is not one of none, int8"),
        (["rollout", "--kv", "int8"], "'int8' is not one of none, fp8"),
        (["rollout", "--workload", "D"], "'D' is not one of A, B, C, Cp"),
        (["rollout", "--new-tokens", "0"], "new_tokens = 0 must be at least 1"),
        (["rollout", "--repeats", "0"], "--repeats 0 must be at least 1"),
        (["sync", "--master", "fp16"], "'fp16' is not one of bf16, fp32"),
        (["sync", "--repeats", "0"], "--repeats 0 must be at least 1"),
    ],
)
def test_refusals(args, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["bench", *args]) == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_plan_covers_every_combination():
    bench = RolloutBench(model="tiny,0.5B", quant="none,int8", kv="none,fp8")
    models, workloads = plan(dataclasses.replace(bench, workload="A,B"))
    assert [w.name for w in workloads] == ["A", "B"]
    assert list(models) == ["tiny", "0.5B"]
    assert list(map(str, models["tiny"])) == [
        "local tiny none kv=none",
        "local tiny none kv=fp8",
        "local tiny int8 kv=none",
        "local tiny int8 kv=fp8",
    ]


def test_sizes_for_a_laptop_are_named(capsys, monkeypatch):
    def stop(*args, **options):
        raise EngineError("built")

    monkeypatch.setattr("qurl.bench.rollout.build_model", stop)
    with pytest.raises(EngineError, match="built"):
        run_rollout(RolloutBench(model="1.5B", device="cpu"))
    note = capsys.readouterr().out.splitlines()[0]
    plan(tyro.cli(RolloutBench, args=note.partition(" try ")[2].split()))


def test_rollout_on_a_cpu(tmp_path, capsys):
    """All of it: two formats, checked, timed, saved."""
    out = tmp_path / "rollout.json"
    args = flags(model="tiny", quant="none,int8", repeats=2, device="cpu", out=out)
    sizes = [*flags(prompts=2, group=2), "--prompt-tokens", "5", "--new-tokens", "6"]
    assert main(["bench", "rollout", *args, *sizes]) == 0
    header, *rows, saved = capsys.readouterr().out.splitlines()
    assert header.split()[:5] == ["engine", "model", "quant", "kv", "workload"]
    assert [line.split()[:5] for line in rows] == [
        ["local", "tiny", quant, "none", "2x2:5+6"] for quant in ("none", "int8")
    ]
    assert saved == f"saved to {out}"
    results = json.loads(out.read_text())["results"]
    assert list(results) == [f"local tiny {quant} kv=none 2x2:5+6" for quant in ("none", "int8")]
    for key, (entry,) in results.items():
        figures = entry["figures"]
        assert len(figures["seconds"]) == 2
        assert all(math.isfinite(x) and x > 0 for x in figures["seconds"])
        seconds = sum(figures["seconds"]) / 2
        assert figures["tokens_per_s"] == pytest.approx(24 / seconds)
        assert figures["ms_per_step"] == pytest.approx(1e3 * seconds / 6)
        assert math.isfinite(figures["limit_tokens_per_s"])
        share = figures["tokens_per_s"] / figures["limit_tokens_per_s"]
        assert figures["limit_share"] == pytest.approx(share)
        assert share > 0
        assert (figures["logprob_gap"] < 1e-4) == ("none kv" in key)
        assert entry["settings"]["new_tokens"] == 6


def test_a_wrong_engine_is_not_measured(tmp_path, monkeypatch):
    model = build_model(SHAPES["tiny"], CPU, seed=1)
    monkeypatch.setattr(
        "qurl.bench.workload.build_engine", lambda kind, _, **options: build_engine("hf", model)
    )
    bench = RolloutBench("tiny", quant="none", prompts=2, group=2, prompt_tokens=5, new_tokens=6)
    bench = dataclasses.replace(bench, device="cpu", out=tmp_path / "rollout.json")
    with pytest.raises(EngineError, match="engines with wrong log-probs are not timed"):
        run_rollout(bench)
    assert not bench.out.exists()


def test_sync_on_a_cpu(tmp_path, capsys):
    out = tmp_path / "sync.json"
    run_sync(SyncBench("tiny", quant="int8", repeats=2, device="cpu", out=out, master="fp32"))
    [(key, [entry])] = json.loads(out.read_text())["results"].items()
    figures = types.SimpleNamespace(**entry["figures"])
    assert len(figures.load_seconds) == 2
    assert figures.limit_share == pytest.approx(figures.limit_ms / figures.load_ms)
    assert figures.limit_share > 0
    body = SHAPES["tiny"].num_quantized
    assert figures.gigabytes == pytest.approx(8 * body / 1e9)
    assert figures.gigabytes_per_s == pytest.approx(figures.gigabytes / figures.load_ms * 1e3)
    assert figures.verify_ms > 0
    assert key == "tiny int8 master=fp32"
    assert capsys.readouterr().out.splitlines()[1].split()[:3] == ["tiny", "int8", "fp32"]
