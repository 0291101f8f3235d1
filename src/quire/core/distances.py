"""From reuse times to a hit-rate curve, for requests that were noted."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeAlias

import msgspec
import numpy as np

Ints: TypeAlias = np.ndarray[tuple[int], np.dtype[np.int64]]
Floats: TypeAlias = np.ndarray[tuple[int], np.dtype[np.float64]]
Flags: TypeAlias = np.ndarray[tuple[int], np.dtype[np.bool_]]
Words: TypeAlias = np.ndarray[tuple[int], np.dtype[np.uint64]]

PRECISION = 5
"""Numbers of tokens are told apart to 2**-5 of their size."""

SHIFT = 52 - PRECISION
"""Bits of a float64 below those that are kept."""

ONE = 1023 << PRECISION
"""The kept bits of 1.0."""

ENOUGH = 32
"""Requests from which a share can be told."""


class Sample(msgspec.Struct, eq=False):
    """The requests that are remembered, in order. Tokens; arrays [samples].

    `unit`    whose request: a number mixed from the first block below the shared prompt
    `word`    a number of the two tokens before token p, the largest power of two within the prompt;
              0 where it was not noted
    `prompt`  all of the prompt
    `size`    the whole blocks of it that could be found
    `reused`  of these, the first ones that were found; if some were evicted, minus all the
              first ones that seem to have been there once
    `begun`   what all requests had touched before this one, sampled or not
    `family`  a number of the shared prompt that it begins with, as far as that is known; else 0
    `told`    the tokens of that prompt
    """

    unit: Words
    word: Words
    prompt: Ints
    size: Ints
    reused: Ints
    begun: Ints
    family: Words
    told: Ints

    @classmethod
    def of(cls, length: int) -> Sample:
        """Return so many requests, of which nothing is known."""
        words, ints = np.zeros(length, np.uint64), np.zeros(length, np.int64)
        return cls(words, words, ints, ints, ints, ints, words, ints)

    @classmethod
    def joined(cls, parts: Iterable[Sample]) -> Sample:
        """Return the requests of several samples after each other."""
        columns = zip(*map(msgspec.structs.astuple, parts), strict=True)
        return cls(*map(np.concatenate, columns))

    def __len__(self) -> int:
        return len(self.unit)

    def where(self, chosen: Any) -> Sample:
        """Return the requests that are chosen, bool [samples]."""
        return Sample(*(column[chosen] for column in msgspec.structs.astuple(self)))


def hit_curve(sample: Sample, block_size: int, rate: float) -> tuple[Floats, Floats]:
    """Return an LRU cache's capacities in tokens, rising from 0, and the share of tokens found at each.

    The capacity from which on a block is found is its stack distance: the different tokens touched
    since its last use (R. L. Mattson et al., *Evaluation techniques for storage hierarchies*,
    1970, doi:10.1147/sj.92.0078). A session's requests overlap in what the later one reuses, and so do
    requests below one shared prompt: of all that was touched, what both of two such requests within the window
    touched is taken off. Where only some sessions are sampled, or output took room, all is scaled by what all
    requests touched meanwhile. Between two capacities the share is a straight line; `rate` is the
    share of sessions sampled.
    """
    if not len(sample):
        return np.zeros(1), np.zeros(1)
    last, alike, root, reused = _chains(sample, block_size)
    shared = np.minimum(root, reused)
    width = reused - shared
    own, others = ((last >= 0) & (width > 0)).nonzero()[0], (alike >= 0).nonzero()[0]
    # What the first request found below a prompt was there before the notes; nobody knows since when.
    before = np.where(alike < 0, np.minimum(np.abs(sample.reused), shared), 0)
    before -= before % block_size
    early = before.nonzero()[0]
    if not len(own) + len(others) + len(early):
        return np.zeros(1), np.zeros(1)

    # Every request touches a shared prompt and then what is its own: two events.
    top = np.minimum(root, sample.size)
    touched = np.column_stack((top, sample.size - top)).ravel()
    events = np.column_stack((2 * alike, np.where(last < 0, -2, 2 * last + 1))).ravel()
    again = np.column_stack((top, width)).ravel()
    at: Ints = np.concatenate((own, others))
    since: Ints = np.concatenate((last[own], alike[others]))
    below = _different(touched, events, again, 2 * since + 1, 2 * at)
    below[: len(own)] -= np.where(alike[own] > last[own], top[own], 0)
    below = _by_all(sample, below, since, at)
    below[: len(own)] += shared[own]
    below[len(own) :] *= np.where(sample.unit[alike[others]] != sample.unit[others], rate, 1)
    capacities, found = _ramps(
        np.concatenate((below, np.zeros(len(early)))),
        np.concatenate((width[own], shared[others], before[early])),
    )
    return capacities, found / sample.prompt.sum()


def _chains(sample: Sample, block_size: int) -> tuple[Ints, Ints, Ints, Floats]:
    """Return of each request, in order of time, what it goes on with: int64 and float64 [n].

    The request of its session before, the one before below the same shared prompt, -1 where there is none; the
    tokens of that prompt; and those that it has in common with its session's request before, or with that prompt.
    """
    order, begins = _sessions(sample.unit)
    by_session, roots = _prefixes(sample.where(order), begins, block_size)
    last, root, reused = np.full(len(order), -1), np.empty_like(roots), np.empty_like(by_session)
    last[order[1:]] = np.where(begins[1:], -1, order[:-1])
    root[order], reused[order] = roots, by_session
    # A prompt that is known to be shared is so whatever the cache remembers.
    told = np.minimum(sample.told, sample.size)
    root, reused = np.where(told > 0, told, root), np.maximum(reused, told)
    return last, _last_alike(root, sample.family), root, reused


def _sessions(unit: Words) -> tuple[Ints, Flags]:
    """Return the requests by session and time, int64 [n], and which are a session's first."""
    bits = np.uint64(len(unit).bit_length())
    ranked = np.sort((unit >> bits << bits) | np.arange(len(unit), dtype=np.uint64))
    session = ranked >> bits
    begins = np.ones(len(unit), np.bool_)
    np.not_equal(session[1:], session[:-1], out=begins[1:])
    return (ranked ^ (session << bits)).astype(np.int64), begins


