"""Attention masses of passages, measured in a forward over K and V that are there."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from quire.engines.models.working_cache import WorkingCache
from quire.errors import UnsupportedModel
from quire.tensors.kinds import model_type
from quire_passages import Masses, Measured
from quire_passages.hf.rows import RowForward

_ROWS_AT_ONCE = 256
"""Attention of a layer takes heads x rows x columns numbers."""

Spans = Sequence[tuple[int, int]]


def masses_of(
    rows: RowForward, past: WorkingCache, tokens: npt.NDArray[np.int32], spans: Spans
) -> list[Masses]:
    """Return the masses of passages at `spans` of `tokens`, of which `past` holds exact K and V.

    Computes the passages once more, the eager way, in pieces. Raises `UnsupportedModel` where the model
    returns no attention.
    """
    weighing = _Weighing(spans, past)
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
    """Adds up attention, of rows to passages: `[rows, passages]` by each way of counting."""

    def __init__(self, spans: Spans, past: WorkingCache) -> None:
        self._spans = spans
        self._begin = spans[0][0]
        self._layers = past.kv_layers
        self._early = -(-len(past.kv_layers) // 2)
        shape = spans[-1][1] - self._begin, len(spans)
        self._mean, self._largest = np.zeros(shape, np.float32), np.zeros(shape, np.float32)
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
        by_head = torch.stack(parts, dim=-1)
        self._mean[self._rows] += by_head.mean(0).numpy(force=True)
        if index < self._early:
            self._largest[self._rows] += by_head.amax(0).numpy(force=True)

    def masses(self) -> list[Masses]:
        """Return what each passage gave to those before it, and to itself."""
        return [
            Masses(
                tuple(b - a for a, b in self._spans[:index]),
                self._measured(self._mean, index),
                self._measured(self._largest, index),
            )
            for index in range(len(self._spans))
        ]

    def _measured(self, given: npt.NDArray[np.float32], index: int) -> Measured:
        start, stop = self._spans[index]
        own = given[start - self._begin : stop - self._begin]
        return Measured(
            own[:, :index].sum(0), float(own[:, index].sum()), own[:, :index].sum(1).copy()
        )
