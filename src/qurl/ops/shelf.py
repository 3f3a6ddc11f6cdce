"""Where the numbers of completions wait for the trainer rank that trains on them.

    engine ──token ids, log-probs, ...──▶ shelf of a rank ──▶ the rank that trains on them
       └──────ids, lengths, texts, versions──────▶ driver

Each trainer rank has a shelf, which engines and other ranks reach by TCP while it trains. The
driver's completions have `Column`s in place of numbers. These know their length; somebody who reads
one fetches the numbers and counts as traffic of the driver.
"""

from __future__ import annotations

import functools
import socket
import uuid
import weakref
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import numpy as np
import torch.distributed as dist

from qurl.errors import EngineError, RankLost
from qurl.types import Completion, Rollout

FIELDS = {
    "token_ids": np.dtype(np.int32),
    "logprobs": np.dtype(np.float32),
    "versions": np.dtype(np.int32),
    "trained": np.dtype(np.bool_),
}
"""Numbers of a completion, in the order in which they are sent."""
TOKEN_BYTES = sum(dtype.itemsize for dtype in FIELDS.values())
LARGEST = 8 * 2**20
"""Bytes of one value that torch's store takes."""
MOST_CONNECTIONS = 256
"""Connections that a process keeps; those to shelves that are gone must not pile up."""
PATIENCE = timedelta(seconds=30)
"""How long a shelf that does not answer is waited for."""


@dataclass
class Traffic:
    """Bytes of problems, rollouts and commands that passed through the driver."""

    num_bytes: int = 0

    def take(self) -> int:
        """The bytes since the last time."""
        num_bytes, self.num_bytes = self.num_bytes, 0
        return num_bytes


@dataclass(frozen=True)
class Address:
    """Where the shelf of a trainer rank is."""

    rank: int
    host: str
    port: int
    name: str
    """The name of this shelf: a later one may get the same port."""


def own_host() -> str:
    """An address of this machine that others can reach."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("10.255.255.255", 1))  # nothing is sent
            return probe.getsockname()[0]
        except OSError:
            return "127.0.0.1"


@functools.lru_cache(MOST_CONNECTIONS)
def _connect(address: Address) -> dist.Store:
    return dist.TCPStore(address.host, address.port, is_master=False, timeout=PATIENCE)


class Shelf:
    """The shelf of this process."""

    def __init__(self, rank: int) -> None:
        # A thread of torch serves it, whatever this process computes.
        self._store = dist.TCPStore("0.0.0.0", 0, is_master=True, wait_for_workers=False)
        self.address = Address(rank, own_host(), self._store.port, uuid.uuid4().hex)

    def __len__(self) -> int:
        return self._store.num_keys()

    def drop(self, keys: Sequence[str]) -> None:
        for key in keys:
            self._store.delete_key(key)


class Slip:
    """Says on which shelf the numbers of a completion are."""

    def __init__(self, address: Address, key: str, count: int) -> None:
        self.address, self.key, self.count = address, key, count
        self.traffic: Traffic | None = None
        self._numbers: dict[str, list[Any]] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return Slip, (self.address, self.key, self.count)

    def read(self) -> dict[str, list[Any]]:
        """The numbers by the name of their field; they are fetched once."""
        if self._numbers is None:
            try:
                data = _connect(self.address).get(self.key)
            except dist.DistError as error:
                raise RankLost(
                    f"tokens of a rollout cannot be fetched from trainer rank {self.address.rank} "
                    f"at {self.address.host}:{self.address.port}: {error}"
                ) from error
            if self.traffic is not None:
                self.traffic.num_bytes += len(data)
            self._numbers = decode(data, self.count)
        return self._numbers


@dataclass(frozen=True, eq=False)
class Column(Sequence[Any]):
    """One field of a completion whose numbers are on a shelf."""

    slip: Slip
    name: str

    def __len__(self) -> int:
        return self.slip.count

    def __getitem__(self, index: Any) -> Any:
        return self.slip.read()[self.name][index]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.slip.read()[self.name])


def encode(completion: Completion) -> bytes:
    """13 bytes a token."""
    columns = [np.array(getattr(completion, name), dtype) for name, dtype in FIELDS.items()]
    return b"".join(column.tobytes() for column in columns)


def decode(data: bytes, count: int) -> dict[str, list[Any]]:
    found, start = {}, 0
    for name, dtype in FIELDS.items():
        found[name] = np.frombuffer(data, dtype, count, start).tolist()
        start += count * dtype.itemsize
    return found


def shelve(rollout: Rollout, addresses: Sequence[Address]) -> Rollout:
    """The rollout without its numbers, which are now on the first of these shelves that answers.

    A shelf that does not answer is that of a dead rank, for which the driver stops the run.
    """
    completions = []
    for completion in rollout.completions:
        data = encode(completion)
        if len(data) > LARGEST:
            raise EngineError(
                f"problem {rollout.problem.id!r}: a completion of {len(completion.token_ids)} "
                f"tokens is more than the {LARGEST // TOKEN_BYTES} that can be sent to a trainer "
                "rank; lower sampling.max_tokens"
            )
        key = uuid.uuid4().hex
        slip = Slip(_put(addresses, key, data), key, len(completion.token_ids))
        columns = {name: Column(slip, name) for name in FIELDS}
        completions.append(replace(completion, **columns))
    return replace(rollout, completions=completions)


def _put(addresses: Sequence[Address], key: str, data: bytes) -> Address:
    for address in addresses:
        if address in _SILENT:
            continue
        try:
            store = _connect(address)
            store.set(key, data)  # type: ignore[arg-type]  # bytes do
            if store.check([key]):  # `set` itself waits for no answer
                return address
        except dist.DistError:
            _SILENT.add(address)
    named = ", ".join(f"{a.host}:{a.port} of rank {a.rank}" for a in addresses)
    raise EngineError(f"no trainer rank takes the tokens of a rollout: none answers at {named}")


_SILENT: set[Address] = set()
"""Shelves that did not answer; waiting for them again would take as long."""


def slip_of(completion: Completion) -> Slip | None:
    """Where the numbers of a completion are; None if it has them itself."""
    column = completion.token_ids
    return column.slip if isinstance(column, Column) else None


class Shelves:
    """All shelves, seen from the driver."""

    def __init__(self, addresses: Sequence[Address], traffic: Traffic) -> None:
        self.addresses, self.traffic = addresses, traffic
        self._dropped: list[tuple[int, str]] = []

    def adopt(self, rollout: Rollout) -> Rollout:
        """Count what is read of it here, and let its shelves forget it when the driver does."""
        for slip in filter(None, map(slip_of, rollout.completions)):
            slip.traffic = self.traffic
            forgotten = (slip.address.rank, slip.key)
            weakref.finalize(slip, self._dropped.append, forgotten).atexit = False
        return rollout

    def take_dropped(self) -> dict[int, list[str]]:
        """Keys that nobody refers to any more, by the rank that still holds their numbers."""
        keys: dict[int, list[str]] = defaultdict(list)
        while self._dropped:  # another thread may add to it
            rank, key = self._dropped.pop()
            keys[rank].append(key)
        return keys
