"""How far a sound quantized copy is from its trainer on the canary prompt, and a damaged one.

    python benchmarks/canary_gap.py MODEL_FOLDER

Writes benchmarks/results/canary_gap.json: mean |log-prob gap| and KL for each format, on the
canary's own prompt and on 32 greedily sampled tokens.
"""

from __future__ import annotations

import json
import sys
from datetime import UTC, datetime
from pathlib import Path

import torch
import transformers

from qurl.quant import FORMATS, quantized_copy
from qurl.rollout.canary import canary_ids
from qurl.trainer.policy import load_model

RESULTS = Path(__file__).resolve().parent / "results"


@torch.no_grad()
def main(folder: str) -> None:
    model = load_model(folder).eval()
    prompts = {"canary prompt": torch.tensor(canary_ids(model)), "greedy": greedy_tokens(model)}
    copies = {name: quantized_copy(model, name) for name in FORMATS}
    copies["int8, one down_proj's scales shifted by a row"] = shifted_copy(model)
    rows = [
        {"prompt": prompt, "copy": name, **compare(model, copy, ids)}
        for prompt, ids in prompts.items()
        for name, copy in copies.items()
    ]
    result = {
        "date": datetime.now(UTC).date().isoformat(),
        "model": Path(folder).name,
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "rows": rows,
    }
    (RESULTS / "canary_gap.json").write_text(json.dumps(result, indent=1) + "\n")
    for row in rows:
        print(f"{row['prompt']:14} {row['copy']:46} gap {row['gap']:.3f}  KL {row['kl']:.4f}")


def greedy_tokens(model) -> torch.Tensor:
    start = torch.tensor([[model.config.bos_token_id or 1]])
    return model.generate(start, do_sample=False, min_new_tokens=31, max_new_tokens=31)[0]


def shifted_copy(model):
    copy = quantized_copy(model, "int8")
    scale = copy.model.layers[3].mlp.down_proj.weight.scale
    scale.copy_(scale.roll(1, 0))
    return copy


def compare(model, copy, ids: torch.Tensor) -> dict[str, float]:
    ours, theirs = (m(input_ids=ids[None]).logits[0, :-1].log_softmax(-1) for m in (model, copy))
    targets = ids[1:, None]
    gap = (ours.gather(1, targets) - theirs.gather(1, targets)).abs().mean()
    kl = (ours.exp() * (ours - theirs)).sum(-1).mean()
    return {"gap": round(float(gap), 4), "kl": round(float(kl), 4)}


if __name__ == "__main__":
    main(sys.argv[1])
