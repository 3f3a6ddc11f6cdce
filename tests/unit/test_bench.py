"""`qurl bench`: limits worked out by hand, shapes, records, tables, refusals, and one real run."""

import dataclasses
import json
import math
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from qurl.bench import run_bench
from qurl.bench.contenders import Setup
from qurl.bench.judge import Judge, check_completions, score_completion
from qurl.bench.limits import SPEEDS, Storage, find_speed, rollout_limit, step_limit, sync_bytes
from qurl.bench.profile import (
    FIRST_STEP,
    LAST_STEP,
    NUM_STEPS,
    Kernel,
    categorize,
    cut_steps,
    describe_profile,
    exclusive_times,
    read_trace,
    summarize,
)
from qurl.bench.record import Record, source_commit
from qurl.bench.rollout import RolloutBench, plan, run_rollout
from qurl.bench.shapes import SHAPES, build_model, get_shape
from qurl.bench.sync import SyncBench, run_sync
from qurl.bench.table import Column, head, row, split_list
from qurl.bench.timing import paused_gc, seconds_per_call
from qurl.bench.workload import Workload, get_workload, make_problems, sampling_params
from qurl.cli import main
from qurl.errors import ConfigError, EngineError
from qurl.rollout import build_engine
from qurl.rollout.canary import score_with
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
    monkeypatch.setattr("qurl.bench.record.source_commit", lambda: "abc")


@pytest.fixture(scope="module")
def tiny():
    return build_model(get_shape("tiny"), CPU)


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
    assert shape.num_body == 6_525_288_448
    assert shape.num_head == 544_997_376
    assert shape.kv_numbers_per_token * BF16.kv == 57_344
    num_bytes = 6_525_288_448 + 2 * 544_997_376 + 57_344
    assert step_limit(shape, W8, H200, 1, 1) == pytest.approx(num_bytes / 4.3e12)


def test_rollout_limit_is_the_sum_of_its_steps():
    workload = get_workload("A")
    contexts = range(512, 512 + 1024)
    steps = [step_limit(SHAPES["7B"], W8, H200, 256, context) for context in contexts]
    assert rollout_limit(SHAPES["7B"], W8, H200, workload) == pytest.approx(sum(steps))


def test_sync_limit_by_hand():
    """From BF16 three bytes a weight, from FP32 five; then embedding and head are copied too."""
    shape = SHAPES["7B"]
    assert sync_bytes(shape, W8, 2) == 3 * shape.num_body
    assert sync_bytes(shape, W8, 2) / H200.bandwidth == pytest.approx(4.55e-3, rel=1e-3)
    others = 7_615_616_512 - shape.num_body
    assert sync_bytes(shape, W8, 4) == 5 * shape.num_body + 6 * others
    assert sync_bytes(shape, BF16, 2) == 4 * shape.num_body


def test_storage_on_a_cpu_is_fp32():
    assert Storage.of("int8", "none", "cpu") == Storage(4, 4, 4, is_narrow=False)


def test_speed():
    """A device that is not in the table is measured; a number on the command line wins."""
    speed = find_speed(CPU, 2.5)
    assert speed.bandwidth == 2.5e12
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
    ],
)
def test_shapes_are_those_of_qwen(name, num_parameters):
    """The numbers of the published checkpoints."""
    shape = SHAPES[name]
    assert shape.num_parameters == num_parameters
    model = build_model(shape, torch.device("meta"), torch.bfloat16)
    assert sum(p.numel() for p in model.parameters()) == num_parameters
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize(
    ("name", "products"),
    [
        ("0.5B", ((1152, 896), (896, 896), (9728, 896), (896, 4864))),
        ("1.5B", ((2048, 1536), (1536, 1536), (17920, 1536), (1536, 8960))),
        ("3B", ((2560, 2048), (2048, 2048), (22016, 2048), (2048, 11008))),
        ("7B", ((4608, 3584), (3584, 3584), (37888, 3584), (3584, 18944))),
        ("14B", ((7168, 5120), (5120, 5120), (27648, 5120), (5120, 13824))),
    ],
)
def test_products_of_a_layer(name, products):
    roles = ("qkv", "o", "gate_up", "down")
    assert SHAPES[name].products == dict(zip(roles, products, strict=True))


