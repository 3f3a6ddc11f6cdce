"""Reads a recipe: TOML, the preset of `algo.name`, and flags.

Precedence: flags > recipe > preset of `algo.name` > defaults. Unknown keys are refused, and all
mistakes are reported at once.
"""

from __future__ import annotations

import dataclasses
import json
import os
import tomllib
from collections.abc import Mapping, Sequence
from functools import cache
from operator import attrgetter
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from qurl.config.flags import apply_flags
from qurl.config.rules import find_mistakes, find_unusable, needs_file, shorten
from qurl.config.schema import AlgoConfig, Config
from qurl.config.shipped import find_recipe, suggest
from qurl.errors import ConfigError

PRESETS: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "ppo": {"algo": {"advantage": "gae", "aggregation": "token-mean", "whiten": True}},
    "grpo": {"algo": {"advantage": "grpo", "aggregation": "seq-mean-token-mean", "kl_coef": 1e-3}},
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
    "vapo": {
        "algo": {
            "advantage": "gae",
            "aggregation": "token-mean",
            "clip_high": 0.28,
            "whiten": True,
            "critic_lam": 1.0,  # decoupled GAE: the critic learns Monte-Carlo returns
            "lam_alpha": 0.05,  # length-adaptive lambda of the policy
            "positive_coef": 0.1,  # likelihood of right answers
        },
        "critic": {"pretrain_steps": 50},
    },
}
"""What `algo.name` sets; a recipe or a flag overrides any part of it."""

TABLES = ("mix", "eval_sets", "rewards")
"""Keys of [task] that hold a table of names which the user chooses."""

SAFE_EVERY = 20
"""Steps between checkpoints, and between evaluations, if a recipe with data files says nothing."""


def load_config(path: str | Path | None, flags: Sequence[str] = ()) -> Config:
    """Read a recipe (a file, or one of ours by name) or a run, apply the flags, check the whole."""
    recipe = read_recipe(path) if path else {}
    sources = ([str(path)] if path else []) + (["flags"] if flags or not path else [])
    source = " and ".join(sources)
    is_run = path is not None and _is_run(path)
    if is_run:
        recipe["run_dir"] = str(path)  # it may have been moved
    base = build_config(_with_preset(recipe), source)
    config = _with_flags(base, flags, source)
    if (name := config.algo.name) != base.algo.name:
        if is_run:
            raise ConfigError(
                f"algo.name = {name!r}, but {path} holds the resolved recipe of a run with "
                f"{base.algo.name!r}; start from a recipe instead"
            )
        config = _with_flags(build_config(_with_preset(recipe, name), source), flags, source)
    if not is_run:
        config = _with_safeguards(config, recipe, flags)
    check_combinations(config, source)
    return config


def _with_safeguards(config: Config, recipe: Mapping[str, Any], flags: Sequence[str]) -> Config:
    """Checkpoints and evaluations for a run on one's own data whose recipe asks for none."""
    changes: dict[str, Any] = {}
    for section, is_wanted in {
        "save": needs_file(config.task.name) and config.save.keep,
        "eval": config.task.eval_path or config.task.eval_sets,
    }.items():
        is_given = f"--{section}.every" in [flag.partition("=")[0] for flag in flags]
        if is_wanted and not is_given and "every" not in recipe.get(section, {}):
            changes[section] = dataclasses.replace(getattr(config, section), every=SAFE_EVERY)
    return dataclasses.replace(config, **changes)


def check_combinations(config: Config, source: str, *facts: Any) -> None:
    """Refuse settings that do not go together; `facts` are those of objective and advantage."""
    if mistakes := find_mistakes(config, *facts):
        raise ConfigError(_listed(mistakes, source))


