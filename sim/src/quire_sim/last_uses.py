"""Last and next uses of blocks, for many requests at a time, in NumPy."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np

from quire_sim.columns import Column

Ints: TypeAlias = np.ndarray[tuple[int], np.dtype[np.int64]]

Again: TypeAlias = tuple[Ints, Ints, Ints]
"""Who used blocks last, who uses them again, and how many; int64 [n] each."""

NONE = -1

STRAND = 1 << 32
"""More than a length: so all of one strand can be made greater than all of another."""

EMPTY: Ints = np.empty(0, np.int64)


class LastUses:
    """The blocks of a trace by who used them last.

    A *strand* is a stretch of ids that rise by one; every run of ids begins where one does. It is cut into pieces by
    who used them last, each its end in the strand and its user. The piece nearest to the root,
    used last, is on top of the others; each of those ends deeper and was used before.
    """

    def __init__(self) -> None:
        self._num_ids = self._num_strands = self._num_pieces = 0
        self._heads = Column(0, np.int32)
        self._tops = Column(NONE, np.int32)
        self._ends, self._users, self._under = (Column(0, np.int32) for _ in range(3))
        self._spare = EMPTY

    def use(self, first: Ints, length: Ints, user: Ints) -> Again:
        """Use runs of ids in the order of their users, of each from the root on; int64 [runs] each.

        Returns who uses what again, in this order; stretches of the same two users are one.
        """
        if not len(first):
            return first, first, first
        begins = np.ones(len(first), np.bool)
        begins[1:] = (user[1:] != user[:-1]) | (first[1:] != (first + length)[:-1])
        starts = np.flatnonzero(begins)
        first, length, user = first[starts], np.add.reduceat(length, starts), user[starts]
        strands, at = np.unique(self._strands(first, length), return_inverse=True)
        pieces, pieces_at, below = self._pieces(strands, at, length)
        # Of each strand its pieces, the deepest first, and then the new runs.
        at = np.concatenate((pieces_at, at))
        order = at.argsort(kind="stable")
        at, run = at[order], order - len(pieces)
        end = np.concatenate((self._ends.values[pieces], length), dtype=np.int64)[order]
        user = np.concatenate((self._users.values[pieces], user), dtype=np.int64)[order]
        # Who goes as far as one before takes all that is left to that one, else the beginning of it.
        taker, giver = _next_as_high(end, at), _last_higher(end, at)
        taken, taking = taker != NONE, (giver != NONE) & (run >= 0)
        before = np.concatenate((np.flatnonzero(taken), giver[taking]))
        after = np.concatenate((taker[taken], np.flatnonzero(taking)))
        by_run = np.lexsort((-before, run[after]))
        before, after = before[by_run], after[by_run]
        left = ~taken
        self._keep(pieces, strands[at[left]], below[at[left]], end[left], user[left])
        return _stretches(
            user[before], user[after], np.minimum(end[before], end[after]), run[after]
        )

    def _strands(self, first: Ints, length: Ints) -> Ints:
        """Return the strands that begin with these ids; those that nobody had before begin new ones."""
        new = np.unique(first[first >= self._num_ids])
        begin, self._num_strands = self._num_strands, self._num_strands + len(new)
        heads = self._heads.upto(self._num_strands)
        heads[begin : self._num_strands] = new
        self._num_ids = max(self._num_ids, int((first + length).max()))
        return heads[: self._num_strands].searchsorted(first)

    def _pieces(self, strands: Ints, at: Ints, length: Ints) -> tuple[Ints, Ints, Ints]:
        """Return the pieces that `strands[at]` are used of, each strand's deepest first, and whose they are.

        The third is what is below them, of each strand.
        """
        longest = np.zeros(len(strands), np.int64)
        np.maximum.at(longest, at, length)
        below = np.full(len(strands), NONE)
        ends, under = self._ends.values, self._under.values
        each = self._tops.upto(self._num_strands)[strands].astype(np.int64)
        of = np.arange(len(strands))
        pieces, owners = [EMPTY], [EMPTY]
        while len(of := of[each != NONE]):
            each = each[each != NONE]
            pieces.append(each)
            owners.append(of)
            below[of] = under[each]
            is_deeper = ends[each] < longest[of]
            of, each = of[is_deeper], under[each[is_deeper]].astype(np.int64)
        return np.concatenate(pieces[::-1]), np.concatenate(owners[::-1]), below

    def _keep(self, pieces: Ints, strands: Ints, below: Ints, end: Ints, user: Ints) -> None:
        """Put others in the place of pieces, of each strand the deepest first, which is on top of what is `below`."""
        free = np.concatenate((pieces, self._spare))
        lacking = max(len(end) - len(free), 0)
        new = np.arange(self._num_pieces, self._num_pieces + lacking)
        self._num_pieces += lacking
        place, self._spare = np.split(np.concatenate((free, new)), [len(end)])
        is_deepest = np.ones(len(strands), np.bool)
        is_deepest[1:] = strands[1:] != strands[:-1]
        self._ends.upto(self._num_pieces)[place] = end
        self._users.upto(self._num_pieces)[place] = user
        under = np.where(is_deepest, below, np.concatenate(([NONE], place[:-1])))
        self._under.upto(self._num_pieces)[place] = under
        self._tops.values[strands] = place  # of several of a strand the last one stays


def _last_higher(end: Ints, at: Ints) -> Ints:
    """Return of each the last one before it of its strand that ends deeper, by index; `at` rises."""
    return _of_strand(_last_above(key := end - at * STRAND, key), at)


def _next_as_high(end: Ints, at: Ints) -> Ints:
    """Return of each the next one of its strand that ends as deep or deeper, by index; `at` rises."""
    key = (end + at * STRAND)[::-1]
    found = _last_above(key, key - 1)[::-1]
    return _of_strand(np.where(found == NONE, NONE, len(end) - 1 - found), at)


def _of_strand(found: Ints, at: Ints) -> Ints:
    return np.where(at[found] == at, found, NONE)


def _last_above(keys: Ints, bars: Ints) -> Ints:
    """Return of each the last one before it whose key is above its bar, by index; NONE where there is none.

    A bar is as high as its own key or just below: whatever one has been compared to is no answer for who is higher,
    so all jump at once to where those before them have come to.
    """
    found = np.arange(-1, len(keys) - 1)
    low = np.arange(1, len(keys))
    while len(low := low[keys[found[low]] <= bars[low]]):
        found[low] = found[found[low]]
        low = low[found[low] != NONE]
    return found


def _stretches(earlier: Ints, later: Ints, end: Ints, run: Ints) -> Again:
    """Return stretches by whose they were, whose they are, and their blocks; each begins where the one before it ended, or the run does."""
    begin = np.zeros(len(end), np.int64)
    goes_on = run[1:] == run[:-1]
    begin[1:][goes_on] = end[:-1][goes_on]
    width = end - begin
    earlier, later, width = (each[width > 0] for each in (earlier, later, width))
    if not len(width):
        return earlier, later, width
    differs = np.ones(len(width), np.bool)
    differs[1:] = (earlier[1:] != earlier[:-1]) | (later[1:] != later[:-1])
    starts = np.flatnonzero(differs)
    return earlier[starts], later[starts], np.add.reduceat(width, starts)
