"""Attention masses of passages, measured in a forward over K and V that are there."""

from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from quire.engines.models.working_cache import WorkingCache
from quire.errors import UnsupportedModel
from quire.tensors.kinds import model_type
from quire_passages import Masses
from quire_passages.hf.rows import RowForward

Counting: TypeAlias = Callable[[torch.Tensor, float], torch.Tensor | None]
"""Attention that counts: `[rows, passages]` of `[heads, rows, passages]` at a depth, 0 to 1; None: nothing there."""

_ROWS_AT_ONCE = 256
"""Attention of a layer takes heads x rows x columns numbers."""

Spans = Sequence[tuple[int, int]]


def largest_early(by_head: torch.Tensor, depth: float) -> torch.Tensor | None:
    """Count the largest of the heads, in the first half of the layers."""
    return by_head.amax(0) if depth < 0.5 else None


def masses_of(
    rows: RowForward,
    past: WorkingCache,
    tokens: npt.NDArray[np.int32],
    spans: Spans,
    count: Counting = largest_early,
) -> list[Masses]:
    """Return the masses of passages at `spans` of `tokens`, of which `past` holds exact K and V.

    Computes the passages once more, the eager way, in pieces. Raises `UnsupportedModel` where the model
    returns no attention.
    """
    weighing = _Weighing(spans, past, count)
    begin, end = spans[0][0], spans[-1][1]
    for start in range(begin, end, _ROWS_AT_ONCE):
        piece = np.arange(start, min(start + _ROWS_AT_ONCE, end))
        weighing.starts(piece)
        rows(past, tokens, piece, look=weighing.look)
    if not weighing.num_seen:
        raise UnsupportedModel(
            f"{model_type(rows.config)} returns no attention probabilities; Cache-Craft cannot be used with it"
        )
    return weighing.masses()


class _Weighing:
    """Adds up attention, of rows to passages: `[rows, passages]`."""

    def __init__(self, spans: Spans, past: WorkingCache, count: Counting) -> None:
        self._spans = spans
        self._begin = spans[0][0]
        self._layers = past.kv_layers
        self._count = count
        self._given = np.zeros((spans[-1][1] - self._begin, len(spans)), np.float32)
        self._rows = slice(0)
        self.num_seen = 0

    def starts(self, rows: npt.NDArray[np.int64]) -> None:
        """Expect the attention of these rows."""
        self._rows = slice(int(rows[0]) - self._begin, int(rows[-1]) - self._begin + 1)

    def look(self, index: int, attention: torch.Tensor) -> None:
        """Add what a layer's rows gave to each passage."""
        self.num_seen += 1
        first = self._layers[index].first  # a windowed layer may lack the first columns
        parts = [
            attention[0, :, :, max(start - first, 0) : max(stop - first, 0)].float().sum(-1)
            for start, stop in self._spans
        ]
        counted = self._count(torch.stack(parts, dim=-1), index / len(self._layers))
        if counted is not None:
            self._given[self._rows] += counted.numpy(force=True)

    def masses(self) -> list[Masses]:
        """Return what each passage gave to those before it, and to itself."""
        found: list[Masses] = []
        for index, (start, stop) in enumerate(self._spans):
            own = self._given[start - self._begin : stop - self._begin]
            lengths = tuple(b - a for a, b in self._spans[:index])
            before = own[:, :index]
            found.append(
                Masses(lengths, before.sum(0), float(own[:, index].sum()), before.sum(1).copy())
            )
        return found
