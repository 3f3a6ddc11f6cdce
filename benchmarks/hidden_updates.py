"""How much of the first update a trainer in BF16 sees, and its quantized actor.

    python benchmarks/hidden_updates.py MODEL_FOLDER

The masters of a checkpoint in BF16 begin on BF16's grid, so that an update of less than half its
step is rounded away. Here every weight moves by 4 x rate up or down: what AdamW's first step does
in four mini-batches that agree. UAQ with s = 1.5 leaves the grid, with s = 2 it does not; dithered
masters (`qurl.trainer.dither`) do.

Writes benchmarks/results/hidden_updates.json: projection of what is seen on the update (1 = all of
it, on average) and the share of changed codes, for the layers that UAQ scales; and the share of
their weights that are 0, in the middle of an INT8 code whatever is done to them.
"""

from __future__ import annotations

import json
import sys
from datetime import UTC, datetime
from pathlib import Path

import torch
from torch import nn

from qurl.bench.record import describe_machine
from qurl.quant import rescale_
from qurl.quant.tracking import GROUPS, UpdateTracker
from qurl.trainer.dither import dither_
from qurl.trainer.policy import load_model

RESULT = Path(__file__).resolve().parent / "results" / "hidden_updates.json"
FORMATS = ("none", "int8", "fp8")
RATES = (1e-6, 3e-6, 1e-5)
STARTS = ("as loaded", "UAQ s = 1.5", "UAQ s = 2", "dithered")
SEEN = ("attn_in", "mlp_in")
ROWS = 64


@torch.no_grad()
def main(folder: str) -> None:
    rows = []
    for start in STARTS:
        model = load_model(folder)
        zeros = share_of_zeros(model)  # the same each time
        prepare_(model, start)
        masters = {name: weight.clone() for name, weight in model.named_parameters()}
        for rate in RATES:
            for format in FORMATS:
                rows.append(
                    {"start": start, "rate": rate, "format": format, **see(model, rate, format)}
                )
                print(json.dumps(rows[-1]), flush=True)
                for name, weight in model.named_parameters():
                    weight.copy_(masters[name])
    record = {
        "date": datetime.now(UTC).date().isoformat(),
        "model": Path(folder).name,
        "zeros": round(zeros, 4),
        "machine": describe_machine(torch.device("cpu")),
        "rows": rows,
    }
    RESULT.write_text(json.dumps(record, indent=1) + "\n")


def prepare_(model: nn.Module, start: str) -> None:
    if start.startswith("UAQ"):
        rescale_(model, float(start.rpartition(" ")[2]))
    elif start == "dithered":
        dither_(model, seed=0)


def share_of_zeros(model: nn.Module) -> float:
    weights = [w for name, w in model.named_parameters() if GROUPS.get(name.split(".")[-2]) in SEEN]
    return sum(int((w == 0).sum()) for w in weights) / sum(w.numel() for w in weights)


def see(model: nn.Module, rate: float, format: str) -> dict[str, float]:
    tracker = UpdateTracker(format, ROWS, torch.bfloat16)
    tracker.measure(model)
    draw = torch.Generator().manual_seed(0)
    for weight in model.parameters():
        weight += 4 * rate * torch.randn(weight.shape, generator=draw).sign()
    measured = tracker.measure(model)
    return {
        f"{name}/{group}": round(measured[f"uaq/{metric}/{group}"], 4)
        for name, metric in (("projection", "update_proj"), ("changed", "code_flip_frac"))
        for group in SEEN
    }


if __name__ == "__main__":
    main(sys.argv[1])
