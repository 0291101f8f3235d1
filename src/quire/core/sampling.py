"""The live curve: what any capacity would find, from a short note per request."""

from __future__ import annotations

from typing import Any, TypeAlias

import msgspec
import numpy as np

from quire.core.stats import Counters
from quire.core.tokens import TOKEN_BYTES, Key
from quire.core.whatif import WhatIf

Ints: TypeAlias = np.ndarray[tuple[int], np.dtype[np.int64]]
Flags: TypeAlias = np.ndarray[tuple[int], np.dtype[np.bool_]]
Floats: TypeAlias = np.ndarray[tuple[int], np.dtype[np.float64]]
Words: TypeAlias = np.ndarray[tuple[int], np.dtype[np.uint64]]

MAX_SAMPLES = 1 << 15
"""Requests that are remembered: under 2 MB. Beyond, every second session is forgotten."""

BATCH = 1 << 13
"""Requests between two readings of the notes."""

LEARN_FROM = 64
"""Requests after which is decided for the first time where sessions part."""

LEARN_READS = 2
"""So many readings of the notes may decide it."""

UNIT_BYTES = 48
"""Bytes of a prompt that tell sessions apart: the end of their first block that is not shared."""

DIVERGING = 0.25
"""Above this share of requests that leave their session's text, sessions part further down."""

ENOUGH = 32
"""Requests from which a share can be told."""

ODD = np.uint64(0x9E3779B97F4A7C15)
"""2**64 / golden ratio: multiplying by it mixes bits."""


class Sample(msgspec.Struct, eq=False):
    """The requests that are remembered, in order. Tokens; arrays [samples].

    `unit`    whose request: a number mixed from the first block below the shared prompt
    `prompt`  all of the prompt
    `size`    the whole blocks of it that could be found
    `reused`  of these, the first ones that an earlier request had as well
    `certain` whether that was found; else it is thought to have been evicted
    `begun`   what all requests had touched before this one, sampled or not
    """

    unit: Words
    prompt: Ints
    size: Ints
    reused: Ints
    certain: Flags
    begun: Ints

    def __len__(self) -> int:
        return len(self.unit)

    def where(self, chosen: Any) -> Sample:
        """Return the requests that are chosen, bool [samples] or a slice."""
        return Sample(*(column[chosen] for column in msgspec.structs.astuple(self)))


