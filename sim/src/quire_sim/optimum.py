"""Upper bounds of policies: Belady's rule, with and without bypass, its stack distances and its rows beside replays.

They are the optimum where all blocks are whole; of last blocks that are partial see `weighed`. The optimum may leave out blocks that a request has just used. A pool cannot, as a request holds its blocks while it
runs: what it can reach is the optimum without bypass.

Its distances stay apart from those of LRU: LRU orders blocks by their last use, which a count of
inversions sees; the optimum by their next, and what it keeps depends on what else was offered.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from heapq import heapify, heappop, heappush, heappushpop
from typing import TypeAlias

import msgspec
import numpy as np

from quire_sim.replay import HitTally, Observer, ReplayResult, check_capacity
from quire_sim.reuse import STEPS_AT_ONCE, Counts, Reuses, Steps, reuses
from quire_sim.trace.rows import Trace

OPTIMUM, REACHABLE = "optimum", "reachable"

GONE = -1
"""The next use of a hole: nothing is kept there."""

COMPACT_AT = 256
"""Pieces of a stack before its holes are collected for the first time."""

REQUESTS_AT_ONCE = 1 << 12
"""Requests whose next uses are listed together."""


Piece: TypeAlias = tuple[int, int]
"""A next use, and the number of blocks that have it."""


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
    read, ends = weighed(reuses(trace, trace.block_size))
    seen_blocks = read.seen_blocks + (ends > 0)
    hit_blocks = np.zeros((len(capacities), read.num_requests), np.int64)
    for steps in BOUNDS[bound](read):
        for row, capacity in zip(hit_blocks, capacities, strict=True):
            np.add.at(row, steps.request, steps.found(capacity))
    columns = [
        column[count_from:].tolist()
        for column in (read.prompt_tokens, read.prompt_blocks, seen_blocks)
    ]
    reading = time.process_time() - begun
    results: list[ReplayResult] = []
    for number, capacity in enumerate(capacities):
        begun = time.process_time()
        hits = hit_blocks[number].tolist()
        last = np.where(read.prompt_blocks <= capacity, ends, 0).tolist()
        tally = HitTally(read.block_size, capacity)
        counted = zip(*columns, hits[count_from:], last[count_from:], strict=True)
        for tokens, blocks, seen, found, end in counted:
            tally.add(tokens, blocks, seen, found, end_tokens=end)
        for request, found, end in zip(trace, hits, last, strict=True) if observers else ():
            for observe in observers[number]:
                observe(request, min(found * read.block_size, request.prompt_tokens) + end)
        seconds = reading / len(capacities) + time.process_time() - begun
        results.append(tally.result(bound, None, seconds))
    return results


def weighed(read: Reuses) -> tuple[Reuses, Counts]:
    """Return the reuses of whole blocks, and the tokens of last, partial blocks that were seen before, int64 [requests].

    Belady's rule counts blocks, and a partial one is worth fewer tokens than a whole one: it may find fewer tokens than
    another choice. So the bounds choose among whole blocks alone. A last block that is partial takes no room in them and counts
    as found where an earlier request had it and the cache holds as many blocks as its prompt has. Where there is none,
    the bounds are exact.
    """
    tokens = read.prompt_tokens - (read.prompt_blocks - 1) * read.block_size
    partial = (read.seen_blocks == read.prompt_blocks) & (tokens < read.block_size)
    partial &= read.prompt_blocks > 0
    deepest = np.flatnonzero(np.append(read.later[1:] != read.later[:-1], True)[: len(read.later)])
    num_blocks = read.num_blocks.copy()
    num_blocks[deepest] -= partial[read.later[deepest]]
    left = num_blocks > 0
    whole = msgspec.structs.replace(
        read, earlier=read.earlier[left], later=read.later[left], num_blocks=num_blocks[left]
    )
    return whole, np.where(partial, tokens, 0)


def optimum_steps(reuses: Reuses) -> Iterator[Steps]:
    """Yield the stack distances of all reuses under the optimum, some at a time: Belady's rule with bypass.

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
        yield from stack.steps(at_least=STEPS_AT_ONCE)
    stack.collect(reuses.num_requests)
    yield from stack.steps()


def reachable_steps(reuses: Reuses) -> Iterator[Steps]:
    """Yield the same under Belady's rule without bypass: the most that a pool can find.

    A request holds all blocks of its prompt while it runs, so what is kept beside them is chosen from the room that they
    leave; a cache smaller than a prompt has its first blocks. This is a stack algorithm as well: the prompt's blocks are the
    uppermost levels, and those that they push away go down as in `optimum_steps`.
    """
    stack = _NextUses()
    prompts = zip(reuses.prompt_blocks.tolist(), _next_uses(reuses), strict=True)
    for now, (num_blocks, pieces) in enumerate(prompts):
        rest = num_blocks - sum([count for _, count in pieces])
        stack.hold(now, [*pieces, (GONE, rest)] if rest else pieces, num_blocks)
        yield from stack.steps(at_least=STEPS_AT_ONCE)
    stack.collect(reuses.num_requests)
    yield from stack.steps()


