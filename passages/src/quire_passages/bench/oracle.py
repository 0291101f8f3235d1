"""Rows that are computed again by attention to them: an oracle's, and those that the question looks at.

An oracle knows the full forward. It has two scores of a token of a moved passage, summed over layers, heads, and the
rows of the question and the answer:

attention  the full forward's attention to it
error      that attention times how far the stored V is from the full forward's: the error of the output, to first order

It is a bound, and no policy. The question's rows are one: the question is computed over moved passages first, and its
attention in the later half of the layers is the score (ProphetKV, https://arxiv.org/abs/2602.02579, asks all layers).
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Literal, NamedTuple, cast

import numpy as np
import numpy.typing as npt
import torch

from quire_passages import Moved, NoRows, Segments, Selector, Variant
from quire_passages.bench.methods import Captured
from quire_passages.hf import PassageModel
from quire_passages.hf.beside import FullAnswer, planned
from quire_passages.hf.capture import PassageKV
from quire_passages.selectors import Rows

Score = Literal["attention", "error"]


class Oracle(NamedTuple):
    """An oracle of a row of the benchmark.

    `share`     of moved rows, those that it picks
    `is_exact`  whether these get K and V of the full forward, instead of being computed again
    """

    score: Score
    share: float
    is_exact: bool = False


class AskedRows(NamedTuple):
    """Rows that the question looks at.

    `share`     of moved rows
    `captured`  as of `Method`
    """

    share: float
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


def oracle_scores(
    model: PassageModel, full: FullAnswer, variants: Sequence[Variant | None]
) -> dict[Score, npt.NDArray[np.float32]]:
    """Return both scores of each token of a prompt, `[tokens]`, before passages are placed from variants."""
    segments, start = full.segments, full.segments.num_tokens - 1
    read = np.array([segments.tokens[-1], *full.answer[:-1]], np.int32)
    model.runs.logits(full.past, read, start, keep=1)
    rows = np.arange(segments.num_tokens - segments.question.size, start + read.size)
    attention = np.zeros(start, np.float32)
    error = np.zeros(start, np.float32)

    def look(index: int, given: torch.Tensor) -> None:
        layer = full.past.kv_layers[index]
        by_head = given[0].float().sum(1)[:, : start - layer.first]  # [heads, columns]
        attention[layer.first :] += by_head.sum(0).numpy(force=True)
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
    return {"attention": attention, "error": error}


def question_scores(
    model: PassageModel, segments: Segments, variants: Sequence[Variant | None]
) -> tuple[npt.NDArray[np.float32], float]:
    """Return the question's attention to each token behind moved passages, `[tokens]`, and the CPU seconds it took."""
    started, start = time.process_time(), segments.num_tokens - 1
    past = model.runs.past(segments.num_tokens)
    if segments.head.size:
        model.runs.feed(past, segments.head)
    model.blending.fill(past, planned(segments, NoRows(), variants), start)
    scores, half = np.zeros(start, np.float32), len(past.kv_layers) // 2

    def look(index: int, given: torch.Tensor) -> None:
        first = past.kv_layers[index].first
        if index >= half:
            scores[first:] += given[0].float().sum((0, 1))[: start - first].numpy(force=True)

    rows = np.arange(segments.spans[-1][1], start)
    model.blending.rows(past, segments.tokens, rows, look=look)
    return scores, time.process_time() - started
