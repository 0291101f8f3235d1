"""LRU stack distances of reused token runs."""

from __future__ import annotations

from typing import TypeAlias

import msgspec
import numpy as np

Ints: TypeAlias = np.ndarray[tuple[int], np.dtype[np.int64]]
Floats: TypeAlias = np.ndarray[tuple[int], np.dtype[np.float64]]

PRECISION = 5
"""Numbers of tokens are told apart to 2**-5 of their size."""

SHIFT = 52 - PRECISION
"""Bits of a float64 below those that are kept."""

ONE = 1023 << PRECISION
"""The kept bits of 1.0."""


class Uses(msgspec.Struct, frozen=True, eq=False):
    """Stretches of prompts that were used again, in the order of the requests that did so, roots first.

    Requests are numbered from 1; int64 [stretches], but `touched`. Of one request the earlier ones fall: the
    deeper a stretch, the longer ago it was used.

    `earlier`  who used it last; 0 or below if that was before the first
    `later`    who used it again
    `width`    tokens
    `touched`  tokens that each request used or made, none for number 0; int64 [requests + 1]
    """

    earlier: Ints
    later: Ints
    width: Ints
    touched: Ints


def uses_of(size: Ints, shared: Ints, since: Ints, generated: int) -> Uses:
    """Return the reused token runs of requests that share `shared` of `size` tokens with request `since`.

    `since`      who used them last; 0 or below: a request before the first one; int64 [requests], as the others
    `generated`  tokens beyond the prompts; those that were used again belong to who made them, the rest is spread
                 evenly

    A request uses all of its prompt, from the root on, so what is left to the one before is the end of its own.
    """
    # Of each request: where what it used last begins, who has used last what is above that, and its end.
    starts, above, ends = [0], [0], [0]
    earlier: list[int] = []
    later: list[int] = []
    width: list[int] = []
    touched = [0, *size.tolist()]
    requests = zip(size.tolist(), shared.tolist(), since.tolist(), strict=True)
    for now, (end, again, last) in enumerate(requests, 1):
        first, stop, user = len(width), again, last
        if user <= 0:
            earlier += [user] * (stop > 0)
            width += [stop] * (stop > 0)
            stop = 0
        elif stop > ends[user]:
            touched[user] += stop - ends[user]
            ends[user] = stop
        while stop:
            while starts[user] >= stop:
                other = above[user]
                if starts[other] >= starts[user]:
                    other = above[user] = above[other]
                user = other
            start = starts[user]
            earlier.append(user)
            width.append(stop - start)
            starts[user], above[user], user, stop = stop, now, above[user], start
        later += [now] * (len(width) - first)
        earlier[first:] = earlier[first:][::-1]
        width[first:] = width[first:][::-1]
        starts.append(0)
        above.append(0)
        ends.append(end)
    uses = Uses(*(np.array(column, np.int64) for column in (earlier, later, width, touched)))
    used_again = int(uses.touched.sum() - size.sum())
    uses.touched[1:] += max(generated - used_again, 0) // max(len(size), 1)
    return uses


def hit_curve(uses: Uses, first: int) -> tuple[Floats, Floats]:
    """Return an LRU cache's capacities in tokens, rising from 0, and the tokens that requests found at each.

    The first requests are not counted. Between two capacities it is a straight line. What was used before all
    that is known is taken to have been as far away as the same number of requests is now.
    """
    counted = uses.later > first
    if not counted.any():
        return np.arange(2.0), np.zeros(2)
    below = lru_distances(np.maximum(uses.earlier, 0), uses.later, uses.width, uses.touched)
    times_as_far = (uses.later - np.minimum(uses.earlier, 0)) / uses.later
    return _ramps((below * times_as_far)[counted], uses.width[counted])


def lru_distances(earlier: Ints, later: Ints, width: Ints, touched: Ints) -> Ints:
    """Return the LRU stack distance of all stretches that are used again, int64 [stretches].

    A path is touched from its deepest block upwards, so a parent is never older than its child and every
    cached set is a tree. What lies above a stretch in the stack is what the requests in between touched,
    each token once: all of it, less what was used again among them (R. L. Mattson et al., *Evaluation techniques for storage
    hierarchies*, 1970, doi:10.1147/sj.92.0078). The arguments are those of `Uses`, in any unit.
    """
    if not len(earlier):
        return width
    total = touched.cumsum()
    # What one request uses again is used at once: all that is counted is of those before it.
    before = np.searchsorted(later, later)
    return total[later - 1] - total[earlier] - _nested(earlier, width, earlier, before)


def _nested(starts: Ints, weights: Ints, after: Ints, until: Ints) -> Ints:
    """Return the weight of those intervals that begin after a time and end before an interval, int64 [windows].

    Interval i begins at `starts[i]`; they are in the order of their ends, and `until` is an index. A wavelet matrix
    (F. Claude, G. Navarro, *The wavelet matrix*, 2012, doi:10.1007/978-3-642-34109-0_18): bit by bit, the
    intervals that begin later than `after` are told apart.
    """
    total = np.zeros(len(until), np.int64)
    begins, bounds, high = (column.astype(np.int32) for column in (starts, after, until))
    low = np.zeros(len(until), np.int32)
    for bit in reversed(range(int(begins.max()).bit_length())):
        is_one = (begins >> bit) & 1 == 1
        ones = np.zeros(len(begins) + 1, np.int32)
        is_one.cumsum(dtype=np.int32, out=ones[1:])
        num_zeros = len(begins) - ones[-1]
        begins = np.concatenate((begins[~is_one], begins[is_one]))
        weights = np.concatenate((weights[~is_one], weights[is_one]))
        summed = np.concatenate(([0], weights.cumsum()))
        first, stop = num_zeros + ones[low], num_zeros + ones[high]
        goes_up = (bounds >> bit) & 1 == 1
        total += np.where(goes_up, 0, summed[stop] - summed[first])
        low = np.where(goes_up, first, low - ones[low])
        high = np.where(goes_up, stop, high - ones[high])
    return total


def _ramps(below: Floats, width: Ints) -> tuple[Floats, Floats]:
    """Return capacities and the tokens found there: of each stretch, what is above `below`."""
    turns = np.concatenate((below, below + width))
    step = _floor_step(turns) + 1
    sign = np.repeat([1.0, -1.0], len(below))
    slope = np.bincount(step, sign).cumsum()
    offset = np.bincount(step, sign * turns).cumsum()
    capacities = _at_step(np.arange(len(slope)))
    return capacities, np.maximum.accumulate(slope * capacities - offset)


def _floor_step(tokens: Floats) -> Ints:
    """Return the last step that is not above each number: 0, 1, 1 + 2**-5, ..., 2, 2 + 2**-4, ..."""
    return np.maximum((tokens.view(np.int64) >> SHIFT) - (ONE - 1), 0)


def _at_step(step: Ints) -> Floats:
    """Return the number of tokens at each step."""
    tokens = ((step + (ONE - 1)) << SHIFT).view(np.float64)
    return np.where(step > 0, tokens, 0.0)