class CurveSampler:
    """Notes one line per request and makes a hit-rate curve of them when asked.

    A note is the size of a prompt, how much of it was ever cached, and a few bytes that name its
    session: the first block below the prompt that sessions share. So a request costs a copy
    of some bytes and three appends; no prompt is hashed. The notes are read 8,192 at a time.

    The reuse *time* of each request's prefix, the tokens that all requests touched since the session's
    request before, is known from that. How many of them were different follows from the
    distribution of reuse times itself: a window of t tokens holds, of each earlier request,
    what is not reused within the window (D. Eklov, E. Hagersten, *StatStack*, 2010,
    doi:10.1109/ISPASS.2010.5452069). Shared prompts are reused by whoever has the same one.

    Memory is bounded by sampling sessions (C. A. Waldspurger et al., *Efficient MRC construction
    with SHARDS*, 2015, USENIX FAST): all of them until `MAX_SAMPLES` requests are remembered, then those
    whose number is below a limit that is halved each time. Times are of all requests.

    len(sample) <= MAX_SAMPLES; the sampled units are those with unit <= limit.
    """

    def __init__(self, block_size: int, counters: Counters) -> None:
        self._block_size = block_size
        self._counters = counters
        self.restart()

    def restart(self) -> None:
        """Forget all requests; the curve is of those from now on."""
        self.num_requests = 0
        self._halvings = 0
        self._sample = Sample(*(np.empty(0, kind) for kind in ("u8", "i8", "i8", "i8", "?", "i8")))
        self._recent: list[Sample] = []
        self._num_sampled = 0
        self._clock = 0
        self._generated = self._generated_tokens()
        self._learning = LEARN_READS
        self._begin(1)

    def opened(self, key: Key, num_tokens: int, reused: int, scope: int) -> None:
        """Note a request.

        `reused`  tokens of its prompt that were found; or, as a negative number, those that were
                  found and those that seem to have been evicted
        `scope`   a number of its scope, 0 for the default one
        """
        units = self._units
        if scope:
            self._scoped[len(units)] = scope
        units.append(key[self._unit].tobytes())
        self._sizes.append(num_tokens)
        self._reused.append(reused)
        if len(units) >= self._read_at:
            self._read()

    @property
    def rate(self) -> float:
        """Share of the sessions that are sampled."""
        return 0.5**self._halvings

    def what_if(self, capacity_blocks: int) -> WhatIf:
        """Return the curve of the requests so far."""
        self._read()
        sample = self._all()
        corners, found = _curve(sample, self.rate)
        return WhatIf(
            capacity_blocks=capacity_blocks,
            capacities=corners / self._block_size,
            token_hit=found,
            num_requests=self.num_requests,
            sampled_requests=len(sample),
            rate=self.rate,
        )

    def _begin(self, depth: int) -> None:
        """Tell sessions apart by block number `depth` of their prompts from now on."""
        block_bytes = self._block_size * TOKEN_BYTES
        self._depth = depth
        stop = (depth + 1) * block_bytes
        width = min(block_bytes, UNIT_BYTES)
        self._unit = slice(stop - width, stop)
        self._forget_notes()

    def _forget_notes(self) -> None:
        self._units: list[bytes] = []
        self._sizes: list[int] = []
        self._reused: list[int] = []
        self._scoped: dict[int, int] = {}
        self._read_at = LEARN_FROM if self._learning == LEARN_READS else BATCH

    def _generated_tokens(self) -> int:
        counters = self._counters
        return counters.computed_tokens + counters.hit_tokens - counters.prompt_tokens

    def _read(self) -> None:
        """Turn the notes into samples."""
        if not self._units:
            return
        more = self._noted()
        self.num_requests += len(more)
        if self._learning:
            self._learning -= 1
            depth = _parting(more, self._depth * self._block_size, self._block_size)
            depth //= self._block_size
            if depth > self._depth:
                self._sample = self._all().where(slice(0))
                self._num_sampled = 0
                self._begin(depth)
                return
        self._forget_notes()
        limit = np.uint64(((1 << 64) - 1) >> self._halvings)
        if self._halvings:
            more = more.where(more.unit <= limit)
        self._recent.append(more)
        self._num_sampled += len(more)
        if self._num_sampled > MAX_SAMPLES:
            self._thin()

    def _all(self) -> Sample:
        """Return all samples, joined."""
        if self._recent:
            columns = zip(*map(msgspec.structs.astuple, [self._sample, *self._recent]), strict=True)
            self._sample = Sample(*map(np.concatenate, columns))
            self._recent = []
        return self._sample

    def _thin(self) -> None:
        """Forget every second session until the samples are few enough."""
        sample = self._all()
        while len(sample) > MAX_SAMPLES:
            self._halvings += 1
            limit = np.uint64(((1 << 64) - 1) >> self._halvings)
            sample = sample.where(sample.unit <= limit)
        self._sample = sample
        self._num_sampled = len(sample)

    def _noted(self) -> Sample:
        """Return the notes as columns; generated tokens are spread evenly over the requests."""
        prompt, reused = np.array(self._sizes, np.int64), np.array(self._reused, np.int64)
        size = prompt - 1 - (prompt - 1) % self._block_size
        certain = reused >= 0
        reused = np.abs(reused)
        reused -= reused % self._block_size
        generated = self._generated_tokens()
        between = max(generated - self._generated, 0) / len(size)
        # Prompts that are not computed yet count as less: only the highest count is sure.
        self._generated = max(generated, self._generated)
        touched = np.cumsum(size + int(between))
        begun = touched - size + self._clock
        self._clock += int(touched[-1])
        return Sample(self._numbers(size, begun), prompt, size, reused, certain, begun)

    def _numbers(self, size: Ints, begun: Ints) -> Words:
        """Mix a number from the bytes of each session; a prompt too short is one of its own."""
        blank = bytes(self._unit.stop - self._unit.start)
        short = size <= self._depth * self._block_size
        for index in np.flatnonzero(short).tolist():
            self._units[index] = blank
        words = (
            np.frombuffer(b"".join(self._units), np.uint32).reshape(len(size), -1).astype(np.uint64)
        )
        # Each word is multiplied by an odd number of its own, folded, and all are added.
        words *= ODD * np.arange(1, 2 * words.shape[1], 2, dtype=np.uint64)
        words ^= words >> np.uint64(32)
        mixed: Words = words.sum(axis=1, dtype=np.uint64)
        for index, scope in self._scoped.items():
            mixed[index] ^= np.uint64(scope) << np.uint64(33)
        mixed = np.where(short, ~begun.astype(np.uint64), mixed)
        mixed = (mixed ^ (mixed >> np.uint64(31))) * ODD
        mixed = (mixed ^ (mixed >> np.uint64(29))) * ODD
        return mixed ^ (mixed >> np.uint64(32))


