"""`qurl tune`: which plans are tried, that wrong ones are found, and where the best are kept."""

import dataclasses
import json
import math
import types
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from qurl.bench import products, tune
from qurl.bench.tune import Tune
from qurl.cli import main
from qurl.errors import ConfigError, EngineError
from qurl.ops.target import Target
from qurl.quant import FORMATS
from qurl.quant.kernels.plans import Plans, open_table, read_table, user_table, write_table

CPU = torch.device("cpu")
ROOT = Path(__file__).parents[2]
MACHINE = {"device": "NVIDIA H200", "versions": {"torch": "2.11.0"}}
CHIP = products.Chip(num_sms=132, shared_bytes=225 * 2**10, l2_bytes=50 * 2**20)
"""The H200."""
H200 = Target("NVIDIA H200", (9, 0), 132)
A100 = Target("NVIDIA A100", (8, 0), 108)
H100 = Target("NVIDIA H100 80GB HBM3", (9, 0), 114)
PRODUCT = ("int8", 1536, 8960, 64)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(products, "LAUNCHES", 1)  # all launches of the interpreter are alike
    return tmp_path / "cache"


# Tables


def test_tables_of_other_cards(cache):
    """Compute capability 9.0 shares the package's table; other cards have the rule of thumb."""
    assert Plans(H200).source == "plans_h200.json (package), rule of thumb"
    assert Plans(H100).source == Plans(H200).source
    assert Plans(H100).table == Plans(H200).table
    assert Plans(H100).choose(*_product()) == Plans(H200).choose(*_product())
    assert (Plans(A100).source, Plans(A100).table) == ("rule of thumb", {})


def _product():
    kind, N, K, M = PRODUCT
    return kind, M, N, K


@pytest.mark.parametrize(("target", "shipped"), [(H100, True), (A100, False)])
def test_the_users_table_comes_first(cache, target, shipped):
    own = products.Plan(64, 64, 64, 7)
    path = user_table(target.name)
    assert path == cache / "qurl" / "plans" / f"{target.name}.json"
    path.parent.mkdir(parents=True)
    path.write_text(write_table({PRODUCT: own}, {"device": target.name}))
    plans = Plans(target)
    assert plans.choose(*_product()) == own
    assert plans.source.startswith(f"{target.name}.json (user's cache), ")
    assert ("package" in plans.source) == (len(plans.table) > 1) == shipped


def test_unified_flows_take_plans_of_their_own_that_cut_no_sum(cache):
    target = Target("NVIDIA H200", (9, 0), 132)
    own, cut = products.Plan(256, 128, 128, 0, 8, 3), products.Plan(16, 64, 128, 4)
    plans = {("fp8", 640, 384, 8192): None, ("fp8-unified", 640, 384, 8192): own}
    plans |= {("fp8", 640, 512, 16): cut, ("int8", 640, 512, 16): cut}
    path = user_table(target.name)
    path.parent.mkdir(parents=True)
    path.write_text(write_table(plans | {("fp8-unified", 640, 512, 16): None}, {}))
    assert Plans(target).choose("fp8", 5000, 640, 384) is None
    unified = Plans(target, unified=True)
    assert unified.choose("fp8", 5000, 640, 384) == dataclasses.replace(own, is_fast=True)
    assert unified.choose("fp8", 16, 640, 512) is None
    assert unified.choose("int8", 16, 640, 512) == cut


@pytest.mark.parametrize(
    ("tokens", "channels", "tile"),
    [(16, 640, 16), (64, 1536, 32), (256, 1536, 32), (256, 2560, 64), (256, 17920, 128)],
)
def test_uncut_plans_have_a_tile_for_every_multiprocessor(cache, tokens, channels, tile):
    """As far as tiles of 32 tokens do. A plan that was measured for more tokens has too few."""
    target = Target("NVIDIA H200", (9, 0), 132)
    large = {("fp8-unified", channels, 384, 8192): products.Plan(256, 128, 128, 0, 8, 3)}
    path = user_table(target.name)
    path.parent.mkdir(parents=True)
    path.write_text(write_table(large, {}))
    plan = Plans(target, unified=True).choose("fp8", tokens, channels, 384)
    assert (plan.tokens, plan.channels, plan.splits) == (tile, 64, 0)


def test_the_cache_of_a_user_who_names_none(monkeypatch):
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/ann")
    assert user_table("A/B") == Path("/home/ann/.cache/qurl/plans/A-B.json")


@pytest.mark.parametrize("content", ["no json", "[]", "{}", '{"plans": {"a": 1}}'])
def test_a_file_that_is_no_table_is_named(cache, content):
    path = user_table(A100.name)
    path.parent.mkdir(parents=True)
    path.write_text(content)
    with pytest.raises(EngineError, match=r"NVIDIA A100\.json is no table of plans .*qurl tune"):
        Plans(A100)


def test_the_shipped_table_says_where_it_was_measured():
    text = (ROOT / "src/qurl/quant/kernels/plans_h200.json").read_text()
    about = json.loads(text)["about"]
    assert about["device"] == "NVIDIA H200"
    assert write_table(read_table(text), about) == text


