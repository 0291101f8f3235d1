"""Replay of requests that overlap: each is in flight for a time, and holds its blocks.

```
arrival ──▶ queue (first come, first served) ──▶ computing ──▶ generating ──▶ closed
             until there is room for all of it    its prompt is not     its prompt is found,
                                                  found yet             output takes blocks
```
A request gets all its blocks when it starts: those of its prompt that are not cached, those
of its output, and one that is never full. So nothing is preempted, and the first of the queue
always starts when those before it have ended. The output of a request cannot be found: a trace
names no blocks of it.
"""

from __future__ import annotations

import heapq
import time
from array import array
from collections import deque
from collections.abc import Iterable, Iterator
from enum import IntEnum
from typing import Any, Protocol

import msgspec
import numpy as np

from quire.core import Sequence
from quire.core.tokens import TOKEN_BYTES, IntArray, key_of
from quire_sim.distributions import check_positive
from quire_sim.foresight import Advice, foresee
from quire_sim.hardware import Roofline
from quire_sim.replay import (
    UNFINISHED,
    HitTally,
    Observer,
    ReplayResult,
    check_capacity,
    manager_of,
    open_request,
    tell_sizes,
)
from quire_sim.trace.rows import Trace, TraceRequest

PREFILL_RATE = 10_000.0
"""Prompt tokens per second that are assumed: about an 8 B model on one large GPU, shared."""

DECODE_RATE = 50.0
"""Output tokens per second of one request that are assumed: what a busy server gives a user."""


class Service(Protocol):
    """Says how long a request computes and generates. Pickled on its way to another process."""

    def times(self, request: TraceRequest, cached_tokens: int) -> tuple[float, float]:
        """Return the seconds until the prompt is computed, and those from there to the end."""
        ...


class Rates(msgspec.Struct, frozen=True):
    """Fixed rates in tokens per second, whatever else is running. Raises `ConfigError`."""

    prefill: float = PREFILL_RATE
    decode: float = DECODE_RATE

    def __post_init__(self) -> None:
        for name in ("prefill", "decode"):
            check_positive(f"the {name} rate in tokens per second", getattr(self, name))

    def times(self, request: TraceRequest, cached_tokens: int) -> tuple[float, float]:
        computed = request.prompt_tokens - cached_tokens
        return computed / self.prefill, request.output_tokens / self.decode


class OnRoofline(msgspec.Struct, frozen=True):
    """The times of a model and an accelerator for a request that runs alone."""

    roofline: Roofline

    def times(self, request: TraceRequest, cached_tokens: int) -> tuple[float, float]:
        line, prompt = self.roofline, request.prompt_tokens
        cached = min(cached_tokens, prompt - 1)
        middle = prompt + request.output_tokens // 2
        decode = request.output_tokens * line.decode_s([middle])
        return line.prefill_s(prompt - cached, cached), decode


class AsRecorded(msgspec.Struct, frozen=True):
    """The durations of the trace, shared out as another service would; its own where none is."""

    otherwise: Service

    def times(self, request: TraceRequest, cached_tokens: int) -> tuple[float, float]:
        prefill, decode = self.otherwise.times(request, cached_tokens)
        duration, total = request.duration_s, prefill + decode
        if duration is None:
            return prefill, decode
        share = prefill / total if total else 1.0
        return duration * share, duration * (1 - share)


class Event(IntEnum):
    """Events, in this order when they happen at the same time; arrivals come last."""

    COMPUTED = 0
    ENDED = 1


class Waiting(msgspec.Struct, eq=False, frozen=True):
    """A request that has arrived: its number in the trace, from 0, and its blocks."""

    number: int
    request: TraceRequest
    blocks: IntArray


class InFlight(msgspec.Struct, eq=False):
    """A request that has started: its sequence, tokens, hint and decode time."""

    seq: Sequence
    tokens: IntArray
    advice: Advice
    decode_s: float
    computing: bool = True


def replay_concurrent(
    trace: Trace,
    capacity_blocks: int,
    policy: str = "lru",
    *,
    service: Service,
    hints: str = "none",
    observers: Iterable[Observer] = (),
) -> ReplayResult:
    """Replay a trace with requests in flight from their arrival on; return the hits.

    `service` says how long each one computes and generates; the rest is as in
    `quire_sim.replay.replay`, which this equals where no request takes any time. Beside the
    result's counts, `measured` has `mean_wait_s`, `p99_wait_s`, `max_wait_s` (from arrival to start, all
    requests), `num_waited`, `peak_active_blocks` and `peak_in_flight`.

    Raises `ConfigError`, and `TraceError` where the trace breaks off.
    """
    started = time.process_time()
    run = _ConcurrentReplay(trace, check_capacity(capacity_blocks), policy, service, hints)
    for request, hit_tokens in run.serve():
        for observe in observers:
            observe(request, hit_tokens)
    evicted = run.manager.kernel.counters.evicted_blocks
    result = run.tally.result(policy, evicted, time.process_time() - started)
    return msgspec.structs.replace(result, measured=run.waits())