def test_model(tiny):
    assert sum(p.numel() for p in tiny.parameters()) == SHAPES["tiny"].num_parameters
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
    a, c = get_workload("A"), get_workload("C")
    assert (a.num_sequences, a.num_new_tokens) == (256, 262_144)
    assert (c.num_sequences, c.prompt_tokens, c.new_tokens) == (64, 512, 8192)
    assert get_workload("Cp").new_tokens == 4096
    custom = get_workload("B", num_prompts=None, group_size=2, prompt_tokens=None, new_tokens=7)
    assert custom == Workload("8x2:512+7", 8, 2, 512, 7)
    assert get_workload("B", num_prompts=8).name == "B"


def test_problems():
    problems = make_problems(SMALL, 1024, seed=3)
    assert [len(p.prompt_ids) for p in problems] == [5, 5]
    assert all(0 <= token < 1024 for p in problems for token in p.prompt_ids)
    assert make_problems(SMALL, 1024, seed=3) == problems
    assert make_problems(SMALL, 1024, seed=4) != problems
    params = sampling_params(SMALL, seed=3)
    assert (params.temperature, params.group_size, params.max_tokens) == (1.0, 2, 6)
    assert params.ignore_eos


# Clocks


def test_time_of_one_of_several_calls(monkeypatch):
    """Each call takes 3 s of a clock that only the work moves."""
    now = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    assert seconds_per_call(lambda: now.__setitem__(0, now[0] + 3.0), CPU) == pytest.approx(3.0)


def test_garbage_collection_pauses():
    import gc

    assert gc.isenabled()
    with paused_gc():
        assert not gc.isenabled()
    assert gc.isenabled()


# Records and tables


def test_a_record_never_loses_a_result(tmp_path):
    path = tmp_path / "deep" / "rollout.json"
    Record("rollout", path).add("a", CPU, figures={"x": 1})
    record = Record("rollout", path)
    record.add("b", CPU, figures={"x": 2})
    record.add("a", CPU, figures={"x": 3})
    content = json.loads(path.read_text())
    assert content["bench"] == "rollout"
    assert [entry["figures"]["x"] for entry in content["results"]["a"]] == [1, 3]
    assert [entry["figures"]["x"] for entry in content["results"]["b"]] == [2]
    entry = content["results"]["a"][0]
    assert entry["machine"]["commit"] == "abc"
    assert entry["machine"]["versions"]["torch"] == torch.__version__
    assert entry["machine"]["device"].startswith("CPU")
    assert re.match(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00$", entry["date"])


def test_a_record_that_cannot_be_written_costs_no_measurement():
    with pytest.raises(ConfigError, match=r"--out /proc/sync.json cannot be written"):
        Record("sync", Path("/proc/sync.json"))


def test_two_commands_may_add_to_one_record(tmp_path):
    first, second = (Record("sync", tmp_path / "sync.json") for _ in range(2))
    first.add("a", CPU, x=1)
    second.add("b", CPU, x=2)
    assert json.loads((tmp_path / "sync.json").read_text())["results"].keys() == {"a", "b"}


def test_writers_at_the_same_time_lose_nothing(tmp_path):
    """Every thread opens the lock for itself, so that they exclude each other as processes do."""
    path = tmp_path / "sync.json"

    def add(writer):
        record = Record("sync", path)
        for i in range(10):
            record.add(f"{writer}.{i}", CPU)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(add, range(4)))
    assert len(json.loads(path.read_text())["results"]) == 40


