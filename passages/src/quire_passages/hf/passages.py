"""Passages of a `PrefixCache`: captured, kept, and placed in prompts that are given in segments."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, cast

import numpy as np
import torch

from quire.core import Scope
from quire.engines.companions import CacheCompanion, TenantHolder
from quire.engines.hf.inputs import Plan as HowToGenerate
from quire.engines.hf.model_calls import CallReport, Calls
from quire.engines.hf.request import Request
from quire.engines.hf.storage import KeptBlocks
from quire.engines.models.identity import Computed
from quire.engines.models.working_cache import WorkingCache
from quire.engines.segments import Given, Tokens
from quire.engines.thread_guard import ThreadGuard, guarded
from quire.errors import ConfigError, NotRelocatable
from quire.tensors.kinds import LayerKind
from quire.tiers.keys import TierKey
from quire.tiers.opening import open_tiers
from quire.tiers.purging import Purged
from quire_passages import (
    PassagePlan,
    Passages,
    PassagesReport,
    PassageStore,
    Reach,
    Segments,
    Selector,
    Variant,
    make_plan,
    report_of,
)
from quire_passages.hf.blending import Blending
from quire_passages.hf.capture import PassageKV, captured
from quire_passages.hf.gate import relocation_of
from quire_passages.hf.relocation import Relocation
from quire_passages.hf.remembered import GateMemory
from quire_passages.hf.runs import Runs, contextual
from quire_passages.hf.warm import WarmPassages
from quire_passages.hf.weighing import masses_of

_NONE = np.empty(0, np.int64)


class PassageHolder(TenantHolder):
    """The K and V of passages beside a prefix cache, and the model's relocation by its identity.

    runs      plain forwards of the model
    bind      what binds a scope to the model as it is now
    computed  what has a model that stays as a scope says compute something (`Identity.computed`)
    turn      of the cache or engine
    store     the variants
    settings  how they are kept and reused

    A prompt that a call gives in segments reuses what is exact first; blended K and V enter neither the
    prefix cache nor this store.
    """

    def __init__(
        self,
        runs: Runs,
        bind: Callable[[Scope | None], Scope],
        computed: Computed,
        guard: ThreadGuard,
        settings: Passages,
    ) -> None:
        self.settings = settings
        self.store = PassageStore(settings.capacity)
        self.runs = runs
        self._bind = bind
        self._computed = computed
        self._guard = guard
        self._warm = None
        if settings.warm is not None:
            file, shared = settings.warm_key, settings.share_isolated
            key = None if file is None else TierKey.from_file(file)
            (tier,) = open_tiers([settings.warm])
            self._warm = WarmPassages(tier, runs.model, shared=shared, key=key)
        self._gates = None if settings.gates is None else GateMemory(settings.gates)
        self._tried: dict[tuple[object, object], Blending | NotRelocatable] = {}

    @guarded
    def relocation(self, scope: Scope | None = None) -> Relocation:
        """Return the relocation gate's result for the model as it is now.

        The gate runs once, here or in the first call. Raises `NotRelocatable` for a model whose keys cannot be moved.
        """
        found = self.tried(self._bind(scope))
        if isinstance(found, NotRelocatable):
            raise found
        return found.relocation

    @guarded
    def capture(
        self, passages: Iterable[Given], head: Given = (), scope: Scope | None = None
    ) -> int:
        """Compute passages behind a head ahead of time, each alone, and keep them; how many are new and fit.

        Raises `NotRelocatable` for a model whose keys cannot be moved, `TokensError` for what are no ids.
        """
        segments = Segments.of([head, *passages, [0]])
        bound = self._bind(scope)
        found = self.tried(bound)
        if isinstance(found, NotRelocatable):
            raise found
        return self.capture_alone(segments, bound, found, None)

    def tried(self, bound: Scope) -> Blending | NotRelocatable:
        """Return who blends with the model as it is now, or why nobody can."""
        key = bound.model, bound.lora
        if key not in self._tried:
            runs, found = self.runs, self._relocation(bound)
            self._tried[key] = (
                found
                if isinstance(found, NotRelocatable)
                else Blending(runs.model, runs.kinds, found)
            )
        return self._tried[key]

    def plan(
        self,
        segments: Segments,
        bound: Scope,
        cached: int,
        blending: Blending | NotRelocatable,
        settings: Passages,
    ) -> PassagePlan:
        """Plan a prompt of which `cached` tokens are there, with what a warm tier has of its passages brought back."""
        lost: dict[bytes, str] = {}
        if isinstance(blending, NotRelocatable):
            limits = Reach(0, 0.0, str(blending))
        else:
            limits = blending.limits(settings.selector)
            lost = self._brought(segments, bound, cached)
        store = self.store
        plan = make_plan(segments, store, bound, cached, settings=settings, limits=limits)
        return plan.explained(lost)

    def capture_alone(
        self, segments: Segments, bound: Scope, blending: Blending, head: PassageKV | None
    ) -> int:
        """Compute the passages that the store lacks behind this head; how many fitted: none where the model changes.

        head  K and V of the head, where they are there
        """
        missing = self.missing(segments, bound, blending)
        if not missing:
            return 0
        found = self._computed(bound, lambda _: self.runs.isolated(segments.head, missing, head))
        return self.keep(bound, found or ())

    def missing(self, segments: Segments, bound: Scope, blending: Blending) -> list[Tokens]:
        """Return the passages of a prompt, each once, of which the store has no capture behind this head."""
        head = segments.head.tobytes()
        limit = blending.relocation.positions - segments.head.size
        lacking = {
            text: ids
            for text, ids in zip(segments.passage_texts, segments.passages, strict=True)
            if self.settings.min_tokens <= ids.size <= limit
            and all(each.before != head for each in self.store.variants(bound, text, head))
        }
        return list(lacking.values())

    def keep(self, bound: Scope, variants: Iterable[Variant]) -> int:
        """Store variants, isolated ones for all scopes where the settings say so; how many fitted."""
        new = list(variants)
        if self._warm is not None:
            self._warm.put(bound, new)
        return self._stored(bound, new)

    @property
    def warm(self) -> WarmPassages | None:
        """The warm tier, where there is one."""
        return self._warm

    def purge(self, scope: Scope, is_own: Callable[[Scope], bool], timeout_s: float) -> int:
        """Drop what was captured under some scopes, and overwrite it; return the captures."""
        gone = self.store.purge(is_own)
        for each in gone:
            cast("PassageKV", each).wipe()
        return len(gone)

    def barring(self, scope: Scope) -> AbstractContextManager[object]:
        """Have the warm tier take and give nothing of a tenant until the end of a block."""
        warm = self._warm
        return nullcontext() if warm is None else warm.tier.writes.barring(warm.tag(scope))

    def purge_tiers(self, scope: Scope, timeout_s: float) -> dict[str, Purged]:
        """Purge the warm tier, as "passages", within `barring`."""
        warm = self._warm
        return {} if warm is None else {"passages": warm.tier.purge(warm.tag(scope), timeout_s)}

    def close(self) -> None:
        """Close the warm tier, where there is one."""
        if self._warm is not None:
            self._warm.close()

    def _stored(self, bound: Scope, variants: Iterable[Variant]) -> int:
        shares = self.settings.share_isolated
        return sum(
            self.store.put(bound, each, shared=shares and each.kind == "isolated")
            for each in variants
        )

    def _relocation(self, bound: Scope) -> Relocation | NotRelocatable:
        runs = self.runs
        found = self._gates and self._gates.recall(bound, len(runs.kinds))
        if found is None:
            try:
                found = relocation_of(runs.model, runs.kinds)
            except NotRelocatable as refused:
                found = refused
            if self._gates is not None:
                self._gates.keep(bound, found)
        return found

    def _brought(self, segments: Segments, bound: Scope, cached: int) -> dict[bytes, str]:
        """Bring passages that the store lacks back from the warm tier; return why some of them cannot be."""
        if self._warm is None:
            return {}
        head, least = segments.head.tobytes(), 4 * self.settings.min_tokens
        passages = zip(segments.passage_texts, segments.spans, strict=True)
        lacking = dict.fromkeys(
            text
            for text, (_, stop) in passages
            if stop > cached and len(text) >= least and not self.store.variants(bound, text, head)
        )
        found, lost = self._warm.fetch(bound, list(lacking), head)
        self._stored(bound, found)
        return lost


class AskedSegments:
    """One call that was given segments: how its working cache is filled, and what is kept of it."""

    def __init__(self, passages: PassageHolder, segments: Segments, settings: Passages) -> None:
        self._passages = passages
        self._segments = segments
        self._settings = settings
        self._report: PassagesReport | None = None

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
        if plan.fallback is not None or isinstance(blending, NotRelocatable):
            self._report = report_of(plan, _NONE)
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
        self._report = report_of(plan, rows)

    def ended(
        self, calls: Calls, request: Request, past: WorkingCache, report: CallReport
    ) -> CallReport:
        """Keep what the call has computed of passages, and return its report with that on passages."""
        assert self._report is not None
        blending = self._passages.tried(request.scope)
        count = 0
        if not isinstance(blending, NotRelocatable) and request.has_stayed():
            count = self._captured(request, past, blending)
        return replace(report, passages=replace(self._report, captured=count))

    def _captured(self, request: Request, past: WorkingCache, blending: Blending) -> int:
        """Keep the passages of this prompt that the store lacks; how many fitted."""
        segments, passages = self._segments, self._passages
        has_row = past.ledger.num_rows == 1
        if self._settings.capture == "isolated":
            size = segments.head.size
            has_head = has_row and past.ledger.known >= size > 0
            head = captured(past, 0, size) if has_head else None
            return passages.capture_alone(segments, request.scope, blending, head)
        if self._settings.capture == "none" or not has_row:
            return 0
        new = [
            index
            for index, (start, stop) in enumerate(segments.spans)
            if stop <= min(past.ledger.known, blending.relocation.positions)
            and stop - start >= self._settings.min_tokens
            and not self._is_held(request.scope, index)
        ]
        if not new:
            return 0
        masses = None
        if self._settings.selector.weighs:
            spans = segments.spans[: new[-1] + 1]
            masses = masses_of(blending.rows, past, segments.tokens, spans)
        return passages.keep(request.scope, contextual(past, segments, new, masses))

    def _is_held(self, bound: Scope, index: int) -> bool:
        ids, start = self._segments.passage_texts[index], self._segments.spans[index][0]
        before = self._segments.text[: 4 * start]
        there = self._passages.store.variants(bound, ids, self._segments.head.tobytes())
        return any(each.before == before for each in there)


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
            if not isinstance(selector, Selector):
                raise ConfigError(f"selector={selector!r}; give a selector such as Epic(16)")
            settings = replace(settings, selector=selector)
        read = segments if isinstance(segments, Segments) else Segments.of(segments)
        return AskedSegments(self, read, settings)

    def clear(self) -> None:
        """Drop all captures."""
        self.store.clear()
