"""Reads a recipe: TOML, the preset of `algo.name`, and flags.

Precedence: flags > recipe > preset of `algo.name` > defaults. Unknown keys are refused, and all
mistakes are reported at once.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from qurl.config.rules import find_mistakes
from qurl.config.schema import AlgoConfig, Config, Section
from qurl.errors import ConfigError
from qurl.objectives import Advantage, Objective

PRESETS: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "ppo": {"algo": {"advantage": "gae", "aggregation": "token-mean", "whiten": True}},
    "grpo": {
        "algo": {"advantage": "grpo", "aggregation": "seq-mean-token-mean", "kl_coef": 1e-3},
    },
    "dr_grpo": {"algo": {"advantage": "dr_grpo", "aggregation": "seq-mean-token-sum-norm"}},
    "rloo": {"algo": {"advantage": "rloo", "aggregation": "token-mean"}},
    "reinforce_pp": {"algo": {"advantage": "reinforce_pp", "aggregation": "token-mean"}},
    "dapo": {
        "algo": {
            "advantage": "grpo",
            "aggregation": "token-mean",  # token-level loss
            "clip_high": 0.28,  # clip-higher
            "dynamic_sampling": True,
            "gen_multiple": 3,
            "overlong_frac": 0.2,  # soft overlong punishment over the last fifth
            "dual_clip": 10.0,
        },
        "optim": {"warmup_steps": 10, "weight_decay": 0.1},
    },
}
"""What `algo.name` sets; a recipe or a flag overrides any part of it."""

MOVED: Mapping[str, str] = {
    "algo.acr_max_bound": "experimental.acr_max_bound",
    "algo.kl_is_correct": "experimental.weighted_kl",
    "optim.norm_fed_lr_scale": "experimental.norm_fed_lr_scale",
    "optim.dither": "experimental.dither",
    "quant.scale_o_proj": "experimental.scale_o_proj",
    "quant.scale_down_proj": "experimental.scale_down_proj",
    "sampling.top_p": "gone: training always samples with top_p = 1; eval.top_p is for evaluations",
    "sampling.top_k": "gone: training always samples from all tokens",
    "rollout.page_size": "gone: the engine chooses it, and results do not depend on it",
}
"""Keys of earlier versions: where each is now, or why it is gone.

No key that is gone ever had a value that changed a run's results.
"""


def load_config(path: str | Path | None, flags: Sequence[str] = ()) -> Config:
    """Read a recipe or a run, lay the flags over it, and check the whole."""
    recipe, words = read_recipe(path) if path else {}, _split_flags(flags)
    sources = ([str(path)] if path else []) + (["flags"] if flags or not path else [])
    source = " and ".join(sources)
    own = _section(recipe, "algo").get("name")
    name = _last_value(words, "algo.name") or own
    if path and _is_run(path):
        if name != own:
            raise ConfigError(
                f"algo.name = {name!r}, but {path} holds the resolved recipe of a run with "
                f"{own!r}, whose keys would all stay; start from a recipe of recipes/ instead"
            )
        recipe["run_dir"] = str(path)  # it may have been moved
    config = build_config(_with_preset(recipe, str(name or AlgoConfig.name)), source)
    if words:
        config = build_config(to_dict(_apply_flags(config, words)), source)
    check_combinations(config, source)
    return config


def check_combinations(
    config: Config,
    source: str = "config",
    objective: Objective | None = None,
    advantage: Advantage | None = None,
) -> None:
    """Refuse settings that do not go together; give the facts of parts of your own if known."""
    if mistakes := find_mistakes(config, objective, advantage):
        raise ConfigError(_listed(mistakes, source))


def read_recipe(path: str | Path) -> dict[str, Any]:
    """The raw tree of a TOML recipe, or of the config.json of a run directory.

    A run of an earlier version has its old keys carried over.
    """
    path, is_run = Path(path), _is_run(path)
    path = path / "config.json" if is_run else path
    if path.is_dir():
        raise ConfigError(f"{path} is a folder without a config.json; give a recipe or a run")
    if not path.is_file():
        raise ConfigError(f"there is no recipe and no run at {path}; see recipes/ for examples")
    try:
        tree = (json.loads if is_run else tomllib.loads)(path.read_text(encoding="utf-8"))
    except ValueError as error:  # both parsers raise it, and so does a file that is not text
        kind = "JSON" if is_run else "TOML"
        raise ConfigError(f"{path} is not valid {kind}: {error}") from error
    if not is_run:
        return tree
    if not (isinstance(tree, dict) and {"steps", "run_dir", "algo"} <= set(tree)):
        raise ConfigError(f"{path} is not a run's config")
    for name in [name for name, section in tree.items() if isinstance(section, dict)]:
        for key, value in carry_over({f"{name}.{k}": v for k, v in tree.pop(name).items()}).items():
            section, _, rest = key.partition(".")
            tree.setdefault(section, {})[rest] = value
    return tree


def _is_run(path: str | Path) -> bool:
    return (Path(path) / "config.json").is_file()


def carry_over(values: Mapping[str, Any]) -> dict[str, Any]:
    """{"section.key": value} of an earlier version under today's keys."""
    return {MOVED.get(key, key): value for key, value in values.items() if not _is_gone(key)}


def _is_gone(key: str) -> bool:
    return MOVED.get(key, "").startswith("gone: ")


def _explain_moved(key: str, value: Any) -> str:
    if _is_gone(key):
        return f"{key} = {value!r} is {MOVED[key]}; remove the key"
    return f"{key} = {value!r} has moved; write {MOVED[key]} instead"


