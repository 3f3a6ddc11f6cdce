"""Errors of the TRL plug-in name what its user wrote; without TRL."""

import ast
import re
from pathlib import Path

import pytest

import qurl
from qurl.config import build_config, to_dict
from qurl.errors import EngineError
from qurl.integrations.trl_options import QurlOptions, as_options, named_as_options

SOURCE = Path(qurl.__file__).parent
REACHED = [
    *(SOURCE / "rollout" / name for name in ("canary.py", "engine.py", "stop.py")),
    *(SOURCE / "rollout" / "local").glob("*.py"),
    *(SOURCE / "quant" / name for name in ("kernels/plans.py", "linear.py", "scaling.py")),
]
SECTIONS = {
    name: part for name, part in to_dict(build_config({})).items() if isinstance(part, dict)
}
KEYS = {f"{section}.{key}" for section, part in SECTIONS.items() for key in part}
ELSEWHERE = {"model.base", "sampling.stop_ids"}
"""Keys of what no option of the plug-in leads to: a base in codes, and stops."""


def messages(path):
    """Strings of a module that are no docstrings."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    docs = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    strings = [n for n in ast.walk(tree) if isinstance(n, ast.Constant) and id(n) not in docs]
    return [n.value for n in strings if isinstance(n.value, str)]


def keys_in(text):
    return KEYS & set(re.findall(r"[a-z_]+\.[a-z_]+", text))


def test_no_key_of_a_recipe_reaches_a_user_of_the_plug_in():
    texts = [text for path in REACHED for text in messages(path)]
    assert len({key for text in texts for key in keys_in(text)}) > 10
    assert {key for text in texts for key in keys_in(as_options(text))} == ELSEWHERE


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("set quant.kv = 'none'", "set engine['kv'] = 'none'"),
        ("(kv_tokens = 64; 0 = what fits)", "(engine['kv_tokens'] = 64; 0 = what fits)"),
        (
            "rollout.deterministic = true needs threads = 1 on a CPU",
            "engine['deterministic'] = True needs torch.set_num_threads(1) on a CPU",
        ),
        ("quant.format = 'fp8' needs a GPU", "quant = 'fp8' needs a GPU"),
        (
            "max_tokens = 8; lower sampling.max_tokens",
            "max_completion_length = 8; lower max_completion_length",
        ),
        (
            'it supports llama. Set rollout.engine = "hf" to sample with transformers instead',
            "it supports llama",
        ),
        ("weights in model.layers.0.mlp", "weights in model.layers.0.mlp"),
    ],
)
def test_words(message, expected):
    assert as_options(message) == expected


def test_an_error_stays_what_it_is():
    error = EngineError("lower rollout.max_batch")
    with pytest.raises(EngineError) as caught, named_as_options():
        raise error
    assert caught.value is error
    assert str(error) == "lower engine['max_batch']"


def test_a_format_is_refused_by_the_name_of_its_option():
    with pytest.raises(ValueError, match=r"^quant = 'int3' is not one of none, int8"):
        QurlOptions(quant="int3")
