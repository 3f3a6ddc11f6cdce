"""The paged KV cache: one tensor for all layers, pages counted by who holds them.

A sequence owns a list of pages; its token at position p lives in `pages[p // page_size]`. Full
pages can be shared, because nobody writes to them again. Page 0 belongs to no sequence: padding
rows of a batch write there.
"""

from __future__ import annotations

import torch
from torch import Tensor

from qurl.rollout.local.weights import Architecture

SCRATCH_PAGE = 0


class PagePool:
    """Which pages are free, and how many sequences hold each of the others."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
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

    def release(self, pages: list[int]) -> None:
        """Drop one hold of each page; a page that nobody holds is free."""
        for page in pages:
            assert self._holders[page] > 0, f"page {page} is released but nobody holds it"
            self._holders[page] -= 1
            if self._holders[page] == 0:
                self._free.append(page)


def allocate_kv(
    arch: Architecture, num_pages: int, page_size: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """[layers, 2, 1 + pages, page_size, kv_heads, head_dim], zero: masked keys must be finite."""
    shape = (arch.num_layers, 2, 1 + num_pages, page_size, arch.num_kv_heads, arch.head_dim)
    return torch.zeros(shape, dtype=dtype, device=device)


def copy_pages_(kv: Tensor, copies: list[tuple[int, int]]) -> None:
    """Copy whole pages, (source, target) each, in all layers."""
    if copies:
        sources, targets = zip(*copies, strict=True)
        kv[:, :, list(targets)] = kv[:, :, list(sources)]
