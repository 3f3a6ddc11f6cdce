"""Writes the pairs of systems into docs/systems.md, each tried against the rules of the code."""

from __future__ import annotations

import functools
import itertools
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from qurl.config import PRESETS, build_config
from qurl.config.rules import find_mistakes, find_warnings

TARGET = Path(__file__).with_name("systems.md")
BEGIN, END = "<!-- pairs: written by docs/write_systems_table.py -->", "<!-- end of pairs -->"
ONE_KEY, REFUSED, WARNED, WORKS = "one key", "refused", "warned", "works"

FEATURES: Mapping[str, Mapping[str, Any]] = {
    "ACR": {"algo.objective": "acr"},
    "TIS": {"algo.objective": "tis"},
    "no correction": {"algo.objective": "ppo_prox"},
    "one update a step": {"batch.minibatches": 1},
    "UAQ": {"quant.update_scale": 1.5},
    "Jet-RL": {"quant.unified": True},
    "LoRA": {"model.lora_rank": 16, "optim.lr": 1e-5},
    "QeRL base": {
        "model.base": "nvfp4",
        "model.lora_rank": 16,
        "optim.lr": 1e-5,
        "quant.format": "nvfp4",
    },
    "AQN": {"quant.noise": "aqn"},
    "frozen scales": {"quant.scales": "frozen"},
    "dynamic sampling": {"algo.dynamic_sampling": True},
    "PPO": {"algo.name": "ppo"},
    "VAPO": {"algo.name": "vapo"},
    "GRESO": {"sampling.select": "greso"},
    "DOTS": {"sampling.select": "dots"},
    "replay": {"sampling.replay": "recent"},
    "E3 budget": {"sampling.budget": "e3", "algo.aggregation": "token-mean"},
    "E3 temperature": {"sampling.thermostat": "e3"},
    "BroRL": {"sampling.group_size": 512, "sampling.chunk": 64, "optim.base_batch": 8192},
    "Shuffle-R1": {"batch.subselect": "shuffle-r1"},
    "PODS": {"batch.subselect": "pods"},
    "HistoSpec": {"rollout.drafts": "histospec", "sampling.keep_responses": True},
    "HistoPipe": {"parallel.engines": 2, "parallel.deal": "histopipe"},
    "FP8 cache": {"quant.kv": "fp8"},
    "vLLM": {"rollout.engine": "vllm"},
}
"""Settings that turn each of them on. To list another system, add it here."""

NOTES: Mapping[tuple[str, str], str] = {
    ("ACR", "replay"): "one behaviour log-prob per token travels with the sample, so the weight "
    "covers quantization and age; `replay/k3_kl_fresh` and `replay/k3_kl_replayed` tell them apart",
    ("TIS", "replay"): "as ACR",
    ("ACR", "Shuffle-R1"): "a repeated completion keeps its weights; mismatch metrics are of the "
    "batch after the draw",
    ("dynamic sampling", "GRESO"): "groups without signal are still dropped; GRESO says how many "
    "problems a round asks for",
    ("dynamic sampling", "DOTS"): "groups without signal are still dropped",
    ("dynamic sampling", "Shuffle-R1"): "groups are filtered first, then paired",
    ("E3 budget", "BroRL"): "`group_size` is the mean; the bounds are shares of it",
    ("E3 budget", "PODS"): "a group keeps `systems.pods.keep` completions, whatever its size",
    ("replay", "E3 temperature"): "the trainer uses the present temperature, and old log-probs are "
    "those of the temperature that sampled them, so the weight covers it",
    ("BroRL", "Shuffle-R1"): "pairs are made within the whole group",
    ("BroRL", "PODS"): 'caps the cost of training; set `systems.pods.statistics = "group"` to keep '
    "the baseline of the whole group",
    (
        "HistoSpec",
        "FP8 cache",
    ): "drafts are checked with the FP8 cache too, so the log-probs are those of the actor",
    ("E3 budget", "HistoSpec"): "a problem drafts from its last group, whatever its size",
    ("BroRL", "HistoSpec"): "each piece of a group builds its own index of the last group",
    ("E3 budget", "HistoPipe"): "engines get equal numbers of problems, not of completions; an "
    "engine with room helps a full one",
    ("BroRL", "HistoPipe"): "all pieces of a group are meant for one engine",
    ("E3 temperature", "HistoSpec"): "tokens are drawn at the present temperature, whatever the "
    "drafts were drawn at",
    ("ACR", "Jet-RL"): "allowed; all weights are 1, so it does nothing",
    ("UAQ", "AQN"): "sigma is multiplied by s, because the norms are",
    ("UAQ", "frozen scales"): "the profile is taken after UAQ",
    ("LoRA", "AQN"): "adapters are merged as always; noise is on the norms",
    ("QeRL base", "AQN"): "QeRL; the mismatch is the noise alone",
    ("ACR", "QeRL base"): "allowed; without noise all weights are 1 up to rounding",
    ("UAQ", "Jet-RL"): "UAQ stays a learning rate per layer",
}
"""What happens where two of them work together and that needs a word."""