def _parting(sample: Sample, depth: int, block_size: int) -> int:
    """Return after how many tokens sessions part: `depth`, or more where many leave at one place."""
    before, _ = _sessions(sample.unit)
    after = np.flatnonzero((before >= 0) & sample.certain)
    common = np.minimum(sample.size[before[after]], sample.size[after])
    leaving = sample.reused[after]
    leaving = leaving[(leaving + 2 * block_size < common) & (leaving > depth)]
    places, counts = np.unique(leaving, return_counts=True)
    if not len(places) or counts.max() <= DIVERGING * len(sample):
        return depth
    return int(places[counts.argmax()])


def _sessions(names: Any) -> tuple[Ints, Ints]:
    """Return the index of the last equal name before each, or -1, and of the first, int64 [n]."""
    order = np.argsort(names, kind="stable")
    ordered = names[order]
    begins = np.concatenate(([True], ordered[1:] != ordered[:-1]))
    before, first = np.empty(len(names), np.int64), np.empty(len(names), np.int64)
    before[order] = np.where(begins, -1, np.concatenate(([-1], order[:-1])))
    first[order] = order[begins][np.cumsum(begins) - 1]
    return before, first


def _curve(sample: Sample, rate: float) -> tuple[Floats, Floats]:
    """Return the corners of the curve: capacities in tokens, and the hit rate at each."""
    nothing = np.zeros(1), np.zeros(1)
    if not len(sample):
        return nothing
    size, begun = sample.size, sample.begun
    before, first = _sessions(sample.unit)
    again = before >= 0
    shared = sample.reused[first]
    reused = sample.reused.copy()
    common = np.where(again, np.minimum(size, size[before]), reused)
    lost = again & sample.certain & (reused <= shared)
    unsure = ~sample.certain | lost
    sure = again & ~unsure
    reused = np.where(lost, common, np.minimum(reused, size))
    if np.count_nonzero(sure) >= ENOUGH:
        same_text = float(reused[sure].sum()) / float(common[sure].sum())
        reused = np.where(unsure & again, reused * min(same_text, 1.0), reused)
    shared = np.minimum(shared, reused)
    own = np.flatnonzero(again & (reused > shared))
    others = np.flatnonzero(shared)
    alike = _sessions(sample.reused[first])[0][others]
    ended = begun + size
    own_time = begun[own] - ended[before[own]]
    known = alike >= 0
    common_time = np.where(known, begun[others] - ended[alike], 0)
    other = known & (sample.unit[alike] != sample.unit[others])
    common_time = np.where(other, common_time * rate, common_time)
    time = np.maximum(np.concatenate((own_time, common_time)), 0).astype(np.float64)
    width = np.concatenate((reused[own] - shared[own], shared[others])).astype(np.float64)
    if not len(time):
        return nothing
    # A window that holds both requests holds the later one whole, and on average half of
    # the earlier one is behind the middle of its tokens.
    within = time + np.concatenate((size[own], size[others]))
    within += np.concatenate((size[before[own]], np.where(known, size[alike], 0))) / 2
    below = _different(time, within, width, float(size.sum()))
    corners, where = np.unique(np.concatenate((below, below + width)), return_inverse=True)
    turns = np.repeat([1.0, -1.0], len(below))
    slopes = np.cumsum(np.bincount(where, turns))
    found = np.concatenate(([0.0], np.cumsum(slopes[:-1] * np.diff(corners))))
    return corners, found / float(sample.prompt.sum())


def _different(time: Floats, within: Floats, width: Floats, touched: float) -> Floats:
    """Return how many different tokens a window of so many touched ones holds, float64 [n].

    The integral of the share that is not reused within the window.
    """
    order = np.argsort(within)
    times = np.concatenate(([0.0], within[order]))
    fresh = 1 - np.concatenate(([0.0], np.cumsum(width[order]))) / touched
    different = np.concatenate(([0.0], np.cumsum(np.diff(times) * fresh[:-1])))
    return np.interp(time, times, different)
