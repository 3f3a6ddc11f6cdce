"""The way that weights take from the trainer to engines in other processes: one broadcasts, all
others receive.

    header   names, shapes, dtypes and checksums of a chunk; none at the end
    tensors  one after the other, or with "ipc" only where they are

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


@dataclass(frozen=True)
class Address:
    """Where the members of a wire meet."""

    host: str
    port: int
    name: str
    """Of this wire, since one store serves many."""
    seconds: float
    """How long each waits for the others."""
    carrier: Carrier = "gloo"


class Switchboard:
    """The sender's store, at which members of one wire after the other meet."""

    def __init__(self, seconds: float, carrier: Carrier = "gloo") -> None:
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

    def send(self, chunk: Chunk) -> None:
        """An empty chunk ends the shipment."""
        sums = checksums(chunk)
        tensors = {name: x.detach().to(self.device).contiguous() for name, x in chunk.items()}
        described: dict[str, Any] = tensors
        if self._carrier != "ipc":
            described = {name: (tuple(x.shape), x.dtype) for name, x in tensors.items()}
        header = ForkingPickler.dumps((described, sums))  # of a tensor, where its memory is
        self._broadcast(torch.tensor([len(header)]))
        self._broadcast(torch.frombuffer(bytearray(header), dtype=torch.uint8))
        if self._carrier == "ipc" and tensors:
            self._meet()  # the others have read them
        for tensor in tensors.values():
            self.num_bytes += tensor.nbytes
            if self._carrier != "ipc":
                self._broadcast(_as_bytes(tensor))

    def receive(self) -> Iterator[Chunk]:
        """All chunks of a shipment; raises after the last if one was not what was sent.

        A chunk may be gone when the next one is asked for.
        """
        wrong: list[str] = []
        while True:
            length = self._broadcast(torch.zeros(1, dtype=torch.int64))
            header = self._broadcast(torch.empty(int(length), dtype=torch.uint8))
            described, sums = pickle.loads(header.numpy().tobytes())
            if not described and wrong:
                raise SyncError(f"{', '.join(wrong[:3])} arrived damaged")
            if not described:
                return
            chunk = {name: self._take(found) for name, found in described.items()}
            wrong += mismatches(chunk, sums)
            yield chunk
            if self._carrier == "ipc":
                chunk.clear()
                self._meet()

    def _take(self, described: Any) -> Tensor:
        """A tensor of a chunk; with "ipc" it is the sender's own."""
        if self._carrier == "ipc":
            return described
        shape, dtype = described
        tensor = torch.empty(shape, dtype=dtype, device=self.device)
        self._broadcast(_as_bytes(tensor))
        return tensor

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


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)
