"""Prompts through a cache in the order of their times: what each one finds, and why not more."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from typing import Protocol

import msgspec

from quire_sim.caches.prompts import CachePrompt

REASONS = {
    "": "all that earlier prompts have is found",
    "rounding": "rest of a block or step, and the last token",
    "minimum": "shorter than the provider's minimum",
    "no-breakpoint": "the request has no breakpoint",
    "behind-breakpoint": "its breakpoints stand behind what changed",
    "unmarked": "earlier requests had no breakpoint there",
    "look-back": "the last entry lies too many blocks before the breakpoint",
    "parameters": "parameters that belong to the cached prefix changed",
    "ttl": "the TTL had passed",
    "evicted": "evicted for lack of room",
    "other-machine": "another machine of the provider has it",
    "at-once": "its twin was not computed yet",
    "other-slot": "held by a slot that another request used",
    "other-replica": "another replica has it",
    "other-tenant": "another tenant or API key has it",
}
"""Why a request finds less than earlier prompts have."""

ADVICE = {
    "minimum": "Put more of what stays at the front, or leave short prompts as they are.",
    "no-breakpoint": "Mark the last tool or the end of the system text with cache_control, and the last message.",
    "behind-breakpoint": "Place a breakpoint before what changes.",
    "unmarked": "Place the same breakpoints in every request.",
    "look-back": "Place a second breakpoint at most 20 blocks before the last one.",
    "parameters": "Keep tool_choice, thinking and images the same during a conversation.",
    "ttl": "Ask for a longer TTL, or send a request before it has passed.",
    "other-machine": "Set prompt_cache_key: the same for a conversation, at most some 15 requests a minute each.",
    "evicted": "Give the cache more memory; --curve shows what that finds.",
    "at-once": "Send one request first, and the others once its answer begins.",
    "other-slot": "Give the server more slots, or send a conversation's requests one after the other.",
    "other-tenant": "Caches of tenants are divided: send requests that may share one by one API key.",
    "other-replica": "Send requests with one beginning to one replica: quire route does, by the prompt.",
}
"""Advice for each reason that can be mended."""

WINDOW = 1024
"""Requests among which lines of a log may be out of order of their times."""

DECODE_TOKENS = 64
"""Prompt tokens that take as long as one decode step, where a log tells no time of the first token."""


class CacheHit(msgspec.Struct):
    """The hit of a request in a cache.

    `number`        its place in the log, from 0
    `seen_tokens`   those that an earlier prompt of its model and scope begins with: a cache without limits finds them
    `hit_tokens`    those found
    `why`           one of `REASONS`: why that is less
    `least`         of "minimum", tokens of the shortest beginning that is found; 0: none
    `earlier_row`   the line of the last prompt that has most of it; 0: none
    `replica`       of "other-replica", the one that has it; `own_replica`: the one that was asked
    `merged`        tokens behind those seen that an earlier answer has as text, and not as tokens
    `written`       tokens that a provider writes to its cache, by TTL in seconds
    `cost`          the price of the prompt in input tokens that are not cached; of a server, the tokens it computes
    """

    number: int
    row: int
    prompt_tokens: int
    seen_tokens: int
    hit_tokens: int
    why: str = ""
    least: int = 0
    earlier_row: int = 0
    replica: str = ""
    own_replica: str = ""
    merged: int = 0
    written: dict[int, int] = {}
    cost: float = 0.0


class ServerCache(Protocol):
    """The cache of a server, asked by the requests of a log in the order in which they were sent."""

    def add(self, number: int, prompt: CachePrompt) -> Iterator[CacheHit]:
        """Take the next request; yield the hits of requests that start meanwhile."""
        ...

    def rest(self) -> Iterator[CacheHit]:
        """Yield the hits of the requests that have not started yet."""
        ...


class RequestCache(Protocol):
    """A cache by the calls of each request. Requests are known by their number; times are seconds.

    `has_steps`  the server computes in steps: requests that come during one start together behind it
    """

    has_steps: bool

    def start(self, number: int, prompt: CachePrompt, now: float) -> CacheHit | None:
        """Admit a request and return its hit; None, and nothing changed, if it has to wait for another one's end."""
        ...

    def step(self, now: float) -> None:
        """Say that requests which started are computed from now on."""
        ...

    def computed(self, number: int, now: float) -> None:
        """Say that the prompt of a request is computed: its first token leaves."""
        ...

    def end(self, number: int, now: float) -> None:
        """Say that the answer of a request has ended."""
        ...


