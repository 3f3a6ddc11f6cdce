"""Runs a program that a model wrote, contained: limits, no network, an empty folder.

This is containment, not a security boundary. It stops what models write by accident and the usual
tricks: endless loops, fork bombs, huge outputs, files in odd places, programs that look around for
the tests. It does not stop an attacker: a program can read what its user can read, and without
namespaces it can reach the network. For programs that you must not trust, give `make_reward` a
`Sandbox` of your own, such as a container or a virtual machine.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from qurl.errors import RewardError


@dataclass(frozen=True)
class Limits:
    """What one program may use."""

    seconds: float = 4.0
    memory: int = 1 << 30  # bytes
    output: int = 1 << 22  # bytes of standard output, and of each file
    processes: int = 32  # threads included; as far as the system counts them per user


@dataclass(frozen=True)
class Ran:
    """What a program did."""

    finish: Literal["ok", "error", "timeout"]
    output: str  # standard output, cut at the limit


class Sandbox(Protocol):
    """Runs a Python program with a text as its standard input."""

    def run(self, program: str, stdin: str, limits: Limits) -> Ran: ...


_SPACES = ("unshare", "--net", "--ipc", "--pid", "--fork", "--kill-child", "--mount-proc")
# A change of user forgets that unshare's child must die with it; --pdeathsig says so again.
_NOBODY = ("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "--pdeathsig=KILL")
_READER = ("--inh-caps=-all,+dac_read_search", "--ambient-caps=-all,+dac_read_search")
CELLS: Sequence[Sequence[str]] = (
    # As root: a user who may write nowhere. One who may also read everything, because Python may
    # be installed where only root can read.
    (*_SPACES, *_NOBODY),
    (*_SPACES, *_NOBODY, *_READER),
    # As any other user.
    (*_SPACES, "--user", "--map-root-user"),
    # Without namespaces the network is open, and what a program leaves behind may live on.
    _NOBODY,
    (),
)
"""Commands that isolate another command, the strictest first; the first that works here is used."""

_LAUNCHER = """
import resource, sys
seconds, memory, output, processes = map(int, sys.argv[2:6])
if sys.argv[6] == "plain":
    import ctypes, signal
    getattr(ctypes.CDLL(None), "prctl", lambda *_: 0)(1, signal.SIGKILL)  # die with the grader
for name, value in {
    "CPU": seconds, "AS": memory, "FSIZE": output, "NPROC": processes, "NOFILE": 64, "CORE": 0,
}.items():
    resource.setrlimit(getattr(resource, "RLIMIT_" + name), (value, value))
with open(sys.argv[1], encoding="utf-8", errors="surrogatepass") as file:
    source = file.read()
sys.argv[:] = ["program.py"]
exec(compile(source, "program.py", "exec"), {"__name__": "__main__"})
"""


class Subprocess:
    """A sandbox of rlimits, a temporary folder and, where the system allows it, namespaces."""

    @functools.cached_property
    def cell(self) -> Sequence[str]:
        """The first of `CELLS` that can run a program here."""
        # Where a user cannot read Python's own files, another Python's may be found instead.
        look, expected = "import os, random; print(os.__file__)", f"{os.__file__}\n"
        for cell in CELLS:
            if self._run(cell, look, "", Limits(seconds=20)).output == expected:
                return cell
        raise RewardError("reward 'code' cannot run a Python program here, not even without limits")

    @property
    def has_spaces(self) -> bool:
        """Do programs run in namespaces of their own, without a network?"""
        return _has_spaces(self.cell)

    def run(self, program: str, stdin: str, limits: Limits) -> Ran:
        return self._run(self.cell, program, stdin, limits)

    def _run(self, cell: Sequence[str], program: str, stdin: str, limits: Limits) -> Ran:
        options = {"prefix": "qurl-", "ignore_cleanup_errors": True}
        # Input and output have no name, so that a program cannot look for them.
        with (
            tempfile.TemporaryDirectory(**options) as outer,
            tempfile.TemporaryFile() as given,
            tempfile.TemporaryFile() as printed,
        ):
            folder, path = Path(outer) / "work", Path(outer) / "program.py"
            folder.mkdir()
            path.write_text(program, encoding="utf-8", errors="surrogatepass")
            for place, mode in ((Path(outer), 0o711), (folder, 0o777), (path, 0o644)):
                place.chmod(mode)
            given.write(stdin.encode(errors="surrogatepass"))
            given.seek(0)
            numbers = (int(limits.seconds) + 1, limits.memory, limits.output, limits.processes)
            has_spaces = _has_spaces(cell)
            words = [str(path), *map(str, numbers), "spaces" if has_spaces else "plain"]
            try:
                process = subprocess.Popen(
                    [*cell, sys.executable, "-I", "-c", _LAUNCHER, *words],
                    stdin=given,
                    stdout=printed,
                    stderr=subprocess.DEVNULL,
                    cwd=folder,
                    env=_environment(folder),
                    process_group=None if has_spaces else 0,  # spaces end with their first process
                )
            except OSError:  # there is no such command here
                return Ran("error", "")
            finish = _wait(process, limits.seconds, has_group=not has_spaces)
            printed.seek(0)
            return Ran(finish, printed.read(limits.output).decode(errors="replace"))


def _has_spaces(cell: Sequence[str]) -> bool:
    return cell[: len(_SPACES)] == _SPACES


def _wait(
    process: subprocess.Popen[bytes], seconds: float, *, has_group: bool
) -> Literal["ok", "error", "timeout"]:
    """Wait for a program, and end all that it started."""
    try:
        return "ok" if process.wait(seconds) == 0 else "error"
    except subprocess.TimeoutExpired:
        return "timeout"
    finally:
        if has_group:
            with contextlib.suppress(ProcessLookupError, PermissionError):  # all of it has ended
                os.killpg(process.pid, signal.SIGKILL)
        process.kill()
        process.wait()


def _environment(folder: Path) -> dict[str, str]:
    """Nothing of ours, and no threads that a numerical library would start by itself."""
    threads = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
    places = dict.fromkeys(("HOME", "TMPDIR"), str(folder))
    return {"PATH": os.defpath, "LANG": "C.UTF-8", **places, **dict.fromkeys(threads, "1")}
