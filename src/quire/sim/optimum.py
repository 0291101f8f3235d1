"""What no policy exceeds: Belady's rule, with and without bypass, its stack distances and its rows beside replayed policies.

The optimum may leave out blocks that a request has just used. A pool cannot, as a request holds its blocks while it
runs: what it can reach is the optimum without bypass.

Its distances stay apart from those of LRU: LRU orders blocks by their last use, which a count of
inversions sees; the optimum by their next, and what it keeps depends on what else was offered.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np

from quire.sim.replay import HitTally, Observer, ReplayResult, check_capacity
from quire.sim.reuse import Reuses, Steps, reuses
from quire.sim.trace.rows import Trace

OPTIMUM, REACHABLE = "optimum", "reachable"

GONE = -1
"""The next use of a hole: nothing is kept there."""

COMPACT_AT = 256
"""Pieces of a stack before its holes are collected for the first time."""


def optimum_results(
    trace: Trace,
    capacities: Sequence[int],
    bound: str = OPTIMUM,
    *,
    observers: Sequence[Sequence[Observer]] = (),
    count_from: int = 0,
) -> list[ReplayResult]:
    """Return the hits of a bound, one of `BOUNDS`, at each capacity, in blocks, as a replay of it would.

    A miss counts as evicted where an earlier request had the block. The trace is read once, and
    once more for the `observers` of each capacity, as in a replay.
    """
    for capacity in capacities:
        check_capacity(capacity)
    begun = time.process_time()
    read = reuses(trace, trace.block_size)
    steps = BOUNDS[bound](read)
    columns = [
        column[count_from:].tolist()
        for column in (read.prompt_tokens, read.prompt_blocks, read.seen_blocks)
    ]
    reading = time.process_time() - begun
    results: list[ReplayResult] = []
    for number, capacity in enumerate(capacities):
        begun = time.process_time()
        hits = steps.found_by(capacity, read.num_requests).tolist()
        tally = HitTally(read.block_size, capacity)
        for row in zip(*columns, hits[count_from:], strict=True):
            tally.add(*row)
        for request, found in zip(trace, hits, strict=True) if observers else ():
            for observe in observers[number]:
                observe(request, min(found * read.block_size, request.prompt_tokens))
        seconds = reading / len(capacities) + time.process_time() - begun
        results.append(tally.result(bound, None, seconds))
    return results


def optimum_steps(reuses: Reuses) -> Steps:
    """Return the stack distances of all reuses under the optimum: Belady's rule with bypass.

    A cache of C blocks keeps, of what it held and what the request just used, the C blocks
    that are used again soonest (L. A. Belady, *A study of replacement algorithms for a
    virtual-storage computer*, 1966, doi:10.1147/sj.52.0078); a block may be left out at
    once. A parent is used again no later than its child, so the kept set is a tree.

    The stack holds, at level i, the one block that a cache of i has and a cache of i - 1 has
    not. What a request used goes down the levels as a heap: each level keeps the smallest next use
    of its own and those carried, and the rest is carried on. A block that is used now leaves a
    hole, which takes one of those carried. Levels with one next use are one piece.
    """
    stack = _NextUses()
    for now, pieces in enumerate(_next_uses(reuses)):
        if pieces:
            stack.use(now, pieces)
    stack.collect(reuses.num_requests)
    return stack.steps()


def reachable_steps(reuses: Reuses) -> Steps:
    """Return the stack distances of all reuses under Belady's rule without bypass: the most that a pool can find.

    A request holds all blocks of its prompt while it runs, so what is kept beside them is chosen from the room that they
    leave; a cache smaller than a prompt has its first blocks. This is a stack algorithm as well: the prompt's blocks are the
    uppermost levels, and those that they push away go down as in `optimum_steps`.
    """
    stack = _NextUses()
    for now, pieces in enumerate(_next_uses(reuses)):
        rest = int(reuses.prompt_blocks[now]) - sum(count for _, count in pieces)
        stack.hold(now, [*pieces, [GONE, rest]] if rest else pieces)
    stack.collect(reuses.num_requests)
    return stack.steps()


def _next_uses(reuses: Reuses) -> list[list[list[int]]]:
    """Return of each request the blocks that are used again: [next use, count], soonest first."""
    pieces: list[list[list[int]]] = [[] for _ in range(reuses.num_requests)]
    rows = zip(
        reuses.earlier.tolist(), reuses.later.tolist(), reuses.num_blocks.tolist(), strict=True
    )
    for user, use, count in rows:
        pieces[user].append([use, count])
    return pieces


BOUNDS: dict[str, Callable[[Reuses], Steps]] = {
    OPTIMUM: optimum_steps,
    REACHABLE: reachable_steps,
}
"""Stack distances of what no policy exceeds, by the names that stand in place of a policy's."""