def read_recipe(path: str | Path) -> dict[str, Any]:
    """The raw tree of a TOML recipe, or of a run's config.json."""
    path, is_run = Path(path), _is_run(path)
    path = path / "config.json" if is_run else find_recipe(path)
    if not os.path.isfile(path):
        raise ConfigError(f"there is no recipe and no run at {path}; {suggest(str(path))}")
    kind, parse = ("JSON", json.loads) if is_run else ("TOML", tomllib.loads)
    try:
        tree = parse(path.read_text(encoding="utf-8-sig"))  # some editors begin files with a BOM
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:  # both parsers raise it, and so does a file that is not text
        hint = '; text needs quotes, as in "int8"' if "Invalid value" in str(error) else ""
        raise ConfigError(f"{path} is not valid {kind}: {error}{hint}") from error
    except RecursionError as error:
        raise ConfigError(f"{path} is nested too deeply; a recipe has three levels") from error
    if is_run and not (isinstance(tree, dict) and {"steps", "run_dir", "algo"} <= set(tree)):
        raise ConfigError(
            f"{path} is not a run's config; choose another folder. That of a model goes into "
            "model.path of a recipe"
        )
    return tree


def _is_run(path: str | Path) -> bool:
    return os.path.isfile(Path(path) / "config.json")


def build_config(tree: Mapping[str, Any], source: str = "config") -> Config:
    """Validate a tree of plain values. Presets and combinations are left to `load_config`."""
    try:
        config = _adapter().validate_python(tree)
    except ValidationError as error:
        mistakes = [_explain(e, tree) for e in error.errors(include_url=False)]
        raise ConfigError(_listed(list(dict.fromkeys(mistakes)), source)) from None
    if mistakes := list(find_unusable(to_dict(config))):
        raise ConfigError(_listed(mistakes, source))
    return config


@cache
def _adapter() -> TypeAdapter[Config]:
    """Once: to make it takes longer than all the rest of reading a recipe."""
    return TypeAdapter(Config)


def to_dict(config: Config) -> dict[str, Any]:
    return dataclasses.asdict(config)


def to_json(config: Config) -> str:
    return json.dumps(to_dict(config), indent=2)


def _with_preset(recipe: Mapping[str, Any], name: str | None = None) -> dict[str, Any]:
    """The recipe over the preset of `name`, or of its own algo.name."""
    own = recipe.get("algo", {})
    own = own.get("name", AlgoConfig.name) if isinstance(own, dict) else ""
    tree = dict(recipe)
    for section, preset in PRESETS.get(name or str(own), {}).items():
        if isinstance(keys := recipe.get(section, {}), dict):
            tree[section] = {**preset, **keys}
    return tree


def _with_flags(config: Config, flags: Sequence[str], source: str) -> Config:
    if not flags:
        return config
    return build_config(to_dict(apply_flags(config, flags)), source)


def _explain(error: Mapping[str, Any], tree: Mapping[str, Any]) -> str:
    """One validation error as `path = value is wrong because ...`."""
    parts = [str(p) for p in error["loc"] if not (isinstance(p, str) and "[" in p)]
    if parts[:1] == ["task"] and parts[2:] and parts[1] in TABLES:
        table = tree["task"][parts[1]]
        if isinstance(table, dict):  # kept as a list of pairs
            parts = [*parts[:2], repr(list(table)[int(parts[2])])]
    path, value = ".".join(parts), shorten(error["input"])
    kind = error["type"]
    if kind in ("unexpected_keyword_argument", "extra_forbidden"):
        name, default = ".".join(parts[:-1]), Config()
        section = attrgetter(name)(default) if name else default
        where = f"[{name}]" if name else "the top level"
        return f"{path} = {value} is not a key; {where} has {', '.join(vars(section))}"
    if kind == "literal_error":
        return f"{path} = {value} is not one of {error['ctx']['expected']}"
    if kind == "dataclass_type":
        return f"{path} = {value} must be a table, like [{path}]"
    message = error["msg"].replace("Input should be", "must be").replace("Input must", "must")
    return f"{path} = {value}: {message.replace('tuple', 'list')}"


def _listed(mistakes: Sequence[str], source: str) -> str:
    if len(mistakes) == 1:
        return f"{mistakes[0]} ({source})"
    lines = "\n".join(f"  - {m}" for m in mistakes)
    return f"{len(mistakes)} mistakes in {source}:\n{lines}"
