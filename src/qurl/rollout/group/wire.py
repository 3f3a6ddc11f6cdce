"""The way that weights take from the trainer to engines in other processes: one broadcasts, all
others receive.

    header   names, shapes, dtypes and checksums of a chunk; none at the end
    tensors  one after the other, or with "ipc" in one block of the sender's memory

It is a process group of its own, made for this purpose and thrown away when a member dies: the
trainer's groups know nothing of it. Its carrier is one of

    gloo   through main memory
    nccl   between GPUs, each member on its own
    ipc    where members share the GPUs of a machine: they read the sender's memory
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from math import prod
from multiprocessing.reduction import ForkingPickler
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.multiprocessing  # teaches ForkingPickler what tensors are
from torch import Tensor

from qurl.errors import SyncError
from qurl.ops.shelf import own_host
from qurl.quant.shipment import Chunk, checksums, mismatches

Carrier = Literal["gloo", "nccl", "ipc"]
Description = dict[str, tuple[tuple[int, ...], torch.dtype]]
"""Shapes and dtypes of a chunk, by name."""
ALIGNMENT = 512
"""Bytes, as torch allocates on a GPU."""


@dataclass(frozen=True)
class Address:
    """Where the members of a wire meet."""

    host: str
    port: int
    name: str
    """The name of this wire: one store serves many."""
    seconds: float
    """How long each waits for the others."""
    carrier: Carrier


class Switchboard:
    """The sender's store, at which members of one wire after the other meet."""

    def __init__(self, seconds: float, carrier: Carrier) -> None:
        self._store = dist.TCPStore("0.0.0.0", 0, is_master=True, wait_for_workers=False)
        self._seconds, self._count = seconds, 0
        self._carrier: Carrier = carrier

    def next_address(self) -> Address:
        self._count += 1
        name = f"wire-{self._count}"
        return Address(own_host(), self._store.port, name, self._seconds, self._carrier)


class Wire:
    """One end; `rank` 0 sends."""

    def __init__(self, address: Address, rank: int, size: int, device: torch.device) -> None:
        """Returns when all members are there; `device` is this one's."""
        patience = timedelta(seconds=address.seconds)
        meeting = dist.TCPStore(address.host, address.port, is_master=False, timeout=patience)
        store = dist.PrefixStore(address.name, meeting)
        self._carrier, self.num_bytes = address.carrier, 0
        self.device = torch.device("cpu") if address.carrier == "gloo" else device
        self._group: Any
        if address.carrier == "nccl":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = patience
            self._group = dist.ProcessGroupNCCL(store, rank, size, options)
        else:
            self._group = dist.ProcessGroupGloo(store, rank, size, patience)
        self._store = store  # the group does not keep it
        self._block: Tensor | None = None
        """Memory that the others read, during a shipment."""

    def send(self, chunk: Chunk) -> None:
        """An empty chunk ends the shipment."""
        sums = checksums(chunk)
        tensors = {name: x.detach().to(self.device).contiguous() for name, x in chunk.items()}
        described = {name: (tuple(x.shape), x.dtype) for name, x in tensors.items()}
        block = self._lay_out(described, tensors) if self._carrier == "ipc" else None
        header = ForkingPickler.dumps((described, sums, block))  # of a block, where it is
        self._broadcast(torch.tensor([len(header)]))
        self._broadcast(torch.frombuffer(bytearray(header), dtype=torch.uint8))
        if block is not None:
            self._meet()  # the others have read it
        for tensor in tensors.values():
            self.num_bytes += tensor.nbytes
            if block is None:
                self._broadcast(_as_bytes(tensor))

    def receive(self) -> Iterator[Chunk]:
        """All chunks of a shipment; raises after the last if one was not what was sent.

        A chunk may be gone when the next one is asked for: copy what you keep.
        """
        wrong: list[str] = []
        while True:
            length = self._broadcast(torch.zeros(1, dtype=torch.int64))
            header = self._broadcast(torch.empty(int(length), dtype=torch.uint8))
            described, sums, block = pickle.loads(header.numpy().tobytes())
            if not described and wrong:
                raise SyncError(f"{', '.join(wrong[:3])} arrived damaged")
            if not described:
                return
            chunk = self._take(described) if block is None else _cut(block, described)
            wrong += mismatches(chunk, sums)
            yield chunk
            if block is not None:
                # The sender keeps memory for as long as anyone here refers to it.
                chunk.clear()
                block = None
                self._meet()

    def _take(self, described: Description) -> Chunk:
        chunk = Chunk()
        for name, (shape, dtype) in described.items():
            chunk[name] = torch.empty(shape, dtype=dtype, device=self.device)
            self._broadcast(_as_bytes(chunk[name]))
        return chunk

    def _lay_out(self, described: Description, tensors: dict[str, Tensor]) -> Tensor | None:
        """The block with a copy of all tensors, one after the other; None after the last.

        The trainer's own memory is not shared: torch would keep count of its readers, one more at
        every sync, for as long as a weight lives. All chunks of a shipment take one block, since
        torch takes memory at the same place for the same, also if it has another size.
        """
        num_bytes = sum(_padded(tensor.nbytes) for tensor in tensors.values())
        if not tensors:
            self._block = None
        elif self._block is None or len(self._block) < num_bytes:
            self._block = torch.empty(num_bytes, dtype=torch.uint8, device=self.device)
        if self._block is not None:
            for name, place in _cut(self._block, described).items():
                place.copy_(tensors[name])
        return self._block

    def _broadcast(self, tensor: Tensor) -> Tensor:
        """From rank 0 to all others, in place."""
        # Headers live in main memory, which NCCL does not reach.
        carried = tensor.to(self.device) if self._carrier == "nccl" else tensor
        options = dist.BroadcastOptions()
        options.rootRank = 0
        self._group.broadcast([carried], options).wait()
        self._finish()
        return carried.to(tensor.device)

    def _meet(self) -> None:
        """Wait until all members have finished what they do with the sender's memory."""
        self._finish()
        self._group.barrier(dist.BarrierOptions()).wait()

    def _finish(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def _cut(block: Tensor, described: Description) -> Chunk:
    """The tensors of a block."""
    chunk, start = Chunk(), 0
    for name, (shape, dtype) in described.items():
        num_bytes = prod(shape) * dtype.itemsize
        chunk[name] = block[start : start + num_bytes].view(dtype).view(shape)
        start += _padded(num_bytes)
    return chunk


def _padded(num_bytes: int) -> int:
    """Each tensor starts where memory for it would, too."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)
