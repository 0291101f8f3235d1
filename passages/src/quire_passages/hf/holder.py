"""The passages of a cache or an engine: what is kept, and what verdicts let be served."""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

import msgspec

from quire.core import Scope
from quire.engines.models.identity import Computed
from quire.engines.segments import Given
from quire.engines.thread_guard import ThreadGuard, guarded
from quire.errors import ConfigError, NotRelocatable
from quire_passages import PassagePlan, Passages, Reach, Segments, Selector, Variant, make_plan
from quire_passages.earned import EarnedRows
from quire_passages.hf.audit import CAPTURED_ALONE, LEAST_THERE, MOST_ANSWER, Audit
from quire_passages.hf.blending import Blending
from quire_passages.hf.keeping import PassageKeeper
from quire_passages.hf.relocation import Relocation
from quire_passages.hf.runs import Runs
from quire_passages.hf.verdict_memory import VerdictMemory
from quire_passages.variants import is_behind
from quire_passages.verdict import PolicyEstimate, Verdict, Verdicts, candidates


class PassageHolder(PassageKeeper):
    """The kept passages, plans of prompts over them, and verdicts on what may be served.

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
        super().__init__(runs, bind, computed, guard, settings)
        self.earned = EarnedRows(settings.share)
        kept, placed = None, (settings.capturing, settings.variants, settings.share_isolated)
        if settings.verdicts is not None:
            kept = VerdictMemory(settings.verdicts, placed)
        self._verdicts = None
        if settings.target:
            self._verdicts = Verdicts(
                settings.target, settings.audit, kept, worth=settings.most_work
            )

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
        self,
        bound: Scope,
        segments: Segments,
        answer: Sequence[int],
        given: str = "",
        least: float = LEAST_THERE,
    ) -> Audit:
        """Return the comparison of a prompt that is due, to be advanced; `given` as of `verdict`, `least` of `Audit`."""
        verdict = self.verdict(bound, cast("Blending", self.tried(bound)), given)
        least = least if self.settings.capturing == "contextual" else 0.0
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
        *,
        history: int = 0,
    ) -> list[PolicyEstimate]:
        """Compare policies on prompts in segments now, each behind the model's own answer; return the estimates.

        progress  is shown the estimates after each prompt
        history   so many prompts, the first ones, are traffic: their passages are captured, and nothing is compared

        They count for the verdict of the scope's tenant. Raises as `verdict_on`.
        """
        bound, verdict = self._bind(scope), self.verdict_on(scope)
        for number, each in enumerate(prompts):
            segments = each if isinstance(each, Segments) else Segments.of(each)
            audit = self.audit(bound, segments, (), least=CAPTURED_ALONE if number < history else 0)
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

    def purge(self, scope: Scope, is_own: Callable[[Scope], bool], timeout_s: float) -> int:
        """Drop what was captured under some scopes, and overwrite it; return the captures."""
        if self._verdicts:
            self._verdicts.purge(scope, is_own)
        return super().purge(scope, is_own, timeout_s)

    def _policies(self, found: Relocation) -> list[Selector]:
        given = self.settings.selector
        if given is not None:
            return [given]
        able = {"drops_rows": found.drops_rows is None, "shows": found.shows is None}
        return candidates(found.num_layers, **able, worth=self.settings.most_work)
