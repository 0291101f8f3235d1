"""The account of one call that was given passages."""

from dataclasses import dataclass
from typing import Literal

from quire_passages.planning import PassagePlan
from quire_passages.selectors import Rows
from quire_passages.variants import Kind
from quire_passages.verdict import PolicyEstimate

Exactness = Literal["exact", "approximate"]


@dataclass(frozen=True, slots=True)
class PassageReport:
    """The result for one passage.

    tokens      of the passage
    variant     the name of the variant that was placed, and its kind; None: none was
    shift       positions by which its keys were rotated
    recomputed  rows of it that were computed again
    is_exact    whether its K and V are those of this very text
    reason      why no variant was placed
    """

    tokens: int
    variant: str | None
    kind: Kind | None
    shift: int
    recomputed: int
    is_exact: bool
    reason: str | None


@dataclass(frozen=True, slots=True)
class PassagesReport:
    """The account of a call with passages.

    prompt tokens == exact_tokens + moved_tokens + recomputed_rows + computed_tokens
    work_rows == computed_tokens + recomputed_rows + checked_rows * share of layers up to the check layer

    exactness        "approximate" where K and V of another text took part; else the answer is the model's own
    exact_tokens     from the prefix cache, or from variants that were captured behind this very text
    moved_tokens     from variants that were captured behind another text, not computed again
    recomputed_rows  the rest of these
    computed_tokens  all others: what the model had to compute as ever
    checked_rows     of moved_tokens, those that were computed up to the check layer, to choose among
    work_rows        all that was computed, as rows of a whole forward
    details          one for each passage, in their order
    fallback         why passages were not reused at all; None: they were
    selector         which rows were computed again
    estimate         of the chosen policy, or of the best one where passages are declined; None: not measured
    captured         passages that this call has stored; an engine computes and stores them after its answer
    """

    exactness: Exactness
    exact_tokens: int
    moved_tokens: int
    recomputed_rows: int
    computed_tokens: int
    details: tuple[PassageReport, ...]
    fallback: str | None
    selector: str
    checked_rows: int = 0
    work_rows: float = 0.0
    estimate: PolicyEstimate | None = None
    captured: int = 0


def report_of(
    plan: PassagePlan, recomputed: Rows, estimate: PolicyEstimate | None = None
) -> PassagesReport:
    """Return the account of a plan that was carried out, with these rows of moved passages computed again."""
    whole = plan.segments.num_tokens
    if plan.fallback is not None:
        return PassagesReport(
            exactness="exact",
            exact_tokens=plan.cached,
            moved_tokens=0,
            recomputed_rows=0,
            computed_tokens=whole - plan.cached,
            details=tuple(
                PassageReport(each.stop - each.start, None, None, 0, 0, True, plan.fallback)
                for each in plan.placements
            ),
            fallback=plan.fallback,
            selector=plan.selector.name,
            work_rows=whole - plan.cached,
            estimate=estimate,
        )
    exact = plan.cached + sum(
        each.stop - max(each.start, plan.cached) for each in plan.placed if each.is_exact
    )
    moved = sum(each.num_tokens for each in plan.moved) - recomputed.size
    computed = whole - exact - moved - recomputed.size
    checked = moved if plan.selector.checks else 0
    return PassagesReport(
        exactness="exact" if plan.is_exact else "approximate",
        exact_tokens=exact,
        moved_tokens=moved,
        recomputed_rows=recomputed.size,
        computed_tokens=computed,
        details=tuple(
            PassageReport(
                tokens=each.stop - each.start,
                variant=None if each.variant is None else each.variant.name,
                kind=None if each.variant is None else each.variant.kind,
                shift=each.shift,
                recomputed=int(((recomputed >= each.start) & (recomputed < each.stop)).sum()),
                is_exact=each.is_exact,
                reason=each.reason,
            )
            for each in plan.placements
        ),
        fallback=None,
        selector=plan.selector.name,
        checked_rows=checked,
        work_rows=round(computed + plan.asked + recomputed.size + checked * plan.depth, 1),
        estimate=estimate,
    )
