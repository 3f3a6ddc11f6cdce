"""Wrong inputs end in an error that was foreseen, soon, and `validate` finds what `train` refuses.

An exception that no code expects goes through `main` and fails the test. So does a wrong input that
is trained, and one that hangs.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import signal
import tempfile
from pathlib import Path

import bad_inputs
import pytest
from bad_inputs import to_toml
from hypothesis import given, settings
from hypothesis import strategies as st
from models import tiny_policy

import qurl.train
from qurl.cli import main

SECONDS = 30
PROFILE = settings.get_profile("chaos" if settings().max_examples > 100 else "chaos-short")
RECIPE = {
    "steps": 1,
    "run_dir": "run",
    "device": "cpu",
    "threads": 1,
    "model": {"path": "model"},
    "task": {"name": "file", "path": "data.jsonl", "max_prompt_tokens": 50, "reward": "exact"},
    "batch": {"problems": 2, "minibatches": 1},
    "sampling": {"max_tokens": 2, "group_size": 2},
    "algo": {"kl_coef": 0.0, "objective": "tis"},
    "quant": {"track_rows": 0},
    "track": {"samples": 0},
    "alarms": {"no_signal": "off"},  # these runs have none
}


@pytest.fixture(autouse=True, scope="module")
def _no_report():
    """It takes longer than all the rest, and comes when everything is over."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(qurl.train, "report", lambda run: None)
        yield


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    """A folder with a recipe, its data and its model, all of which are fine."""
    folder = tmp_path_factory.mktemp("sound")
    tiny_policy().save(folder / "model")
    (folder / "data.jsonl").write_text(json.dumps(bad_inputs.GOOD_ROW) + "\n")
    (folder / "recipe.json").write_text(json.dumps(RECIPE))
    (folder / "recipe.toml").write_text(to_toml(RECIPE))
    return folder


class Hang(BaseException):
    """No `except` of the code under test catches it."""


def ring(*_):
    raise Hang(f"still at work after {SECONDS} s")


def call(*words):
    """Exit code and output of a command; no exception is caught but the parser's exit."""
    out, err = io.StringIO(), io.StringIO()
    signal.signal(signal.SIGALRM, ring)
    signal.alarm(SECONDS)
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = main(list(words))
    except SystemExit as exit:
        code = exit.code
    finally:
        signal.alarm(0)
    return code, out.getvalue() + err.getvalue()


def try_input(sound, spoil, *, is_bad):
    """Spoil a copy of the sound folder, then validate and train it."""
    home = Path.cwd()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place, "x")
        shutil.copytree(sound, folder)
        flags = list(spoil(folder))
        os.chdir(folder)
        try:
            validated, found = call("validate", "recipe.toml", *flags)
            trained, said = call("train", "recipe.toml", *flags)
            began = (folder / "run" / "crash").exists()
        finally:
            os.chdir(home)
    assert "Traceback" not in found + said
    for code, words in ((validated, found), (trained, said)):
        assert code == 0 or len(words) > 30, "it fails without a word"
    if is_bad:
        assert validated == 2, f"validate accepts it: {found}\n{said}"
        assert trained in (1, 2), "it is trained"
    if trained and not began:
        assert validated, f"train refuses what validate accepts:\n{found}\n{said}"
    if not trained:
        assert not validated, f"validate refuses what train does:\n{found}\n{said}"


def test_the_folder_itself_is_sound(sound):
    try_input(sound, lambda folder: [], is_bad=False)


@PROFILE
@given(spoil=st.one_of(bad_inputs.WRONG_VALUES, bad_inputs.UNKNOWN_KEYS))
def test_wrong_values_in_a_recipe(sound, spoil):
    try_input(sound, spoil, is_bad=True)


@PROFILE
@given(spoil=bad_inputs.ODD_VALUES)
def test_odd_values_in_a_recipe(sound, spoil):
    try_input(sound, spoil, is_bad=False)


@PROFILE
@given(spoil=st.one_of(bad_inputs.damages("recipe.toml"), bad_inputs.DEEP_RECIPES))
def test_damaged_recipes(sound, spoil):
    try_input(sound, spoil, is_bad=False)


@PROFILE
@given(spoil=bad_inputs.FLAGS)
def test_flags(sound, spoil):
    try_input(sound, spoil, is_bad=False)


@PROFILE
@given(spoil=bad_inputs.BAD_DATA)
def test_bad_data(sound, spoil):
    try_input(sound, spoil, is_bad=True)


@PROFILE
@given(spoil=bad_inputs.ODD_DATA)
def test_odd_data(sound, spoil):
    try_input(sound, spoil, is_bad=False)


@PROFILE
@given(spoil=bad_inputs.other_files())
def test_other_files(sound, spoil):
    try_input(sound, spoil, is_bad=True)


@PROFILE
@given(spoil=bad_inputs.BAD_MODELS)
def test_bad_models(sound, spoil):
    try_input(sound, spoil, is_bad=True)


@PROFILE
@given(spoil=bad_inputs.ODD_MODELS)
def test_odd_models(sound, spoil):
    try_input(sound, spoil, is_bad=False)
