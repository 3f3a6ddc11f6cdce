"""Forecasts for many GPUs: formulas by hand, counts against benchmarks/results/wire.json."""

import itertools
import json
import math
import runpy
from dataclasses import replace
from pathlib import Path

import pytest
from test_advise import recipe, scenario

from qurl.bench import cluster, forecast
from qurl.bench.advise import advise
from qurl.bench.arms import Arm
from qurl.bench.plan import Placement
from qurl.bench.shapes import SHAPES
from qurl.cli import main
from qurl.errors import ConfigError
from qurl.run.budget import memory_rows, peak_memory
from qurl.run.cards import CARDS

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
H200, NODE_RATE, NETWORK = CARDS["H200"], 0.8 * 450e9, 0.8 * 400e9
SHAPE = SHAPES["7B"]
P, Q = 7_615_616_512, 28 * 233_046_016  # q, k, v, o, gate, up and down of a layer


@pytest.fixture(scope="module")
def wire():
    results = json.loads((RESULTS / "wire.json").read_text())["results"]
    assert all(entry["machine"]["commit"] for entries in results.values() for entry in entries)
    return {key: entries[-1]["figures"] for key, entries in results.items()}


def test_a_shipment_of_codes_is_half_of_one_in_bf16():
    """7B: codes and scales of 6.53e9 projections, 0.545e9 numbers of the embedding in FP32, and
    as many others in BF16: 9.8 of 16.3 GB. Ranks gather all that is not coded in FP32."""
    assert (SHAPE.num_parameters, SHAPE.num_quantized) == (P, Q)
    embedding, codes = 152_064 * 3584, Q + 4 * Q / 3584
    assert cluster.shipment_bytes(SHAPE, "none") == 2 * P + 2 * embedding
    assert cluster.shipment_bytes(SHAPE, "int8") == codes + 2 * (P - Q) + 2 * embedding
    assert 9.79e9 < cluster.shipment_bytes(SHAPE, "int8") < 9.81e9
    assert cluster.collected_bytes(SHAPE, "int8") == codes + 4 * (P - Q)
    assert cluster.collected_bytes(SHAPE, "none") == 4 * P
    assert cluster.collected_bytes(SHAPE, "fp8-block") == 4 * P, "tiles are gathered, then coded"


def test_exchanges_by_hand():
    """29 calls of 15 hops on two nodes; 7 hops over NVLink on one."""
    seconds, received = cluster.exchange_seconds(SHAPE, H200, 16, 2, 1, is_unified=False)
    assert received == pytest.approx(3 * 4 * P * 15 / 16)
    assert seconds == pytest.approx(received / NETWORK + 3 * 29 * 15 * 10e-6)
    alone = cluster.exchange_seconds(SHAPE, H200, 8, 1, 0, is_unified=True)
    codes = (Q + 4 * (P - Q)) * 7 / 8
    assert alone == pytest.approx((codes / NODE_RATE + 29 * 7 * 10e-6, codes))


def test_a_sync_by_hand():
    """Gathered over 8 GPUs of a node in 16 calls a layer, then through one network card to 56
    engines, in 10 chunks of a GiB."""
    sent, held = (f(SHAPE, "int8") for f in (cluster.shipment_bytes, cluster.collected_bytes))
    gather = held * 7 / 8 / NODE_RATE + 16 * 28 * 7 * 10e-6
    apart = cluster.sync_seconds(SHAPE, "int8", H200, 8, 56, is_colocated=False)
    assert apart == pytest.approx(gather + sent / (NETWORK / 8) + 10 * 56 * 10e-6 + 0.12)
    together = cluster.sync_seconds(SHAPE, "int8", H200, 8, 8, is_colocated=True)
    assert together == pytest.approx(gather + 0.12)


def test_the_driver_by_hand():
    """Ten completions of 100 tokens behind prompts of 50, for 8 trainers: outlines of 170 bytes and
    texts of 4 a token in, rows of 200 bytes and prompts of 4 a token out, and 13 bytes a token on
    and off the shelves."""
    work = (10, 50, 100)
    seconds, received, sent = cluster.driver_seconds(*work, 8, is_shelved=True)
    assert (received, sent) == (1700 + 4000, 2000 + 2000)
    shelves = 13 * 1000 / 8 * (1 / 115e6 + 1 / 180e6)
    assert seconds == pytest.approx(10 * 20e-6 + shelves + 9700 / 1.25e9)
    seconds, received, sent = cluster.driver_seconds(*work, 8, is_shelved=False)
    assert (received, sent) == (5700 + 16_000, 4000 + 16_000)
    assert seconds == pytest.approx(10 * 20e-6 + 1000 * 0.1e-6 + 41_700 / 1.25e9)
    assert cluster.driver_seconds(*work, 1, is_shelved=False)[1:] == (21_700, 0)


