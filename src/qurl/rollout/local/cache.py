"""The paged KV cache: one tensor for all layers, and a count of holders for each page.

A sequence's token at position p lives in `pages[p // page_size]`. Full pages can be shared, because
nobody writes to them again. Padding rows of a batch write to page 0. An FP8 cache holds codes, with
one scale per layer, key or value, and head, and a center of the keys (`kv_range`).
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from qurl.quant.kv import FP8_MAX
from qurl.rollout.local.architecture import Architecture
from qurl.rollout.local.arena import Arena
from qurl.rollout.local.kv_range import KVRange
from qurl.rollout.local.ops import LayerCache
from qurl.types import KVScales

SCRATCH_PAGE = 0
KV_MARGIN = 16.0
"""Range of an FP8 cache relative to what the canary prompt needs. That prompt is short, and a range
sixteen times as wide costs four of E4M3's 17 binades and no precision."""
LARGEST_CODE = 0x7E
"""Of E4M3: 448."""
MEMORY_CPU = 4 * 2**30
"""Largest cache that `kv_tokens = 0` takes on a CPU; on a GPU it is a share of the free memory."""
SMALL_GAIN = 1 / 8
"""A cache that would grow by no more than this is kept: moving it costs all CUDA graphs."""


class PagePool:
    """Which pages are free, and how many sequences hold each of the others."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.num_pages, self.page_size = num_pages, page_size
        self._free = list(range(num_pages, SCRATCH_PAGE, -1))
        self._holders = [0] * (num_pages + 1)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def pages_for(self, num_tokens: int) -> int:
        """Pages that hold so many tokens."""
        return -(-num_tokens // self.page_size)

    def allocate(self, count: int) -> list[int]:
        """`count` pages with one holder each."""
        assert count <= self.num_free, f"{count} pages wanted, {self.num_free} free"
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._holders[page] = 1
        return pages

    def share(self, pages: list[int]) -> list[int]:
        """The same pages, held once more."""
        for page in pages:
            assert self._holders[page] > 0, f"page {page} is free and cannot be shared"
            self._holders[page] += 1
        return list(pages)

    def release(self, pages: Sequence[int]) -> None:
        """Drop one hold of each page; a page that nobody holds is free."""
        for page in pages:
            assert self._holders[page] > 0, f"page {page} is released but nobody holds it"
            self._holders[page] -= 1
            if self._holders[page] == 0:
                self._free.append(page)


@dataclass(frozen=True)
class KVCache:
    """Keys and values of all layers, in pages."""

    data: Tensor  # [layers, 2, 1 + pages, page_size, kv_heads, head_dim]
    scales: KVScales | None = None
    """What its codes stand for; None if it holds numbers."""

    @property
    def page_size(self) -> int:
        return self.data.shape[3]

    def layer(self, index: int, slots: Tensor | None = None) -> LayerCache:
        """One layer; `slots` are where its new keys and values go."""
        if self.scales is None:
            return LayerCache(self.data[index], None, None, slots)
        scale, center = self.scales.scale[index], self.scales.center[index]
        return LayerCache(self.data[index], scale, center, slots)

    def addresses(self) -> tuple[object, ...]:
        """A CUDA graph is valid while they stay equal."""
        scales = () if self.scales is None else (self.scales.scale, self.scales.center)
        return (self.data.shape, *(x.data_ptr() for x in (self.data, *scales)))

    def copy_(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy whole pages, (source, target) each, in all layers."""
        if not copies:
            return
        sources, targets = upload(torch.tensor(copies).T.contiguous(), self.data.device)
        for layer in self._bytes():  # one by one: what is gathered lies in memory twice
            layer[:, targets] = layer[:, sources]

    def save(self, pages: Sequence[int]) -> Tensor:
        """A copy of the pages in host memory."""
        return self._bytes()[:, :, torch.tensor(pages, device=self.data.device)].cpu()

    def restore_(self, saved: Tensor, pages: Sequence[int]) -> None:
        """Put a saved copy into pages."""
        index = torch.tensor(pages, device=self.data.device)
        self._bytes()[:, :, index] = saved.to(self.data.device)

    def saturated_frac(self, slots: Sequence[int]) -> float:
        """Share of the codes of these tokens that are +-448, the ends of the range."""
        index = torch.tensor(slots, device=self.data.device)
        codes = self._bytes().flatten(2, 3)[:, :, index]  # [layers, 2, slots, kv_heads, head_dim]
        return int((codes & 0x7F == LARGEST_CODE).sum()) / codes.numel()

    def _bytes(self) -> Tensor:
        """FP8 as bytes: torch cannot index it on every device."""
        return self.data.view(torch.uint8) if self.data.itemsize == 1 else self.data


def upload(tensor: Tensor, device: torch.device) -> Tensor:
    """To the device, without waiting: torch keeps the pinned copy until the stream has read it."""
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


@dataclass(frozen=True)
class CacheOptions:
    """What the user decides about the cache."""

    page_size: int
    kv_tokens: int = 0
    """Capacity; 0 = as large as needed, as far as memory permits."""
    memory_frac: float = 0.8
    """Most of a GPU's free memory that the cache takes."""
    is_fp8: bool = False
    is_released: bool = False
    """Give a GPU's memory back after each generation."""


