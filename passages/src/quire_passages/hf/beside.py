"""Answers behind reused passages beside those of a full forward, token by token."""

import time
from collections.abc import Sequence

import numpy as np
import torch

from quire.engines.models.working_cache import WorkingCache
from quire.engines.packed.model import eos_ids
from quire.engines.segments import Segments, Tokens
from quire_passages import PassagePlace, PassagePlan
from quire_passages.hf.blending import Blending
from quire_passages.hf.runs import Runs
from quire_passages.selectors import Rows, Selector
from quire_passages.variants import Variant, is_behind
from quire_passages.verdict import PolicyOutcome

_ROWS_AT_ONCE = 16
"""Rows of an answer whose logits are held at once: memory is bounded by rows, not by the vocabulary."""


class FullAnswer:
    """A prompt in a full forward, and an answer that is read behind it.

    answer   ids that are read; where none are given, the model's own, `num_tokens` of them
    seconds  CPU seconds of the prompt but its last token

    Of windowed layers the working cache keeps all columns, so that an answer can be read again.
    """

    def __init__(
        self,
        runs: Runs,
        blending: Blending,
        segments: Segments,
        answer: Sequence[int] = (),
        *,
        num_tokens: int = 32,
    ) -> None:
        self.segments = segments
        self._runs, self._blending = runs, blending
        self._start = segments.num_tokens - 1
        started = time.process_time()
        self.past = runs.past(segments.num_tokens + max(len(answer), num_tokens))
        if self._start:
            runs.feed(self.past, segments.tokens[: self._start])
        self.seconds = time.process_time() - started
        self.answer = _until(list(answer) or self._said(num_tokens), eos_ids(runs.model))

    def beside(
        self, selector: Selector, variants: Sequence[Variant | None], exact: Rows | None = None
    ) -> PolicyOutcome:
        """Return the outcome of a policy: passages placed from variants, one for each; None: computed.

        exact  rows of passages that get K and V of the full forward before the question is computed, which no policy could
        """
        runs, segments = self._runs, self.segments
        plan = planned(segments, selector, variants)
        started = time.process_time()
        past = runs.past(segments.num_tokens + len(self.answer))
        if plan.exact_until:
            runs.feed(past, segments.tokens[: plan.exact_until])
        self._blending.fill(past, plan, self._start)
        seconds = time.process_time() - started
        if exact is not None:
            self._copy(past, exact)
            asked = segments.question.size - 1
            if asked:  # it was computed over what stood there
                past.crop(-asked)
                runs.feed(
                    past, segments.tokens[self._start - asked : self._start], self._start - asked
                )
        agreed, kl = self._compared(past)
        depth = self._blending.limits(selector).depth
        placed = sum(each.stop - each.start for each in plan.placed)
        work = segments.num_tokens - placed + plan.asked + selector.work(plan.moved, depth)
        return PolicyOutcome(len(self.answer), agreed, kl, work / segments.num_tokens, seconds)

    def seconds_behind(self, cached: int) -> float:
        """Return the CPU seconds to the first token where so many exact columns are there."""
        self.past.crop(cached - self._start)
        started = time.process_time()
        self._runs.feed(self.past, self.segments.tokens[cached:], cached)
        seconds = time.process_time() - started
        self.past.crop(-1)
        return seconds

    def _copy(self, past: WorkingCache, rows: Rows) -> None:
        """Copy K and V of some rows from the full forward."""
        columns = torch.as_tensor(rows[rows < self._start])
        for index, layer in past.kv_layers.items():
            pairs = zip(
                *(each.row(0, 0, self._start) for each in (layer, self.past.kv_layers[index])),
                strict=True,
            )
            for out, exact in pairs:
                out[:, columns] = exact[:, columns]

    def _compared(self, past: WorkingCache) -> tuple[int, float]:
        """Return the tokens of the answer that agree, and the nats of all of them."""
        read = self._read()
        agreed, kl = 0, 0.0
        for at in range(0, read.size, _ROWS_AT_ONCE):
            piece = read[at : at + _ROWS_AT_ONCE]
            whole, found = (
                self._runs.logits(each, piece, self._start + at).float()
                for each in (self.past, past)
            )
            agreed += int((whole.argmax(-1) == found.argmax(-1)).sum())
            kl += float(divergence(whole, found).sum())
        self.past.crop(-read.size)
        return agreed, kl

    def _read(self) -> Tokens:
        """Return the ids behind which the tokens of the answer come next."""
        return np.array([self.segments.tokens[-1], *self.answer[:-1]], np.int32)

    def _said(self, num_tokens: int) -> list[int]:
        said = [int(self.segments.tokens[-1])]
        for at in range(num_tokens):
            ids = np.array(said[-1:], np.int32)
            said.append(int(self._runs.feed(self.past, ids, self._start + at).argmax()))
        self.past.crop(-num_tokens)
        return said[1:]


def _until(answer: list[int], ends: Sequence[int]) -> list[int]:
    """Return an answer up to the id that ends it."""
    last = next((at for at, token in enumerate(answer) if token in ends), len(answer))
    return answer[: last + 1]


def planned(
    segments: Segments, selector: Selector, variants: Sequence[Variant | None]
) -> PassagePlan:
    """Return a plan that places variants; those that were captured behind this very text are exact."""
    places = tuple(
        PassagePlace(*span, each, is_exact=each is not None and is_behind(each, segments, at))
        for at, (span, each) in enumerate(zip(segments.spans, variants, strict=True))
    )
    exact_until = segments.head.size
    if places and places[0].variant is None:
        exact_until = places[0].stop
    return PassagePlan(segments, selector, 0, exact_until, places)


def divergence(whole: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """Return KL(whole || logits) of distributions given by logits `[rows, vocab]`, in nats: `[rows]`."""
    expected = whole.double().log_softmax(-1)
    return (expected.exp() * (expected - logits.double().log_softmax(-1))).sum(-1)
