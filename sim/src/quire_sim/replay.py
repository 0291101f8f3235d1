"""Replay: a trace through the real cache manager, one request at a time.

One block of the trace is one token of a `CacheManager` with `block_size=1`: ids are chained,
so equal ids mean equal prefixes and the tree is the one that the prompts themselves would
make. Each request is opened, its missing blocks are reserved and committed, and it is closed
before the next one begins; see `quire_sim.concurrent` for requests that overlap.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

import msgspec
import numpy as np

from quire.config import check_count
from quire.core import CacheManager, Sequence, Watcher
from quire.core.terms import NO_HINT
from quire.core.tokens import INT32, IntArray
from quire.foresight import Learned, Trail
from quire_sim.foresight import Advice, foresee
from quire_sim.trace.rows import Trace, TraceRequest

UNFINISHED = np.array([2**31 - 1], dtype=INT32)
"""Stands for the last, unfinished block of a prompt; it is never committed."""

MAX_CAPACITY = 2**31 - 3
"""The largest capacity in blocks: block ids are int32."""

REASONS: tuple[str, ...] = ("cold", "evicted", "computing", "oversized", "partial_block")
"""Why tokens of a trace were not found:

cold           first seen in this request
evicted        seen in an earlier request, and not in the cache any more
computing      being computed by a request in flight (`quire_sim.concurrent`)
oversized      beyond the first `capacity` blocks of a prompt that is larger than the cache
partial_block  after the last block that the trace names
"""

Observer: TypeAlias = Callable[[TraceRequest, int], None]
"""Told of every request, in order, and how many tokens of it were found cached."""


class ReplayResult(msgspec.Struct, frozen=True):
    """The outcome of a replay. Tokens, unless the name says otherwise.

    hit_tokens + sum(missed) == prompt_tokens. `evicted_blocks`: None of the optimum; `seconds` is
    CPU time, reading included.
    """

    policy: str
    capacity_blocks: int
    block_size: int
    num_requests: int
    prompt_tokens: int
    hit_tokens: int
    missed: dict[str, int]
    prompt_blocks: int
    hit_blocks: int
    evicted_blocks: int | None
    seconds: float
    measured: dict[str, Any] = {}

    @property
    def token_hit(self) -> float:
        """Share of all prompt tokens that were found cached, 0 to 1."""
        return self.hit_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    @property
    def block_hit(self) -> float:
        """Share of all named blocks of prompts that were found cached, 0 to 1."""
        return self.hit_blocks / self.prompt_blocks if self.prompt_blocks else 0.0

    def row(self) -> dict[str, Any]:
        """Return the result as a row of a report: plain data, with the ratios."""
        counts: dict[str, Any] = msgspec.to_builtins(self)
        measured = counts.pop("measured")
        head = {name: counts.pop(name) for name in ("policy", "capacity_blocks")}
        ratios = {"token_hit": self.token_hit, "block_hit": self.block_hit}
        return head | ratios | {"evictions": counts.pop("evicted_blocks")} | counts | measured


def replay(
    trace: Trace,
    capacity_blocks: int,
    policy: str = "lru",
    *,
    hints: str = "none",
    observers: Iterable[Observer] = (),
    count_from: int = 0,
) -> ReplayResult:
    """Replay a trace through a manager of `capacity_blocks` blocks and return the hits.

    `hints`       what callers say of the future: a kind of `quire_sim.foresight.foresee`, which
                  reads the trace once more
    `observers`   are told of each request and its tokens found: see `quire_sim.observers`
    `count_from`  requests before this one (from 0) warm the cache up and are not counted

    Memory grows with the capacity, and with the runs of different blocks of the trace. A prompt larger than the capacity keeps its
    first blocks. Raises `ConfigError`, and `TraceError` where the trace breaks off.
    """
    started = time.process_time()
    capacity_blocks = check_capacity(capacity_blocks)
    foresight = foresee(trace, hints)
    now = 0.0
    manager = manager_of(capacity_blocks + 1, policy, lambda: now)
    tally = HitTally(trace.block_size, capacity_blocks)
    evicted_before = 0
    watching = tuple(observers)
    for number, request in enumerate(trace):
        now = request.time_s
        if number == count_from:
            evicted_before = manager.kernel.counters.evicted_blocks
            tally.start_counting()
        blocks = request.blocks
        tokens = np.concatenate((blocks[:capacity_blocks], UNFINISHED))
        advice = foresight(number)
        seq = open_request(manager, tokens, advice)
        num_hit = seq.num_cached
        manager.reserve(seq, len(tokens) - num_hit)
        tell_sizes(manager, seq, request.prompt_tokens, request.output_tokens, trace.block_size)
        if num_hit < len(tokens) - 1:
            manager.commit(seq, tokens[num_hit:-1])
        manager.close(seq)
        if advice.ends is not None:
            manager.end_session(advice.ends)
        hit_tokens = tally.count(request, blocks, num_hit)
        for observe in watching:
            observe(request, hit_tokens)
    evicted = manager.kernel.counters.evicted_blocks - evicted_before
    return tally.result(policy, evicted, time.process_time() - started)


def manager_of(
    num_blocks: int, policy: str, clock: Callable[[], float], watchers: Iterable[Watcher] = ()
) -> CacheManager:
    """Return the manager of a simulation: a block of a trace is a token of it."""
    told = [Trail(), *watchers]
    return CacheManager(num_blocks, 1, policy=policy, sub_block=False, clock=clock, watchers=told)


def open_request(manager: CacheManager, tokens: IntArray, advice: Advice) -> Sequence:
    """Open a request by `tokens`, the ids of its blocks and `UNFINISHED`."""
    store_until = advice.stored_blocks if advice.stored_blocks < len(tokens) - 1 else None
    if store_until is None and advice.hint is NO_HINT:
        return manager.open(tokens)
    return manager.open(tokens, hint=advice.hint, store_until=store_until)


def tell_sizes(
    manager: CacheManager, seq: Sequence, prompt: int, output: int, block_size: int
) -> None:
    """Give a policy that watches requests the true sizes of one that has room, in tokens."""
    learned = manager.kernel.watchers.find(Learned)
    if learned is not None:
        walk = learned.walk_of(seq)
        walk.prompt, walk.output, walk.block_size = prompt, output, block_size


def check_capacity(capacity_blocks: int) -> int:
    """Return a capacity in blocks; raise `ConfigError` if it cannot be one."""
    return check_count("a capacity in blocks", capacity_blocks, limit=MAX_CAPACITY)


class HitTally:
    """Counts the hit tokens of each request, and the misses by reason.

    Ids are dense and numbered by first appearance, so the new blocks of a request are the last
    ones, and their ids go on where those before ended: nothing evicted must be remembered.
    """

    def __init__(self, block_size: int, capacity_blocks: int) -> None:
        self._block_size = block_size
        self._capacity = capacity_blocks
        self._num_unique = 0
        self.start_counting()

    def start_counting(self) -> None:
        """Forget the counts, but not which blocks were seen."""
        self._num_requests = self._prompt_tokens = self._hit_tokens = 0
        self._prompt_blocks = self._hit_blocks = 0
        self._missed = dict.fromkeys(REASONS, 0)

    def count(
        self, request: TraceRequest, blocks: IntArray, num_hit: int, num_computing: int = 0
    ) -> int:
        """Count a request, of whose blocks so many were found; return the tokens found.

        After those found come `num_computing` that another request computes at the moment.
        """
        num_blocks, num_seen = len(blocks), self._num_unique
        if num_blocks:
            self._num_unique = max(num_seen, blocks.item(-1) + 1)
        num_seen += num_blocks - self._num_unique
        return self.add(request.prompt_tokens, num_blocks, num_seen, num_hit, num_computing)

    def add(
        self,
        num_tokens: int,
        num_blocks: int,
        num_seen: int,
        num_hit: int,
        num_computing: int = 0,
        *,
        end_tokens: int = 0,
    ) -> int:
        """Count a request of so many blocks, of which so many were in an earlier one; return the tokens found.

        `end_tokens`  of a last block that counts as found beside the others
        """
        size, missed = self._block_size, self._missed
        held = min(num_blocks, self._capacity)
        hit_end = min(num_hit * size, num_tokens) + end_tokens
        seen_end = min(min(held, num_seen) * size, num_tokens)
        computing_end = min(hit_end + num_computing * size, seen_end)
        held_end = min(held * size, num_tokens)
        blocks_end = min(num_blocks * size, num_tokens)
        missed["computing"] += computing_end - hit_end
        missed["evicted"] += seen_end - computing_end
        missed["cold"] += held_end - seen_end
        missed["oversized"] += blocks_end - held_end
        missed["partial_block"] += num_tokens - blocks_end
        self._num_requests += 1
        self._prompt_tokens += num_tokens
        self._hit_tokens += hit_end
        self._prompt_blocks += num_blocks
        self._hit_blocks += num_hit + (end_tokens > 0)
        return hit_end

    def result(self, policy: str, evicted_blocks: int | None, seconds: float) -> ReplayResult:
        """Return the counts as a result."""
        return ReplayResult(
            policy=policy,
            capacity_blocks=self._capacity,
            block_size=self._block_size,
            num_requests=self._num_requests,
            prompt_tokens=self._prompt_tokens,
            hit_tokens=self._hit_tokens,
            missed=dict(self._missed),
            prompt_blocks=self._prompt_blocks,
            hit_blocks=self._hit_blocks,
            evicted_blocks=evicted_blocks,
            seconds=seconds,
        )