def test_failures_by_hand():
    """Meta's 419 in 54 days of 16,384 GPUs: on 1024 GPUs one in 49.5 hours.

    With checkpoints every hour each costs 30 minutes and a restart of 10: 40 of 2970 minutes.
    """
    hours = cluster.MTBF_HOURS / 1024
    assert hours == pytest.approx(49.5, abs=0.05)
    assert cluster.lost_share(1024, 3600) == pytest.approx(40 / (49.49 * 60), rel=1e-3)


def test_counts_of_bytes_are_those_of_processes(wire):
    """What two FSDP2 ranks receive, what the driver gets and sends."""
    sharded = wire["fsdp2 tiny 2 ranks"]
    whole = 4 * sharded["parameters"] / 2
    assert sharded["received"] == {"gathers": 2 * whole, "reductions": whole}
    assert sharded["parameters"] == SHAPES["tiny"].num_parameters
    records = wire["records"]
    counted = {
        "outline_bytes_per_completion": cluster.OUTLINE_BYTES,
        "row_bytes_per_completion": cluster.ROW_BYTES,
        "rollout_bytes_per_token": cluster.RECORD_BYTES,
    }
    assert {name: records[name] for name in counted} == pytest.approx(counted, rel=0.05)
    timed = {
        "outline_us_per_completion": 1e6 * cluster.OUTLINE_SECONDS,
        "rollout_us_per_token": 1e6 * cluster.RECORD_SECONDS,
        "shelf_put_mb_per_s": cluster.SHELF_PUT / 1e6,
        "shelf_get_mb_per_s": cluster.SHELF_GET / 1e6,
    }
    assert all(0.5 < records[name] / expected < 2 for name, expected in timed.items())


def test_codes_take_about_half_the_time_of_bf16_between_processes(wire):
    """Every receiver costs as much again, because all share the cores of one machine."""
    for receivers in (1, 2, 3, 4):
        codes, bf16 = (wire[f"broadcast 64M {f} to {receivers}"] for f in ("int8", "bf16"))
        assert bf16["bytes"] == 2 * codes["bytes"] == 128e6
        assert 0.3 < codes["fastest_s"] / bf16["fastest_s"] < 0.8
        first = wire["broadcast 64M bf16 to 1"]["fastest_s"]
        assert 0.5 * receivers < bf16["fastest_s"] / first < 2 * receivers


def test_unfused_layers_take_as_long_as_was_measured():
    runs = json.loads((RESULTS / "update.json").read_text())["runs"]
    before, after = (
        next(r for r in runs if r["what"].startswith(what) and r["arm"] == "bf16")
        for what in ("layers of modules", "one function per layer")
    )
    for key, rate in (("update_s", "UNFUSED_UPDATE"), ("prox_s", "UNFUSED_FORWARD")):
        ratio = before[key][-1] / after[key][-1]
        assert getattr(forecast, rate) == pytest.approx(ratio, abs=0.01)


def predict(gpus, placement, arm="int8", shape="7B", **sections):
    model = {"path": "nowhere", "gradient_checkpointing": True}
    found = scenario(recipe(model=model, **sections), gpus=gpus, shape=shape)
    arm = Arm.of(arm)
    return found.planner.predict(arm, found.work(arm), placement), found


def test_one_gpu_alone_is_what_was_measured():
    """The plan of one GPU is the forecast that is checked against measured steps."""
    plan, one = predict(1, Placement(1, 1, True))
    alone = one.forecast(Arm.of("int8"))
    assert plan.rollout == pytest.approx(alone.rollout, rel=0.02)
    assert plan.compute == pytest.approx(alone.train)
    assert (plan.exchange, plan.exchanged_bytes) == (0, 0)


