"""Passages over a bare model: capture, blend, compare. No cache, no store, and nothing is declined."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from quire.engines.models.supported import checked_model
from quire.engines.models.working_cache import WorkingCache
from quire.engines.segments import Given
from quire.errors import TokensError
from quire.tensors.kinds import layer_kinds
from quire_passages import NoRows, PassagePlace, PassagePlan, Segments, Selector, Variant
from quire_passages.hf.beside import FullAnswer
from quire_passages.hf.blending import Blending
from quire_passages.hf.gate import relocation_of
from quire_passages.hf.relocation import Relocation
from quire_passages.hf.runs import Runs, contextual
from quire_passages.hf.weighing import Counting, masses_of
from quire_passages.selectors import Rows


@dataclass(frozen=True, slots=True, eq=False)
class Blended:
    """The result of a prompt with reused passages.

    logits  `[vocab]` of the next token, float32 on the host
    rows    positions of moved passages that were computed again
    moved   tokens of these passages
    past    the working cache of all tokens, to go on from: `model(next_ids, past_key_values=past)`
    """

    logits: torch.Tensor
    rows: Rows
    moved: int
    past: WorkingCache

    @property
    def share(self) -> float:
        """The rows that were computed again, of those of moved passages."""
        return self.rows.size / self.moved if self.moved else 0.0


class PassageModel:
    """A model of transformers with operations on the KV of passages, for measuring and checking.

        passage_model = PassageModel(model)
        held = [passage_model.capture(ids, before=segments.head) for ids in segments.passages]
        blended, whole = passage_model.blend(segments, held, Epic(16)), passage_model.full(segments)

    runs       plain forwards of the model
    relocation  the gate's result
    blending   working caches filled by plans
    positions  positions that the gate has to vouch for; None: as far as the model's config goes

    Raises `NotRelocatable` for a model whose keys cannot be moved.
    """

    def __init__(
        self,
        model: Any,
        *,
        positions: int | None = None,
    ) -> None:
        model = checked_model(model, "PassageModel")
        kinds = layer_kinds(model.config)
        self.runs = Runs(model, kinds)
        self.relocation: Relocation = relocation_of(model, kinds, positions)
        self.blending = Blending(model, kinds, self.relocation)

    def capture(self, ids: Given, before: Given = ()) -> Variant:
        """Return K and V of a passage computed behind a head, whose own are dropped."""
        read = Segments.of([before, ids, ids])
        return self.capture_alone([read.passages[0]], read.head)[0]

    def capture_alone(self, passages: Sequence[Given], head: Given = ()) -> list[Variant]:
        """Return isolated variants of passages, each computed behind the head alone."""
        read = Segments.of([head, *passages, [0]])
        return self.runs.isolated(read.head, read.passages)

    def capture_all(self, segments: Segments, *, count: Counting | None = None) -> list[Variant]:
        """Return variants of all passages of a prompt as they are there.

        count  measure their attention too, counted so; `CacheCraft` goes by `weighing.largest_early`
        """
        past = self.runs.past(segments.num_tokens)
        self.runs.feed(past, segments.tokens)
        found = None
        if count is not None and segments.passages:
            found = masses_of(self.blending.rows, past, segments.tokens, segments.spans, count)
        return contextual(past, segments, range(len(segments.passages)), found)

    def blend(
        self,
        segments: Segments,
        variants: Sequence[Variant | None],
        selector: Selector,
        *,
        reposition: bool = True,
        exact_first: bool = True,
    ) -> Blended:
        """Return what comes of a prompt with passages placed from variants, one for each; None: computed.

        reposition   False: keys are not rotated: a control
        exact_first  a variant that was captured behind this very text is placed as exact; False: it is
                     treated as all others
        """
        if len(variants) != len(segments.passages):
            raise TokensError(f"{len(variants)} variants for {len(segments.passages)} passages")
        self.blending.must_choose(selector)
        placements: list[PassagePlace] = []
        for (start, stop), ids, variant in zip(
            segments.spans, segments.passages, variants, strict=True
        ):
            if variant is not None and variant.ids != ids.tobytes():
                raise TokensError(
                    f"a variant of {variant.num_tokens} tokens is given for another passage of {ids.size}"
                )
            is_exact = (
                exact_first
                and variant is not None
                and variant.start == start
                and segments.text.startswith(variant.before)
            )
            placements.append(PassagePlace(start, stop, variant, is_exact=is_exact))
        plan = PassagePlan(segments, selector, 0, segments.head.size, tuple(placements))
        if not plan.placed:
            return self.full(segments)
        past = self.runs.past(segments.num_tokens)
        if segments.head.size:
            self.runs.feed(past, segments.head)
        rows, logits = self.blending.fill(past, plan, segments.num_tokens, rotate=reposition)
        assert logits is not None
        moved = sum(each.num_tokens for each in plan.moved)
        return Blended(logits.float().cpu(), rows, moved, past)

    def answer(self, segments: Segments, *, num_tokens: int = 32) -> FullAnswer:
        """Return a prompt in a full forward, and the model's own answer to it."""
        return FullAnswer(self.runs, self.blending, segments, num_tokens=num_tokens)

    def full(self, segments: Segments) -> Blended:
        """Return the result of a prompt in one plain forward."""
        past = self.runs.past(segments.num_tokens)
        logits = self.runs.feed(past, segments.tokens)
        return Blended(logits.float().cpu(), NoRows().rows([]), 0, past)
