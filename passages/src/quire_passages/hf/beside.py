"""Answers behind reused passages beside those of a full forward, token by token."""

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from quire.engines.models.working_cache import WorkingCache
from quire.engines.segments import Segments, Tokens
from quire_passages import PassagePlace, PassagePlan
from quire_passages.hf.blending import Blending
from quire_passages.hf.runs import Runs
from quire_passages.selectors import Selector
from quire_passages.variants import Variant
from quire_passages.verdict import PolicyOutcome

_ROWS_AT_ONCE = 16
"""Rows of an answer whose logits are held at once: memory is bounded by rows, not by the vocabulary."""


class FullAnswer:
    """A prompt in a full forward, and an answer that is read behind it.

    answer  ids that are read; where none are given, the model's own, `num_tokens` of them

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
        self.answer = _until(list(answer) or self._said(num_tokens), _ends(runs.model))

    def beside(self, selector: Selector, variants: Sequence[Variant | None]) -> PolicyOutcome:
        """Return the outcome of a policy: passages placed from variants, one for each; None: computed."""
        runs, segments = self._runs, self.segments
        plan = planned(segments, selector, variants)
        started = time.process_time()
        past = runs.past(segments.num_tokens + len(self.answer))
        if plan.exact_until:
            runs.feed(past, segments.tokens[: plan.exact_until])
        self._blending.fill(past, plan, self._start)
        seconds = time.process_time() - started
        agreed, kl = self._compared(past)
        depth = self._blending.limits(selector).depth
        placed = sum(each.stop - each.start for each in plan.placed)
        work = segments.num_tokens - placed + selector.work(plan.moved, depth)
        return PolicyOutcome(len(self.answer), agreed, kl, work / segments.num_tokens, seconds)

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


def _ends(model: Any) -> set[int]:
    """Return the ids that end an answer of a model."""
    given: Any = getattr(model.generation_config, "eos_token_id", None)
    return {*np.atleast_1d(given).tolist()}


def _until(answer: list[int], ends: set[int]) -> list[int]:
    """Return an answer up to the id that ends it."""
    last = next((at for at, token in enumerate(answer) if token in ends), len(answer))
    return answer[: last + 1]


def planned(
    segments: Segments, selector: Selector, variants: Sequence[Variant | None]
) -> PassagePlan:
    """Return a plan that places variants; those that were captured behind this very text are exact."""
    places = tuple(
        PassagePlace(
            start,
            stop,
            each,
            is_exact=each is not None
            and not each.rounded
            and each.start == start
            and segments.text.startswith(each.before),
        )
        for (start, stop), each in zip(segments.spans, variants, strict=True)
    )
    return PassagePlan(segments, selector, 0, segments.head.size, places)


def divergence(whole: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """Return KL(whole || logits) of distributions given by logits `[rows, vocab]`, in nats: `[rows]`."""
    expected = whole.double().log_softmax(-1)
    return (expected.exp() * (expected - logits.double().log_softmax(-1))).sum(-1)
