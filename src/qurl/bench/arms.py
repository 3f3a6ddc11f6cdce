"""What training benchmarks compare: arms, each a name for the keys of a recipe's [quant].

none                BF16 everywhere
int8                quantized rollouts, BF16 training
int8+kv             with an FP8 KV cache
fp8-unified         training in the same format; gradients in BF16
fp8-unified-dgrad   gradients of inputs in 8 bits too (quant.backward)
fp8-unified-all     gradients of weights as well
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, get_args, get_type_hints

from qurl.bench.shapes import Bench
from qurl.config import Config, build_config, check_combinations
from qurl.config.schema import QuantConfig
from qurl.errors import ConfigError
from qurl.quant.formats import FORMATS
from qurl.run.shape import Shape

BACKWARDS = get_args(get_type_hints(QuantConfig)["backward"])
"""Values of quant.backward, by the number of gradients that are products in 8 bits."""
_ARM = re.compile(
    rf"(?P<format>{'|'.join(['none', *FORMATS])})"
    r"(?P<unified>-unified(-(?P<backward>dgrad|all))?)?(?P<kv>\+kv)?"
)


@dataclass(frozen=True)
class Arm:
    """One setting of [quant]."""

    name: str
    quant: Mapping[str, Any]  # only the keys that the name asks for

    @staticmethod
    def of(name: str) -> Arm:
        found = _ARM.fullmatch(name)
        if found is None:
            raise ConfigError(
                f"{name!r} is not an arm; write a format (none, {', '.join(FORMATS)}), then "
                "-unified, -unified-dgrad or -unified-all, then +kv, such as int8+kv or fp8-unified"
            )
        quant: dict[str, Any] = {"format": found["format"]}
        if found["unified"]:
            quant["unified"] = True
        if found["backward"]:
            quant["backward"] = found["backward"]
        if found["kv"]:
            quant["kv"] = "fp8"
        return Arm(name, quant)

    @staticmethod
    def list_of(names: str) -> list[Arm]:
        """Arms separated by commas, without duplicates."""
        return [Arm.of(name) for name in dict.fromkeys(map(str.strip, names.split(",")))]

    def apply(self, config: Config) -> Config:
        """A recipe with this [quant]."""
        quant = {"kv": "none", "unified": False, "backward": "bf16", **self.quant}
        if quant["format"] == "none":
            quant["full_layers"] = 0
        if quant["format"] != "int8":
            quant["scales"] = "dynamic"
        return replace(config, quant=replace(config.quant, **quant))

    @property
    def format(self) -> str:
        return self.quant["format"]

    @property
    def kv(self) -> str:
        return self.quant.get("kv", "none")

    @property
    def is_unified(self) -> bool:
        return "unified" in self.quant

    @property
    def num_narrow(self) -> int:
        """How many of a linear layer's three products are in 8 bits."""
        return 1 + BACKWARDS.index(self.quant.get("backward", "bf16")) if self.is_unified else 0


@dataclass(frozen=True)
class BatchBench(Bench):
    """The flags of benchmarks that train on batches of equal sequences."""

    sequences: int = 256
    """Sequences of a step."""
    group: int = 8
    """Completions per prompt."""
    prompt_tokens: int = 16
    """Tokens of a prompt."""
    tokens: int = 1024
    """Tokens of a completion."""
    minibatches: int = 4
    """Optimizer updates per step."""
    microbatch_tokens: int = 16384
    """Most tokens per forward and backward pass."""
    repeats: int = 3
    """Measured runs; the median counts."""
    keys: str = ""
    """Other keys of the recipe, such as optim.lr=1e-5; several with commas."""

    def check(self) -> None:
        super().check()
        for name in ("sequences", "group", "prompt_tokens", "tokens"):
            if (value := getattr(self, name)) < 1:
                raise ConfigError(f"--{name.replace('_', '-')} {value} must be at least 1")
        if self.sequences % self.group:
            raise ConfigError(
                f"--sequences {self.sequences} must be a multiple of --group {self.group}"
            )

    @property
    def batch(self) -> str:
        return f"{self.sequences}x{self.prompt_tokens}+{self.tokens}"

    def settings(self, shape: Shape, arm: str) -> dict[str, Any]:
        """What is saved with the figures of an arm."""
        flags = ("group", "minibatches", "microbatch_tokens", "repeats", "seed", "keys")
        named = {"model": shape.name, "arm": arm, "batch": self.batch}
        return named | {flag: getattr(self, flag) for flag in flags}

    @property
    def num_tokens(self) -> int:
        """Tokens of a step, prompts included."""
        return self.sequences * (self.prompt_tokens + self.tokens)

    def config(self, arm: Arm, **others: Any) -> Config:
        """GRPO without KL; `others` are top-level keys and sections, and --keys come last."""
        tree: dict[str, Any] = {
            "seed": self.seed,
            "device": self.device,
            "batch": {
                "problems": self.sequences // self.group,
                "minibatches": self.minibatches,
                "microbatch_tokens": self.microbatch_tokens,
            },
            "sampling": {"group_size": self.group, "max_tokens": self.tokens},
            "algo": {"aggregation": "seq-mean-token-mean"},
            "quant": dict(arm.quant),
            **others,
        }
        for key, value in parse_keys(self.keys).items():
            section, _, name = key.rpartition(".")
            (tree.setdefault(section, {}) if section else tree)[name] = value
        config = build_config(tree, f"arm {arm.name}")
        check_combinations(config, f"arm {arm.name}")
        return config


def parse_keys(text: str) -> dict[str, Any]:
    """{"optim.lr": 1e-05} from "optim.lr=1e-5"; what is no JSON is text."""
    keys = {}
    for word in filter(None, map(str.strip, text.split(","))):
        key, equals, value = word.partition("=")
        if not equals:
            raise ConfigError(f"--keys {text}: {word!r} is not of the form section.key=value")
        try:
            keys[key] = json.loads(value)
        except ValueError:
            keys[key] = value
    return keys
