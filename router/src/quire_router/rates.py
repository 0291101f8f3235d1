"""Limits by key: requests and tokens a minute, requests at once, and requests that wait."""

from __future__ import annotations

import asyncio
import re
from collections import Counter, deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from itertools import islice
from math import ceil
from pathlib import Path

import msgspec

from quire.config import read_bytes
from quire.errors import ConfigError, InvariantError
from quire.web.errors import ApiError
from quire.web.keys import ApiKeys
from quire_router.usage import BYTES_PER_TOKEN, AnswerUsage

EACH = "*"
"""The name of the limits that each key has without a line of its own."""

MINUTE_S = 60.0

QUEUE_S = 60.0
"""Seconds for which a request waits for its key's others."""

MOST_KEYS = 4096
"""Keys that are told apart at once; where more are busy, the others share one."""

NUM_LOOKED = 8
"""Kept keys that are looked at for one that is idle, when another comes."""

_OTHERS = "*others"
"""The key that all share for which there is no room."""


class KeyLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of one key, of which each may be left out.

    `rpm`, `tpm`  requests and tokens a minute, which may also come at once
    `running`     requests at once
    `waiting`     requests beside, which wait until one of those ends
    """

    rpm: int | None = None
    tpm: int | None = None
    running: int | None = None
    waiting: int = 0


class TokenBucket:
    """A bucket of `size` tokens that a minute fills again; it may be overdrawn."""

    def __init__(self, size: int, now_s: float) -> None:
        self._size, self._level, self._since_s = size, float(size), now_s

    def wait_s(self, now_s: float, count: int) -> float:
        """Return the seconds until it has `count` tokens, or is full where it is smaller; 0: it has them."""
        filled = (now_s - self._since_s) * self._size / MINUTE_S
        self._level, self._since_s = min(self._level + filled, self._size), now_s
        return max(min(count, self._size) - self._level, 0.0) * MINUTE_S / self._size

    def take(self, count: int) -> None:
        """Take tokens; fewer than 0 are given back."""
        self._level = min(self._level - count, self._size)


class _Key:
    """One key's buckets, its requests that run, and those that wait: first come, first served."""

    def __init__(self, limits: KeyLimits, now_s: float) -> None:
        self.limits = limits
        sizes = {"rpm": limits.rpm, "tpm": limits.tpm}
        self.buckets = {name: TokenBucket(size, now_s) for name, size in sizes.items() if size}
        self.num_running = 0
        self.waiting = deque[asyncio.Future[None]]()

    def is_idle(self, now_s: float) -> bool:
        """Whether it is as it was at first, so that nothing is lost with it."""
        is_full = not any(each.wait_s(now_s, 1 << 62) for each in self.buckets.values())
        return is_full and not self.num_running and not self.waiting

    def take(self, **counts: int) -> None:
        """Take requests and tokens from the buckets that it has."""
        for name, count in counts.items():
            if name in self.buckets:
                self.buckets[name].take(count)

    def leave(self) -> None:
        """End a request: the next one that waits runs."""
        while self.waiting:
            turn = self.waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                return
        self.num_running -= 1


