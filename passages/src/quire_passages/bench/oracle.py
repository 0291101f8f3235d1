"""Rows that an oracle computes again: those of the largest error, known from the full forward.

The error of a token of a moved passage is the full forward's attention to it times how far its stored V is from the full
forward's, summed over layers, heads, and the rows of the question and the answer: the error of the output, to first
order. An oracle is a bound, and no policy.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, cast

import numpy as np
import numpy.typing as npt
import torch

from quire_passages import Moved, Selector, Variant
from quire_passages.bench.methods import Captured
from quire_passages.hf import PassageModel
from quire_passages.hf.beside import FullAnswer
from quire_passages.hf.capture import PassageKV
from quire_passages.selectors import Rows


class Oracle(NamedTuple):
    """An oracle of a row of the benchmark.

    `share`     of moved rows, those that it picks
    `is_exact`  whether these get K and V of the full forward, instead of being computed again
    `captured`  as of `Method`
    """

    share: float
    is_exact: bool = False
    captured: Captured = "alone"


class ScoredRows(Selector):
    """The rows of the largest scores, `[tokens of the prompt]`."""

    def __init__(self, scores: npt.NDArray[np.float32], share: float) -> None:
        self._scores, self._share = scores, share
        self.name = f"scored {share:g}"

    def rows(self, moved: Sequence[Moved]) -> Rows:
        return self.among([(each.start, each.start + each.num_tokens) for each in moved])

    def among(self, spans: Sequence[tuple[int, int]]) -> Rows:
        """Return the rows of the largest scores in some spans of a prompt."""
        found = np.concatenate([np.arange(*each) for each in spans] or [np.empty(0, np.int64)])
        best = np.argsort(-self._scores[found], kind="stable")[
            : math.ceil(self._share * found.size)
        ]
        return np.sort(found[best])


def true_errors(
    model: PassageModel, full: FullAnswer, variants: Sequence[Variant | None]
) -> npt.NDArray[np.float32]:
    """Return the error of each token of a prompt, `[tokens]`, before passages are placed from variants."""
    segments, start = full.segments, full.segments.num_tokens - 1
    read = np.array([segments.tokens[-1], *full.answer[:-1]], np.int32)
    model.runs.logits(full.past, read, start, keep=1)
    rows = np.arange(segments.num_tokens - segments.question.size, start + read.size)
    error = np.zeros(start, np.float32)

    def look(index: int, given: torch.Tensor) -> None:
        layer = full.past.kv_layers[index]
        by_head = given[0].float().sum(1)[:, : start - layer.first]  # [heads, columns]
        values = layer.row(0, layer.first, start)[1].float()
        by_kv = by_head.view(values.shape[0], -1, by_head.shape[-1]).sum(1)
        for (first, stop), variant in zip(segments.spans, variants, strict=True):
            if variant is not None and first >= layer.first:
                held = cast("PassageKV", variant.kv).layers[index][1].float()
                there = values[:, first - layer.first : stop - layer.first]
                off = (there - held).square().sum(-1).sqrt()
                part = by_kv[:, first - layer.first : stop - layer.first] * off
                error[first:stop] += part.sum(0).numpy(force=True)

    model.blending.rows(full.past, np.append(segments.tokens[:start], read), rows, look=look)
    full.past.crop(-read.size)
    return error