def judge(first: str, second: str) -> tuple[str, str]:
    """(verdict, the rule in the words of the code) of two features in one recipe."""
    ours, theirs = FEATURES[first], FEATURES[second]
    if clash := [key for key in ours if key in theirs and ours[key] != theirs[key]]:
        return ONE_KEY, f"both set `{clash[0]}`"
    alone = [*findings_of(first), *findings_of(second)]
    for verdict, rule in findings({**ours, **theirs}):
        if (verdict, rule) not in alone:
            return verdict, rule
    return WORKS, NOTES.get((first, second), "")


@functools.cache
def findings_of(feature: str) -> list[tuple[str, str]]:
    return findings(FEATURES[feature])


def findings(settings: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What the rules say to a recipe with these settings, over the preset of its algorithm."""
    tree: dict[str, dict[str, Any]] = {}
    presets = PRESETS[settings.get("algo.name", "grpo")]
    flat: dict[str, Any] = {"algo.objective": "tis"}  # the default, ACR, is one of the features
    flat |= {f"{s}.{k}": v for s, keys in presets.items() for k, v in keys.items()} | settings
    for key, value in flat.items():
        section, _, name = key.partition(".")
        tree.setdefault(section, {})[name] = value
    config = build_config(tree)
    refused = [(REFUSED, mistake) for mistake in find_mistakes(config)]
    return [*refused, *((WARNED, warning) for warning in find_warnings(config))]


def render() -> str:
    """The matrix, and below it every pair that needs a word."""
    marks = {ONE_KEY: "-", REFUSED: "✗", WARNED: "!", WORKS: "·"}
    names, verdicts = list(FEATURES), {}
    for pair in itertools.combinations(FEATURES, 2):
        verdicts[pair] = judge(*pair)
    lines = ["| | " + " | ".join(str(i + 1) for i in range(len(names))) + " |"]
    lines.append("|---" * (len(names) + 1) + "|")
    for i, row in enumerate(names):
        cells = [marks[verdicts[column, row][0]] for column in names[:i]]
        lines.append(f"| {i + 1} {row} | " + " | ".join([*cells, *[" "] * (len(names) - i)]) + " |")
    lines += ["", "| pair | | rule |", "|---|---|---|"]
    for (first, second), (verdict, rule) in verdicts.items():
        if rule and verdict != ONE_KEY:
            lines.append(f"| {first} and {second} | {verdict} | {rule} |")
    return "\n".join(lines)


def rewrite(page: str) -> str:
    """The page with the tables of today."""
    pattern = f"{re.escape(BEGIN)}.*?{re.escape(END)}"
    return re.sub(pattern, lambda _: f"{BEGIN}\n\n{render()}\n\n{END}", page, flags=re.DOTALL)


if __name__ == "__main__":
    TARGET.write_text(rewrite(TARGET.read_text(encoding="utf-8")), encoding="utf-8")
    print(f"wrote {TARGET}", file=sys.stderr)
