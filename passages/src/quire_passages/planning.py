"""Plans of prompts with passages: exact parts, moved parts, and whether moving pays."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import msgspec
import numpy as np

from quire.engines.segments import Segments
from quire.scope import Scope
from quire_passages.earned import FORWARD_ROWS
from quire_passages.selectors import Moved, Rows, Selector
from quire_passages.settings import Passages
from quire_passages.store import PassageStore
from quire_passages.variants import Variant, is_behind

MOVE_ROWS = 0.02
"""Fetching and rotating K and V of a token, against computing it."""

_NOT_STORED = "not in the store"
_NOTHING_LEFT = "all variants have gone since they were planned"
_NOTHING_STORED = "no passage behind the exact prefix is in the store"


class PassagePlace(msgspec.Struct, frozen=True, eq=False):
    """The plan for one passage, of tokens `start` to `stop` of the prompt.

    variant   the variant whose K and V are placed; None: it is computed, or it was cached as a prefix
    is_exact  whether its K and V are those of this very text
    reason    why no variant is placed
    """

    start: int
    stop: int
    variant: Variant | None = None
    is_exact: bool = False
    reason: str | None = None

    @property
    def shift(self) -> int:
        """Positions between where the variant was captured and where it is placed."""
        return 0 if self.variant is None else self.start - self.variant.start


@dataclass(frozen=True, slots=True)
class Reach:
    """Facts of a model that passages depend on.

    positions  no token may stand at this position or behind; the relocation gate vouches for those before
    depth      the share of layers before the check layer
    refusal    why K of this model cannot be moved; None: it can
    """

    positions: int
    depth: float
    refusal: str | None = None


@dataclass(frozen=True)
class PassagePlan:
    """The source of each part of a prompt's K and V: cached, computed or placed.

    cached       tokens that the exact prefix cache has
    exact_until  tokens that are computed in plain forwards, where they are not cached: the head, and the
                 first passage behind what is exact
    placements   one for each passage
    depth        the share of layers up to the check layer, 0 where the selector has none
    fallback     why the whole prompt is computed instead; None: passages are reused
    """

    segments: Segments
    selector: Selector
    cached: int
    exact_until: int
    placements: tuple[PassagePlace, ...]
    fallback: str | None = None
    depth: float = 0.0

    @cached_property
    def moved(self) -> list[Moved]:
        """The passages that are placed, and are not exact."""
        return [
            Moved(each.variant, each.start, self.segments.passage_texts[:index])
            for index, each in enumerate(self.placements)
            if each.variant is not None and not each.is_exact
        ]

    @property
    def placed(self) -> list[PassagePlace]:
        """The passages that are placed, exact ones too."""
        return [each for each in self.placements if each.variant is not None]

    @property
    def is_exact(self) -> bool:
        """Whether all K and V are those of this very text."""
        return self.fallback is not None or not self.moved

    @property
    def asked(self) -> int:
        """The rows of the question that are computed once more."""
        return self.segments.question.size if self.selector.asks and self.moved else 0

    def rows(self, chosen: Rows) -> Rows:
        """Return all rows behind `exact_until` to compute: `chosen`, and all that no variant stands for."""
        wanted = np.ones(self.segments.num_tokens, bool)
        wanted[: self.exact_until] = False
        for each in self.placed:
            wanted[each.start : each.stop] = False
        wanted[chosen] = True
        return np.flatnonzero(wanted)

    def without(self, gone: Sequence[Variant]) -> "PassagePlan":
        """Return the plan with passages computed whose variants have gone; without any left, the whole prompt is."""
        placements = tuple(
            msgspec.structs.replace(
                each,
                variant=None,
                is_exact=False,
                reason="its variant has gone since it was planned",
            )
            if each.variant in gone
            else each
            for each in self.placements
        )
        is_left = any(each.variant is not None for each in placements)
        fallback = self.fallback if is_left else self.fallback or _NOTHING_LEFT
        return replace(self, placements=placements, fallback=fallback)

    def explained(self, lost: Mapping[bytes, str]) -> "PassagePlan":
        """Return the plan with why a tier could not give passages (ids as bytes) that it had."""
        if not lost:
            return self
        texts = self.segments.passage_texts
        placements = tuple(
            msgspec.structs.replace(each, reason=lost[text])
            if each.reason == _NOT_STORED and text in lost
            else each
            for text, each in zip(texts, self.placements, strict=True)
        )
        fallback = self.fallback
        if fallback == _NOTHING_STORED:
            fallback = ": ".join([fallback, *dict.fromkeys(lost.values())])
        return replace(self, placements=placements, fallback=fallback)


def make_plan(
    segments: Segments,
    store: PassageStore,
    scope: Scope,
    cached: int,
    *,
    settings: Passages,
    limits: Reach,
) -> PassagePlan:
    """Plan a prompt of which an exact prefix of `cached` tokens is there.

    An exact prefix wins over variants. The first passage behind it is exact as well: a variant that was
    captured behind this very text, or computed. Passages behind that are placed from variants, which the
    selector prefers among.
    """
    selector = settings.chosen
    exact_until = max(cached, segments.head.size)
    placements: list[PassagePlace] = []
    is_first, passages = True, segments.passage_texts
    find = store.finder(scope, segments.head.tobytes())
    for index, ((start, stop), ids) in enumerate(zip(segments.spans, passages, strict=True)):
        if stop <= cached:
            placements.append(
                PassagePlace(start, stop, None, is_exact=True, reason="cached prefix")
            )
            continue
        there = find(ids) if stop - start >= settings.min_tokens else ()
        found = [each for each in there if each.kv is not None]
        exact = [each for each in found if is_behind(each, segments, index)]
        if exact:
            placements.append(PassagePlace(start, stop, exact[-1], is_exact=True))
            is_first = False
            continue
        if is_first:
            is_first, exact_until = False, stop
            reason = "the first passage behind what is exact is computed exactly"
            placements.append(PassagePlace(start, stop, None, is_exact=True, reason=reason))
        elif found:
            chosen = selector.preferred(found, passages[:index])
            placements.append(PassagePlace(start, stop, chosen))
        else:
            reason = (
                f"shorter than {settings.min_tokens} tokens"
                if stop - start < settings.min_tokens
                else _NOT_STORED
            )
            placements.append(PassagePlace(start, stop, None, reason=reason))
    depth = limits.depth if selector.checks else 0.0
    plan = PassagePlan(segments, selector, cached, exact_until, tuple(placements), depth=depth)
    fallback = _refusal(plan, limits) or _unworthy(plan, settings, limits)
    return replace(plan, fallback=fallback)


def _refusal(plan: PassagePlan, limits: Reach) -> str | None:
    num_tokens = plan.segments.num_tokens
    if limits.refusal is not None:
        return limits.refusal
    if num_tokens > limits.positions:
        return (
            f"{num_tokens} tokens; the relocation of this model's keys was checked for positions below "
            f"{limits.positions}"
        )
    if not plan.placed:
        return _NOTHING_STORED
    return None


def _unworthy(plan: PassagePlan, settings: Passages, limits: Reach) -> str | None:
    """Return why plain prefill is to be preferred: what passages would take, of what it takes."""
    tokens = plan.segments.num_tokens
    placed = sum(each.stop - max(each.start, plan.cached) for each in plan.placed)
    whole = tokens - plan.cached
    rest = whole - placed
    work = rest + plan.asked + plan.selector.work(plan.moved, limits.depth)
    work += MOVE_ROWS * placed + FORWARD_ROWS
    if work <= settings.most_work * whole:
        return None
    return (
        f"with passages {work:.0f} rows' worth of work, of {whole} that a plain prefill takes: above the share "
        f"of {settings.most_work:g}"
    )