@pytest.mark.parametrize("content", ["{}", "[1]", '{"bench": "sync", "results": {}}', "no json"])
def test_a_file_of_another_kind_is_left_alone(tmp_path, content):
    path = tmp_path / "rollout.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match=r"rollout\.json"):
        Record("rollout", path)
    assert path.read_text() == content


def test_the_default_record_is_named_after_the_bench(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Record("sync").add("a", CPU)
    assert (tmp_path / "benchmarks" / "results" / "sync.json").exists()


@pytest.mark.parametrize(
    ("changes", "expected"), [("", "0123"), ("M src/qurl/cli.py", "0123+"), (None, None)]
)
def test_commit(tmp_path, monkeypatch, changes, expected):
    """Asked of a stand-in for git; None stands for a folder without a repository."""
    git = tmp_path / "git"
    answer = f'[ "$1" = status ] && echo "{changes}" || echo 0123'
    git.write_text("#!/bin/sh\n" + ("exit 128" if changes is None else answer) + "\n")
    git.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert source_commit() == expected


def test_commit_without_git(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert source_commit() is None


def test_table():
    columns = (Column("name", "name", width=6), Column("x", "x/s", ",.1f", 8), Column("y", "y"))
    assert head(columns) == "name         x/s  y"
    assert row(columns, {"name": "ab", "x": 1234.56, "y": "z"}) == "ab       1,234.6  z"
    assert row(columns, {"name": "abcdefgh", "x": None}) == "abcdefgh         -  -"


def test_lists():
    assert split_list("quant", "none, int8,none", ("none", "int8")) == ["none", "int8"]
    with pytest.raises(ConfigError, match="'int9' is not a value; there are none, int8"):
        split_list("quant", "none,int9", ("none", "int8"))
    with pytest.raises(ConfigError, match="'' is not a value"):
        split_list("model", "")


# Profiles


def steps_of(*names, gap=0.0):
    """A prefill, then NUM_STEPS steps of the given kernels, 10 us each."""
    kernels, time = [Kernel("prefill_gemm", 0.0, 5.0)] * 7, 100.0
    for _ in range(NUM_STEPS):
        for name in names:
            kernels.append(Kernel(name, time, 10.0))
            time += 10.0 + gap
    return kernels


STEP = (
    *("add_norm_kernel", "gemm_kernel", "rotate_kernel", "split_kernel", "combine_kernel"),
    *("map_row_kernel", "gemm_kernel", "add_norm_kernel"),
    *("nvjet_sm90_tst", "splitKreduce_kernel", "elementwise_kernel", "summarise_kernel"),
    "sample_kernel",
)


def test_profile_of_some_steps():
    kernels = cut_steps(steps_of(*STEP, gap=1.0))
    num_steps = LAST_STEP - FIRST_STEP
    assert len(kernels) == num_steps * len(STEP)
    profile = summarize(kernels, num_steps)
    assert profile.num_kernels == len(STEP) == 13
    assert profile.busy_ms == pytest.approx(0.130)
    # The cut is at a kernel that runs once per step, so the first step's head is whole.
    assert profile.microseconds == {
        "norms, activations, rope": pytest.approx(40.0),
        "linears": pytest.approx(20.0),
        "attention": pytest.approx(20.0),
        "lm_head": pytest.approx(20.0),
        "sampling": pytest.approx(20.0),
        "other": pytest.approx(10.0),
    }
    gemm = next(k for k in profile.top if k["name"] == "gemm_kernel")
    assert gemm == {
        "name": "gemm_kernel",
        "category": "linears",
        "per_step": 2.0,
        "microseconds": pytest.approx(20.0),
    }
    assert "0.130 ms busy per step, 13 kernels" in describe_profile(profile)


def test_overlapping_kernels_count_once():
    """b starts while a runs, c lies within b: 10 + 5 + 0, which is the time that anything ran."""
    kernels = [Kernel("a", 0, 10), Kernel("b", 5, 10), Kernel("c", 6, 3), Kernel("d", 20, 1)]
    assert exclusive_times(kernels) == [10, 5, 0, 1]


def test_a_product_between_other_kernels_is_not_the_head():
    names = ("gemm_kernel", "add_norm_kernel", "sample_kernel")
    kernels = [Kernel(name, i, 1.0) for i, name in enumerate(names)]
    assert categorize(kernels) == ["linears", "norms, activations, rope", "sampling"]


def test_steps_that_cannot_be_told_apart():
    with pytest.raises(EngineError, match="ran once per step"):
        cut_steps(steps_of("gemm_kernel", "gemm_kernel"))


def test_every_kernel_of_ours_has_a_category():
    sources = [p.read_text() for p in (ROOT / "src/qurl/rollout/local/kernels").glob("*.py")]
    names = re.findall(r"^def (\w+_kernel)\(", "\n".join(sources), re.MULTILINE)
    categories = categorize([Kernel(name, 0, 1) for name in names])
    others = [name for name, c in zip(names, categories, strict=True) if c == "other"]
    assert others == ["begin_kernel"]  # the embedding


def test_trace():
    events = [
        {"cat": "kernel", "name": "b", "ts": 7.5, "dur": 2},
        {"cat": "cpu_op", "name": "aten::mm", "ts": 0, "dur": 2},
        {"ph": "M", "name": "process_name"},
        {"cat": "gpu_memcpy", "name": "Memcpy HtoD", "ts": 1, "dur": 0.5},
    ]
    kernels = read_trace(json.dumps({"traceEvents": events}))
    assert kernels == [Kernel("Memcpy HtoD", 1.0, 0.5), Kernel("b", 7.5, 2.0)]


# Right or wrong


def sampled(model, workload, quant="none"):
    engine = build_engine("hf", model, quant=quant)
    problems = make_problems(workload, SHAPES["tiny"].vocabulary, seed=0)
    rollouts = engine.generate(problems, sampling_params(workload, 0))
    return problems, [list(r.completions) for r in rollouts]


def judge(model, quant="none"):
    return Judge(model, Setup("hf", SHAPES["tiny"], quant, "none"))


def test_scores_are_the_models(tiny):
    (problem, _), ((completion, _), _) = sampled(tiny, SMALL)
    ids = [*problem.prompt_ids, *completion.token_ids]
    expected = score_with(tiny, ids)[len(problem.prompt_ids) - 1 :]
    assert torch.allclose(score_completion(tiny, problem, completion), expected, atol=1e-5)


@pytest.mark.parametrize(("quant", "largest"), [("none", 1e-5), ("int8", 0.02), ("fp8", 0.08)])
def test_a_sound_engine_passes(tiny, quant, largest):
    problems, groups = sampled(tiny, dataclasses.replace(SMALL, new_tokens=16), quant)
    gap = judge(tiny, quant).gap(problems, groups)
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
    with pytest.raises(EngineError, match="a wrong engine is not measured"):
        judge(tiny, quant).gap(problems, groups)


def test_an_engine_that_is_wrong_at_the_end_fails(tiny):
    problems, groups = sampled(tiny, dataclasses.replace(SMALL, new_tokens=16))
    assert judge(tiny).gap(problems, with_logprobs(groups, list)) < 1e-5
    late = with_logprobs(groups, lambda x: x[:-4] + [v - 0.3 for v in x[-4:]])
    with pytest.raises(EngineError, match="log-probs differ"):
        judge(tiny).gap(problems, late)


def test_nan_fails(tiny):
    problems, groups = sampled(tiny, SMALL)
    with pytest.raises(EngineError, match="log-probs differ"):
        judge(tiny).gap(problems, with_logprobs(groups, lambda x: [math.nan, *x[1:]]))


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
    assert printed.startswith("usage: qurl bench rollout|sync")


@pytest.mark.parametrize(("kind", "bench"), [("rollout", RolloutBench), ("sync", SyncBench)])
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
        (["speed"], "qurl bench speed: there are rollout and sync"),
        (["rollout", "--model", "8B"], "model '8B' is not one of tiny, 0.5B"),
        (["rollout", "--quant", "int8,int3"], "'int3' is not a value; there are none, int8"),
        (["rollout", "--kv", "int8"], "'int8' is not a value; there are none, fp8"),
        (["rollout", "--workload", "D"], "workload 'D' is not one of A, B, C, Cp"),
        (["rollout", "--new-tokens", "0"], "new_tokens = 0 must be at least 1"),
        (["rollout", "--repeats", "0"], "--repeats 0 must be at least 1"),
        (["rollout", "--device", "cpu", "--profile"], "--profile traces a GPU"),
        (["rollout", "--against", "hf", "--kv", "fp8"], "use --kv none"),
        (["sync", "--master", "fp16"], "'fp16' is not a value; there are bf16, fp32"),
        (["sync", "--repeats", "0"], "--repeats 0 must be at least 1"),
    ],
)
def test_refusals(args, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["bench", *args]) == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_plan_covers_every_combination():
    bench = RolloutBench(model="tiny,0.5B", quant="none,int8", kv="none", against="hf")
    setups, workloads = plan(dataclasses.replace(bench, workload="A,B"), CPU)
    assert [s.key(workloads[0]) for s in setups][:3] == [
        "local tiny none kv=none A",
        "hf tiny none kv=none A",
        "local tiny int8 kv=none A",
    ]
    assert len({s.key(w) for s in setups for w in workloads}) == 2 * 2 * 2 * 2


