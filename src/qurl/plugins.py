"""Parts of your own: `"module:name"` in a recipe, for every key that names a built-in part."""

from __future__ import annotations

import importlib
import inspect
import sys
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from qurl.errors import ConfigError


def is_users_own(spec: str) -> bool:
    """Is it `module:name`, as against the name of a built-in part (`gym:<name>` is one)?"""
    return ":" in spec and not spec.startswith("gym:")


def check_plugin(spec: str, key: str) -> None:
    """Raise unless the module of `module:name` can be found; it is not run.

    `key` is what the recipe calls it, for errors.
    """
    if not is_users_own(spec):
        return
    module, _, name = spec.partition(":")
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
    """The object behind `module:name`; a module in the working directory comes first."""
    check_plugin(spec, key)
    module, _, name = spec.partition(":")
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    found = importlib.import_module(module)
    plugin = getattr(found, name, None)
    if not callable(plugin):
        names = [name for name, value in vars(found).items() if inspect.isfunction(value)]
        raise ConfigError(
            f"{key} = {spec!r}: {module} has no function {name!r}; it has "
            f"{', '.join(names) or 'none'}"
        )
    return plugin


def _is_importable(module: str) -> bool:
    """From the working directory or Python's path."""
    places = [str(Path.cwd()), *sys.path]
    for part in module.split("."):
        found = PathFinder.find_spec(part, places)
        if found is None:
            return False
        places = list(found.submodule_search_locations or [])
    return True
