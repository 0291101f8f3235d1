"""Rows of the cost gate: what requests take with a tier at some distance, beside loading always and computing always."""

from __future__ import annotations

import logging
import time
from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager
from hashlib import sha256
from statistics import median
from urllib.parse import urlsplit

from quire.bench.proxy import DelayingProxy
from quire.bench.tier_rows import Records, check_all
from quire.bench.timing import Progress, Row
from quire.errors import ConfigError
from quire.tiers import StackSettings, TierStack
from quire.tiers.base import Outcome, Tier
from quire.tiers.opening import open_tier

BLOCK_TOKENS = 16
BLOCK_BYTES = 16 << 10
WARM_UPS = 5
REQUESTS = 7
SLACK_S = 0.002
SLACK_SHARE = 0.1

RTT_MS = (0.0, 0.5, 2.0, 8.0, 20.0, 50.0)
LENGTHS = (64, 256, 512, 1024, 2048, 8192)


def computing_s(num_tokens: int) -> float:
    """Return what computing so many tokens is said to take: 10,000 a second, and 4 ms for a call."""
    return num_tokens / 10_000 + 0.004 if num_tokens else 0.0


def rows(
    lines: Sequence[str],
    progress: Progress | None = None,
    *,
    quick: bool = False,
    rtt_ms: Sequence[float] = RTT_MS,
    lengths: Sequence[int] = LENGTHS,
) -> list[Row]:
    """Measure requests of a length over a tier at a distance, one row for each: wall time, medians of `REQUESTS`.

    `lines`  tiers, as `open_tier` takes them; one that is `redis://host:port` is measured at each of `rtt_ms`, behind a
             proxy that delays, any other one where it is
    `quick`  every other round trip and length

    Computing is a sleep. `computing_ms` is without a tier, `loading_ms` of prompts that somebody else has stored without a gate,
    `hit_ms` with it, `miss_ms` of new prompts, the last two after five requests of their kind; it `holds` where neither is more than
    10 % and 2 ms slower than the better of computing and loading. Raises `ConfigError` and `TierError`.
    """
    if not lines or any(line.startswith("host:") for line in lines):
        raise ConfigError(
            "name a tier that keeps what is put when it is closed, as redis://127.0.0.1:6379"
        )
    measured: list[Row] = []
    for line in lines:
        is_far = urlsplit(line).scheme == "redis"
        open_tier(line).close()
        for rtt in rtt_ms[:: 1 + quick] if is_far else (0.0,):
            with _at_distance(line, rtt / 1e3) as near, _said_already():
                for num_tokens in lengths[:: 1 + quick]:
                    if progress is not None:
                        progress(f"{rtt:g} ms, {num_tokens:,} tokens")
                    row = _Cell(near, num_tokens).row()
                    measured.append({"rtt_ms": rtt, "tokens": num_tokens, **row})
    return measured


@contextmanager
def _at_distance(line: str, rtt_s: float) -> Generator[str]:
    """Yield a line for the same tier behind a proxy, where it has a round trip."""
    if not rtt_s:
        yield line
        return
    parts = urlsplit(line)
    with DelayingProxy((parts.hostname or "127.0.0.1", parts.port or 6379), rtt_s) as proxy:
        user, at, _ = parts.netloc.rpartition("@")
        yield parts._replace(netloc=f"{user}{at}127.0.0.1:{proxy.port}").geturl()


@contextmanager
def _said_already() -> Generator[None]:
    """While entered, opening a Redis tier does not warn of its memory again: it is opened five times for a row."""
    log = logging.getLogger("quire.tiers.redis")
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(before)


class _Cell:
    """Requests of one length over one tier."""

    def __init__(self, line: str, num_tokens: int) -> None:
        self._line = line
        self._num_tokens = num_tokens
        self._records = Records(BLOCK_BYTES, max(1, (num_tokens - 1) // BLOCK_TOKENS))
        self._sizes = [len(each) for each in self._records.records]

    def row(self) -> Row:
        """Measure and judge."""
        alone_s = computing_s(self._num_tokens)
        with open_tier(self._line) as tier:
            hits = [self._stored(tier) for _ in range(WARM_UPS + REQUESTS)]
        loading_s, hit_s = self._in_turn(hits, gates=(False, True))
        misses = [[sha256(key).digest() for key in keys] for keys in hits]
        (miss_s,) = self._in_turn(misses, gates=(True,))
        with open_tier(self._line) as tier:
            for keys in hits:
                tier.delete(keys, 60.0)
        best_s = min(alone_s, loading_s)
        return {
            "computing_ms": alone_s * 1e3,
            "loading_ms": loading_s * 1e3,
            "hit_ms": hit_s * 1e3,
            "miss_ms": miss_s * 1e3,
            "holds": "yes" if holds(hit_s, best_s) and holds(miss_s, alone_s) else "no",
        }

    def _stored(self, tier: Tier) -> list[bytes]:
        """Store a prompt's records under new keys."""
        self._records.fresh()
        for part in self._records.batches():
            kept = tier.put(self._records.keys[part], self._records.records[part], 60.0)
            check_all(kept, Outcome.STORED)
        return self._records.keys

    def _in_turn(self, prompts: Sequence[list[bytes]], gates: Sequence[bool]) -> list[float]:
        """Serve prompts over a new stack for each of `gates`, by turns; return the median seconds of each, warm."""
        took_s: list[list[float]] = [[] for _ in gates]
        with ExitStack() as opened:
            stacks = [opened.enter_context(self._stack(gate=gate)) for gate in gates]
            for number, keys in enumerate(prompts):
                for at in range(len(stacks))[:: 1 - 2 * (number % 2)]:
                    took_s[at].append(self._serve(stacks[at], keys))
        return [median(each[WARM_UPS:]) for each in took_s]

    def _stack(self, *, gate: bool) -> TierStack:
        settings = StackSettings(gate=gate, load_timeout_s=60.0, lookup_timeout_s=5.0)
        return TierStack([open_tier(self._line)], settings)

    def _serve(self, stack: TierStack, keys: list[bytes]) -> float:
        begun_s = time.perf_counter()
        saved_s = self._rest_s(0) - self._rest_s(len(keys))
        found = stack.find(keys, saved_s=saved_s, num_bytes=sum(self._sizes))
        chosen = stack.choose(keys, found, self._sizes, self._rest_s)
        came = 0
        if chosen:
            saved_s = self._rest_s(0) - self._rest_s(chosen)
            sizes, places = self._sizes[:chosen], found[:chosen]
            _, buffers = stack.load(keys[:chosen], sizes, found=places, saved_s=saved_s)
            came = buffers.index(None) if None in buffers else chosen
            stack.give_back(buffers)
        time.sleep(self._rest_s(came))
        return time.perf_counter() - begun_s

    def _rest_s(self, num_keys: int) -> float:
        """Return what computing takes behind so many blocks."""
        return computing_s(self._num_tokens - num_keys * BLOCK_TOKENS)


def holds(seconds: float, best_s: float) -> bool:
    """Return whether that is no longer than a request may take where the better way takes so long."""
    return seconds <= max((1 + SLACK_SHARE) * best_s, best_s + SLACK_S)