def test_gpus_share_sequences_and_groups():
    """256 sequences in 4 mini-batches: 8 ranks have 8 rows of each, 100 ranks at most one."""
    places = {n: Placement(n, n, True) for n in (1, 8, 64, 100)}
    one, eight, many, more = (predict(n, place)[0] for n, place in places.items())
    shards = 4 * P * 36 / 4.3e12
    products = 1.07 * (one.compute - shards) / 8 + shards / 8
    assert eight.compute == pytest.approx(products, rel=0.01), "0.75 forwards take only 1.05"
    assert more.compute == pytest.approx(many.compute, rel=0.01)
    longest = 1024
    assert many.rollout > longest * 28 * 23.1e-6, "decoding the longest completion"
    assert many.rollout == pytest.approx(predict(64, Placement(32, 32, False))[0].rollout)


def test_replicas_add_up_gradients_after_each_mini_batch():
    """Four updates a step of 4 P bytes, twice 7 / 8 of them around a ring of 8 at 0.8 x 450 GB/s,
    in 12 calls a layer of 28. Products are those of fused layers, and each rank has all moments."""
    one, eight = (predict(n, Placement(n, n, True, is_sharded=False))[0] for n in (1, 8))
    received = 4 * 2 * 4 * P * 7 / 8
    assert eight.exchanged_bytes == pytest.approx(received)
    hops = 4 * 2 * 12 * 28 * 7 * 10e-6
    assert eight.exchange == pytest.approx(received / (0.8 * H200.link) + hops)
    optimizer = 4 * P * 36 / 4.3e12
    assert eight.compute == pytest.approx((one.compute - optimizer) / 8 + optimizer, rel=0.01)
    assert eight.train == eight.compute + eight.exchange
    assert (eight.sync, eight.sync_bytes) == (cluster.VERIFY_SECONDS, 0)
    assert eight.trainer_gib == pytest.approx(one.trainer_gib, rel=0.2), "nothing is shared"
    assert eight.trainer_gib > 2 * predict(8, Placement(8, 8, True))[0].trainer_gib


def test_replicas_take_a_little_longer_than_shards():
    """docs/scale.md says so. Products are faster, and nothing hides the exchange."""
    longer = []
    for card, shape in itertools.product(("H200", "A100"), ("0.5B", "1.5B", "3B")):
        plan, arm = scenario(recipe(), card, gpus=8, shape=shape), Arm.of("int8")
        found = {str(p.placement): p for p in plan.planner.best(arm, plan.work(arm))}
        longer.append(found["replicas"].step / found["together"].step)
    assert (round(min(longer), 2), round(max(longer), 2)) == (1.03, 1.08)


@pytest.mark.parametrize("engine", ["local", "hf"])
def test_what_shards_refuse_is_planned_on_replicas(engine):
    """Only the adapters' gradients are exchanged: 32 times those of rank 1."""
    config = recipe(model={"path": "nowhere", "lora_rank": 32}, rollout={"engine": engine})
    plan, arm = scenario(config, gpus=8), Arm.of("int8")
    [found] = plan.planner.best(arm, plan.work(arm))
    assert str(found.placement) == "replicas"
    assert found.placement.engines == (8 if engine == "local" else 1)
    assert found.exchanged_bytes == 4 * 2 * 4 * 32 * plan.shape.num_in_rank * 7 / 8


def test_micro_batches_of_a_step():
    """Per rank 8 rows of 1536 tokens, in pieces of 10 rows: 4 pieces of 0.75 + 2 gathers."""
    planner = scenario(recipe(), gpus=8).planner
    work = scenario(recipe()).work(Arm.of("int8"))
    assert planner._passes(work, 8) == (4 * 0.75 + 4 * 2, 4)
    assert planner._passes(work, 1)[1] == 4 * 7  # 64 rows of each mini-batch


def test_ahead_hides_the_shorter_part():
    apart, ahead = (predict(16, Placement(8, 8, False, n))[0] for n in (0, 1))
    train = apart.train + apart.driver + apart.rest
    assert apart.step == pytest.approx(apart.sync + apart.rollout + train)
    assert ahead.step == pytest.approx(apart.sync + max(apart.rollout, train))
    slow = replace(ahead, exchange=10 * ahead.compute)
    assert slow.train == 10 * ahead.compute, "products wait for weights"


def test_32b_fits_a_node_with_moments_in_8_bits():
    """docs/scale.md says so."""
    writer = runpy.run_path(str(RESULTS.parents[1] / "docs" / "write_scale_tables.py"))
    plain, size = writer["RECIPE"], SHAPES["32B"]
    small = {"batch": replace(plain.batch, microbatch_tokens=8704)}
    coded = {"optim": replace(plain.optim, moments="8bit")}
    for changes, gib in ((small, 142), (coded, 135), (small | coded, 119)):
        config = replace(plain, parallel=replace(plain.parallel, trainers=8), **changes)
        config = Arm.of("int8+kv").apply(config)
        peak = peak_memory(config, memory_rows(config, size, H200.memory, is_cuda=True))
        assert round(peak / 2**30) == gib
    assert round(H200.memory / 2**30) == 131


