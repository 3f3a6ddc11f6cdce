"""The model card of an exported folder: what it is, how it was trained, how well it did."""

from __future__ import annotations

import json
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

USE = {
    "none": """\
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("{name}", dtype="auto")
tokenizer = AutoTokenizer.from_pretrained("{name}")""",
    "vllm": """\
from vllm import LLM

llm = LLM("{name}")  # the format is read from config.json""",
}


def read_run(policy: Path) -> tuple[Path | None, dict[str, Any]]:
    """The run that a policy folder belongs to and its flat recipe; (None, {}) if it has none."""
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
    tags = ["qurl", "reinforcement-learning", recipe.get("algo.name"), f"w8a8-{quant}"]
    if quant == "none":
        tags.pop()
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
        lines += ["", "## Training", "", *_table(_training(policy, recipe))]
        if scores := _scores(run):
            lines += ["", "## Held-out accuracy", "", *_table(scores)]
    lines += ["", "## Format", "", _format(quant), "", "```python"]
    lines += [USE["vllm" if quant != "none" else "none"].format(name=name), "```", ""]
    (folder / "README.md").write_text("\n".join(lines), encoding="utf-8")


def _training(policy: Path, recipe: Mapping[str, Any]) -> dict[str, str]:
    step = policy.parent.name.removeprefix("step-").lstrip("0") or "0"
    done = f"{step} of {recipe['steps']}" if step.isdigit() else str(recipe["steps"])
    return {"steps": done} | {key: f"{recipe[key]}" for key in SHOWN if key in recipe}


def _scores(run: Path) -> dict[str, str]:
    """{"accuracy, int8": "..."} of the last evaluation; the first one is that of the base model."""
    if not (run / METRICS).is_file():
        return {}
    rows = [row for row in iter_jsonl(run / METRICS) if any(k.startswith("eval/") for k in row)]
    if not rows:
        return {}
    names = [k for k in rows[-1] if k.startswith("eval/") and k.endswith("/accuracy")]
    return {
        f"{name.removeprefix('eval/').removesuffix('/accuracy')}, after {rows[-1]['step'] + 1} "
        "steps": f"{rows[-1][name]:.1%} (from {rows[0].get(name, float('nan')):.1%}; 95 % interval "
        f"{rows[-1][name + '_low']:.1%} to {rows[-1][name + '_high']:.1%})"
        for name in names
    }


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
