"""The passages of a cache or an engine: variants, the gate, verdicts, and the tier below."""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, cast

import msgspec
import numpy as np

from quire.core import Scope
from quire.engines.companions import TenantHolder
from quire.engines.models.identity import Computed
from quire.engines.segments import Given, Tokens
from quire.engines.thread_guard import ThreadGuard, guarded
from quire.errors import ConfigError, NotRelocatable
from quire.tiers.purging import Purged
from quire_passages import (
    PassagePlan,
    Passages,
    PassageStore,
    Reach,
    Segments,
    Selector,
    Variant,
    make_plan,
)
from quire_passages.earned import EarnedRows
from quire_passages.hf.audit import LEAST_THERE, MOST_ANSWER, Audit
from quire_passages.hf.blending import Blending
from quire_passages.hf.capture import PassageKV
from quire_passages.hf.relocation import Relocation
from quire_passages.hf.remembered import GateMemory, relocation_by
from quire_passages.hf.runs import Runs
from quire_passages.hf.verdict_memory import VerdictMemory
from quire_passages.hf.warm import WarmPassages, opened_warm
from quire_passages.variants import in_prompt, is_behind
from quire_passages.verdict import PolicyEstimate, Verdict, Verdicts, candidates

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
        self.store = PassageStore(settings.capacity, settings.variants)
        self.runs = runs
        self._bind = bind
        self._computed = computed
        self._guard = guard
        self.earned = EarnedRows(settings.share)
        self._warm = None if settings.warm is None else opened_warm(settings, runs.model)
        self._gates = None if settings.gates is None else GateMemory(settings.gates)
        self._tried: dict[tuple[object, object], Blending | NotRelocatable] = {}
        kept, placed = None, (settings.capturing, settings.variants, settings.share_isolated)
        if settings.verdicts is not None:
            kept = VerdictMemory(settings.verdicts, placed)
        self._verdicts = None
        if settings.target:
            self._verdicts = Verdicts(
                settings.target, settings.audit, kept, worth=settings.most_work
            )

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
            runs, found = self.runs, relocation_by(self._gates, self.runs, bound)
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
        elif (verdict := self.ruling(bound, blending)) and verdict.chosen is None:
            limits = Reach(0, 0.0, verdict.reason)
        else:
            selector = settings.chosen if verdict is None else cast("Selector", verdict.chosen)
            settings = replace(settings, selector=selector, worth=settings.most_work)
            limits = blending.limits(selector)
            lost = self._brought(segments, bound, cached)
        store = self.store
        plan = make_plan(segments, store, bound, cached, settings=settings, limits=limits)
        return plan.explained(lost)

    def verdict(self, bound: Scope, blending: Blending, given: str = "") -> Verdict | None:
        """Return the verdict of a scope's tenant; None where passages are reused unmeasured.

        given  what stands for an operator's prompts: then the verdict on these
        """
        if self._verdicts is None:
            return None
        policies = partial(self._policies, blending.relocation)
        if given:
            return self._verdicts.of_operator(bound, policies, given)
        return self._verdicts.of(bound, policies)

    def ruling(self, bound: Scope, blending: Blending) -> Verdict | None:
        """Return the verdict that a scope is served by: its own, or an operator's while that is open."""
        policies = partial(self._policies, blending.relocation)
        return self._verdicts.ruling(bound, policies) if self._verdicts else None

    def estimate(self, bound: Scope) -> PolicyEstimate | None:
        """Return the estimate of the policy that a scope is served by, or the best of those declined."""
        blending = self.tried(bound)
        if isinstance(blending, NotRelocatable):
            return None
        verdict = self.ruling(bound, blending)
        return None if verdict is None else verdict.chosen_estimate

    def captures(self, bound: Scope, blending: Blending | NotRelocatable) -> bool:
        """Whether passages of a scope are captured: where they can be moved, and a policy is chosen."""
        if isinstance(blending, NotRelocatable):
            return False
        verdict = self.ruling(bound, blending)
        return verdict is None or verdict.chosen is not None

    def is_due(self, bound: Scope, segments: Segments, blending: Blending | NotRelocatable) -> bool:
        """Whether an answered prompt is to be compared with the full forward, for its tenant's verdict."""
        if isinstance(blending, NotRelocatable) or self.verdict(bound, blending) is None:
            return False
        sizes = [ids.size for ids in segments.passages]
        fits = segments.num_tokens + MOST_ANSWER <= blending.relocation.positions
        is_like_others = sum(size >= self.settings.min_tokens for size in sizes) > 1
        return fits and is_like_others and cast("Verdicts", self._verdicts).is_due(bound)

    def audit(
        self, bound: Scope, segments: Segments, answer: Sequence[int], given: str = ""
    ) -> Audit:
        """Return the comparison of a prompt that is due, to be advanced; `given` as of `verdict`."""
        verdict = self.verdict(bound, cast("Blending", self.tried(bound)), given)
        least = LEAST_THERE if self.settings.capturing == "contextual" else 0.0
        wanted = cast("Verdict", verdict).wanted
        return Audit(bound, segments, answer, wanted, given, least=least)

    def next_given(self, waiting: deque[Segments]) -> Audit | None:
        """Return the comparison of the next of an operator's prompts; None once these decide, and then none wait.

        As many as earlier processes have compared are left out.
        """
        bound, every = self._bind(None), self.settings.prompts
        blending, name = self.tried(bound), self.settings.prompts_name
        if not isinstance(blending, NotRelocatable):
            verdict = self.verdict(bound, blending, name)
            while waiting and verdict is not None and not verdict.is_decided:
                segments, number = waiting.popleft(), len(every) - len(waiting)
                fits = segments.num_tokens + MOST_ANSWER <= blending.relocation.positions
                if fits and number > verdict.num_prompts:
                    return self.audit(bound, segments, (), name)
        waiting.clear()
        return None

    def advance(self, audit: Audit) -> float:
        """Do the next piece of an audit; return its rows. At its end, its figures count."""
        bound, blending = audit.bound, self.tried(audit.bound)
        if isinstance(blending, NotRelocatable):
            audit.has_ended = True
            return 0.0
        segments, store = audit.segments, self.store
        head, texts = segments.head.tobytes(), segments.passage_texts

        def find(at: int, selector: Selector) -> Variant | None:
            there = [each for each in store.variants(bound, texts[at], head) if each.kv is not None]
            exact = [each for each in there if is_behind(each, segments, at)]
            if not at:
                return exact[-1] if exact else None
            others = [each for each in there if each not in exact]
            return selector.preferred(others, texts[:at]) if others else None

        try:
            rows = audit.advance(self.runs, blending, self._computed, find)
        except Exception:  # noqa: BLE001 - nobody asked for it: a model that fails here costs no answer
            audit.outcomes.clear()
            audit.has_ended = True
            return 0.0
        if audit.has_ended and (audit.outcomes or audit.lacks):
            if audit.outcomes:
                cast("Verdicts", self._verdicts).add(bound, audit.outcomes, audit.given)
            if self.settings.capturing == "isolated":
                self.keep(bound, audit.captures)
            if self.settings.capturing == "contextual":
                exact = segments.num_tokens - 1
                self.keep(bound, audit.copies(self.adding(segments, bound, exact, blending)))
        return rows

    @guarded
    def verdict_on(self, scope: Scope | None = None) -> Verdict:
        """Return the verdict of a scope's tenant.

        Raises `NotRelocatable`, and `ConfigError` where `target=None` leaves nothing to judge.
        """
        bound = self._bind(scope)
        blending = self.tried(bound)
        if isinstance(blending, NotRelocatable):
            raise blending
        verdict = self.verdict(bound, blending)
        if verdict is None:
            raise ConfigError("target=None reuses passages unmeasured; give a target, such as 0.98")
        return verdict

    @guarded
    def judge(
        self,
        prompts: Iterable[Segments | Iterable[Given]],
        scope: Scope | None = None,
        progress: Callable[[list[PolicyEstimate]], object] | None = None,
    ) -> list[PolicyEstimate]:
        """Compare policies on prompts in segments now, each behind the model's own answer; return the estimates.

        progress  is shown the estimates after each prompt

        They count for the verdict of the scope's tenant. Raises as `verdict_on`.
        """
        bound, verdict = self._bind(scope), self.verdict_on(scope)
        for each in prompts:
            segments = each if isinstance(each, Segments) else Segments.of(each)
            audit = self.audit(bound, segments, ())
            while not audit.has_ended:
                self.advance(audit)
            if progress is not None:
                progress(verdict.estimates())
        return verdict.estimates()

    @property
    def verdict_counts(self) -> dict[str, int]:
        """Numbers of tenants by kind of verdict, and of prompts that were compared."""
        return self._verdicts.counts() if self._verdicts else {}

    @property
    def figures(self) -> dict[str, Any]:
        """The verdicts of all tenants in figures, empty where passages are reused unmeasured."""
        if not self._verdicts:
            return {}
        told = self._verdicts.estimate
        return {**self.verdict_counts, "estimate": told and msgspec.structs.asdict(told)}

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

    def adding(
        self, segments: Segments, bound: Scope, num_exact: int, blending: Blending
    ) -> list[int]:
        """Return which passages of a prompt, whose first tokens are exact, add to those that the store has."""
        limit = min(num_exact, blending.relocation.positions)
        return [
            at
            for at, (start, stop) in enumerate(segments.spans)
            if stop <= limit
            and stop - start >= self.settings.min_tokens
            and self.store.lacks(bound, in_prompt(segments, at))
        ]

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
        if self._verdicts:
            self._verdicts.purge(scope, is_own)
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

    def _policies(self, found: Relocation) -> list[Selector]:
        given = self.settings.selector
        if given is not None:
            return [given]
        able = {"drops_rows": found.drops_rows is None, "shows": found.shows is None}
        return candidates(found.num_layers, **able, worth=self.settings.most_work)

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
