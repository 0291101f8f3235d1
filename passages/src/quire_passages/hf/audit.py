"""The audit of one prompt: its answer by the full forward, then behind each policy, in pieces of work."""

from collections.abc import Callable, Sequence
from typing import TypeVar, cast

from quire.core import Scope
from quire.engines.models.identity import Computed
from quire.engines.segments import Segments
from quire_passages.earned import FORWARD_ROWS
from quire_passages.hf.beside import FullAnswer
from quire_passages.hf.blending import Blending
from quire_passages.hf.capture import PassageKV
from quire_passages.hf.runs import Runs, contextual
from quire_passages.selectors import Selector
from quire_passages.variants import Variant
from quire_passages.verdict import PolicyOutcome

MOST_ANSWER = 32
"""Tokens of an answer that are compared."""

LEAST_THERE = 0.5
"""Of a prompt's passages behind the first, the share that has to be captured among others: the first prompts have none."""

CAPTURED_ALONE = 2.0
"""More than there can be: a prompt is captured, and not compared."""

_T = TypeVar("_T")

Find = Callable[[int, Selector], Variant | None]
"""Returns the variant of a passage, by its index, that a policy would place now; None: there is none.

Not one that was captured behind this very text, which other prompts have not: of the first passage, no other.
"""


class Audit:
    """A comparison of policies on one prompt. Each `advance` does one piece: a forward of a prompt, or a passage.

    answer  ids that were answered; where none are given, the model's own
    given   what stands for the operator's prompts, where it is one of them
    least   share of the passages behind the first that the store has to have; with fewer it ends without outcomes

    Another passage that is in no store is captured for it, but the first, which is computed. Where the model changes
    meanwhile, it ends without outcomes.
    """

    def __init__(
        self,
        bound: Scope,
        segments: Segments,
        answer: Sequence[int],
        policies: Sequence[Selector],
        given: str = "",
        *,
        least: float = 0.0,
    ) -> None:
        self.bound, self.segments, self.given = bound, segments, given
        self.outcomes: dict[str, PolicyOutcome] = {}
        self._least = least
        self.lacks = False
        self._answer = list(answer[:MOST_ANSWER])
        self._left = list(policies)
        self._full: FullAnswer | None = None
        self._captured: dict[bytes, Variant] = {}
        self.has_ended = False

    def advance(self, runs: Runs, blending: Blending, computed: Computed, find: Find) -> float:
        """Do the next piece, of the model that the scope is bound to; return its rows."""
        segments = self.segments

        def done(piece: Callable[[], _T]) -> _T | None:
            found = computed(self.bound, lambda _: piece())
            self.has_ended |= found is None
            return found

        if self._full is None:
            self._full = done(lambda: FullAnswer(runs, blending, segments, self._answer))
            return float(segments.num_tokens + FORWARD_ROWS)
        policy, full, texts = self._left[0], self._full, segments.passage_texts
        held = [find(at, policy) or self._captured.get(ids) for at, ids in enumerate(texts)]
        if not self.outcomes and not self._captured:
            self.lacks = held[1:].count(None) > (1 - self._least) * len(held[1:])
        if self.lacks:
            self.has_ended = True
            return 0.0
        if None in held[1:]:
            ids = segments.passages[held.index(None, 1)]
            for each in done(lambda: runs.isolated(segments.head, [ids])) or ():
                self._captured[each.ids] = each
            return float(segments.head.size + ids.size + FORWARD_ROWS)
        self._left.pop(0)
        outcome = done(lambda: full.beside(policy, held))
        if outcome is not None:
            self.outcomes[policy.name] = outcome
        self.has_ended |= not self._left
        return (0.0 if outcome is None else outcome.work * segments.num_tokens) + FORWARD_ROWS

    @property
    def captures(self) -> list[Variant]:
        """The passages that were captured for it."""
        return list(self._captured.values())

    def copies(self, which: Sequence[int]) -> list[Variant]:
        """Return some passages as the full forward has them."""
        return [] if self._full is None else contextual(self._full.past, self.segments, which)

    def wipe(self) -> None:
        """Overwrite the K and V of its prompt: its tenant is purged."""
        self.has_ended = True
        if self._full is not None:
            for layer in self._full.past.kv_layers.values():
                for each in layer.row(0, layer.first, layer.length):
                    each.zero_()
        for each in self.captures:
            cast("PassageKV", each.kv).wipe()
