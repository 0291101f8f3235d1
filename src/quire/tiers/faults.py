"""`Faulty`: any tier with faults, drawn from a seed. For tests of engines, stacks and tiers, yours as well.

    tier = Faulty(Host("1GiB"), FaultPlan(latency_s=0.01, hangs=0.01, corruption=0.001), seed=7)
    ...
    tier.plan = FaultPlan()     # all is well again

The same calls in the same order meet the same faults.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from random import Random

import msgspec

from quire.errors import ConfigError, TierError
from quire.tiers.base import Answers, Buffers, Keys, Outcome, Tier
from quire.tiers.purging import Purge
from quire.tiers.wrapped import Wrapped, settle_as_within


class FaultPlan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Faults and their chances, from 0 to 1.

    Of each call:
    `latency_s`    what it takes on average, exponential; beyond its timeout it times out
    `bandwidth`    bytes per second that get and put take on top; 0 for none
    `errors`       chance that it fails, as after a refused connection
    `hangs`        chance that it does not return for `hang_s`, whatever its timeout, and then does its work

    Of each record:
    `losses`       chance that a put is acknowledged and nothing kept
    `full`         chance that a put finds no room
    `corruption`   chance that a read has flipped bits
    `short_reads`  chance that a read ends early
    `false_hits`   chance that a key that is not there is said to be

    `crash_at`     the tier dies while it writes its n-th record from now, which is torn; every call fails
                   until `Faulty.revive`. 0 for never
    """

    latency_s: float = 0.0
    bandwidth: float = 0.0
    errors: float = 0.0
    hangs: float = 0.0
    hang_s: float = 60.0
    losses: float = 0.0
    full: float = 0.0
    corruption: float = 0.0
    short_reads: float = 0.0
    false_hits: float = 0.0
    crash_at: int = 0

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value = getattr(self, name)
            most = 1.0 if name in _CHANCES else float("inf")
            if not 0 <= value <= most:
                raise ConfigError(f"{name} is from 0 to {most:g}, got {value}")


_CHANCES = ("errors", "hangs", "losses", "full", "corruption", "short_reads", "false_hits")


class Faulty(Wrapped):
    """A tier with the faults of `plan`, which may be changed at any time.

    `met` counts the faults that happened, by the names of the plan's fields. Closing it closes the tier within.
    """

    def __init__(
        self,
        tier: Tier,
        plan: FaultPlan | None = None,
        seed: int = 0,
        *,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        super().__init__(tier)
        self.plan = plan or FaultPlan()
        self.met: Counter[str] = Counter()
        self.is_crashed = False
        self._random = Random(seed)  # noqa: S311 - to repeat a history
        self._sleep = sleep
        self._num_written = 0
        self._torn: dict[bytes, None] = {}

    def revive(self) -> None:
        """Start a crashed tier again; torn records are found torn. Plans with a crash count anew."""
        self.is_crashed = False
        self._num_written = 0

    def _get(self, keys: Keys, buffers: Buffers, timeout_s: float, answers: Answers) -> None:
        self._begin(timeout_s, sum(map(len, buffers)))
        outcomes = self.tier.get(keys, buffers, timeout_s, answers.came)
        for index, (key, buffer) in enumerate(zip(keys, buffers, strict=True)):
            if outcomes[index] is Outcome.HIT:
                self._spoil(key, buffer)
            settle_as_within(answers, index, outcomes[index])

    def _spoil(self, key: bytes, buffer: memoryview) -> None:
        """Damage what was read, as it is drawn."""
        if key in self._torn or self._draw("short_reads", self.plan.short_reads):
            whole = self._random.randrange(len(buffer))
            buffer[whole:] = bytes(len(buffer) - whole)
        if self._draw("corruption", self.plan.corruption):
            for _ in range(self._random.randrange(1, 9)):
                at = self._random.randrange(len(buffer))
                buffer[at] ^= 1 << self._random.randrange(8)

    def _put(self, keys: Keys, records: Buffers, timeout_s: float, done: list[Outcome]) -> None:
        self._begin(timeout_s, sum(map(len, records)))
        for index, (key, record) in enumerate(zip(keys, records, strict=True)):
            self._num_written += 1
            if self.plan.crash_at and self._num_written >= self.plan.crash_at:
                self.met["crash_at"] += 1
                self.is_crashed = True
                self.tier.put([key], [record], timeout_s)
                self._torn[key] = None
                raise TierError(
                    f"{self.name} crashed while it wrote its {self._num_written}. record"
                )
            if self._draw("full", self.plan.full):
                done[index] = Outcome.FULL
            elif self._draw("losses", self.plan.losses):
                done[index] = Outcome.STORED
            else:
                done[index] = self.tier.put([key], [record], timeout_s)[0]
                if done[index] is Outcome.STORED:
                    self._torn.pop(key, None)

    def _contains(self, keys: Keys, timeout_s: float) -> list[bool]:
        self._begin(timeout_s, 0)
        there = self.tier.contains(keys, timeout_s)
        return [is_there or self._draw("false_hits", self.plan.false_hits) for is_there in there]

    def _delete(self, keys: Keys, timeout_s: float) -> None:
        self._begin(timeout_s, 0)
        self.tier.delete(keys, timeout_s)
        for key in keys:
            self._torn.pop(key, None)

    def _purge(self, purge: Purge) -> None:
        self._begin(purge.left_s, 0)
        super()._purge(purge)
        self._torn = {key: None for key in self._torn if not purge.owns(key)}

    def _begin(self, timeout_s: float, num_bytes: int) -> None:
        """Meet the faults of a call before it does anything."""
        plan = self.plan
        if self.is_crashed:
            raise TierError(f"{self.name} has crashed; revive it")
        if self._draw("hangs", plan.hangs):
            self._sleep(plan.hang_s)
        if self._draw("errors", plan.errors):
            raise TierError(f"{self.name} was told to fail")
        took_s = self._random.expovariate(1 / plan.latency_s) if plan.latency_s else 0.0
        if plan.bandwidth:
            took_s += num_bytes / plan.bandwidth
        if took_s:
            self._sleep(min(took_s, timeout_s))
        if took_s > timeout_s:
            self.met["latency_s"] += 1
            raise TimeoutError

    def _draw(self, fault: str, chance: float) -> bool:
        happens = chance > 0 and self._random.random() < chance
        if happens:
            self.met[fault] += 1
        return happens
