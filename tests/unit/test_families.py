"""The table of model families, against transformers and without torch."""

import importlib
import subprocess
import sys

import pytest
from transformers import CONFIG_MAPPING

from qurl.ops.families import FAMILIES, local_engine_families


def test_the_local_engine_runs_the_llama_family():
    assert local_engine_families() == ("llama", "mistral", "qwen2", "qwen3")


@pytest.mark.parametrize("model_type", FAMILIES)
def test_transformers_has_the_family_and_its_fusible_classes(model_type):
    family = FAMILIES[model_type]
    assert family.model_type == model_type
    config = CONFIG_MAPPING[model_type]
    modeling = importlib.import_module(config.__module__.replace("configuration", "modeling"))
    if family.fusible:
        assert hasattr(modeling, f"{family.fusible}DecoderLayer")
        assert hasattr(modeling, f"{family.fusible}Attention")


@pytest.mark.parametrize("model_type", local_engine_families())
def test_windows_are_where_transformers_has_them(model_type):
    config = CONFIG_MAPPING[model_type]()
    windows = FAMILIES[model_type].windows
    assert (windows == "layer types") == (getattr(config, "layer_types", None) is not None)
    assert (windows == "none") == (not hasattr(config, "sliding_window"))


@pytest.mark.parametrize(
    ("module", "unwanted"),
    [("qurl.ops.families", {"torch"}), ("qurl.quant", {"transformers", "pydantic"})],
)
def test_imports_stay_light(module, unwanted):
    code = f"import sys, {module}; sys.exit(bool({unwanted!r} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
