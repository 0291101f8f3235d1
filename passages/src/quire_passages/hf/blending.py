"""Blending: a working cache filled by a plan: K and V placed, then chosen rows computed over them."""

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch

from quire.engines.models.working_cache import WorkingCache
from quire.errors import ConfigError, InvariantError, NotRelocatable
from quire.tensors.kinds import LayerKind
from quire_passages import KVDeviation, PassagePlace, PassagePlan, Reach, Selector
from quire_passages.hf.capture import PassageKV, grow, place
from quire_passages.hf.relocation import Relocation
from quire_passages.hf.rows import Choose, Positions, RowForward
from quire_passages.selectors import Rows, Scores

_NONE = np.empty(0, np.int64)

_MOST_ASKED = 64
"""The last tokens of a question, whose attention counts."""

REASON = "K and V of passages that were captured behind another text, or were computed over such"


class Blending:
    """Fills working caches of one model."""

    def __init__(self, model: Any, kinds: Sequence[LayerKind], relocation: Relocation) -> None:
        self.relocation = relocation
        self.rows = RowForward(model, kinds)

    def limits(self, selector: Selector) -> Reach:
        """Return what planning has to know of the model. Raises `ConfigError` for a check layer it has not."""
        found = self.relocation
        if selector.asks:
            return Reach(found.positions, 0.0, found.shows)
        if not selector.checks:
            return Reach(found.positions, 0.0)
        return Reach(
            found.positions, self._check_layer(selector) / found.num_layers, found.drops_rows
        )

    def fill(
        self, past: WorkingCache, plan: PassagePlan, num_columns: int, *, rotate: bool = True
    ) -> tuple[Rows, torch.Tensor | None]:
        """Bring `past`, which holds `plan.exact_until` exact columns, to `num_columns` of the plan's prompt.

        rotate  False: keys are placed as they were captured, which is wrong anywhere else: a control

        Returns the rows of moved passages that were computed again, and the logits `[vocab]` of the last
        column; None where nothing had to be computed. The new columns enter the ledger as unknown: what
        they hold is not a function of the tokens before them, and is never kept as a prefix.
        """
        self._place(past, plan, num_columns, rotate=rotate)
        rows = self._first_rows(past, plan, num_columns)
        if not rows.size:
            return rows, None
        kept: list[Rows] = []
        check, ends = self._check(plan, kept), self.relocation.drops_rows is None
        logits = self.rows(past, plan.segments.tokens, rows, check, ends=ends)
        return moved_rows(plan, kept[0] if kept else rows), logits

    def begin(self, past: WorkingCache, plan: PassagePlan, num_columns: int) -> Rows:
        """Place K and V as `fill` does, and return the rows to compute over them, by whoever asks.

        Where the selector has a check layer, they are computed up to that one, which says what is left of them.
        """
        self._place(past, plan, num_columns, rotate=True)
        rows, check = self._first_rows(past, plan, num_columns), self._check(plan, [])
        if check is None:
            return rows
        return self.rows.chosen(past, plan.segments.tokens, rows, check)

    def _place(
        self, past: WorkingCache, plan: PassagePlan, num_columns: int, *, rotate: bool
    ) -> None:
        if past.get_seq_length() != plan.exact_until:
            raise InvariantError(
                f"a working cache of {past.get_seq_length()} columns, where the plan begins at {plan.exact_until}"
            )
        if any(each.variant is None or each.variant.kv is None for each in plan.placed):
            raise InvariantError(
                "a plan places a variant that has gone; leave it out with `without`"
            )
        self._grow(past, plan, num_columns - plan.exact_until)
        for each in plan.placed:
            shift = each.shift if rotate else 0
            place(past, _kv(each), each.start, shift, self.relocation.rotations)

    def _first_rows(self, past: WorkingCache, plan: PassagePlan, num_columns: int) -> Rows:
        """Return the rows of the first columns of a plan that are computed, up to a check layer at least."""
        chosen = plan.selector.rows(plan.moved)
        if plan.selector.asks and plan.moved:
            chosen = plan.selector.kept(chosen, self._asked(past, plan)[chosen])
        rows = plan.rows(chosen)
        return rows[rows < num_columns]

    def _asked(self, past: WorkingCache, plan: PassagePlan) -> Scores:
        """Return the question's attention to each token of a prompt, `[tokens]`, over K and V as they are placed.

        It computes the rows that no variant stands for.
        """
        tokens, num_columns = plan.segments.tokens, past.get_seq_length()
        missing = tokens.size - num_columns
        self._grow(past, plan, missing)
        rows = plan.rows(_NONE)
        asked = min(plan.segments.question.size, _MOST_ASKED)
        scores, half = np.zeros(tokens.size, np.float32), len(past.kv_layers) // 2

        def look(index: int, given: torch.Tensor) -> None:
            if index >= half:
                scores[past.kv_layers[index].first :] += (
                    given[0].float().sum((0, 1)).numpy(force=True)
                )

        if rows.size > asked:
            self.rows(past, tokens, rows[:-asked])
        self.rows(past, tokens, rows[-asked:], look=look)
        if missing:
            past.crop(-missing)
        return scores

    def _grow(self, past: WorkingCache, plan: PassagePlan, num_columns: int) -> None:
        """Append so many columns, which stay unknown to the ledger."""
        if num_columns and plan.placed:
            grow(past, _kv(plan.placed[0]), num_columns)
        past.ledger.append_unknown(num_columns, REASON)

    def _check(self, plan: PassagePlan, kept: list[Rows]) -> tuple[int, Choose] | None:
        """Return the check layer and who chooses there: of moved rows the selector, and all others; noted in `kept`."""
        if not (plan.selector.checks and plan.moved):
            return None

        def choose(rows: Positions, deviation: npt.NDArray[np.float32]) -> Positions:
            is_moved = np.isin(rows, _spanned(plan))
            chosen = plan.selector.kept(rows[is_moved], deviation[is_moved])
            kept.append(np.union1d(rows[~is_moved], chosen))
            return kept[0]

        return self._check_layer(plan.selector), choose

    def _check_layer(self, selector: Selector) -> int:
        found, asked = (
            self.relocation,
            selector.check if isinstance(selector, KVDeviation) else None,
        )
        if asked is not None and asked >= found.num_layers:
            raise ConfigError(
                f"check={asked}; the model has layers 0 to {found.num_layers - 1}, and one is left behind it"
            )
        return found.check_layer if asked is None else asked

    def must_choose(self, selector: Selector) -> None:
        """Raise `NotRelocatable` where a selector chooses rows in a way that the model does not allow."""
        if (refusal := self.limits(selector).refusal) is not None:
            raise NotRelocatable(refusal)


def _spanned(plan: PassagePlan) -> Rows:
    """Return all positions of moved passages."""
    return np.concatenate([np.arange(each.num_tokens) + each.start for each in plan.moved])


def _kv(placed: PassagePlace) -> PassageKV:
    return cast("PassageKV", cast("Any", placed.variant).kv)


def moved_rows(plan: PassagePlan, rows: Rows) -> Rows:
    """Return those of `rows` that moved passages have."""
    return rows[np.isin(rows, _spanned(plan))] if plan.moved else rows[:0]
