"""Writes the tables of docs/scale.md from `qurl.bench.plan`.

python docs/write_scale_tables.py        (make docs)
"""

from __future__ import annotations

import functools
import re
import sys
from pathlib import Path

from qurl.bench.arms import Arm
from qurl.bench.cluster import (
    ASSUMPTIONS,
    MTBF_HOURS,
    broadcast_seconds,
    lost_share,
    point_rate,
    shipment_bytes,
)
from qurl.bench.limits import speed_of
from qurl.bench.plan import Prediction, shorten
from qurl.bench.scenario import Hardware, Scenario
from qurl.bench.shapes import SHAPES
from qurl.config import build_config
from qurl.run.budget import GIB, loaded_bytes
from qurl.run.cards import CARDS

TARGET = Path(__file__).parent / "scale.md"
MODELS, GPUS = ("7B", "14B", "32B", "72B"), (8, 64, 256, 1024)
PROMPT, TOKENS = 512, 3000
CARD = CARDS["H200"]
RECIPE = build_config(
    {
        "model": {"path": "nowhere", "gradient_checkpointing": True},
        "task": {"max_prompt_tokens": PROMPT},
        "batch": {"problems": 512},
        "sampling": {"group_size": 16, "max_tokens": 8192},
        "algo": {"kl_coef": 0.0},
        "rollout": {"release_kv": True, "max_batch": 1024},
        "save": {"every": 10},
    }
)


@functools.cache
def predict(model: str, gpus: int, arm: str) -> dict[str, Prediction]:
    """The fastest of each kind of placement."""
    hardware = Hardware(CARD.name, CARD.memory, speed_of(CARD), CARD.has_fp8, CARD, gpus)
    scenario = Scenario(RECIPE, hardware, SHAPES[model], PROMPT, TOKENS)
    found = scenario.planner.best(Arm.of(arm), scenario.work(Arm.of(arm)))
    return {str(p.placement): p for p in found}


def fastest(found: dict[str, Prediction]) -> Prediction:
    return min(found.values(), key=lambda p: (not p.fits, p.step))


def table(head: str, rows: list[list[str]]) -> list[str]:
    names = head.split(" | ")
    return [f"| {head} |", "|---" * len(names) + "|", *(f"| {' | '.join(row)} |" for row in rows)]


def steps() -> list[str]:
    rows = []
    for model in MODELS:
        for gpus in GPUS:
            base, found = predict(model, gpus, "none"), predict(model, gpus, "int8+kv")
            best, plain = fastest(found), fastest(base)
            place = best.placement
            if not best.fits:
                rows.append([model, f"{gpus:,}", "none fits", *["-"] * 9])
                continue
            split = f"{place.trainers} + {place.engines}" if not place.is_colocated else "all"
            parts = (best.rollout, best.train, best.exchange, best.sync, best.driver)
            gib = max(best.trainer_gib, best.engine_gib)
            ends = [f"**{shorten(best.step)}**", shorten(plain.step) if plain.fits else "-"]
            cells = [model, f"{gpus:,}", str(place), split, *map(shorten, parts)]
            rows.append([*cells, *ends, f"{gib:.0f}"])
    head = "model | GPUs | placement | train + sample | rollout | train | exchange | sync | driver"
    return table(f"{head} | **step** | step, BF16 | GiB", rows)


def placements() -> list[str]:
    """Every kind of placement on one node: seconds, and GiB of the fuller GPU."""
    rows = []
    for model in MODELS:
        found = predict(model, 8, "int8+kv")
        cells = [f"{shorten(p.step)} s, {_gib(p)}" if p.fits else _gib(p) for p in found.values()]
        rows.append([model, f"{loaded_bytes(RECIPE, SHAPES[model]) / GIB:.0f}", *cells])
    return table(f"model | GiB to load | {' | '.join(predict(MODELS[0], 8, 'int8+kv'))}", rows)


def _gib(found: Prediction) -> str:
    gib = max(found.trainer_gib, found.engine_gib)
    return f"{gib:.0f} GiB" if found.fits else f"does not fit: {gib:.0f} GiB"


def limits() -> list[str]:
    """What grows with the cluster, of the smallest and of the largest model."""
    rate, rows = point_rate(CARD, 1024), {}
    for model in (MODELS[0], MODELS[-1]):
        best = predict(model, 1024, "int8+kv")["ahead"]
        shipped = [shipment_bytes(SHAPES[model], format) for format in ("int8", "none")]
        saved = RECIPE.save.every * best.step
        rows[model] = {
            "bytes through the driver": f"{best.driver_bytes / 1e9:.1f} GB a step",
            "the driver": f"{shorten(best.driver)} s a step",
            "a broadcast to 1000 engines, codes": _sent(shipped[0], rate),
            "a broadcast to 1000 engines, BF16": _sent(shipped[1], rate),
            "codes to one engine after the other": f"{shorten(1000 * shipped[0] / rate)} s",
            "rollouts, and the mean length of a completion": f"{shorten(best.rollout)} s, "
            f"{TOKENS / RECIPE.sampling.max_tokens:.0%} of the longest",
            "a failure of any GPU": f"every {MTBF_HOURS / 1024:.0f} hours",
            "time lost to failures": f"{lost_share(1024, saved):.1%}",
        }
    names = list(rows[MODELS[0]])
    cells = [[name, *(rows[model][name] for model in rows)] for name in names]
    return table(f"at 1024 GPUs | {' | '.join(rows)}", cells)


def _sent(num_bytes: float, rate: float) -> str:
    return f"{num_bytes / 1e9:.0f} GB, {broadcast_seconds(num_bytes, 1000, rate):.1f} s"


def assumptions() -> list[str]:
    return table("source | what", map(list, ASSUMPTIONS))


TABLES = {"steps": steps, "placements": placements, "limits": limits, "assumptions": assumptions}


def rewrite(page: str) -> str:
    """The page with the tables of today."""
    for name, render in TABLES.items():
        begin, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
        body = "\n".join([begin, "", *render(), "", end])
        pattern = f"{re.escape(begin)}.*?{re.escape(end)}"
        page = re.sub(pattern, lambda _, body=body: body, page, flags=re.DOTALL)
    return page


if __name__ == "__main__":
    TARGET.write_text(rewrite(TARGET.read_text(encoding="utf-8")), encoding="utf-8")
    print(f"wrote {TARGET}", file=sys.stderr)
