"""The model card of an exported folder: what it is, how it was trained, how well it did."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from qurl import __version__
from qurl.config import read_recipe
from qurl.errors import ConfigError
from qurl.run.directory import METRICS, flatten, iter_jsonl

SHOWN = (
    *("algo.name", "algo.objective", "algo.cap", "quant.format", "quant.update_scale"),
    *("quant.unified", "model.lora_rank", "optim.lr", "batch.problems", "sampling.group_size"),
    *("sampling.max_tokens", "sampling.temperature", "task.name", "seed"),
)
"""Keys of the recipe that the card lists; never paths, which may tell more than you want to."""

USE_PLAIN = """\
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("{name}", dtype="auto")
tokenizer = AutoTokenizer.from_pretrained("{name}")"""
USE_QUANTIZED = """\
from vllm import LLM

llm = LLM("{name}")  # the format is read from config.json"""


def read_run(policy: Path) -> tuple[Path | None, dict[str, Any]]:
    """The run that a policy folder belongs to and its flat recipe; (None, {}) if it has none."""
    policy = policy.absolute()  # a path that begins inside of the run does not name its folders
    run = next((p for p in policy.parents if p.name == "checkpoints"), policy).parent
    try:
        return run, flatten(read_recipe(run))
    except ConfigError:
        return None, {}


def write_card(folder: Path, policy: Path, name: str, quant: str) -> None:
    """Write README.md; `name` is what the examples call the model."""
    run, recipe = read_run(policy)
    base = recipe.get("model.path", "scratch")
    has_base = bool(re.fullmatch(r"[\w.-]+/[\w.-]+", base)) and not Path(base).exists()
    tags = ["qurl", "reinforcement-learning", recipe.get("algo.name")]
    if quant != "none":
        tags.append(f"w8a8-{quant}")
    front = {
        **({"base_model": base} if has_base else {}),
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": [tag for tag in tags if tag],
    }
    lines = ["---", *(f"{key}: {json.dumps(value)}" for key, value in front.items()), "---", ""]
    origin = f"{base}, trained" if has_base else "A causal language model, trained"
    lines += [f"# {name}", "", f"{origin} by reinforcement learning with QuRL {__version__}."]
    if run is not None:
        found = re.fullmatch(r"step-(\d+)", policy.absolute().parent.name)
        step = int(found[1]) if found else 0  # `initial/`
        lines += ["", "## Training", "", *_table(_training(step, recipe))]
        if scores := _scores(run, step):
            lines += ["", "## Held-out accuracy", "", *_table(scores)]
    lines += ["", "## Format", "", _format(quant), "", "```python"]
    use = USE_PLAIN if quant == "none" else USE_QUANTIZED
    lines += [use.format(name=name), "```", ""]
    (folder / "README.md").write_text("\n".join(lines), encoding="utf-8")


def _training(step: int, recipe: Mapping[str, Any]) -> dict[str, str]:
    done = {"steps": f"{step} of {recipe['steps']}"}
    return done | {key: f"{recipe[key]}" for key in SHOWN if key in recipe}


def _scores(run: Path, step: int) -> dict[str, str]:
    """{"int8, after 100 steps": "..."} of the last evaluation until `step`, against the first."""
    if not (run / METRICS).is_file():
        return {}
    rows = [row for row in iter_jsonl(run / METRICS) if any(k.startswith("eval/") for k in row)]
    rows = [row for row in rows if row["step"] < step]  # later ones are of other weights
    if not rows:
        return {}
    first, last = rows[0], rows[-1]
    scores = {}
    for name in (k for k in last if k.startswith("eval/") and k.endswith("/accuracy")):
        precision = name.removeprefix("eval/").removesuffix("/accuracy")
        low, high = last[f"{name}_low"], last[f"{name}_high"]
        scores[f"{precision}, after {last['step'] + 1} steps"] = (
            f"{last[name]:.1%} (from {first.get(name, math.nan):.1%}; 95 % interval "
            f"{low:.1%} to {high:.1%})"
        )
    return scores


def _format(quant: str) -> str:
    if quant == "none":
        return "Plain weights in safetensors; nothing is quantized, and UAQ is folded back."
    return (
        f"W8A8 {quant.upper()} in compressed-tensors' format: weights with one scale per output "
        "channel, activations quantized per token when the model runs. Embeddings, norms, biases "
        "and lm_head are not quantized. The codes are those that QuRL's rollout engine samples "
        "with. vLLM loads this folder as it is."
    )


def _table(rows: Mapping[str, str]) -> list[str]:
    return ["| | |", "|---|---|", *(f"| {key} | {value} |" for key, value in rows.items())]
