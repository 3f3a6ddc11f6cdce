"""The way that weights take from the trainer to engines in other processes: one broadcasts, all
others receive.

    header   names, shapes, dtypes and checksums of a chunk; none at the end
    tensors  one after the other

It is a process group of its own, made for this purpose and thrown away when a member dies: the
trainer's groups know nothing of it. NCCL on GPUs, gloo in main memory.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from qurl.errors import SyncError
from qurl.ops.shelf import own_host
from qurl.quant.shipment import Chunk, checksums, mismatches


@dataclass(frozen=True)
class Address:
    """Where the members of a wire meet."""

    host: str
    port: int
    name: str
    """Of this wire, since one store serves many."""
    seconds: float
    """How long each waits for the others."""
    is_nccl: bool = False
    """Between GPUs, each member on its own; else through main memory."""


class Switchboard:
    """The sender's store, at which members of one wire after the other meet."""

    def __init__(self, seconds: float, is_nccl: bool = False) -> None:
        self._store = dist.TCPStore("0.0.0.0", 0, is_master=True, wait_for_workers=False)
        self._seconds, self._is_nccl, self._count = seconds, is_nccl, 0

    def next_address(self) -> Address:
        self._count += 1
        name = f"wire-{self._count}"
        return Address(own_host(), self._store.port, name, self._seconds, self._is_nccl)


class Wire:
    """One end; `rank` 0 sends."""

    def __init__(self, address: Address, rank: int, size: int, device: torch.device) -> None:
        """Returns when all members are there; `device` is this one's."""
        patience = timedelta(seconds=address.seconds)
        meeting = dist.TCPStore(address.host, address.port, is_master=False, timeout=patience)
        store = dist.PrefixStore(address.name, meeting)
        self.device, self.num_bytes = device if address.is_nccl else torch.device("cpu"), 0
        self._group: Any
        if address.is_nccl:
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = patience
            self._group = dist.ProcessGroupNCCL(store, rank, size, options)
        else:
            self._group = dist.ProcessGroupGloo(store, rank, size, patience)
        self._store = store  # the group does not keep it

    def send(self, chunk: Chunk) -> None:
        """An empty chunk ends the shipment."""
        described = {name: (tuple(x.shape), str(x.dtype)) for name, x in chunk.items()}
        header = json.dumps((described, checksums(chunk))).encode()
        self._broadcast(torch.tensor([len(header)]))
        self._broadcast(torch.frombuffer(bytearray(header), dtype=torch.uint8))
        for tensor in chunk.values():
            self._broadcast(_as_bytes(tensor.detach().to(self.device).contiguous()))
            self.num_bytes += tensor.nbytes

    def receive(self) -> Iterator[Chunk]:
        """All chunks of a shipment; raises after the last if one was not what was sent."""
        wrong: list[str] = []
        while True:
            length = self._broadcast(torch.zeros(1, dtype=torch.int64))
            header = self._broadcast(torch.empty(int(length), dtype=torch.uint8))
            described, sums = json.loads(bytes(header.tolist()))
            if not described and wrong:
                raise SyncError(f"{', '.join(wrong[:3])} arrived damaged")
            if not described:
                return
            chunk: Chunk = {}
            for name, (shape, dtype) in described.items():
                dtype = getattr(torch, dtype.removeprefix("torch."))
                chunk[name] = torch.empty(shape, dtype=dtype, device=self.device)
                self._broadcast(_as_bytes(chunk[name]))
            wrong += mismatches(chunk, sums)
            yield chunk

    def _broadcast(self, tensor: Tensor) -> Tensor:
        """From rank 0 to all others, in place."""
        carried = tensor.to(self.device)  # headers live in main memory, NCCL does not
        options = dist.BroadcastOptions()
        options.rootRank = 0
        self._group.broadcast([carried], options).wait()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return carried.to(tensor.device)


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)