def _next_uses(reuses: Reuses) -> Iterator[list[Piece]]:
    """Yield of each request the blocks that are used again, soonest first."""
    order = np.argsort(reuses.earlier, kind="stable")
    uses, counts = reuses.later[order], reuses.num_blocks[order]
    stops = np.searchsorted(reuses.earlier[order], np.arange(1, reuses.num_requests + 1))
    for first in range(0, reuses.num_requests, REQUESTS_AT_ONCE):
        last = min(first + REQUESTS_AT_ONCE, reuses.num_requests)
        low = int(stops[first - 1]) if first else 0
        some = slice(low, int(stops[last - 1]))
        pieces = list(zip(uses[some].tolist(), counts[some].tolist(), strict=True))
        start = 0
        for stop in (stops[first:last] - low).tolist():
            yield pieces[start:stop]
            start = stop


BOUNDS: dict[str, Callable[[Reuses], Iterator[Steps]]] = {
    OPTIMUM: optimum_steps,
    REACHABLE: reachable_steps,
}
"""Stack distances of what no policy exceeds, by the names that stand in place of a policy's."""


class _NextUses:
    """The stack of the optimum: pieces of (next use, levels), from level 1 down."""

    def __init__(self) -> None:
        self._uses: list[int] = []
        self._sizes: list[int] = []
        self._found: list[int] = []
        self._compact_at = COMPACT_AT

    def hold(self, now: int, chain: list[Piece], room: int) -> None:
        """Put the blocks of request `now` into the `room` uppermost levels; push others down.

        `chain` is (next use, count) from the root on.
        """
        uses, sizes = self._uses, self._sizes
        level = at = 0
        moved: list[Piece] = []
        for use, size in zip(uses, sizes, strict=True):
            if level == room:
                break
            taken = min(size, room - level)
            if use > now:
                moved.append((use, taken))
            elif use != GONE:
                self._found += (level, taken, use)
            level += taken
            if taken < size:
                sizes[at] = size - taken
                break
            at += 1
        uses[:at] = [use for use, _ in chain]
        sizes[:at] = [count for _, count in chain]
        heapify(moved)
        self._sink(now, moved, len(chain), room)

    def use(self, now: int, carried: list[Piece]) -> None:
        """Request `now` used blocks: (next use, count), soonest first. What was due is a hole.

        A hole is counted as a hit when it is filled or collected; until then its levels stay.
        """
        self._sink(now, carried, 0, 0)

    def _sink(self, now: int, carried: list[Piece], at: int, level: int) -> None:
        """Let a heap of blocks go down the stack, from piece `at` on, which is below `level` levels."""
        if not carried:
            return
        uses, sizes, found = self._uses, self._sizes, self._found
        soonest, count = heappop(carried)
        end, summed = len(uses), at
        while at < end:
            use = uses[at]
            if now < use <= soonest:
                at += 1
                continue
            size = sizes[at]
            if use <= now and use != GONE:
                level += sum(sizes[summed:at])
                summed = at
                found += (level, min(count, size), use)
            if count < size:  # it goes before what is left of the piece
                sizes[at] = size - count
                if at and uses[at - 1] == soonest:
                    sizes[at - 1] += count
                    if at == summed:
                        level += count
                else:
                    uses.insert(at, soonest)
                    sizes.insert(at, count)
                    end += 1
                    at += 1
                if use <= now:
                    if not carried:
                        count = 0
                        break
                    soonest, count = heappop(carried)
                elif carried:
                    soonest, count = heappushpop(carried, (use, count))
                else:
                    # Each piece that follows gives as much as it takes, as long as they rise.
                    soonest = use
                    first = at
                    at += 1
                    while at < end and uses[at] > soonest and sizes[at] > count:
                        soonest = uses[at]
                        at += 1
                    sizes[first] += count
                    sizes[at - 1] -= count
                    continue
            else:  # it takes the place of the piece
                if at and uses[at - 1] == soonest:
                    sizes[at - 1] += size
                    if at == summed:
                        level += size
                    del uses[at], sizes[at]
                    end -= 1
                else:
                    uses[at] = soonest
                    at += 1
                if count > size:
                    count -= size
                    if use > now:
                        heappush(carried, (use, size))
                    continue
                if use > now:
                    soonest, count = heappushpop(carried, (use, size))
                elif carried:
                    soonest, count = heappop(carried)
                else:
                    count = 0
                    break
            while carried and carried[0][0] == soonest:
                count += heappop(carried)[1]
        if count:
            carried.append((soonest, count))
            for use, size in sorted(carried):
                uses.append(use)
                sizes.append(size)
        if len(uses) >= self._compact_at:
            self.collect(now)

    def collect(self, now: int) -> None:
        """Count the hits of all blocks due until `now`, and join their holes."""
        uses: list[int] = []
        sizes: list[int] = []
        level, last = 0, now
        for use, size in zip(self._uses, self._sizes, strict=True):
            if GONE < use <= now:
                self._found += (level, size, use)
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

    def steps(self, at_least: int = 0) -> Iterator[Steps]:
        """Yield the hits counted since the last time, if they are so many."""
        if len(self._found) >= 3 * at_least:
            below, width, request = np.array(self._found, np.int64).reshape(-1, 3).T
            self._found.clear()
            yield Steps(below, width, request)
