"""The check layer: the layer at which K and V tell best which rows of a moved passage are wrong."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from quire.engines.models.supported import num_embeddings
from quire_passages import KVDeviation, NoRows, PassagePlace, PassagePlan, Segments, Selector
from quire_passages.hf.blending import Blending
from quire_passages.hf.capture import PassageKV, captured, grow, place
from quire_passages.hf.relocation import Relocation
from quire_passages.hf.runs import Runs

LEAST_AGREEMENT, MOST_KL = 0.98, 0.01
"""When answers are repaired well enough: next tokens as in the full forward, and nats between the distributions."""

_NUM_PASSAGES, _PASSAGE_TOKENS, _MOST_TOKENS = 8, 64, 1024
_READ_TOKENS, _MOST_ORDERS = 512, 4
"""Passages are brought in another order until so many tokens were read behind them, or so often."""
_SHARE = 0.15
_MOST_LEFT = 0.1
"""Of the nats that moving alone costs, the share that repair may leave."""
_ASKING, _NOTHING = 8, 0.01
"""One token of so many asks most what stood before; and what of probability is not worth repair where it does."""
_DEEPEST = 0.75
"""Layers before the deepest check layer: behind three quarters of them a fifth of the work is saved."""

Deviations = npt.NDArray[np.float64]
Passage = npt.NDArray[np.int64]


def check_layer(runs: Runs, found: Relocation, sample: Sequence[Sequence[int]] | None) -> int:
    """Return the first layer at which recomputing 15 % of rows repairs a moved text.

    Only the first three quarters of the layers are candidates.
    A text is repaired if reading on behind it gives the same as behind the same text in a full forward. That means two
    things. The distributions differ by 0.01 nats at most, and by a tenth of the cost of moving alone: that cost depends
    on how often a text asks for earlier tokens, the share does not. And the next tokens are 98 % as probable as those of
    the full forward: where two are nearly as probable as each other, either may be chosen. A deeper check layer is
    assumed to repair more, so the search halves the range of layers.

    Where nothing is to be repaired, it is the first layer: at the eighth of the tokens that moving alone changes most,
    the next ones are 99 % as probable. Where no layer repairs the text, depth does not pay. Then it is the layer with
    the largest product of two shares: that of the rows furthest off at it which are also furthest off over all layers,
    and that of the layers behind it.

    found   what the gate has found so far; its own check layer is not read
    sample  passages of real text, of which as many are taken as stand in 1,024 tokens; None: random tokens
    """
    num_layers = found.num_layers
    if num_layers < 2:
        return 1
    passages = _passages(runs, found.positions, sample)
    if found.drops_rows is None and len(passages) >= 4:
        reading = GateReading(_texts(runs, found, passages))
        if not reading.asks:
            return 1
        deepest = min(max(int(num_layers * _DEEPEST), 1), num_layers - 1)
        if reading.is_repaired(deepest):
            return bisect_left(range(deepest), True, lo=1, key=reading.is_repaired)
    return _worth_most(runs, found, passages)


class PassageText(Protocol):
    """Moved passages, and what is read behind them; `whole`: its logits `[tokens, vocab]` in a full forward."""

    whole: torch.Tensor

    def read(self, selector: Selector) -> torch.Tensor:
        """Return the logits `[tokens, vocab]` of what is read behind rows that a selector chooses."""
        ...


class GateReading:
    """Forwards behind moved passages, in some texts, against full forwards.

    asks  whether something is to be repaired where passages are moved alone
    """

    def __init__(self, texts: Sequence[PassageText]) -> None:
        self._texts = texts
        far, lost = self._behind(NoRows())
        asking = torch.argsort(far, descending=True)[: max(far.numel() // _ASKING, 1)]
        self.asks = bool(lost[asking].mean() > _NOTHING)
        self._most_left = min(_MOST_LEFT * float(far.mean()), MOST_KL)

    def is_repaired(self, layer: int) -> bool:
        """Whether rows that are chosen at a layer have what is read behind go on as behind the whole text."""
        far, lost = self._behind(KVDeviation(_SHARE, layer))
        return bool(far.mean() <= self._most_left and lost.mean() <= 1 - LEAST_AGREEMENT)

    def _behind(self, selector: Selector) -> tuple[torch.Tensor, torch.Tensor]:
        """Return of each token that is read its nats from the full forward, and how much less probable the next one is."""
        whole = torch.cat([text.whole for text in self._texts])
        found = torch.cat([text.read(selector) for text in self._texts])
        likely = whole.double().softmax(-1)
        said = likely.gather(-1, found.argmax(-1, keepdim=True))[:, 0]
        return divergence(whole, found), likely.amax(-1) - said


def _texts(runs: Runs, found: Relocation, passages: Sequence[Passage]) -> list["_MovedText"]:
    """Return texts of passages, in as many orders as it takes to read enough."""
    blending = Blending(runs.model, runs.kinds, replace(found, check_layer=1))
    source, order, num_read = np.random.default_rng(2), np.arange(len(passages)), 0
    texts: list[_MovedText] = []
    while len(texts) < _MOST_ORDERS and num_read < _READ_TOKENS:
        texts.append(_MovedText(runs, blending, [passages[at] for at in order.tolist()]))
        num_read += texts[-1].num_read
        order = source.permutation(len(passages))
    return texts


class _MovedText:
    """A head, passages captured behind it alone and moved, and passages that are read behind these.

    num_read  tokens that are read
    whole     their logits `[tokens, vocab]` in a full forward
    """

    def __init__(self, runs: Runs, blending: Blending, passages: Sequence[Passage]) -> None:
        self._runs, self._blending = runs, blending
        half = (len(passages) - 2) // 2
        head, *moved = passages[:-half]
        self._read = np.concatenate(passages[-half:])
        self.num_read = self._read.size
        self._segments = Segments.of([head, *moved, self._read])
        variants = runs.isolated(head, moved)
        self._places = tuple(
            PassagePlace(start, stop, variant, is_exact=start == len(head))
            for (start, stop), variant in zip(self._segments.spans, variants, strict=True)
        )
        self._start = self._segments.num_tokens - self.num_read
        past = runs.past(self._segments.num_tokens)
        runs.feed(past, self._segments.tokens[: self._start])
        self.whole = runs.logits(past, self._read, self._start)

    def read(self, selector: Selector) -> torch.Tensor:
        """Return the logits `[tokens, vocab]` of what is read behind rows that a selector chooses."""
        runs, segments = self._runs, self._segments
        plan = PassagePlan(segments, selector, 0, segments.head.size, self._places)
        past = runs.past(segments.num_tokens)
        runs.feed(past, segments.head)
        self._blending.fill(past, plan, self._start)
        return runs.logits(past, self._read, self._start)


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


def _between(exact: PassageKV, moved: PassageKV) -> Deviations:
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
