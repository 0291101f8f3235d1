"""`TierStack`: several tiers as one, fastest first. What engines talk to."""
# ruff: noqa: ARG002

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, Self, TypeAlias

import msgspec

from quire.errors import ConfigError
from quire.tiers.base import Buffers, Keys, Outcome, Tier, TierStats, check_keys
from quire.tiers.format import new_buffer
from quire.tiers.settings import StackSettings

Mode: TypeAlias = Literal["best_effort", "complete", "timeout"]


class TierReport(msgspec.Struct, frozen=True):
    """One tier of a stack: what it holds, what was asked of it through the stack, and how it does.

    `outcomes`      of loads and stores through the stack, by name, counted per key
    `loaded_bytes`, `stored_bytes`, `load_s`, `store_s`   what went through, and the time of the calls
    `queued_bytes`  records that wait to be written;  `dropped` records that found no room to wait
    `breaker`       "closed", "open" or "trying"
    """

    tier: TierStats
    outcomes: dict[str, int]
    loaded_bytes: int = 0
    stored_bytes: int = 0
    load_s: float = 0.0
    store_s: float = 0.0
    queued_bytes: int = 0
    dropped: int = 0
    breaker: str = "closed"

    @property
    def load_mb_s(self) -> float:
        """Megabytes per second of loads, while they ran."""
        return self.loaded_bytes / 1e6 / self.load_s if self.load_s else 0.0

    @property
    def store_mb_s(self) -> float:
        """Megabytes per second of stores, while they ran."""
        return self.stored_bytes / 1e6 / self.store_s if self.store_s else 0.0


class StackStats(msgspec.Struct, frozen=True):
    """A stack's tiers, fastest first, and what became of the keys that `load` was asked for."""

    tiers: list[TierReport]
    loads: dict[str, int]


class Prefetch:
    """Records on their way into the fastest tier, for a request that waits for its turn.

    `finish` is called when its turn has come. Dropping a prefetch without it leaks nothing.
    """

    def __init__(self, num_keys: int) -> None:
        self.num_keys = num_keys

    @property
    def num_ready(self) -> int:
        """Leading keys that are in the fastest tier now."""
        return 0

    @property
    def done(self) -> bool:
        """Whether nothing more is on its way."""
        return True

    def finish(self) -> int:
        """Stop by the rule of its mode, and return `num_ready`. Waits only in modes that say so."""
        return self.num_ready

    def cancel(self) -> None:
        """Stop at once; what has arrived stays."""


