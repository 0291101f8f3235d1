"""Pages: where the bytes of a page of one of SGLang's host pools lie."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch

from quire.errors import ConfigError

_UNKNOWN = (AttributeError, NotImplementedError, ValueError, AssertionError)
"""What a pool raises that cannot say where its pages lie, or cannot give them as one tensor."""


class HostPages:
    """The pages of a host pool as bytes: in place if the pool gives addresses, else by its flat pages.

    `num_bytes`  of a page; `form` says in which order they come
    Raises `ConfigError` for a pool that has neither.
    """

    def __init__(self, pool: Any, name: str) -> None:
        self.page_size = int(getattr(pool, "logical_page_size", 0) or pool.page_size)
        self._pool = pool
        try:
            _, sizes = pool.get_page_buffer_meta(torch.arange(self.page_size))
            self.form, self.num_bytes = f"in place {list(map(int, sizes))}", int(sum(sizes))
            self._is_placed = True
        except _UNKNOWN:
            self._is_placed = False
            try:
                page = pool.get_dummy_flat_data_page()
            except _UNKNOWN as error:
                raise ConfigError(
                    f"quire cannot read pages of SGLang's pool {name!r} ({type(pool).__name__}, layout "
                    f"{getattr(pool, 'layout', None)!r}): {error}; try --hicache-mem-layout page_first"
                ) from None
            self.form, self.num_bytes = "flat", page.numel() * page.element_size()

    def read(self, indices: torch.Tensor, into: Sequence[memoryview]) -> None:
        """Copy pages, whose slots are the indices one page after the other, into buffers."""
        if self._is_placed:
            for buffer, parts in zip(into, self._places(indices), strict=True):
                _copy_parts(buffer, parts, out=True)
            return
        for buffer, index in zip(into, self._starts(indices), strict=True):
            page = self._pool.get_data_page(index, flat=True)
            buffer[:] = page.contiguous().view(torch.uint8).numpy().data

    def write(self, indices: torch.Tensor, payloads: Sequence[memoryview | None]) -> None:
        """Copy payloads into pages; None leaves a page as it is."""
        if self._is_placed:
            for payload, parts in zip(payloads, self._places(indices), strict=True):
                if payload is not None:
                    _copy_parts(payload, parts, out=False)
            return
        for payload, index in zip(payloads, self._starts(indices), strict=True):
            if payload is not None:
                page = self._pool.get_dummy_flat_data_page()
                page.view(torch.uint8).numpy().data[:] = payload
                self._pool.set_from_flat_data_page(index, page)

    def _starts(self, indices: torch.Tensor) -> list[int]:
        return [int(each) for each in indices[:: self.page_size]]

    def _places(self, indices: torch.Tensor) -> list[list[tuple[int, int]]]:
        """Return address and size of each part of each page."""
        pointers, sizes = self._pool.get_page_buffer_meta(indices)
        parts = [(int(at), int(size)) for at, size in zip(pointers, sizes, strict=True)]
        step = len(parts) * self.page_size // max(len(indices), 1)
        return [parts[at : at + step] for at in range(0, len(parts), step)]


def _copy_parts(buffer: memoryview, parts: Sequence[tuple[int, int]], *, out: bool) -> None:
    """Copy between a buffer and memory at addresses: `out` of the memory, or into it."""
    ends = [0]
    for _, size in parts:
        ends.append(ends[-1] + size)
    for (address, size), (first, end) in zip(parts, pairwise(ends), strict=True):
        memory = memoryview((ctypes.c_char * size).from_address(address)).cast("B")
        if out:
            buffer[first:end] = memory
        else:
            memory[:] = buffer[first:end]