# The command


def test_help_explains_every_flag(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["tune", "--help"])
    assert stop.value.code == 0
    printed = capsys.readouterr().out
    for field in dataclasses.fields(Tune):
        assert f"--{field.name.replace('_', '-')}" in printed


def test_without_triton(capsys, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["tune"]) == 1
    assert "qurl tune needs the package 'triton'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--model", "7B,8B"], "'8B' is not one of tiny, 0.5B"),
        (["--kind", "int8,fp8-block"], "'fp8-block' is not one of int8, fp8, fp8-unified"),
        (["--tokens", "48"], "'48' is not one of 16, 32, 64"),
        ([], "measures kernels of a GPU, and there is none here"),
    ],
)
def test_refusals(args, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main(["tune", *args]) == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_fp8_products_need_fp8(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr(tune, "Target", types.SimpleNamespace(of=lambda device: A100))
    assert tune.find_gpu(needs_fp8=False) == torch.device("cuda")
    with pytest.raises(ConfigError, match=r"NVIDIA A100 has no FP8.* --kind int8,nvfp4,bf16"):
        tune.find_gpu(needs_fp8=True)


# Products and plans


def test_products_to_measure():
    bench = Tune(model="1.5B, 7B", kind="int8,bf16", tokens="64,256")
    groups = tune.list_problems(bench)
    assert [len(group) for group in groups] == [8] * 4
    assert [(group[0].kind, group[0].K) for group in groups] == [
        ("int8", 1536),
        ("bf16", 1536),
        ("int8", 3584),
        ("bf16", 3584),
    ]
    problem = groups[2][5]
    assert problem == products.Gemm("gate_up", "int8", 37888, 3584, 256)
    assert problem.table_key == ("int8", 37888, 3584, 256)


def test_candidates_fit_the_chip():
    groups = tune.list_problems(Tune())
    for problem in (p for group in groups for p in group):
        plans = products.candidates(problem, CHIP)
        assert len(set(plans)) == len(plans) > 8
        for p in plans:
            stage = problem.tile_bytes(p.tokens, p.channels) * p.depth
            assert 2 * stage <= p.stages * stage <= CHIP.shared_bytes
            assert p.tokens <= problem.M
            assert p.prefetch == 0
            tiles = -(-problem.M // p.tokens) * -(-problem.N // p.channels)
            assert p.splits == 0 or 1 < p.splits <= min(16, 5 * 132 // tiles)
            assert p.splits == 0 or problem.role != "gate_up"


def test_the_known_plan_is_tried_first():
    problem = products.Gemm("o", "int8", 1536, 1536, 64)
    others = products.candidates(problem, CHIP)
    known = products.Plan(64, 64, 128, 4, 4, 6, prefetch=4)
    expected = dataclasses.replace(known, prefetch=0)
    assert expected not in others
    assert products.candidates(problem, CHIP, known) == [expected, *others]
    last = products.candidates(problem, CHIP, others[-1])
    assert last == [others[-1], *others[:-1]]
    gated = dataclasses.replace(problem, role="gate_up")
    assert products.candidates(gated, CHIP, known)[0] == dataclasses.replace(expected, splits=0)


def test_copies_exceed_the_l2():
    l2_bytes = 50 * 2**20
    sizes = {"7B gate_up": 37888 * 3584, "7B o": 3584 * 3584, "1.5B o": 1536 * 1536}
    copies = {name: products.num_copies(size, l2_bytes) for name, size in sizes.items()}
    assert copies == {"7B gate_up": 2, "7B o": 9, "1.5B o": 24}
    assert products.num_copies(10**6, 0) == 1


class ScriptedSetup:
    """Plans take the microseconds that they are given; None does not fit."""

    def __init__(self, times):
        self.times, self.replays = times, []

    def check(self, choice):
        return self.times[choice] is not None

    def clock(self, choice):
        def replay():
            self.replays.append(choice)
            return self.times[choice]

        return replay


@pytest.mark.parametrize("kind", ["int8", "fp8", "nvfp4", "bf16"])
@pytest.mark.parametrize("role", ["qkv", "o", "gate_up"])
def test_right_products_pass(kind, role):
    setup = products.GemmRun(products.Gemm(role, kind, 64, 128, 16), CPU)
    for splits in (0,) if role == "gate_up" else (0, 2):
        assert setup.check(products.Plan(16, 64, 128, splits))
    if kind == "bf16":
        assert setup.check(None)


@pytest.mark.parametrize(
    ("role", "function", "change"),
    [("o", "multiply", 1.01), ("gate_up", "multiply_gated", 1.02), ("o", "multiply", math.nan)],
)
def test_one_wrong_number_is_found(role, function, change, monkeypatch):
    right = getattr(products, function)

    def wrong(*args, **options):
        y = right(*args, **options)
        y[3, 5] *= change
        return y

    monkeypatch.setattr(products, function, wrong)
    setup = products.GemmRun(products.Gemm(role, "int8", 64, 128, 16), CPU)
    with pytest.raises(EngineError, match="is wrong"):
        setup.check(products.Plan(16, 64, 64))


def test_a_product_that_is_wrong_now_and_then_is_found(monkeypatch):
    """As one is that overwrites numbers which it still reads."""
    right, launches = products.multiply, []

    def third_is_wrong(*args, **options):
        y = right(*args, **options)
        launches.append(y)
        return y * 1.01 if len(launches) == 3 else y

    monkeypatch.setattr(products, "LAUNCHES", 4)
    monkeypatch.setattr(products, "multiply", third_is_wrong)
    setup = products.GemmRun(products.Gemm("o", "int8", 64, 128, 16), CPU)
    with pytest.raises(EngineError, match="is wrong"):
        setup.check(products.Plan(16, 64, 64))
    assert len(launches) == 3


def test_tables_are_merged(tmp_path):
    path = tmp_path / "plans.json"
    session = tune.Tuning(CPU, CHIP, {}, path, MACHINE, compile=list)
    problem = products.Gemm("o", "int8", 512, 256, 64)
    plan = products.Plan(64, 64, 128, 2)
    assert tune.known_plans(path, MACHINE) == {}
    session.save(problem, {plan: 2.0})
    session.save(dataclasses.replace(problem, kind="fp8"), {None: 2.0, plan: 3.0})
    newer = dataclasses.replace(plan, prefetch=4)
    session.save(problem, {plan: 2.0, newer: 1.0})
    shape = (512, 256, 64)
    assert open_table(path) == {("int8", *shape): newer, ("fp8", *shape): None}
    assert json.loads(path.read_text())["about"] == MACHINE
    with pytest.raises(ConfigError, match=r"holds plans of NVIDIA H200, and this is NVIDIA A100"):
        tune.known_plans(path, {"device": "NVIDIA A100"})


def test_hopeless_plans_are_not_timed_further():
    first, close, hopeless, large, best = (products.Plan(16, 64, 64, 0, 4, n) for n in range(5))
    times = {first: 10.0, close: 14.0, hopeless: 16.0, large: None, best: 8.0}
    setup = ScriptedSetup(times)
    found = products.measure(setup, list(times))
    assert found == {first: 10.0, close: 14.0, best: 8.0}
    assert products.best_of(found) == best
    assert setup.replays == [*[first] * 4, *[close] * 4, hopeless, *[best] * 4]


def test_plans_of_unified_flows_cut_no_sum_and_are_fast():
    """They are measured as they are used, and have small tiles for few tokens."""
    problem = products.Gemm("o", "fp8-unified", 1536, 1536, 64)
    assert problem.table_key == ("fp8-unified", 1536, 1536, 64)
    assert problem.format == FORMATS["fp8"]
    plans = products.candidates(problem, CHIP, known=products.Plan(64, 64, 128, 0))
    assert {(plan.splits, plan.is_fast) for plan in plans} == {(0, True)}
    assert {plan.tokens for plan in plans} == {16, 32, 64}
    cut = products.candidates(dataclasses.replace(problem, kind="fp8"), CHIP)
    assert any(plan.splits for plan in cut)
    assert not any(plan.is_fast for plan in cut)


def test_the_best_plan_of_ours_is_tried_with_prefetch():
    plan = products.Plan(16, 64, 64)
    ahead = products.with_prefetch({None: 5.0, plan: 6.0})
    assert [p.prefetch for p in ahead] == [2, 4, 8]
    assert {dataclasses.replace(p, prefetch=0) for p in ahead} == {plan}
    assert products.with_prefetch({None: 5.0}) == []


def test_the_best_plans_of_a_group_are_saved_and_shown(tmp_path, capsys, monkeypatch):
    """In Triton's interpreter, in place of a GPU."""
    plans = [products.Plan(16, 64, 64), products.Plan(16, 64, 64, 2)]
    monkeypatch.setattr(products, "candidates", lambda problem, chip, known: plans)
    compiled = []
    session = tune.Tuning(
        device=CPU,
        chip=dataclasses.replace(CHIP, l2_bytes=0),
        known={},
        table=tmp_path / "plans.json",
        machine=MACHINE,
        compile=compiled.extend,
    )
    problems = [
        products.Gemm("qkv", "int8", 64, 128, 16),
        products.Gemm("down", "int8", 64, 64, 16),
    ]
    tune.measure_group(session, problems)
    assert compiled == [(problem, plan) for problem in problems for plan in plans]
    table = open_table(session.table)
    assert list(table) == sorted(p.table_key for p in problems)
    assert all(plan in plans for plan in table.values())
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:5] for line in lines] == [
        ["int8", p.role, str(p.N), str(p.K), str(p.M)] for p in problems
    ]


def test_kernels_are_compiled_with_small_problems(monkeypatch):
    """They depend on neither M nor K."""
    made = []

    class Setup:
        def __init__(self, problem, device):
            made.append(problem)

        def launch(self, plan):
            made.append(plan)

    monkeypatch.setattr(products, "GemmRun", Setup)
    problem, plan = products.Gemm("o", "int8", 3584, 18944, 256), products.Plan(64, 64, 128)
    products.compile_plan(problem, plan, CPU)
    assert made == [dataclasses.replace(problem, M=64, K=1024), plan]