def hits(cache: ServerCache, prompts: Iterable[CachePrompt]) -> Iterator[CacheHit]:
    """Yield the hit of each request when it starts.

    Requests with times start at them and stay until their end, so they may overlap; one that has no room waits in
    a queue. Requests without times come one at a time.
    """
    for number, prompt in _in_order(prompts):
        yield from cache.add(number, prompt)
    yield from cache.rest()


def _in_order(prompts: Iterable[CachePrompt]) -> Iterator[tuple[int, CachePrompt]]:
    waiting: list[tuple[float, int, CachePrompt]] = []
    for number, prompt in enumerate(prompts):
        if prompt.time_s is None:
            yield number, prompt
            continue
        heapq.heappush(waiting, (prompt.time_s, number, prompt))
        if len(waiting) > WINDOW:
            yield heapq.heappop(waiting)[1:]
    while waiting:
        yield heapq.heappop(waiting)[1:]


class TimedCache:
    """A `RequestCache` asked by a log: requests start when they were sent, and stay until their answers end."""

    def __init__(self, cache: RequestCache) -> None:
        self.of = cache
        self._now = 0.0
        self._events: list[tuple[float, bool, int]] = []
        self._queue: list[tuple[int, CachePrompt]] = []
        self._computing: set[int] = set()

    def add(self, number: int, prompt: CachePrompt) -> Iterator[CacheHit]:
        """Take the next request; yield the hits of requests that start meanwhile."""
        time_s = prompt.time_s
        while self._events and (time_s is None or self._events[0][0] <= time_s):
            yield from self._next()
        self._now = max(self._now, time_s or 0.0)
        self._queue.append((number, prompt))
        yield from self._admit()

    def rest(self) -> Iterator[CacheHit]:
        """Yield the hits of the requests that have not started yet."""
        while self._events:
            yield from self._next()

    def _next(self) -> Iterator[CacheHit]:
        self._now = self._events[0][0]
        while self._events and self._events[0][0] == self._now:
            _, is_end, number = heapq.heappop(self._events)
            if is_end:
                self.of.end(number, self._now)
            else:
                self.of.computed(number, self._now)
                self._computing.discard(number)
        yield from self._admit()

    def _admit(self) -> Iterator[CacheHit]:
        if not self._queue or (self.of.has_steps and self._computing):
            return
        waiting, self._queue = self._queue, []
        for number, prompt in waiting:
            found = None if self._queue else self.of.start(number, prompt, self._now)
            if found is None:  # later ones wait behind it
                self._queue.append((number, prompt))
                continue
            self._computing.add(number)
            prefill_s, whole_s = answer_times(prompt, found)
            sent_s = self._now if prompt.time_s is None else prompt.time_s
            heapq.heappush(self._events, (max(sent_s + prefill_s, self._now), False, number))
            heapq.heappush(self._events, (max(sent_s + whole_s, self._now), True, number))
            yield found
        self.of.step(self._now)


def answer_times(prompt: CachePrompt, found: CacheHit) -> tuple[float, float]:
    """Return the seconds from sending a request to the first token of its answer, and to the end."""
    whole = prompt.duration_s or prompt.first_s or 0.0
    if len(prompt.output) <= 1:
        return whole, whole
    if prompt.first_s is not None:
        return min(prompt.first_s, whole), whole
    computed = max(prompt.size - found.hit_tokens, 1)
    share = computed / (computed + DECODE_TOKENS * max(len(prompt.output) - 1, 0))
    return whole * share, whole