class CacheMemory:
    """The cache's memory: how large it is, and when it is given back.

    A GPU's cache keeps its address, because CUDA graphs hold it. A CPU's lives for one generation.
    """

    def __init__(
        self, arch: Architecture, dtype: torch.dtype, device: torch.device, options: CacheOptions
    ) -> None:
        self.options, self.device, self._arch = options, device, arch
        self.dtype = torch.float8_e4m3fn if options.is_fp8 else dtype
        self.num_pages = self._wanted = 0
        """The number of pages, and how many would have been best when it was chosen."""
        self._arena: Arena | None = None
        self.scales: KVScales | None = None
        if options.is_fp8:
            layers, heads = arch.num_layers, arch.num_kv_heads
            scale = torch.ones(layers, 2, heads, device=device)
            self.scales = KVScales(scale, scale.new_zeros(layers, heads, arch.head_dim))

    @property
    def is_mapped(self) -> bool:
        """Whether the present cache has its memory."""
        return self._arena is not None and self._arena.is_mapped

    @property
    def page_bytes(self) -> int:
        return math.prod(self._shape(0)) * self.dtype.itemsize

    def set_range_(self, sample: KVRange) -> None:
        """FP8 scales and centers from what a sample of keys and values shows.

        A scale is the next power of two, see `qurl.quant.kv`.
        """
        assert self.scales is not None
        mantissa, exponent = torch.frexp(KV_MARGIN * sample.amax / FP8_MAX)  # mantissa < 1
        power = torch.ldexp(torch.ones_like(mantissa), exponent - (mantissa == 0.5).int())
        self.scales.scale.copy_(torch.where(sample.amax == 0, 1.0, power))
        self.scales.center.copy_(sample.center)

    def choose_num_pages(self, num_sequences: int, num_tokens: int) -> int:
        """Pages for so many sequences of so many tokens, as far as memory permits.

        The present cache is kept if a new one would not be much larger.
        """
        if self.options.kv_tokens:
            return self.options.kv_tokens // self.options.page_size
        pages_each = -(-num_tokens // self.options.page_size)
        # One more page each, for prompts that are held while part of their group waits.
        wanted = num_sequences * (pages_each + 1)
        large = self.num_pages * (1 + SMALL_GAIN)
        is_settled = pages_each <= self.num_pages and wanted <= max(self._wanted, large)
        if is_settled and self._is_at_hand():
            return self.num_pages
        self._wanted = wanted
        frac = 1.0 if self.device.type == "cpu" else self.options.memory_frac
        best = min(wanted, max(self._num_pages_in(frac * self.available_bytes()), 0))
        is_kept = self.is_mapped and pages_each <= self.num_pages and best <= large
        return self.num_pages if is_kept else best

    def acquire(self, num_pages: int) -> KVCache:
        """A cache of so many pages; the old one if it has as many."""
        if self._arena is None or num_pages != self.num_pages:
            if self._arena is not None and self._arena.is_mapped:
                self._arena.unmap()
            self._arena = Arena((1 + num_pages) * self.page_bytes, self.device)
            self.num_pages = num_pages
        if not self._arena.is_mapped:
            self._arena.map()
        data = self._arena.tensor(self._shape(num_pages), self.dtype)
        return KVCache(data, self.scales)

    def make_small(self, num_tokens: int) -> KVCache:
        """A cache of the same kind for one short sequence, apart from the large one."""
        shape = self._shape(-(-num_tokens // self.options.page_size))
        data = torch.zeros(shape, device=self.device).to(self.dtype)
        return KVCache(data, self.scales)

    def release(self) -> None:
        """The generation is over: give the memory back, on a GPU if that is wanted."""
        is_cuda = self.device.type == "cuda"
        if not self._arena or not self.is_mapped or (is_cuda and not self.options.is_released):
            return
        self._arena.unmap()
        if is_cuda and not self._arena.keeps_address:
            warnings.warn(
                "rollout.release_kv frees the KV cache without keeping its address, so that CUDA "
                "graphs are captured again at each rollout; install cuda-bindings",
                stacklevel=2,
            )

    def available_bytes(self) -> int:
        """Memory that a cache could take, including that of the present one."""
        if self.device.type == "cpu":
            return MEMORY_CPU
        # Torch's own count of unused blocks would include those of CUDA graphs.
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info(self.device)
        return free + ((1 + self.num_pages) * self.page_bytes if self.is_mapped else 0)

    def _is_at_hand(self) -> bool:
        """Whether the present cache has its memory, or can have it again.

        The bound is looser than for a new cache, or any change in the trainer's memory would move
        the cache.
        """
        if self.is_mapped or self.device.type == "cpu":
            return self.is_mapped
        share = (1 + self.options.memory_frac) / 2
        return self.num_pages <= self._num_pages_in(share * self.available_bytes())

    def _shape(self, num_pages: int) -> tuple[int, ...]:
        arch, page_size = self._arch, self.options.page_size
        return (arch.num_layers, 2, 1 + num_pages, page_size, arch.num_kv_heads, arch.head_dim)

    def _num_pages_in(self, num_bytes: float) -> int:
        return int(num_bytes // self.page_bytes) - 1  # the scratch page