class RateLimits:
    """Limits of keys, by which requests run, wait, or are refused with 429.

    `by_name`  limits by tenant; those of `EACH` hold for every other tenant, or for every key where there are no tenants
    `clock`    seconds that never step back
    `refused`  requests refused, by the name of the limits and the limit

    A request takes one of `rpm`, and of `tpm` the tokens of its prompt, estimated from its bytes. Once its answer has
    ended, what its server counted is settled, and the bucket may be overdrawn. At most `MOST_KEYS` keys are kept.
    """

    def __init__(self, by_name: Mapping[str, KeyLimits], clock: Callable[[], float]) -> None:
        self.by_name, self.refused = by_name, Counter[tuple[str, str]]()
        self._clock = clock
        self._keys: dict[str, _Key] = {}

    async def begin(self, name: str, num_bytes: int) -> Callable[[AnswerUsage], None]:
        """Admit a request of a key, whose body has `num_bytes`; waits while others of the key run.

        Return the function to be called once at its end, with its usage. Raises `ApiError` 429.
        """
        label = name if name in self.by_name else EACH
        limits = self.by_name.get(label)
        if limits is None:
            return _nothing
        now_s, prompt = self._clock(), num_bytes // BYTES_PER_TOKEN
        key = self._key(name, limits, now_s)
        for limit, bucket in key.buckets.items():
            if wait_s := bucket.wait_s(now_s, 1 if limit == "rpm" else prompt):
                most = limits.rpm if limit == "rpm" else limits.tpm
                what = "requests" if limit == "rpm" else "tokens"
                raise self._refusal(label, limit, f"{most} {what} a minute", wait_s)
        most = limits.running
        must_wait = most is not None and key.num_running >= most
        if must_wait and len(key.waiting) >= limits.waiting:
            raise self._refusal(label, "running", f"{most} requests at once, and {limits.waiting} waiting", 1.0)  # fmt: skip
        key.take(rpm=1, tpm=prompt)
        if must_wait:
            try:
                await self._turn(key, label)
            except BaseException:
                key.take(rpm=-1, tpm=-prompt)  # it never ran
                raise
        else:
            key.num_running += 1

        def end(usage: AnswerUsage) -> None:
            key.leave()
            key.take(tpm=usage.tokens(num_bytes) - prompt)

        return end

    def check(self) -> None:
        """Raise `InvariantError` unless keys run at most what they may, and others wait for that alone."""
        for name, key in self._keys.items():
            most, num_waiting = key.limits.running, len(key.waiting)
            is_full = most is not None and key.num_running == most
            is_right = key.num_running >= 0 and (most is None or key.num_running <= most)
            if not is_right or num_waiting > key.limits.waiting or (num_waiting and not is_full):
                raise InvariantError(f"{name}: {key.num_running} run, {num_waiting} wait")
        if len(self._keys) > MOST_KEYS + 1 + len(self.by_name):
            raise InvariantError(f"{len(self._keys)} keys are kept")

    def _key(self, name: str, limits: KeyLimits, now_s: float) -> _Key:
        """Return the state of a key; that of all others where too many are busy."""
        is_new = name not in self._keys and name not in self.by_name
        if is_new and len(self._keys) >= MOST_KEYS:
            for other in [*islice(self._keys, NUM_LOOKED)]:
                state = self._keys.pop(other)
                if not state.is_idle(now_s):
                    self._keys[other] = state  # behind the others
            if len(self._keys) >= MOST_KEYS:
                name = _OTHERS
        if name not in self._keys:
            self._keys[name] = _Key(limits, now_s)
        return self._keys[name]

    async def _turn(self, key: _Key, label: str) -> None:
        """Wait for the end of another request."""
        turn = asyncio.get_running_loop().create_future()
        key.waiting.append(turn)
        try:
            async with asyncio.timeout(QUEUE_S):
                await turn
        except BaseException as error:
            if turn.done() and not turn.cancelled():
                key.leave()
            else:
                with suppress(ValueError):
                    key.waiting.remove(turn)
            if isinstance(error, TimeoutError):
                said = f"{key.limits.running} requests at once, and waiting {QUEUE_S:g} s for one of them"
                raise self._refusal(label, "waiting", said, 1.0) from None
            raise

    def _refusal(self, label: str, limit: str, said: str, wait_s: float) -> ApiError:
        self.refused[label, limit] += 1
        seconds = ceil(wait_s)
        return ApiError(
            429,
            f"the limit of this key is {said}: come back in {seconds} s",
            code="rate_limit_exceeded",
            headers={"Retry-After": str(seconds)},
        )


def read_limits(file: Path, keys: ApiKeys) -> dict[str, KeyLimits]:
    """Return limits by name. Raises `ConfigError` with the line.

    A line of the file is `NAME rpm=N tpm=N running=N waiting=N`, without those that are not limited.
    """
    found: dict[str, KeyLimits] = {}
    for number, line in enumerate(read_bytes(file).decode("utf-8", "replace").splitlines(), 1):
        name, *words = line.partition("#")[0].split() or ("",)
        if not name:
            continue
        given = [each for word in words if (each := _LIMIT.fullmatch(word))]
        limits = {each[1]: int(each[2]) for each in given}
        where = f"line {number} of {str(file)!r}"
        if not words or len(limits) < len(words):
            raise ConfigError(
                f"{where} is {line[:80]!r}; a line is NAME rpm=N tpm=N running=N waiting=N, each limit once and above 0"
            )
        if name in found:
            raise ConfigError(f"{where} has {name!r} again; a name has one line")
        if name != EACH and name not in keys.names:
            known = ", ".join(sorted(keys.names)) or "none"
            raise ConfigError(f"{where}: no key has the name {name!r}; they are {known}, and {EACH} is each other")  # fmt: skip
        if "waiting" in limits and "running" not in limits:
            raise ConfigError(f"{where}: requests wait for others that run; give running=N too")
        found[name] = KeyLimits(**limits)
    if not found:
        raise ConfigError(
            f"{str(file)!r} has no limit; a line is NAME rpm=N, and {EACH} is each key"
        )
    return found


_LIMIT = re.compile(r"(rpm|tpm|running|waiting)=0*([1-9]\d{0,8})")


def _nothing(_: AnswerUsage) -> None:
    """End a request without limits."""