def test_rollout_on_a_cpu(tmp_path, capsys):
    """All of it: our engine in two formats against transformers, checked, timed, saved."""
    out = tmp_path / "rollout.json"
    args = flags(model="tiny", quant="none,int8", against="hf", repeats=2, device="cpu", out=out)
    sizes = [*flags(prompts=2, group=2), "--prompt-tokens", "5", "--new-tokens", "6"]
    assert main(["bench", "rollout", *args, *sizes]) == 0
    header, *rows, saved = capsys.readouterr().out.splitlines()
    assert header.split()[:5] == ["engine", "model", "quant", "kv", "workload"]
    assert [line.split()[:5] for line in rows] == [
        [engine, "tiny", quant, "none", "2x2:5+6"]
        for quant in ("none", "int8")
        for engine in ("local", "hf")
    ]
    assert saved == f"saved to {out}"
    results = json.loads(out.read_text())["results"]
    assert list(results) == [
        f"{engine} tiny {quant} kv=none 2x2:5+6"
        for quant in ("none", "int8")
        for engine in ("local", "hf")
    ]
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
        "qurl.bench.contenders.build_engine", lambda kind, _, **options: build_engine("hf", model)
    )
    bench = RolloutBench("tiny", "none", prompts=2, group=2, prompt_tokens=5, new_tokens=6)
    bench = dataclasses.replace(bench, device="cpu", out=tmp_path / "rollout.json")
    with pytest.raises(EngineError, match="a wrong engine is not measured"):
        run_rollout(bench)
    assert not bench.out.exists()


def test_sync_on_a_cpu(tmp_path, capsys):
    out = tmp_path / "sync.json"
    figures = run_sync(SyncBench("tiny", "int8", "fp32", repeats=2, device="cpu", out=out))[0]
    assert len(figures.load_seconds) == 2
    assert figures.limit_share == pytest.approx(figures.limit_ms / figures.load_ms)
    assert figures.limit_share > 0
    body = SHAPES["tiny"].num_body
    assert figures.gigabytes == pytest.approx(8 * body / 1e9)
    assert figures.gigabytes_per_s == pytest.approx(figures.gigabytes / figures.load_ms * 1e3)
    assert figures.verify_ms > 0
    assert list(json.loads(out.read_text())["results"]) == ["tiny int8 master=fp32"]
    assert capsys.readouterr().out.splitlines()[1].split()[:3] == ["tiny", "int8", "fp32"]
