"""Reads a recipe: TOML, the preset of `algo.name`, and flags.

Precedence: flags > recipe > preset of `algo.name` > defaults. Unknown keys are refused, and all
mistakes are reported at once.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from qurl.config.rules import find_mistakes
from qurl.config.schema import AlgoConfig, Config, Section
from qurl.errors import ConfigError

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
"""What `algo.name` sets; every part can be overridden in the recipe or by a flag."""


def load_config(path: str | Path | None, flags: Sequence[str] = ()) -> Config:
    """Read a recipe, lay the flags over it, and check the whole."""
    recipe = read_recipe(path) if path else {}
    source = " and ".join(
        [*([str(path)] if path else []), *(["flags"] if flags or not path else [])]
    )
    own = _section(recipe, "algo").get("name")
    name = _flag_value(flags, "--algo.name") or own
    if path and _is_run(path) and name != own:
        raise ConfigError(
            f"algo.name = {name!r}, but {path} holds the resolved recipe of a run with {own!r}, "
            "whose keys would all stay as they are; start from a recipe of recipes/ instead"
        )
    if path and _is_run(path):
        recipe["run_dir"] = str(path)  # it may have been moved
    config = build_config(_merge(PRESETS.get(str(name or AlgoConfig.name), {}), recipe), source)
    if flags := _with_values(flags):
        import tyro  # here, because it costs a tenth of a second that `qurl --help` does not pay

        config = tyro.cli(
            Config,
            prog="qurl COMMAND [RECIPE|RUN]",
            default=config,
            args=[_python_word(flags, i) for i in range(len(flags))],
            config=(tyro.conf.FlagConversionOff,),
        )
        config = build_config(to_dict(config), source)
    check_combinations(config, source)
    return config


def check_combinations(config: Config, source: str = "config") -> None:
    """Refuse settings that do not go together."""
    if mistakes := find_mistakes(config):
        raise ConfigError(_listed(mistakes, source))


def read_recipe(path: str | Path) -> dict[str, Any]:
    """The raw tree of a TOML recipe, or of the config.json of a run directory."""
    path = Path(path)
    if _is_run(path):
        path, parse, kind = path / "config.json", json.loads, "JSON"
    else:
        parse, kind = tomllib.loads, "TOML"
    if path.is_dir():
        raise ConfigError(f"{path} is a folder without a config.json; give a recipe or a run")
    if not path.is_file():
        raise ConfigError(f"there is no recipe and no run at {path}; see recipes/ for examples")
    try:
        tree = parse(path.read_text(encoding="utf-8"))
    except ValueError as error:  # of either parser, or no text at all
        raise ConfigError(f"{path} is not valid {kind}: {error}") from error
    if kind == "JSON" and not (
        isinstance(tree, dict) and {"steps", "run_dir", "algo"} <= set(tree)
    ):
        raise ConfigError(f"{path} is not that of a run, but something else's")
    return tree


def _is_run(path: str | Path) -> bool:
    return (Path(path) / "config.json").is_file()


def build_config(tree: Mapping[str, Any], source: str = "config") -> Config:
    """Validate a tree of plain values; all mistakes are reported at once.

    It sets no presets and does not look at combinations, as `load_config` does.
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


def _merge(under: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(under)
    for key, value in over.items():
        both = isinstance(merged.get(key), Mapping) and isinstance(value, Mapping)
        merged[key] = _merge(merged[key], value) if both else value
    return merged


def _section(tree: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    section = tree.get(name, {})
    return section if isinstance(section, Mapping) else {}


def _flag_value(flags: Sequence[str], name: str) -> str | None:
    """The last one counts, as for tyro."""
    found = None
    for i, flag in enumerate(flags):
        if flag == name and i + 1 < len(flags):
            found = flags[i + 1]
        elif flag.startswith(name + "="):
            found = flag.split("=", 1)[1]
    return found


def _with_values(flags: Sequence[str]) -> list[str]:
    """A switch that is only named is on."""
    words: list[str] = []
    for i, flag in enumerate(flags):
        words.append(flag)
        if _is_switch(flag) and all(word.startswith("--") for word in flags[i + 1 : i + 2]):
            words.append("true")
    return words


def _python_word(flags: Sequence[str], index: int) -> str:
    """Flags say none, true and false as recipes do; tyro wants them capitalised."""
    name, equals, value = flags[index].partition("=")
    if not equals:
        name, value = flags[max(index - 1, 0)], flags[index]
    is_word = (value == "none" and _keys_of(name)[-1] in _optional_keys()) or (
        value in ("true", "false") and _is_switch(name)
    )
    if not is_word:
        return flags[index]
    return f"{name}={value.capitalize()}" if equals else value.capitalize()


def _is_switch(flag: str) -> bool:
    """Does `--optim.dither`, say, name a key that is true or false?"""
    default: Any = Config()
    for key in _keys_of(flag):
        default = getattr(default, key, None)
    return isinstance(default, bool)


def _keys_of(flag: str) -> list[str]:
    return flag.removeprefix("--").replace("-", "_").split(".")


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
    if kind in ("unexpected_keyword_argument", "extra_forbidden"):
        return f"{path} = {value!r} is not a key; {_known_keys(parts[:-1])}"
    if kind == "literal_error":
        return f"{path} = {value!r} is not one of {context['expected']}"
    if kind == "dataclass_type":
        return f"{path} = {value!r} must be a table, like [{path}]"
    if kind == "missing":  # the input is what lacks it
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
