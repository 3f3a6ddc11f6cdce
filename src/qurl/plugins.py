"""Loading by name: your own parts (`"module:name"` in a recipe) and optional packages."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.machinery import PathFinder
from pathlib import Path
from traceback import extract_tb
from typing import Any

from qurl.errors import ConfigError, MissingExtra, QurlError


def is_users_own(spec: str) -> bool:
    """Is it `module:name` rather than the name of a built-in part (`gym:<name>` is built in)?"""
    return ":" in spec and not spec.startswith("gym:")


def check_plugin(spec: str, key: str) -> None:
    """Raise unless the module of `module:name` exists, without importing it.

    `key` is the recipe's key, for errors. Names of built-in parts pass.
    """
    if not is_users_own(spec):
        return
    module, _, name = spec.partition(":")
    if module == "__main__":
        raise ConfigError(
            f"{key} = {spec!r} was defined in a script; run that script again, or move {name} into "
            "a module"
        )
    if not all(part.isidentifier() for part in module.split(".")) or module.endswith(".py"):
        raise ConfigError(
            f"{key} = {spec!r}: {module!r} is not the name of a module; for a file my_module.py in "
            f"the working directory write my_module:{name or 'function'}"
        )
    if not _is_importable(module):
        raise ConfigError(
            f"{key} = {spec!r}: there is no module {module!r} in {Path.cwd()} nor on Python's path "
            "(PYTHONPATH)"
        )


def load_plugin(spec: str, key: str) -> Any:
    """The function `module:name`. Modules in the working directory come first."""
    check_plugin(spec, key)
    module, _, name = spec.partition(":")
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        found = importlib.import_module(module)
    except Exception as error:  # a module of yours may raise anything
        raise ConfigError(
            f"{key} = {spec!r}: {module} cannot be imported: {type(error).__name__}: {error}"
        ) from error
    plugin = getattr(found, name, None)
    if not callable(plugin):
        what = "has no" if plugin is None else "has, but cannot call,"
        own = [n for n, x in vars(found).items() if getattr(x, "__module__", "") == module]
        raise ConfigError(
            f"{key} = {spec!r}: {module} {what} {name!r}; it has {', '.join(own) or 'nothing'}"
        )
    return plugin


def name_of(function: Any) -> str | None:
    """`module:name` if another process can load the function by it, else None.

    Lambdas, inner functions, and functions of the main script have no such name.
    """
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", "")
    if module in (None, "__main__") or getattr(sys.modules.get(module), name, None) is not function:
        return None
    return f"{module}:{name}"


def import_extra(module: str, package: str, extra: str, purpose: str) -> Any:
    """Import a module of an optional package, or say which extra of ours installs it."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in (package, module.partition(".")[0]):  # it is there and lacks another one
            raise
        raise MissingExtra(package, extra, purpose) from error


def check_call(
    part: Callable[..., Any], key: str, *arguments: str, keywords: Sequence[str] = ()
) -> None:
    """Refuse a function of yours, or the class of one, that cannot be called with these."""
    try:
        signature = inspect.signature(part)
    except (TypeError, ValueError):  # a few built-in ones do not say what they take
        return
    try:
        signature.bind(*arguments, **dict.fromkeys(keywords))
    except TypeError as error:
        name = getattr(part, "__qualname__", repr(part))
        wanted = ", ".join((*arguments, "*", *keywords) if keywords else arguments)
        raise ConfigError(f"{key}: {name}{signature} must take ({wanted}): {error}") from None


def kind_of(value: Any) -> str:
    """What a part of yours returned, in a few words: a whole tensor would fill the screen."""
    if (shape := getattr(value, "shape", None)) is not None:
        return f"{type(value).__name__} {list(shape)} of {getattr(value, 'dtype', '?')}"
    if isinstance(value, tuple):
        return f"({', '.join(map(kind_of, value))})"
    return "None" if value is None else type(value).__name__


@contextmanager
def naming_failures(key: str) -> Iterator[None]:
    """Say which part of a recipe failed, and where: code of yours may raise anything.

    Errors of ours say it already.
    """
    try:
        yield
    except QurlError:
        raise
    except Exception as error:
        if type(error).__name__ == "OutOfMemoryError":  # torch's, which the trainer explains
            raise
        *_, place = extract_tb(error.__traceback__)
        raise ConfigError(
            f"{key} failed: {type(error).__name__}: {error} ({place.filename}, line {place.lineno})"
        ) from error


def _is_importable(module: str) -> bool:
    places = [str(Path.cwd()), *sys.path]
    for part in module.split("."):
        found = PathFinder.find_spec(part, places)
        if found is None:
            return False
        places = list(found.submodule_search_locations or [])
    return True
