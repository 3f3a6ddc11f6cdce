"""The recipe: its keys (`schema`), what goes together (`rules`), and how it is read (`recipe`)."""

from qurl.config.recipe import (
    PRESETS,
    build_config,
    check_combinations,
    load_config,
    read_recipe,
    to_dict,
    to_json,
)
from qurl.config.schema import AlgoConfig, Config, ModelConfig, OptimConfig, ScratchConfig

__all__ = [
    "PRESETS",
    "AlgoConfig",
    "Config",
    "ModelConfig",
    "OptimConfig",
    "ScratchConfig",
    "build_config",
    "check_combinations",
    "load_config",
    "read_recipe",
    "to_dict",
    "to_json",
]
