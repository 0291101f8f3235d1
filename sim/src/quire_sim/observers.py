"""Observers of a replay: hits over time, shared prefixes, prefill that is saved.

Observers are handed to `replay(observers=...)` and told of every counted request. They are
called with (request, tokens found), and keep what they saw; `found` gives it as plain data.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import Any

import msgspec
import numpy as np

from quire_sim.columns import Column
from quire_sim.hardware import Roofline
from quire_sim.trace.rows import TraceRequest, end_id

MAX_PREFIXES = 12
"""Stretches that `SharedPrefixes` gives."""


class Bucket(msgspec.Struct, frozen=True):
    """Requests that arrived in [start_s, stop_s) of the trace."""

    start_s: float
    stop_s: float
    num_requests: int
    prompt_tokens: int
    hit_tokens: int

    @property
    def token_hit(self) -> float | None:
        """Share of their prompt tokens that were found; None without requests."""
        return self.hit_tokens / self.prompt_tokens if self.prompt_tokens else None


class HitsOverTime:
    """Tokens found, in at most `max_buckets` stretches of time of equal length.

    The length doubles whenever the trace outgrows the buckets, so memory does not grow.
    """

    def __init__(self, max_buckets: int = 120, width_s: float = 1.0) -> None:
        self._max_buckets = max_buckets + max_buckets % 2
        self._width_s = width_s
        self._counts = np.zeros((self._max_buckets, 3), dtype=np.int64)
        self._used = 0

    def __call__(self, request: TraceRequest, hit_tokens: int) -> None:
        while request.time_s >= self._max_buckets * self._width_s:
            half = self._max_buckets // 2
            self._counts[:half] = self._counts.reshape(half, 2, 3).sum(axis=1)
            self._counts[half:] = 0
            self._width_s *= 2
            self._used = -(-self._used // 2)
        at = int(request.time_s / self._width_s)
        self._counts[at] += (1, request.prompt_tokens, hit_tokens)
        self._used = max(self._used, at + 1)

    @property
    def buckets(self) -> list[Bucket]:
        """The stretches from the start of the trace to its last request, empty ones too."""
        width = self._width_s
        return [
            Bucket(at * width, (at + 1) * width, *counts)
            for at, counts in enumerate(self._counts[: self._used].tolist())
        ]

    def found(self) -> dict[str, Any]:
        """Return the token hit of each stretch: (start_s, stop_s, 0 to 1 or None)."""
        return {"over_time": [(each.start_s, each.stop_s, each.token_hit) for each in self.buckets]}


class SharedPrefix(msgspec.Struct, frozen=True):
    """A stretch of a prompt that was found as a whole: tokens [start, stop), `num_hits` times.

    `row` is the first request of the trace that had all of it. Stretches do not overlap: together,
    their `hit_tokens` are all tokens found, a last block that is not full counted as one that is.
    """

    row: int
    start: int
    stop: int
    num_hits: int
    hit_tokens: int


class _Stretch(msgspec.Struct):
    """A stretch in blocks: from `depth` on, with the id of its last block."""

    depth: int
    num_hits: int
    length: int = 0
    tail: int = -1


class SharedPrefixes:
    """Stretches of prompts that were found, counted: twelve bytes per distinct block."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._hits = Column(0, np.int32)
        self._parent = Column(-1, np.int32)
        self._depth = Column(0, np.int32)
        self._rows: list[tuple[int, int]] = []
        self._num_unique = 0

    def __call__(self, request: TraceRequest, hit_tokens: int) -> None:
        hit_blocks = -(-hit_tokens // self._block_size)
        left = hit_blocks
        for first, length in request.runs.tolist():
            if left <= 0:
                break
            self._hits.upto(first + length)[first : first + min(length, left)] += 1
            left -= length
        self._note_new(request)

    def top(self, limit: int = 20) -> list[SharedPrefix]:
        """Return the stretches that gave most tokens, most first."""
        hits, parent, depth = (
            column.upto(self._num_unique)[: self._num_unique]
            for column in (self._hits, self._parent, self._depth)
        )
        found = np.flatnonzero(hits > 0)
        if not len(found):
            return []
        above = parent[found]
        alike = (above >= 0) & (hits[above] == hits[found])
        stretch_of = np.full(len(hits), -1, dtype=np.int64)
        stretches: list[_Stretch] = []
        breaks = np.flatnonzero(~(alike & (above == found - 1) & (np.diff(found, prepend=-2) == 1)))
        for start, stop in zip(breaks, [*breaks[1:], len(found)], strict=True):
            number = int(stretch_of[above[start]]) if alike[start] else len(stretches)
            if number == len(stretches):
                head = int(found[start])
                stretches.append(_Stretch(int(depth[head]), int(hits[head])))
            stretches[number].length += int(stop - start)
            stretches[number].tail = int(found[stop - 1])
            stretch_of[found[start:stop]] = number
        stretches.sort(key=lambda each: -each.num_hits * each.length)
        return [self._shared(each) for each in stretches[:limit]]

    def found(self) -> dict[str, Any]:
        """Return the stretches that gave most tokens."""
        return {"prefixes": self.top(MAX_PREFIXES)}

    def _shared(self, stretch: _Stretch) -> SharedPrefix:
        start, stop = stretch.depth, stretch.depth + stretch.length
        tokens = stretch.num_hits * stretch.length * self._block_size
        _, row = self._rows[bisect_right(self._rows, stretch.tail, key=lambda pair: pair[0]) - 1]
        return SharedPrefix(
            row, start * self._block_size, stop * self._block_size, stretch.num_hits, tokens
        )

    def _note_new(self, request: TraceRequest) -> None:
        end = end_id(request)
        new = end - self._num_unique
        if new <= 0:
            return
        blocks = request.blocks
        at = len(blocks) - new
        self._parent.upto(end)[blocks[max(at, 1) :]] = blocks[max(at, 1) - 1 : -1]
        self._depth.upto(end)[blocks[at:]] = np.arange(at, len(blocks))
        self._rows.append((self._num_unique, request.row))
        self._num_unique = end


class Savings:
    """Adds up the prefill cost of the hit tokens of each request, each computed alone.

    `prefill_flops`, `prefill_s`              without a cache
    `saved_prefill_flops`, `saved_prefill_s`  of these, what is not computed thanks to hits

    The last token of a prompt is always computed, as an engine must.
    """

    def __init__(self, roofline: Roofline) -> None:
        self._roofline = roofline
        self._flops = self._saved_flops = 0.0
        self._s = self._saved_s = 0.0

    def __call__(self, request: TraceRequest, hit_tokens: int) -> None:
        flops, seconds = self._cost(request.prompt_tokens, 0)
        self._flops += flops
        self._s += seconds
        cached = min(hit_tokens, request.prompt_tokens - 1)
        if cached > 0:
            rest_flops, rest_s = self._cost(request.prompt_tokens - cached, cached)
            self._saved_flops += flops - rest_flops
            self._saved_s += seconds - rest_s

    def found(self) -> dict[str, Any]:
        return {
            "prefill_flops": self._flops,
            "saved_prefill_flops": self._saved_flops,
            "prefill_s": self._s,
            "saved_prefill_s": self._saved_s,
        }

    def _cost(self, new_tokens: int, cached_tokens: int) -> tuple[float, float]:
        line = self._roofline
        flops = line.product_flops(new_tokens) + line.attention_flops(new_tokens, cached_tokens)
        return flops, line.prefill_s(new_tokens, cached_tokens)
