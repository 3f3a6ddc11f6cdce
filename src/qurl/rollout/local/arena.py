"""Memory for the KV cache that keeps its address while the memory behind it comes and goes.

CUDA graphs hold addresses, and between rollouts a large trainer needs the cache's memory. So we
reserve a range of addresses once and map physical memory into it for each rollout, with CUDA's
virtual memory management.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from qurl.errors import EngineError


class Arena:
    """Bytes on one device; all zero whenever they have been mapped."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self.num_bytes, self.device = num_bytes, device
        self._bytes: Tensor | None = None
        self._virtual = _reserve(num_bytes, device) if device.type == "cuda" else None

    @property
    def is_mapped(self) -> bool:
        return self._bytes is not None

    @property
    def keeps_address(self) -> bool:
        """Whether the address stays while the memory goes."""
        return self._virtual is not None

    def map(self) -> None:
        """Get the memory, filled with zeros: keys that are masked must be finite."""
        assert not self.is_mapped
        if self._virtual is None:
            self._bytes = _allocate(self.num_bytes, self.device)
            return
        with self._device_at_rest():
            self._virtual.map()
        self._bytes = torch.as_tensor(self._virtual, device=self.device).zero_()

    def unmap(self) -> None:
        """Give the memory back, once the device has done what it was asked before."""
        assert self.is_mapped
        self._bytes = None
        if self._virtual is not None:
            with self._device_at_rest():
                self._virtual.unmap()

    def tensor(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """The start of the arena, seen as a tensor; to be used while mapped."""
        assert self._bytes is not None
        num_bytes = math.prod(shape) * dtype.itemsize
        assert num_bytes <= self.num_bytes, f"{num_bytes} bytes wanted of {self.num_bytes}"
        return self._bytes[:num_bytes].view(dtype).view(tuple(shape))

    @contextmanager
    def _device_at_rest(self) -> Iterator[None]:
        """The driver is called with nothing running, and with a context in this thread."""
        with torch.cuda.device(self.device):
            torch.cuda.synchronize()
            yield


class VirtualMemory:
    """A range of addresses of one GPU, with all of its memory behind it or none.

    Calls need a CUDA context in their thread; `unmap` needs an idle device.
    """

    def __init__(self, num_bytes: int, device: int, driver: Any) -> None:
        """`driver` is `cuda.bindings.driver`."""
        self.is_mapped = False
        self._range: Any = None
        self._driver = driver
        self._properties = driver.CUmemAllocationProp()
        self._properties.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        self._properties.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        self._properties.location.id = device
        recommended = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_RECOMMENDED
        unit = self._call("cuMemGetAllocationGranularity", self._properties, recommended)
        self.num_bytes = -(-num_bytes // unit) * unit
        self._range = self._call("cuMemAddressReserve", self.num_bytes, 0, 0, 0)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """Tells torch where the memory is; torch then keeps this object from being collected."""
        data = (int(self._range), False)
        return {"shape": (self.num_bytes,), "typestr": "|u1", "data": data, "version": 3}

    def map(self) -> None:
        """Free memory that torch holds unused before giving up."""
        driver = self._driver
        error, handle = driver.cuMemCreate(self.num_bytes, self._properties, 0)
        if error == driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
            torch.cuda.empty_cache()
            error, handle = driver.cuMemCreate(self.num_bytes, self._properties, 0)
        if error == driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
            raise _no_memory(self.num_bytes, f", and {self._call('cuMemGetInfo')[0]} are free")
        self._check("cuMemCreate", error)
        try:
            self._call("cuMemMap", self._range, self.num_bytes, 0, handle, 0)
        finally:
            # A mapping keeps the memory by itself, and unmapping frees it.
            self._call("cuMemRelease", handle)
        self.is_mapped = True
        access = driver.CUmemAccessDesc()
        access.location = self._properties.location
        access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        try:
            self._call("cuMemSetAccess", self._range, self.num_bytes, [access], 1)
        except EngineError:
            self.unmap()
            raise

    def unmap(self) -> None:
        self._call("cuMemUnmap", self._range, self.num_bytes)
        self.is_mapped = False

    def __del__(self) -> None:
        # At the end of the process the driver may be gone already, and frees everything itself.
        if self._range is not None and not sys.is_finalizing():
            if self.is_mapped:
                self._call("cuCtxSynchronize")
                self.unmap()
            self._call("cuMemAddressFree", self._range, self.num_bytes)

    def _call(self, name: str, *arguments: Any) -> Any:
        """Call the driver; returns its result without the error code."""
        error, *values = getattr(self._driver, name)(*arguments)
        self._check(name, error)
        return values[0] if len(values) == 1 else tuple(values)

    def _check(self, name: str, error: Any) -> None:
        if error != self._driver.CUresult.CUDA_SUCCESS:
            raise EngineError(f"the KV cache cannot be placed on the GPU: {name} gave {error.name}")


def _reserve(num_bytes: int, device: torch.device) -> VirtualMemory | None:
    """Addresses on a GPU; None if cuda-bindings is not installed."""
    try:
        from cuda.bindings import driver  # pyright: ignore[reportMissingImports]
    except ImportError:
        return None
    torch.cuda.synchronize(device)  # the driver is initialised, and has a context
    index = torch.cuda.current_device() if device.index is None else device.index
    return VirtualMemory(num_bytes, index, driver)


def _allocate(num_bytes: int, device: torch.device) -> Tensor:
    out_of_memory = torch.OutOfMemoryError if device.type == "cuda" else RuntimeError
    try:
        return torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    except out_of_memory as error:
        raise _no_memory(num_bytes) from error


def _no_memory(num_bytes: int, free: str = "") -> EngineError:
    return EngineError(
        f"no memory for the KV cache: it needs {num_bytes} bytes{free}; lower rollout.kv_tokens, "
        "rollout.max_batch or rollout.kv_memory_frac"
    )
