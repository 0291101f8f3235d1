"""The K and V of passages that a cache or an engine keeps: variants, the tier below, and the gate's results."""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import cast

from quire.core import Scope
from quire.engines.companions import TenantHolder
from quire.engines.models.identity import Computed
from quire.engines.segments import Given, Tokens
from quire.engines.thread_guard import ThreadGuard, guarded
from quire.errors import NotRelocatable
from quire.tiers.purging import Purged
from quire_passages import Passages, PassageStore, Segments, Variant
from quire_passages.hf.blending import Blending
from quire_passages.hf.capture import PassageKV
from quire_passages.hf.relocation import Relocation
from quire_passages.hf.remembered import GateMemory, relocation_by
from quire_passages.hf.runs import Runs
from quire_passages.hf.warm import WarmPassages, opened_warm
from quire_passages.variants import in_prompt


class PassageKeeper(TenantHolder):
    """The K and V of passages beside a prefix cache, and the model's relocation by its identity.

    runs      plain forwards of the model
    bind      what binds a scope to the model as it is now
    computed  what has a model that stays as a scope says compute something (`Identity.computed`)
    turn      of the cache or engine
    store     the variants
    settings  how they are kept and reused
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
        self._warm = None if settings.warm is None else opened_warm(settings, runs.model)
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
            runs, found = self.runs, relocation_by(self._gates, self.runs, bound)
            self._tried[key] = (
                found
                if isinstance(found, NotRelocatable)
                else Blending(runs.model, runs.kinds, found)
            )
        return self._tried[key]

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