def _last_alike(root: Ints, family: Words) -> Ints:
    """Return the request before each below the same shared prompt, -1 where there is none."""
    before = np.full(len(root), -1)
    kind = family ^ root.astype(np.uint64)
    ranked = np.argsort(kind, kind="stable")
    same = kind[ranked[1:]] == kind[ranked[:-1]]
    before[ranked[1:][same]] = ranked[:-1][same]
    before[root == 0] = -1
    return before


def _prefixes(sample: Sample, begins: Flags, block_size: int) -> tuple[Floats, Ints]:
    """Return how many tokens of each request are those of its session's one before, and of all sessions like it.

    float64 and int64 [n]. The requests come by session. Where the cache forgot, the words of both prompts
    tell whether they part before that place; if they do, then halfway between it and the end of the
    shared prompt. Pairs without words are taken for the mean of those with.
    """
    known = np.minimum(np.abs(sample.reused), sample.size)
    known -= known % block_size
    root = known[np.maximum.accumulate(np.where(begins, np.arange(len(begins)), 0))]
    reused = known.astype(np.float64)
    unsure = (~begins & ((sample.reused < 0) | (known <= root))).nonzero()[0]
    if not len(unsure):
        return reused, root
    both = np.minimum(sample.size[1:], sample.size[:-1])
    last = unsure - 1
    common = both[last].astype(np.float64)
    bits = np.frexp(sample.prompt)[1]
    mine, theirs = sample.word[unsure], sample.word[last]
    seen = (bits[unsure] == bits[last]) & (mine > 0) & (theirs > 0)
    place = np.ldexp(0.5, bits[unsure])
    parted = seen & (mine != theirs)
    estimate = np.where(parted, np.minimum((root[unsure] + place) / 2, common), common)
    told, of = float(estimate[seen].sum()), float(common[seen].sum())
    if np.count_nonzero(seen) < ENOUGH:
        sure = ~begins
        sure[unsure] = False
        told += float(reused[sure].sum())
        of += float(both[sure[1:]].sum())
    if of:
        estimate[~seen] *= min(told / of, 1.0)
    reused[unsure] = estimate
    return reused, root


def _different(touched: Ints, before: Ints, again: Floats, after: Ints, until: Ints) -> Floats:
    """Return the different tokens of the events after one and until another, float64 [windows].

    `touched`        tokens of each event
    `before, again`  the event that touched some of them last, negative for none, and how many
    `after, until`   of each window
    """
    total = np.concatenate(([0], touched.cumsum()))
    again = np.where(before >= 0, again, 0.0)
    twice = _nested(np.maximum(before, 0), again, after, until)
    return total[until] - total[after + 1] - twice


def _by_all(sample: Sample, different: Floats, since: Ints, at: Ints) -> Floats:
    """Scale what the sampled requests between two touched to what all did, float64 [windows]."""
    ended, touched = sample.begun + sample.size, sample.size.cumsum()
    seen = (touched - sample.size)[at] - touched[since]
    by_all = np.maximum(sample.begun[at] - ended[since], 0)
    return np.where(seen > 0, different * by_all / np.maximum(seen, 1), by_all)


def _nested(starts: Ints, weights: Floats, after: Ints, until: Ints) -> Floats:
    """Return the weight of those intervals that begin after one event and end before another, float64 [windows].

    Interval i begins at `starts[i]` and ends at i. A wavelet matrix (F. Claude, G. Navarro, *The wavelet matrix*,
    2012, doi:10.1007/978-3-642-34109-0_18): bit by bit, the intervals that begin later than `after` are told apart.
    """
    total = np.zeros(len(until))
    low, high = np.zeros(len(until), np.int64), until
    for bit in reversed(range(len(starts).bit_length())):
        is_one = (starts >> bit) & 1 == 1
        ones = np.concatenate(([0], is_one.cumsum()))
        num_zeros = len(starts) - ones[-1]
        starts = np.concatenate((starts[~is_one], starts[is_one]))
        weights = np.concatenate((weights[~is_one], weights[is_one]))
        summed = np.concatenate(([0.0], weights.cumsum()))
        first, stop = num_zeros + ones[low], num_zeros + ones[high]
        goes_up = (after >> bit) & 1 == 1
        total += np.where(goes_up, 0.0, summed[stop] - summed[first])
        low = np.where(goes_up, first, low - ones[low])
        high = np.where(goes_up, stop, high - ones[high])
    return total


def _ramps(below: Floats, width: Floats) -> tuple[Floats, Floats]:
    """Return capacities and the tokens found there: of each reuse, what is above `below`."""
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
