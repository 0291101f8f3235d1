"""Passages of a `PrefixCache`: prompts that are given in segments, and what is kept of them."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np
import torch

from quire.engines.companions import CacheCompanion
from quire.engines.hf.inputs import Plan as HowToGenerate
from quire.engines.hf.model_calls import CallReport, Calls
from quire.engines.hf.request import Request
from quire.engines.hf.storage import KeptBlocks
from quire.engines.models.working_cache import WorkingCache
from quire.engines.thread_guard import ThreadGuard
from quire.errors import ConfigError, NotRelocatable
from quire.tensors.kinds import LayerKind
from quire_passages import (
    Passages,
    PassagesReport,
    Segments,
    Selector,
    Variant,
    report_of,
)
from quire_passages.hf.blending import Blending
from quire_passages.hf.capture import captured
from quire_passages.hf.holder import PassageHolder
from quire_passages.hf.runs import Runs, contextual
from quire_passages.hf.weighing import masses_of
from quire_passages.verdict import PolicyEstimate

_NONE = np.empty(0, np.int64)


class AskedSegments:
    """One call that was given segments: how its working cache is filled, and what is kept of it."""

    def __init__(self, passages: PassageHolder, segments: Segments, settings: Passages) -> None:
        self._passages = passages
        self._segments = segments
        self._settings = settings
        self._report: PassagesReport | None = None
        self._estimate: PolicyEstimate | None = None

    def prompt(
        self, input_ids: object, attention_mask: object, media: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ids and mask `[1, tokens]`. Raises `ConfigError` for what is given beside segments."""
        given = {"input_ids": input_ids, "attention_mask": attention_mask, "media": media}
        for name, value in given.items():
            if value is not None:
                raise ConfigError(
                    f"{name} is given beside segments, which are the whole prompt of one row; leave it out"
                )
        ids = torch.as_tensor(self._segments.tokens.astype(np.int64))[None]
        return ids, torch.ones_like(ids)

    def fill(self, calls: Calls, request: Request, past: WorkingCache, how: HowToGenerate) -> None:
        """Bring a working cache from its cached columns to all but the prompt's last one, by a plan."""
        blending = self._passages.tried(request.scope)
        if how.assisted:
            blending = NotRelocatable(
                "assisted decoding feeds whole prompts, and would not see what is placed"
            )
        plan = self._passages.plan(
            self._segments, request.scope, past.get_seq_length(), blending, self._settings
        )
        self._estimate = self._passages.estimate(request.scope)
        if plan.fallback is not None or isinstance(blending, NotRelocatable):
            self._report = report_of(plan, _NONE, self._estimate)
            return
        variants = [cast("Variant", each.variant) for each in plan.placed]
        with self._passages.store.pin(variants):
            calls.prefill(request.prompts, request.media, past, plan.exact_until, how.chunk)
            plan = plan.without([each for each in variants if each.kv is None])
            rows = _NONE
            if plan.fallback is None:
                rows, _ = blending.fill(past, plan, self._segments.num_tokens - 1)
        for each in variants:
            self._passages.store.use(each)
        self._report = report_of(plan, rows, self._estimate)

    def ended(
        self, request: Request, past: WorkingCache, report: CallReport, output: Any
    ) -> CallReport:
        """Keep what the call has computed of passages, and return its report with that on passages."""
        assert self._report is not None
        bound, passages = request.scope, self._passages
        blending = passages.tried(bound)
        count = 0
        if not isinstance(blending, NotRelocatable) and request.has_stayed():
            if self._settings.capturing == "contextual" or passages.captures(bound, blending):
                count = self._captured(request, past, blending)
            ids: torch.Tensor = getattr(output, "sequences", output)
            answer = [int(each) for each in ids[0, self._segments.num_tokens :]]
            passages.earned.earn(self._segments.num_tokens + len(answer))
            if passages.earned.is_left and passages.is_due(bound, self._segments, blending):
                audit = passages.audit(bound, self._segments, answer)
                while not audit.has_ended:
                    passages.earned.spend(passages.advance(audit))
        return replace(report, passages=replace(self._report, captured=count))

    def _captured(self, request: Request, past: WorkingCache, blending: Blending) -> int:
        """Keep the passages of this prompt that the store lacks; how many fitted."""
        segments, passages = self._segments, self._passages
        has_row = past.ledger.num_rows == 1
        if self._settings.capturing == "isolated":
            size = segments.head.size
            has_head = has_row and past.ledger.known >= size > 0
            head = captured(past, 0, size) if has_head else None
            return passages.capture_alone(segments, request.scope, blending, head)
        if self._settings.capturing == "none" or not has_row:
            return 0
        new = passages.adding(segments, request.scope, past.ledger.known, blending)
        if not new:
            return 0
        masses = None
        if self._settings.chosen.weighs:
            spans = segments.spans[: new[-1] + 1]
            masses = masses_of(blending.rows, past, segments.tokens, spans)
        return passages.keep(request.scope, contextual(past, segments, new, masses))


class CachePassages(PassageHolder, CacheCompanion):
    """The passages of a `PrefixCache`."""

    def __init__(
        self, kept: KeptBlocks, kinds: Sequence[LayerKind], guard: ThreadGuard, settings: Passages
    ) -> None:
        identity = kept.identity
        runs = Runs(kept.model, kinds)
        super().__init__(runs, identity.scope, identity.computed, guard, settings)

    def asked(self, segments: Any, selector: Any) -> AskedSegments:
        """Return what fills the working cache of a call with segments.

        Raises `ConfigError` for what is no selector, `TokensError` for segments that are none.
        """
        settings = self.settings
        if selector is not None:
            if settings.target is not None:
                raise ConfigError(
                    "selector is given with one call, and this cache reuses passages as its verdict says; make it with "
                    "Passages(target=None) to choose rows unmeasured, or Passages(selector=...) to have one measured"
                )
            if not isinstance(selector, Selector):
                raise ConfigError(f"selector={selector!r}; give a selector such as Epic(16)")
            settings = replace(settings, selector=selector)
        read = segments if isinstance(segments, Segments) else Segments.of(segments)
        return AskedSegments(self, read, settings)

    def clear(self) -> None:
        """Drop all captures."""
        self.store.clear()