def test_memory_of_placements():
    """Whole engines beside shards, and each on cards of their own."""
    driver, together, apart = (
        predict(8, place)[0]
        for place in (Placement(8, 1, True), Placement(8, 8, True), Placement(4, 4, False))
    )
    assert together.trainer_gib > apart.trainer_gib - 16 * P / 8 / 2**30
    engine = Q + 4 * (P - Q) - 2 * 152_064 * 3584  # codes, an FP32 embedding, a BF16 head
    cache = 57_344 * 1536  # BF16 keys of a completion
    moved = 4 * 152_064 * 3584  # the largest chunk of a sync: the embedding
    expected = engine + 8 * 8 * cache + moved + 2**30
    assert apart.engine_gib == pytest.approx(expected / 2**30)
    kept = predict(8, Placement(8, 8, True), rollout={"release_kv": False})[0]
    assert kept.trainer_gib - together.trainer_gib == pytest.approx(4 * 8 * cache / 2**30)
    assert driver.sync_bytes == together.sync_bytes > apart.sync_bytes
    assert apart.fits
    large = predict(64, Placement(32, 32, False), arm="none", shape="72B")[0]
    assert not large.fits, "145 GB of BF16 weights are more than a GPU has"
    assert predict(256, Placement(192, 64, False), shape="72B")[0].fits


@pytest.mark.parametrize(
    ("engine", "kinds"), [("vllm", ["driver", "apart", "ahead"]), ("hf", ["driver"])]
)
def test_placements_are_those_that_an_engine_has(engine, kinds):
    plan = scenario(recipe(rollout={"engine": engine}), gpus=4)
    arm = Arm.of("int8")
    assert [str(p.placement) for p in plan.planner.best(arm, plan.work(arm))] == kinds


def test_the_plan_of_a_recipe():
    config = recipe(model={"path": "nowhere", "gradient_checkpointing": True})
    advice = advise(config, gpus=16, shape="7B", gpu="H100")
    kinds = [str(p.placement) for p in advice.plan]
    assert kinds == 2 * ["driver", "together", "replicas", "apart", "ahead"]
    assert {p.placement.num_gpus for p in advice.plan} == {16}
    assert all(p.placement.trainers % 8 == 0 for p in advice.plan), "whole nodes"
    for source, text in cluster.ASSUMPTIONS:
        assert f"{source}: {text}" in advice.notes
    assert any(
        note.startswith("extrapolated: a failure every 3,167 hours") for note in advice.notes
    )
    large = advise(config, gpus=256, shape="72B")
    assert "the driver needs 271 GiB of main memory to load the models" in large.notes
    assert large.answer == "yes"
    assert math.isfinite(large.rows[1].step_s)


def test_trainers_of_a_recipe_are_planned_for():
    config = recipe(parallel={"trainers": 4})
    assert "on 4 x H200" in advise(config, shape="7B").setting
    config = recipe(parallel={"trainers": 4, "engines": 3})
    assert "on 7 x H200" in advise(config, shape="7B").setting
    adapters = recipe(model={"path": "nowhere", "lora_rank": 8})
    with pytest.raises(ConfigError, match=r"lora_rank = 8 is not built for .* \(--gpus 2\)"):
        advise(adapters, gpus=2, shape="7B")


def test_the_table_fits_a_terminal(tmp_path, capsys):
    path = tmp_path / "r.toml"
    sizes = "[task]\nmax_prompt_tokens = 512\n[sampling]\nmax_tokens = 1024\n"
    path.write_text(f'[model]\npath = "nowhere"\ngradient_checkpointing = true\n{sizes}')
    assert main(["advise", str(path), "--shape", "14B", "--gpus", "64"]) == 0
    lines = capsys.readouterr().out.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("placement"))
    heads = "placement GPUs rollout train exchange sync driver step GiB"
    assert " ".join(lines[start].split()) == heads
    assert max(map(len, lines[: start + 9])) <= 80
    assert main(["advise", str(path), "--shape", "14B", "--gpus", "64", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)["plan"]
    assert plan[0]["placement"]["trainers"] == 64