class TierStack:
    """Tiers as one, fastest first. It owns them and closes them.

    Keys are flat lists, a prompt's head first, the parts of one block side by side.
    No call raises because a tier fails, and no call waits longer than its deadline.
    """

    def __init__(self, tiers: Sequence[Tier], settings: StackSettings | None = None) -> None:
        if not tiers:
            raise ConfigError("a stack has at least one tier, got none")
        self.tiers = tuple(tiers)
        self.settings = settings or StackSettings()

    # Reading

    def find(self, keys: Keys, *, contiguous: bool = True) -> list[int]:
        """Return, for each key, the fastest tier that seems to have it, or -1.

        A hint: nothing is read. With `contiguous` only an unbroken head is of use: everything behind
        the first key that no tier has is -1, and slower tiers are not asked for it.
        """
        check_keys(keys)
        found = [-1] * len(keys)
        for level, tier in enumerate(self.tiers):
            missing = [index for index, where in enumerate(found) if where < 0]
            if not missing:
                break
            answers = tier.contains(
                [keys[index] for index in missing], self.settings.lookup_timeout_s
            )
            for index, answer in zip(missing, answers, strict=True):
                if answer:
                    found[index] = level
        if contiguous and -1 in found:
            hole = found.index(-1)
            found[hole:] = [-1] * (len(found) - hole)
        return found

    def choose(
        self,
        keys: Keys,
        found: Sequence[int],
        sizes: Sequence[int],
        recompute_s: Callable[[int], float],
        *,
        step: int = 1,
    ) -> int:
        """Return how many leading keys to load: the least of loading them and computing the rest.

        `found`        what `find` said; nothing is loaded from the first -1 on
        `sizes`        bytes of each key's record
        `recompute_s`  seconds to compute what is behind the first n keys, for n from 0 to all
        `step`         keys per block: the answer is a multiple of it
        """
        whole = found.index(-1) if -1 in found else len(found)
        return whole - whole % step

    def load(
        self,
        keys: Keys,
        buffers: list[memoryview],
        timeout_s: float | None = None,
        *,
        found: Sequence[int] | None = None,
    ) -> list[Outcome]:
        """Fill a buffer for each key, from the fastest tier that gives it. `HIT` is verified.

        `buffers`  of exactly the records' sizes. **The list may change**: where a read was given up but may
                   still write, its buffer is replaced by a fresh one. After the call use the list's items
                   only, not views taken before.
        `found`    what `find` said; saves asking tiers in vain. Keys with -1 are not looked for

        Returns after `timeout_s` (default `load_timeout_s`) at the latest; what has not come is `TIMEOUT`.
        """
        check_keys(keys, buffers)
        outcomes = [Outcome.ABSENT] * len(keys)
        for tier in self.tiers:
            missing = [index for index, what in enumerate(outcomes) if what is not Outcome.HIT]
            if not missing:
                break
            answers = tier.get(
                [keys[index] for index in missing],
                [buffers[index] for index in missing],
                self.settings.load_timeout_s if timeout_s is None else timeout_s,
            )
            for index, answer in zip(missing, answers, strict=True):
                outcomes[index] = answer
        return outcomes

    def prefetch(
        self, keys: Keys, sizes: Sequence[int], num_tokens: int, mode: Mode = "best_effort"
    ) -> Prefetch:
        """Begin to load a waiting request's records into the fastest tier, leased there.

        Returns at once. `sizes` are bytes of each record, `num_tokens` what the keys stand for.
        """
        check_keys(keys)
        return Prefetch(len(keys))

    # Writing

    def wanted(self, keys: Keys) -> list[bool]:
        """Return which keys are worth encoding for `store` now. Asks no tier that could wait."""
        check_keys(keys)
        return [not there for there in self.tiers[0].contains(keys)]

    def store(self, keys: Keys, records: Buffers) -> list[Outcome]:
        """Keep sealed records, which become the stack's: the caller writes to them no more.

        Never waits. `STORED` where a tier has the record or has taken it into its queue, `PRESENT` where all
        that want it have it, `SKIPPED` where nobody took it. Behind a refused head no tail is stored.
        """
        check_keys(keys, records)
        outcomes = [Outcome.SKIPPED] * len(keys)
        for tier in self.tiers:
            outcomes = tier.put(keys, records, self.settings.store_timeout_s)
        return outcomes

    def evicted(self, keys: Keys, records: Buffers) -> list[Outcome]:
        """Keep what the device has evicted, where tiers are written `back`; else as `store`."""
        return self.store(keys, records)

    def used(self, keys: Keys) -> None:
        """Say that a prompt was asked for: counts the use, and keeps its records from ageing."""
        check_keys(keys)
        for tier in self.tiers:
            tier.touch(keys)

    def lease(self, keys: Keys, seconds: float) -> None:
        """Keep these records from making room for so long, as far as tiers decide that."""
        for tier in self.tiers:
            tier.lease(keys, seconds)

    def delete(self, keys: Keys) -> None:
        """Forget these keys in every tier; waits for tiers that answer."""
        for tier in self.tiers:
            tier.delete(keys, self.settings.store_timeout_s)

    # Buffers

    def buffers(self, sizes: Sequence[int]) -> list[memoryview]:
        """Return buffers for records, used before where there are some: cheaper than fresh memory."""
        return [new_buffer(size) for size in sizes]

    def give_back(self, buffers: Sequence[memoryview]) -> None:
        """Return buffers from `buffers` that are of no more use. Those given to `store` come back alone."""

    # Life

    def drain(self, timeout_s: float) -> bool:
        """Wait until everything queued is written; return whether it is."""
        return timeout_s >= 0

    def flush(self) -> None:
        """Drain, then have every tier write what it holds back. Bounded by `close_timeout_s`."""
        for tier in self.tiers:
            tier.flush()

    def close(self) -> None:
        """Write what is queued, within `close_timeout_s`, and close all tiers. Twice does nothing."""
        for tier in self.tiers:
            tier.close()

    def stats(self) -> StackStats:
        """Return what every tier holds and what became of calls."""
        return StackStats([TierReport(tier.stats(), {}) for tier in self.tiers], {})

    def check(self) -> None:
        """Verify the invariants of the stack and of every tier; raises `InvariantError`."""
        for tier in self.tiers:
            tier.check()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<TierStack {' > '.join(tier.name for tier in self.tiers)}>"
