"""Killed again and again, on a full disk or without write permission, a run ends as it would have.

Each leg of a run is a child forked from this process, which has imported everything already.
"""

import ctypes
import multiprocessing
import os
import random
import resource
import signal
import sys
import time

import pytest
from hypothesis import settings
from models import TINY_RUN, as_flags, logged_rows
from safetensors.torch import load_file
from torch.testing import assert_close

import qurl.train  # noqa: F401 (so that no child imports it)
from qurl.cli import main
from qurl.run.directory import read_jsonl

IS_LONG = settings().max_examples > 100  # `make test-chaos`
KILLS, FULL_DISKS = (50, 20) if IS_LONG else (4, 4)
TINY = TINY_RUN | {"save.every": 3, "alarms.no_signal": "off"}


def command(run_dir, **changes):
    named = {key.replace("__", "."): value for key, value in changes.items()}
    return ["train", *as_flags(TINY | {"run_dir": run_dir} | named)]


class Leg:
    """A child that runs a command. What it prints goes through a pipe, which no disk limits."""

    def __init__(self, words, prepare=lambda: None):
        self._output, self._input = os.pipe()
        self._words, self._prepare = words, prepare
        self.process = multiprocessing.get_context("fork").Process(target=self._run)
        self.process.start()
        os.close(self._input)

    def _run(self):
        for stream in (1, 2):
            os.dup2(self._input, stream)
        # Not those of pytest, nor those that Python opened, which remember whether they can seek.
        sys.stdout, sys.stderr = (os.fdopen(stream, "w", closefd=False) for stream in (1, 2))
        self._prepare()
        code = main(self._words)
        sys.stderr.flush()
        sys.exit(code)

    def end(self):
        """Its exit code, once it is over, and what it printed."""
        self.process.join(timeout=300)
        os.set_blocking(self._output, False)  # an orphan of a killed leg may hold the other end
        with os.fdopen(self._output, "rb") as file:
            return self.process.exitcode, (file.read() or b"").decode()


def finish(words, prepare=lambda: None):
    """The exit code and output of a whole leg; an unforeseen error fails the test."""
    code, text = Leg(words, prepare).end()
    assert "Traceback" not in text, text[-4000:]
    return code, text


def weights(run_dir):
    newest = max((run_dir / "checkpoints").glob("step-*"))
    return newest.name, load_file(newest / "policy/model.safetensors")


def assert_same(broken, whole):
    assert logged_rows(broken) == logged_rows(whole)
    for name in ("samples.jsonl", "evals.jsonl"):
        if (whole / name).exists():
            assert read_jsonl(broken / name) == read_jsonl(whole / name)
    (step, found), (expected_step, expected) = weights(broken), weights(whole)
    assert step == expected_step
    assert_close(found, expected, rtol=0, atol=0)


def wait_for_kill(process, run_dir, chance, is_aimed):
    """Until a checkpoint is being written, or some steps and a random moment are over."""
    num_rows, is_over = count_rows(run_dir) + chance.randrange(8), False
    while process.is_alive() and not is_over:
        time.sleep(0.0005)
        if is_aimed:
            is_over = any((run_dir / "checkpoints").glob(".*.partial"))
        else:
            is_over = count_rows(run_dir) >= num_rows
    time.sleep(chance.uniform(0, 0.02 if is_aimed else 0.5))


def count_rows(run_dir):
    path = run_dir / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def test_random_kills(tmp_path):
    """Half of them while a checkpoint is written."""
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    chance, endless = random.Random(0), {"steps": 100_000, "eval__every": 7, "eval__problems": 10}
    for number in range(KILLS):
        leg = Leg(command(broken, **endless))
        wait_for_kill(leg.process, broken, chance, is_aimed=number % 2 == 1)
        leg.process.kill()
        code, text = leg.end()
        assert code == -signal.SIGKILL, text[-4000:]
    trained = int(max((broken / "checkpoints").glob("step-*")).name.removeprefix("step-"))
    assert trained >= 3
    last = endless | {"steps": trained + 4}
    assert finish(command(broken, **last))[0] == 0
    assert finish(command(whole, **last))[0] == 0
    assert_same(broken, whole)


def test_a_disk_that_fills_up_at_any_size(tmp_path):
    """No file can grow beyond a random size, which cuts logs and checkpoints anywhere."""
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    chance, codes = random.Random(1), []
    for _ in range(FULL_DISKS):
        size = int(10 ** chance.uniform(2.5, 5.5))  # a checkpoint's largest file has 100 kB

        def shrink(size=size):
            _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
            resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))

        code, text = finish(command(broken, steps=12), shrink)
        codes.append(code)
        assert code == 0 or "Error: " in text, text
    assert 1 in codes
    assert finish(command(broken, steps=12))[0] == 0
    assert finish(command(whole, steps=12))[0] == 0
    assert_same(broken, whole)


def obey_permissions():
    """Give up what lets root write to read-only files: CAP_DAC_OVERRIDE, number 1."""
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    sets = (ctypes.c_uint32 * 6)()  # effective, permitted, inheritable; twice 32 bits
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.capget(header, sets) or libc.capset(header, _without(sets, 1)):
        raise OSError(ctypes.get_errno(), "capset")


def _without(sets, capability):
    for i in range(3):
        sets[i] &= ~(1 << capability)
    return sets


def set_writable(run_dir, is_writable):
    for path in (run_dir, *run_dir.rglob("*")):
        path.chmod((0o755 if path.is_dir() else 0o644) & ~(0 if is_writable else 0o222))


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux's capabilities")
def test_a_run_directory_without_write_permission(tmp_path):
    """From the start of a leg, and in the middle of one."""
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    assert finish(command(broken, steps=4), obey_permissions)[0] == 0
    before = {path: path.read_bytes() for path in broken.rglob("*") if path.is_file()}
    set_writable(broken, False)
    code, text = finish(command(broken, steps=12), obey_permissions)
    assert code == 2, text
    assert "cannot be written: Permission denied" in text
    assert {path: path.read_bytes() for path in broken.rglob("*") if path.is_file()} == before
    set_writable(broken, True)
    leg = Leg(command(broken, steps=12), obey_permissions)
    while len(logged_rows(broken)) < 6 and leg.process.is_alive():
        time.sleep(0.005)
    set_writable(broken, False)
    code, text = leg.end()
    assert code == 1, text
    assert "Permission denied" in text
    assert "Traceback" not in text
    set_writable(broken, True)
    assert finish(command(broken, steps=12))[0] == 0
    assert finish(command(whole, steps=12))[0] == 0
    assert_same(broken, whole)
