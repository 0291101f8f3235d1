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
    """

    unit: Words
    word: Words
    prompt: Ints
    size: Ints
    reused: Ints
    begun: Ints

    @classmethod
    def of(cls, length: int) -> Sample:
        """Return so many requests, of which nothing is known."""
        words, ints = np.zeros(length, np.uint64), np.zeros(length, np.int64)
        return cls(words, words, ints, ints, ints, ints)

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

    The reuse *time* of each request's prefix, the tokens that all requests touched since the session's
    request before, is known. How many of them were different follows from the distribution
    of reuse times itself: a window of t tokens holds, of each earlier request, what is not
    reused within the window (D. Eklov, E. Hagersten, *StatStack*, 2010,
    doi:10.1109/ISPASS.2010.5452069). Shared prompts are reused by whoever has the same one.
    Between two capacities the share is a straight line; `rate` is the share of sessions sampled.
    """
    if not len(sample):
        return np.zeros(1), np.zeros(1)
    order, begins = _sessions(sample.unit)
    sample = sample.where(order)
    size, ended = sample.size, sample.begun + sample.size
    known = np.minimum(np.abs(sample.reused), size)
    known -= known % block_size
    root = known[np.maximum.accumulate(np.where(begins, np.arange(len(begins)), 0))]
    reused = _prefixes(sample, begins, known, root)
    shared = np.minimum(root, reused)

    own = (~begins & (reused > shared)).nonzero()[0]
    time = np.maximum(sample.begun[own] - ended[own - 1], 0).astype(np.float64)
    width = (reused - shared)[own]
    within = time + size[own] + size[own - 1] / 2
    if root.any():
        others, before = _last_alike(order, root)
        by_another = sample.unit[before] != sample.unit[others]
        since = np.maximum(sample.begun[others] - ended[before], 0) * np.where(by_another, rate, 1)
        since[before == others] = 0.0
        time = np.concatenate((time, since))
        width = np.concatenate((width, shared[others]))
        within = np.concatenate((within, since + size[others] + size[before] / 2))
    below = _different(time, within, width, size.sum())
    capacities, found = _ramps(below, width)
    return capacities, found / sample.prompt.sum()


def _sessions(unit: Words) -> tuple[Ints, Flags]:
    """Return the requests by session and time, int64 [n], and which are a session's first."""
    bits = np.uint64(len(unit).bit_length())
    ranked = np.sort((unit >> bits << bits) | np.arange(len(unit), dtype=np.uint64))
    session = ranked >> bits
    begins = np.ones(len(unit), np.bool_)
    np.not_equal(session[1:], session[:-1], out=begins[1:])
    return (ranked ^ (session << bits)).astype(np.int64), begins


def _last_alike(order: Ints, root: Ints) -> tuple[Ints, Ints]:
    """Return the requests below a shared prompt, and the last ones before with one of the same size.

    As positions in `order`; the first one of a size comes after itself. `root` is the shared
    tokens of each.
    """
    bits = len(order).bit_length()
    ranked = np.sort((root << bits) | order)
    at = np.empty(len(order), np.int64)
    at[order] = np.arange(len(order))
    position = at[ranked & ((1 << bits) - 1)]
    position = position[np.searchsorted(ranked, 1 << bits) :]
    alike, before = root[position], position.copy()
    before[1:] = np.where(alike[1:] == alike[:-1], position[:-1], position[1:])
    return position, before


def _prefixes(sample: Sample, begins: Flags, known: Ints, root: Ints) -> Floats:
    """Return how many tokens of each request are those of its session's one before, float64 [n].

    Where the cache forgot, the words of both prompts tell whether they part before that place; if
    they do, then halfway between it and the end of the shared prompt. Pairs without words
    are taken for the mean of those with.
    """
    reused = known.astype(np.float64)
    unsure = (~begins & ((sample.reused < 0) | (known <= root))).nonzero()[0]
    if not len(unsure):
        return reused
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
    return reused


def _different(time: Floats, within: Floats, width: Floats, touched: float) -> Floats:
    """Return how many different tokens a window of so many touched ones holds, float64 [n].

    The integral of the share that is not reused within the window.
    """
    again = np.bincount(_floor_step(within), width)
    times = _at_step(np.arange(len(again) + 1))
    fresh = 1 - again.cumsum() / touched
    different = np.zeros(len(times))
    ((times[1:] - times[:-1]) * fresh).cumsum(out=different[1:])
    # No reuse is longer than its window, so its step is one of these.
    step = _floor_step(time)
    return different[step] + (time - times[step]) * fresh[step]


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
