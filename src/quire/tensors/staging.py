"""Rows of bytes between a device and buffers in host memory, in chunks, through pinned memory."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeAlias, cast

import torch

_Waiting: TypeAlias = tuple[int, torch.Tensor, Sequence[memoryview]]
"""An area whose copy is on its way, and the buffers that its rows are for."""


class Staging:
    """Two areas of host memory, used in turn; pinned where the device is CUDA.

    While one area is on its way, the other is filled or emptied. An area is written again only
    when the copy that read it has ended, whichever stream it was queued on. One thread at a time.
    """

    def __init__(self) -> None:
        self._areas: list[torch.Tensor | None] = [None, None]
        self._events: list[torch.cuda.Event | None] = [None, None]
        self._turn = 0

    def fetch(self, chunks: Iterable[tuple[torch.Tensor, Sequence[memoryview]]]) -> None:
        """Copy rows, uint8 `[n, bytes]` on any device, each into its buffer of the same size."""
        waiting: _Waiting | None = None
        for rows, buffers in chunks:
            if self._is_host(rows.device):
                _deal(rows, buffers)
                continue
            turn, area = self._area(tuple(rows.shape))
            area.copy_(rows, non_blocking=True)
            self._mark(turn)
            self._collect(waiting)
            waiting = turn, area, buffers
        self._collect(waiting)

    def _collect(self, waiting: _Waiting | None) -> None:
        if waiting is not None:
            turn, area, buffers = waiting
            self._wait(turn)
            _deal(area, buffers)

    def send(self, buffers: Sequence[memoryview], device: torch.device) -> torch.Tensor:
        """Return the bytes of buffers of one size as rows on a device, uint8 `[n, bytes]`.

        On CUDA they are there for what is queued on the current stream from now on.
        """
        shape = (len(buffers), buffers[0].nbytes)
        if self._is_host(device):
            rows = torch.empty(shape, dtype=torch.uint8)
            _gather(buffers, rows)
            return rows
        turn, area = self._area(shape)
        _gather(buffers, area)
        rows = area.to(device, non_blocking=True)
        self._mark(turn)
        return rows

    def wipe(self) -> None:
        """Overwrite both areas with zeros, once they are no longer in use."""
        for turn, area in enumerate(self._areas):
            self._wait(turn)
            if area is not None:
                area.zero_()

    def _is_host(self, device: torch.device) -> bool:
        """Whether its memory is written without staging; tests say no for a CPU."""
        return device.type == "cpu"

    def _area(self, shape: tuple[int, ...]) -> tuple[int, torch.Tensor]:
        """Return the area whose turn it is, no longer in use, as uint8 of this shape."""
        self._turn = turn = 1 - self._turn
        self._wait(turn)
        area, size = self._areas[turn], shape[0] * shape[1]
        if area is None or area.numel() < size:
            pinned = torch.cuda.is_available()
            self._areas[turn] = area = torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
        return turn, area[:size].view(shape)

    def _mark(self, turn: int) -> None:
        event = self._events[turn] = torch.cuda.Event()
        cast("Any", event).record()

    def _wait(self, turn: int) -> None:
        event = self._events[turn]
        if event is not None:
            event.synchronize()
            self._events[turn] = None


def _deal(rows: torch.Tensor, buffers: Sequence[memoryview]) -> None:
    for row, buffer in zip(_views(rows), buffers, strict=True):
        buffer[:] = row


def _gather(buffers: Sequence[memoryview], rows: torch.Tensor) -> None:
    for row, buffer in zip(_views(rows), buffers, strict=True):
        row[:] = buffer


def _views(rows: torch.Tensor) -> Iterator[memoryview]:
    """View each row."""
    size = rows.shape[1]
    data = memoryview(cast("Any", rows.flatten().numpy()))  # pyright: ignore[reportUnknownMemberType] - torch leaves it untyped
    return (data[start : start + size] for start in range(0, len(data), size))