class _NextUses:
    """The stack of the optimum: pieces of (next use, levels), from level 1 down."""

    def __init__(self) -> None:
        self._uses: list[int] = []
        self._sizes: list[int] = []
        self._found: list[tuple[int, int, int]] = []
        self._compact_at = COMPACT_AT

    def hold(self, now: int, chain: list[list[int]]) -> None:
        """Request `now` holds blocks in the uppermost levels: [next use, count] from the root on; others go down."""
        uses, sizes, found = self._uses, self._sizes, self._found
        room = sum(count for _, count in chain)
        level = at = 0
        moved: dict[int, int] = {}
        while at < len(uses) and level < room:
            use, size = uses[at], min(sizes[at], room - level)
            if use > now:
                moved[use] = moved.get(use, 0) + size
            elif use != GONE:
                found.append((level, size, use))
            level += size
            if size < sizes[at]:
                sizes[at] -= size
                break
            at += 1
        del uses[:at], sizes[:at]
        above = [use for use, _ in chain], [count for _, count in chain]
        self._sink(now, [[use, moved[use]] for use in sorted(moved)], above, room)

    def use(self, now: int, carried: list[list[int]]) -> None:
        """Request `now` used blocks: [next use, count], soonest first. What was due is a hole.

        A hole is counted as a hit when it is filled or collected; until then its levels stay.
        """
        self._sink(now, carried, ([], []), 0)

    def _sink(
        self, now: int, carried: list[list[int]], above: tuple[list[int], list[int]], level: int
    ) -> None:
        """Let blocks go down the stack, below `level` levels that are filled already."""
        uses, sizes, found = self._uses, self._sizes, self._found
        above_uses, above_sizes = above
        at, end = 0, len(uses)
        while carried and at < end:
            soonest, count = carried[0]
            start = at
            while at < end and now < uses[at] <= soonest:
                at += 1
            if start < at:
                above_uses += uses[start:at]
                above_sizes += sizes[start:at]
                level += sum(above_sizes[start - at :])
                if at == end:
                    break
            use, size = uses[at], sizes[at]
            kept = min(size, count)
            if use <= now and use != GONE:
                found.append((level, kept, use))
            if use > now and kept == count and len(carried) == 1:
                carried[0][0] = use
            else:
                _exchange(carried, kept, use if use > now else GONE)
            level += kept
            if above_uses and above_uses[-1] == soonest:
                above_sizes[-1] += kept
            else:
                above_uses.append(soonest)
                above_sizes.append(kept)
            if kept == size:
                at += 1
            else:
                sizes[at] = size - kept
        uses[:at] = above_uses
        sizes[:at] = above_sizes
        for use, count in carried:
            uses.append(use)
            sizes.append(count)
        if len(uses) >= self._compact_at:
            self.collect(now)

    def collect(self, now: int) -> None:
        """Count the hits of all blocks due until `now`, and join their holes."""
        uses: list[int] = []
        sizes: list[int] = []
        level, last = 0, now
        for use, size in zip(self._uses, self._sizes, strict=True):
            if GONE < use <= now:
                self._found.append((level, size, use))
            level += size
            left = use if use > now else GONE
            if left == last:
                sizes[-1] += size
            else:
                uses.append(left)
                sizes.append(size)
                last = left
        if uses and uses[-1] == GONE:
            del uses[-1], sizes[-1]
        self._uses, self._sizes = uses, sizes
        self._compact_at = max(COMPACT_AT, 2 * len(uses))

    def steps(self) -> Steps:
        """Return the hits counted so far."""
        found = np.array(self._found, np.int64).reshape(-1, 3)
        return Steps(found[:, 0], found[:, 1], found[:, 2])


def _exchange(carried: list[list[int]], count: int, use: int) -> None:
    """Put `count` of the soonest down; take as many with next use `use`, unless it is `GONE`."""
    if carried[0][1] == count:
        del carried[0]
    else:
        carried[0][1] -= count
    if use == GONE:
        return
    for index, item in enumerate(carried):
        if item[0] >= use:
            if item[0] == use:
                item[1] += count
            else:
                carried.insert(index, [use, count])
            return
    carried.append([use, count])