def build_config(tree: Mapping[str, Any], source: str = "config") -> Config:
    """Validate a tree of plain values; all mistakes are reported at once.

    Unlike `load_config`, it applies no preset and does not check combinations.
    """
    try:
        return TypeAdapter(Config).validate_python(_without_none_strings(tree))
    except ValidationError as error:
        mistakes = [_explain(e) for e in error.errors()]
        raise ConfigError(_listed(list(dict.fromkeys(mistakes)), source)) from None


def to_dict(config: Config) -> dict[str, Any]:
    return dataclasses.asdict(config)


def to_json(config: Config) -> str:
    return json.dumps(to_dict(config), indent=2)


def _with_preset(recipe: Mapping[str, Any], name: str) -> dict[str, Any]:
    own = {section: recipe.get(section, {}) for section in PRESETS.get(name, {})}
    preset = {s: {**PRESETS[name][s], **keys} for s, keys in own.items() if isinstance(keys, dict)}
    return {**recipe, **preset}


def _section(tree: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    section = tree.get(name, {})
    return section if isinstance(section, Mapping) else {}


def _split_flags(flags: Sequence[str]) -> list[str]:
    """Flags in tyro's form: `--a=b` in two words, a value after every switch, None, True, False."""
    words: list[str] = []
    for flag in flags:
        name, equals, value = flag.partition("=")
        is_pair = flag.startswith("--") and equals and not value.startswith("-")
        for word in (name, value) if is_pair else (flag,):
            before = words[-1] if words else ""
            if _is_switch(before) and word.startswith("--"):
                words.append("True")
            is_none = word == "none" and _key(before).split(".")[-1] in _optional_keys()
            is_bool = word in ("true", "false") and _is_switch(before)
            words.append(word.capitalize() if is_none or is_bool else word)
    return [*words, "True"] if words and _is_switch(words[-1]) else words


def _apply_flags(config: Config, words: Sequence[str]) -> Config:
    if old := [key for word in words if (key := _key(word)) in MOVED]:
        mistakes = [_explain_moved(key, _last_value(words, key) or True) for key in old]
        raise ConfigError(_listed(mistakes, "flags"))
    import tyro  # here, because it costs a tenth of a second that `qurl --help` does not pay

    return tyro.cli(
        Config,
        prog="qurl COMMAND [RECIPE|RUN]",
        default=config,
        args=words,
        config=(tyro.conf.FlagConversionOff,),
    )


def _last_value(words: Sequence[str], key: str) -> str | None:
    """The value of a flag; as for tyro, the last one counts."""
    values = [value for name, value in itertools.pairwise(words) if _key(name) == key]
    return values[-1] if values and not _key(values[-1]) else None


def _key(word: str) -> str:
    """`--run-dir` -> `run_dir`; "" for a word that is no flag."""
    return word[2:].replace("-", "_") if word.startswith("--") else ""


def _is_switch(word: str) -> bool:
    """Is it the flag of a key that is true or false?"""
    default: Any = Config()
    for name in _key(word).split("."):
        default = getattr(default, name, None)
    return isinstance(default, bool)


@functools.cache
def _optional_keys() -> frozenset[str]:
    """Keys whose type admits None."""
    fields = [f for section in Section.__subclasses__() for f in dataclasses.fields(section)]  # type: ignore[arg-type]
    return frozenset(f.name for f in fields if str(f.type).endswith("None"))


def _without_none_strings(tree: Mapping[str, Any]) -> dict[str, Any]:
    """TOML has no null: "none" stands for it in the optional keys."""
    return {
        key: _without_none_strings(value)
        if isinstance(value, Mapping)
        else None
        if key in _optional_keys() and value == "none"
        else value
        for key, value in tree.items()
    }


def _explain(error: Mapping[str, Any]) -> str:
    """One validation error as `path = value is wrong because ...`."""
    parts = [str(p) for p in error["loc"] if not (isinstance(p, str) and "[" in p)]
    path, value = ".".join(parts), error["input"]
    kind, context = error["type"], error.get("ctx", {})
    if path in MOVED:
        return _explain_moved(path, value)
    if kind in ("unexpected_keyword_argument", "extra_forbidden"):
        return f"{path} = {value!r} is not a key; {_known_keys(parts[:-1])}"
    if kind == "literal_error":
        return f"{path} = {value!r} is not one of {context['expected']}"
    if kind == "dataclass_type":
        return f"{path} = {value!r} must be a table, like [{path}]"
    if kind == "missing":  # the input is the list that is too short
        return f"{'.'.join(parts[:-1])} = {value!r} has too few values"
    if kind == "tuple_type":
        return f"{path} = {value!r} must be a list, like [{value!r}]"
    message = error["msg"].replace("Input should be", "must be").replace("Input must", "must")
    return f"{path} = {value!r}: {message}"


def _known_keys(section: Sequence[str]) -> str:
    node: Any = Config()
    for name in section:
        node = getattr(node, name)
    keys = ", ".join(f.name for f in dataclasses.fields(node))
    where = f"[{'.'.join(section)}]" if section else "the top level"
    return f"{where} has {keys}"


def _listed(mistakes: Sequence[str], source: str) -> str:
    if len(mistakes) == 1:
        return f"{mistakes[0]} ({source})"
    lines = "\n".join(f"  - {m}" for m in mistakes)
    return f"{len(mistakes)} mistakes in {source}:\n{lines}"