class _ConcurrentReplay:
    """The state of one replay: a manager, requests in flight, waiting ones, and the next events."""

    def __init__(
        self, trace: Trace, capacity: int, policy: str, service: Service, hints: str
    ) -> None:
        self._trace = trace
        self._capacity = capacity
        self._service = service
        self._foresight = foresee(trace, hints)
        self._now = 0.0
        self._events: list[tuple[float, Event, int]] = []
        self._flying: dict[int, InFlight] = {}
        self._queue: deque[Waiting] = deque()
        self._waits = array("d")
        self._peak_active = self._peak_flying = 0
        self.tally = HitTally(trace.block_size, capacity)
        self.manager = manager_of(capacity + 1, policy, lambda: self._now)

    def serve(self) -> Iterator[tuple[TraceRequest, int]]:
        """Yield each request when it starts, with the tokens of it that were found."""
        for number, request in enumerate(self._trace):
            while self._events and self._events[0][0] <= request.time_s:
                yield from self._next_event()
            self._now = request.time_s
            self._queue.append(Waiting(number, request, request.blocks))
            yield from self._start_waiting()
        while self._events:
            yield from self._next_event()

    def waits(self) -> dict[str, Any]:
        """Return the waits of requests, and the peaks of blocks in use."""
        waits = np.frombuffer(self._waits) if self._waits else np.zeros(1)
        return {
            "mean_wait_s": float(waits.mean()),
            "p99_wait_s": float(np.quantile(waits, 0.99, method="inverted_cdf")),
            "max_wait_s": float(waits.max()),
            "num_waited": int(np.count_nonzero(waits > 0)),
            "peak_active_blocks": self._peak_active,
            "peak_in_flight": self._peak_flying,
        }

    def _next_event(self) -> Iterator[tuple[TraceRequest, int]]:
        self._now, event, number = heapq.heappop(self._events)
        each = self._flying[number]
        if event is Event.COMPUTED:
            each.computing = False
            if each.seq.num_cached < len(each.tokens) - 1:
                self.manager.commit(each.seq, each.tokens[each.seq.num_cached : -1])
            heapq.heappush(self._events, (self._now + each.decode_s, Event.ENDED, number))
            return
        del self._flying[number]
        self.manager.close(each.seq)
        if each.advice.ends is not None:
            self.manager.end_session(each.advice.ends)
        yield from self._start_waiting()

    def _start_waiting(self) -> Iterator[tuple[TraceRequest, int]]:
        while self._queue:
            first = self._queue[0]
            tokens = np.concatenate((first.blocks[: self._capacity], UNFINISHED))
            num_blocks = self._num_blocks(first.request, len(tokens))
            if not self._has_room(tokens, num_blocks):
                return
            self._queue.popleft()
            yield first.request, self._start(first, tokens, num_blocks)

    def _start(self, waiting: Waiting, tokens: IntArray, num_blocks: int) -> int:
        number, request = waiting.number, waiting.request
        advice = self._foresight(number)
        seq = open_request(self.manager, tokens, advice)
        num_hit = seq.num_cached
        self.manager.reserve(seq, num_blocks - num_hit)
        sizes = request.prompt_tokens, request.output_tokens
        tell_sizes(self.manager, seq, *sizes, self._trace.block_size)
        computing = self._computing(tokens) - num_hit
        hit_tokens = self.tally.count(request, waiting.blocks, num_hit, max(computing, 0))
        prefill_s, decode_s = self._service.times(request, hit_tokens)
        self._flying[number] = InFlight(seq, tokens, advice, decode_s)
        heapq.heappush(self._events, (self._now + prefill_s, Event.COMPUTED, number))
        self._waits.append(self._now - request.time_s)
        self._peak_active = max(self._peak_active, self.manager.num_active)
        self._peak_flying = max(self._peak_flying, len(self._flying))
        return hit_tokens

    def _num_blocks(self, request: TraceRequest, num_prompt: int) -> int:
        """Return the blocks that a request holds at its end, as many as there are at most."""
        total = request.prompt_tokens + request.output_tokens
        return min(max(num_prompt, -(-total // self._trace.block_size)), self._capacity + 1)

    def _has_room(self, tokens: IntArray, num_blocks: int) -> bool:
        """Whether a request can have so many blocks now; those it finds in use, it shares."""
        free = self._capacity + 1 - self.manager.num_active
        return num_blocks <= free or num_blocks - self._shared(tokens) <= free

    def _shared(self, tokens: IntArray) -> int:
        """Return the number of leading blocks of a prompt that others use. Pure."""
        manager = self.manager
        match = manager.kernel.tree.match(
            manager.default_root, key_of(tokens), (len(tokens) - 1) * TOKEN_BYTES
        )
        if match.edge is not None and match.into and match.edge.locks:
            return match.num_blocks
        node = match.node
        while node.parent is not None and not node.locks:
            node = node.parent
        return node.end

    def _computing(self, tokens: IntArray) -> int:
        """Return the number of leading blocks of a prompt that others are computing now."""
        longest = 0
        for each in self._flying.values():
            if each.computing:
                length = min(len(tokens), len(each.tokens)) - 1
                differ = tokens[:length] != each.tokens[:length]
                longest = max(longest, int(differ.argmax()) if differ.any() else length)
        return longest
