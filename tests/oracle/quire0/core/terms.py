"""Terms: how long, how firmly and how far the blocks of one request are kept."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Items

import msgspec

from quire.errors import ConfigError

MAX_PRIORITY = 100

ENDLESS = 2**31


class TokenRange(msgspec.Struct, frozen=True):
    """Terms for tokens [start, stop) of a request that differ from the rest.

    `stop`      None: to the end, generated tokens included
    `priority`  None: the request's
    `retain_s`  seconds; None: the request's
    `store`     False: not to be found again. Since the KV of a token depends on all before it,
                nothing from the block of token `start` on is published, wherever the range
                stops; TokenRange(0, store=False) keeps nothing of a request

    Blocks that lie in two ranges are kept on the better terms, and everything before a range
    is kept at least as well as the range: a parent is never evicted before its child.
    """

    start: int
    stop: int | None = None
    priority: int | None = None
    retain_s: float | None = None
    store: bool = True


class Term(msgspec.Struct, frozen=True, gc=False):
    """From block `start` on: this priority, this retention in seconds."""

    start: int
    priority: int
    keep_for: float


class Terms(msgspec.Struct, frozen=True):
    """The terms of a request whose ranges differ, by block.

    `steps`  rising starts, from 0; priority and retention never rise from one to the next
    `limit`  blocks from this one on are not published
    """

    steps: tuple[Term, ...]
    limit: int = ENDLESS

    def at(self, start: int) -> Term:
        """Return the term of the blocks from `start` on."""
        return next(term for term in reversed(self.steps) if term.start <= start)

    def next_step(self, start: int) -> int:
        """Return the first block after `start` at which the terms change or publishing ends."""
        return min([self.limit, *(term.start for term in self.steps if term.start > start)])


def check_priority(priority: object) -> int:
    """Return a priority; raise `ConfigError` if it is none."""
    if type(priority) is not int or abs(priority) > MAX_PRIORITY:
        msg = f"priority must be an integer from {-MAX_PRIORITY} to {MAX_PRIORITY}"
        raise ConfigError(f"{msg}, got {priority!r}")
    return priority


def terms_of(
    ranges: Items[TokenRange],
    block_size: int,
    default: Term,
    check_duration: Callable[[str, float | None], float],
) -> Terms:
    """Return the terms of a request with ranges; raise `ConfigError`."""
    _check_ranges(ranges)
    limit = ENDLESS
    pieces: list[Term] = []
    ends: list[int] = []
    for each in ranges:
        priority = default.priority if each.priority is None else check_priority(each.priority)
        keep_for = default.keep_for
        if each.retain_s is not None:
            keep_for = check_duration("retain_s", each.retain_s)
        pieces.append(Term(each.start // block_size, priority, keep_for))
        ends.append(ENDLESS if each.stop is None else -(-each.stop // block_size))
        if not each.store:
            limit = min(limit, each.start // block_size)
    starts = sorted(
        {0, *(piece.start for piece in pieces), *(end for end in ends if end < ENDLESS)}
    )
    steps: list[Term] = []
    best = Term(ENDLESS, -MAX_PRIORITY, 0.0)
    for start, stop in reversed(list(zip(starts, [*starts[1:], ENDLESS], strict=True))):
        here = [p for p, end in zip(pieces, ends, strict=True) if p.start < stop and end > start]
        for term in here or [default]:
            best = Term(start, max(best.priority, term.priority), max(best.keep_for, term.keep_for))
        steps.append(best)
    steps.reverse()
    return Terms(tuple(steps), limit)


def nothing_more(terms: Terms | None, default: Term) -> Terms:
    """Return the same terms, but that nothing more is published."""
    return Terms(terms.steps if terms is not None else (default,), limit=0)


def _check_ranges(ranges: object) -> None:
    if not isinstance(ranges, tuple | list):
        raise ConfigError(f"ranges must be a list or tuple of quire.TokenRange, got {ranges!r}")
    end = 0
    for each in ranges:  # pyright: ignore[reportUnknownVariableType]
        if not isinstance(each, TokenRange) or type(each.store) is not bool:
            raise ConfigError(f"ranges are made of quire.TokenRange, got {each!r}")
        stop = ENDLESS if each.stop is None else each.stop
        if type(each.start) is not int or type(stop) is not int or not end <= each.start < stop:
            msg = (
                f"token range [{each.start!r}, {each.stop!r}) must not be empty and must start at "
                f"or after {end}: ranges are in order and do not overlap"
            )
            raise ConfigError(msg)
        end = stop
