"""Which layer tells best what of a moved passage is wrong, and is not too deep."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

import numpy as np
import numpy.typing as npt
import torch

from quire.chunks import ChunkPlan, KVDeviation, PassagePlace, Segments
from quire.engines.hf.chunks.blending import Blending
from quire.engines.hf.chunks.capture import ChunkKV, captured, grow, place
from quire.engines.hf.chunks.relocation import Relocation
from quire.engines.hf.chunks.runs import Runs
from quire.engines.hf.models import num_embeddings

LEAST_AGREEMENT, MOST_KL = 0.98, 0.01
"""When rows are repaired well enough: next tokens as in the full forward, and nats between the distributions."""

_NUM_PASSAGES, _PASSAGE_TOKENS, _MOST_TOKENS = 8, 64, 1024
_SHARE = 0.15
_DEEPEST = 0.75
"""Layers before the deepest check layer: behind three quarters of them a fifth of the work is saved."""

Deviations = npt.NDArray[np.float64]
Passage = npt.NDArray[np.int64]


def check_layer(runs: Runs, found: Relocation, sample: Sequence[Sequence[int]] | None) -> int:
    """Return the first layer at which 15 % of rows repair a moved text, of those in the first three quarters.

    Repaired is a text where what is read behind it goes on as behind the same text in a full forward: 98 %
    of the next tokens are the same ones, and distributions differ by 0.01 nats. A deeper check layer is taken
    to repair more, so layers between are left out by halves. Where no layer repairs it, depth does not
    pay: then it is the one at which the share of rows furthest off that are those over all layers, times the share of
    layers behind it, is largest.

    found   what the gate has found so far; its own check layer is not read
    sample  passages of real text, of which as many are taken as stand in 1,024 tokens; None: random tokens
    """
    num_layers = found.num_layers
    if num_layers < 2:
        return 1
    passages = _passages(runs, found.positions, sample)
    if found.drops_rows is None and len(passages) >= 4:
        text = _MovedText(runs, found, passages)
        deepest = min(max(int(num_layers * _DEEPEST), 1), num_layers - 1)
        if text.is_repaired(deepest):
            return bisect_left(range(deepest), True, lo=1, key=text.is_repaired)
    return _worth_most(runs, found, passages)


class _MovedText:
    """A head, passages captured behind it alone and moved, and passages that are read behind these."""

    def __init__(self, runs: Runs, found: Relocation, passages: Sequence[Passage]) -> None:
        self._runs = runs
        self._blending = Blending(runs.model, runs.kinds, replace(found, check_layer=1))
        num_read = (len(passages) - 2) // 2
        head, *moved = passages[:-num_read]
        self._read = np.concatenate(passages[-num_read:])
        self._segments = Segments.of([head, *moved, self._read])
        variants = runs.isolated(head, moved)
        self._places = tuple(
            PassagePlace(start, stop, variant, is_exact=start == len(head))
            for (start, stop), variant in zip(self._segments.spans, variants, strict=True)
        )
        self._start = self._segments.tokens.size - self._read.size
        past = runs.past(self._segments.tokens.size)
        runs.feed(past, self._segments.tokens[: self._start])
        self._expected = runs.logits(past, self._read, self._start)

    def is_repaired(self, layer: int) -> bool:
        """Whether rows that are chosen at a layer have what is read behind go on as behind the whole text."""
        runs, segments, head = self._runs, self._segments, self._segments.head.size
        plan = ChunkPlan(segments, KVDeviation(_SHARE, layer), 0, head, self._places)
        past = runs.past(segments.tokens.size)
        runs.feed(past, segments.head)
        self._blending.fill(past, plan, self._start)
        got = runs.logits(past, self._read, self._start)
        same = (got.argmax(-1) == self._expected.argmax(-1)).double().mean()
        far = divergence(self._expected, got).mean()
        return bool(same >= LEAST_AGREEMENT and far <= MOST_KL)


def divergence(whole: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """Return KL(whole || logits) of distributions given by logits `[questions, vocab]`, in nats: `[questions]`."""
    expected = whole.double().log_softmax(-1)
    return (expected.exp() * (expected - logits.double().log_softmax(-1))).sum(-1)


def _worth_most(runs: Runs, found: Relocation, passages: Sequence[Passage]) -> int:
    """Return the layer at which most rows are told for the layers that are saved."""
    far = _deviations(runs, found, passages)
    count = max(round(_SHARE * far.shape[1]), 1)
    wanted = np.argsort(-far.sum(0))[:count]
    told = [
        np.isin(np.argsort(-far[layer])[:count], wanted).mean() * (found.num_layers - layer)
        for layer in range(1, found.num_layers)
    ]
    return 1 + int(np.argmax(told))


def _deviations(runs: Runs, found: Relocation, passages: Sequence[Passage]) -> Deviations:
    """Return how far K and V of each row of all passages but the first are off: `[layers, rows]`.

    Squared distances, over the mean square of a row in that layer.
    """
    text = np.concatenate(passages)
    whole = runs.past(len(text))
    runs.feed(whole, text)
    parts: list[Deviations] = []
    start = len(passages[0])
    for ids in passages[1:]:
        stop = start + len(ids)
        exact = captured(whole, start, stop)
        assert exact is not None
        alone = runs.kv(ids, 0)
        moved = runs.past(stop)
        grow(moved, alone, stop)
        place(moved, alone, start, start, found.rotations)
        there = captured(moved, start, stop)
        assert there is not None
        parts.append(_between(exact, there))
        start = stop
    return np.concatenate(parts, axis=1)


def _between(exact: ChunkKV, moved: ChunkKV) -> Deviations:
    layers = [
        _relative(one[0], two[0]) + _relative(one[1], two[1])
        for one, two in zip(exact.layers, moved.layers, strict=True)
    ]
    return torch.stack(layers).double().numpy(force=True)


def _relative(exact: torch.Tensor, moved: torch.Tensor) -> torch.Tensor:
    size = exact.float().square().sum((0, 2))
    far = (exact.float() - moved.float()).square().sum((0, 2))
    return far / size.mean().clamp_min(1e-12)


def _passages(runs: Runs, limit: int, sample: Sequence[Sequence[int]] | None) -> list[Passage]:
    given = [np.asarray(ids, np.int64) for ids in sample or () if len(ids)]
    fitting = sum(total <= min(limit, _MOST_TOKENS) for total in accumulate(map(len, given)))
    if fitting > 1:
        return given[:fitting]
    vocab, size = num_embeddings(runs.model), min(_PASSAGE_TOKENS, limit // _NUM_PASSAGES)
    return list(np.random.default_rng(1).integers(1, vocab, (_NUM_PASSAGES, max(size, 1))))
