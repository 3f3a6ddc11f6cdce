"""Flags of the command line: any key of a recipe, read by tyro."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from functools import cache
from io import StringIO
from typing import Any, get_type_hints

from qurl.config.schema import Config

DESCRIPTION = (
    "The keys of a recipe. qurl train also takes --dry-run, which prints the resolved recipe and "
    "its memory and token budget instead of training; --gpu NAME computes them for another GPU."
)


def apply_flags(config: Config, flags: Sequence[str]) -> Config:
    """The config with flags applied, not yet validated; mistakes are printed and end the program.

    tyro looks at every key that it is given, which takes a tenth of a second for all of them. So it
    gets those that the flags name, and all of them only to say what is wrong, or to help.
    """
    try:
        some = _narrow(config, [key_of(f).split(".") for f in flags if f.startswith("--")])
        with redirect_stdout(StringIO()) as silence, redirect_stderr(silence):
            return _replace(config, _read(some, flags))
    except (KeyError, SystemExit):
        return _read(config, flags)


def key_of(flag: str) -> str:
    """Underscores are as good as hyphens, and a value may follow an equals sign."""
    return flag.partition("=")[0].removeprefix("--").replace("-", "_")


def _narrow(config: Any, paths: Sequence[Sequence[str]]) -> Any:
    """A record with those fields of a config that paths name, or KeyError."""
    below: dict[str, list[Sequence[str]]] = {}
    for name, *rest in paths:
        below.setdefault(name, []).append(rest)
    fields = []
    for name, rests in below.items():
        kind = _hints(type(config))[name]
        value = getattr(config, name)
        if dataclasses.is_dataclass(value):
            value = _narrow(value, [rest or [""] for rest in rests])
            kind = type(value)
        elif any(rests):
            raise KeyError(name)
        fields.append((name, kind, dataclasses.field(default_factory=lambda value=value: value)))
    # tyro would look for help in the source of the module.
    namespace = {"__module__": "builtins"}
    name = type(config).__name__
    return dataclasses.make_dataclass(name, fields, frozen=True, namespace=namespace)()


@cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind, include_extras=True)


def _replace(config: Any, some: Any) -> Any:
    """The config with what a narrow one holds."""
    changes = {
        name: _replace(getattr(config, name), value) if dataclasses.is_dataclass(value) else value
        for name, value in vars(some).items()
    }
    return dataclasses.replace(config, **changes)


def _read(config: Any, flags: Sequence[str]) -> Any:
    import tyro  # here, because it costs a tenth of a second that `qurl --help` does not pay
    from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

    registry = ConstructorRegistry()

    @registry.primitive_rule
    def _(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[Any] | None:
        """Flags take true, false and none as recipes do; a switch alone is true."""
        if info.type not in (bool, type(None)):
            return None
        words = {"true": True, "false": False} if info.type is bool else {"none": None}
        return PrimitiveConstructorSpec(
            nargs=(0, 1) if info.type is bool else 1,
            metavar="|".join(words),
            instance_from_str=lambda given: words[given[0].lower()] if given else True,
            is_instance=lambda value: isinstance(value, info.type),
            str_from_instance=lambda value: [str(value).lower()],
            choices=(*words, *(word.capitalize() for word in words)),
        )

    options = {"config": (tyro.conf.FlagConversionOff,), "registry": registry}
    texts = {"prog": "qurl train", "description": DESCRIPTION}
    return tyro.cli(type(config), **texts, default=config, args=flags, **options)
