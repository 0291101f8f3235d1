"""Lookups: which tier has what, asked within a deadline; tiers that are not used are measured in the background."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from quire.tiers.base import Keys, Outcome, Tier
from quire.tiers.stack.lanes import Deadline, LaneJob, TierLane
from quire.tiers.stack.level import BreakerState, Level, Shared, guarded

T = TypeVar("T")

FIRST_WINDOW = 64
FIRST_WINDOW_HERE = 8
"""Keys in the first question to a tier that others write to, and to one that answers at once; each
next one asks for four times as many."""

SAMPLE_KEYS = 4
_CHUNKS = (4.0, 0.25, 1.0)
"""How much is loaded to measure a tier, in turn, so that latency and bandwidth show; in chunks."""

PROBE_S = 10.0
"""How often a tier that is not used is measured in the background, or asked although that does not pay."""

PROBE_SHARE = 0.05
"""The most of a tier's bandwidth, as far as it is known, that measuring it may take."""


class LaneCall(Generic[T]):
    """A call in a lane; `result` is `None` until it returned, and where it was dropped or raised."""

    def __init__(self, shared: Shared, lane: TierLane, function: Callable[[], T]) -> None:
        self.result: T | None = None
        self._done = shared.lanes.signal()
        self._function = function
        lane.submit(self, LaneJob(self._run, self._done.set))

    def wait(self, timeout_s: float) -> bool:
        """Return whether it has returned or was dropped, now or within so long."""
        return self._done.wait(timeout_s)

    def _run(self) -> None:
        try:
            self.result = self._function()
        except Exception:  # noqa: BLE001 - a tier that raises has not answered
            self.result = None
        self._done.set()


class _Habits:
    """The recent answers of one tier.

    `lookups_s`    what the last two lookups took; the shorter counts, so that one hiccup does not
    `asked_at`, `probed_at`  when it was last asked what it has, and measured by a load
    `sample`       a few keys that it has, and the sizes of their records, to try it with
    `num_trials`   trials that have not come back
    """

    def __init__(self) -> None:
        self.lookups_s = (0.0, 0.0)
        self.asked_at = self.probed_at = -math.inf
        self.is_probed = False
        self.num_trials = 0
        self.sample: tuple[list[bytes], list[int]] = ([], [])


class TierLookup:
    """Finds out which tier has what, and whether tiers that are out of service answer again."""

    def __init__(self, shared: Shared, levels: Sequence[Level]) -> None:
        self._shared = shared
        self._levels = levels
        self._habits = [_Habits() for _ in levels]
        self._num_probes = 0

    def find(
        self, keys: Keys, *, contiguous: bool, patience_s: float, gains_s: Sequence[float]
    ) -> list[int]:
        """Return the fastest tier that seems to have each key; see `TierStack.find`."""
        found = [-1] * len(keys)
        missing = list(range(len(keys)))
        deadline = Deadline(self._shared.lanes, self._shared.settings.lookup_timeout_s)
        for level in self._levels:
            if not missing:
                break
            with self._shared.lock:
                if not level.reading.allows:
                    continue
                usual_s = min(self._habits[level.index].lookups_s)
            if usual_s > patience_s:
                self._look_again(level, keys[:1])
                continue
            if gains_s and usual_s > gains_s[level.index] and not self._is_due(level):
                continue
            for window in _windows(level, missing, contiguous=contiguous):
                wanted = keys if len(window) == len(keys) else [keys[at] for at in window]
                answers = self._ask(level, wanted, deadline)
                for at, is_there in zip(window, answers, strict=False):
                    if is_there:
                        found[at] = level.index
                if not answers or (contiguous and not all(answers)):
                    break
            missing = [at for at in missing if found[at] < 0]
        if contiguous and missing:
            found[missing[0] :] = [-1] * (len(found) - missing[0])
        return found

    def _is_due(self, level: Level) -> bool:
        """Return whether to ask a tier even though that will not pay: it may have become faster."""
        asked_at = self._habits[level.index].asked_at
        return level.answers_at_once or self._shared.lanes.now() - asked_at >= PROBE_S

    def _ask(self, level: Level, keys: Keys, deadline: Deadline) -> list[bool]:
        """Return the keys that a tier has, bool per key; nothing where it does not say so in time."""
        shared, left_s = self._shared, deadline.left_s
        if any(other.reading.allows for other in self._levels[level.index + 1 :]):
            left_s /= 2
        left_s = min(left_s, level.settings.lookup_timeout_s or left_s)
        began_s = shared.lanes.now()
        if level.answers_at_once:
            answer = level.tier.lookup(keys, left_s)
        else:
            call = LaneCall(shared, level.loads, lambda: level.tier.lookup(keys, left_s))
            if not call.wait(left_s):
                with shared.lock:
                    self._took(level, began_s)
                    level.meter.loads["lookup_timeout"] += 1
                    level.given_up("lookup", left_s)
                return []
            answer = call.result
        there, failures = answer or ([], [Outcome.ERROR])
        with shared.lock:
            self._took(level, began_s)
            level.answered("lookup", failures)
            if failures:
                level.meter.loads[f"lookup_{failures[0]}"] += 1
                return []
            if not level.answers_at_once:
                had = [key for key, is_there in zip(keys, there, strict=True) if is_there]
                shared.whereabouts.mark(had, level.index)
                lost = [key for key, is_there in zip(keys, there, strict=True) if not is_there]
                shared.whereabouts.clear(lost, level.index)
        return there

    def _took(self, level: Level, began_s: float) -> None:
        """Note what a lookup took. The lock is held."""
        habits = self._habits[level.index]
        habits.asked_at = self._shared.lanes.now()
        habits.lookups_s = (habits.lookups_s[1], max(0.0, habits.asked_at - began_s))

    def in_all_lanes(self, function: Callable[[Tier], None], timeout_s: float) -> None:
        """Call a function of every tier behind what waits to be written to it; wait so long for all together."""
        if self._shared.is_closed:
            return
        deadline = Deadline(self._shared.lanes, timeout_s)
        calls = [
            LaneCall(self._shared, level.stores, lambda tier=level.tier: function(tier))
            for level in self._levels
        ]
        for call in calls:
            call.wait(deadline.left_s)

    # Trials and probes: in the background, so that no request pays for them

    def remember(self, keys: Keys, found: Sequence[int], sizes: Sequence[int]) -> None:
        """Keep a few keys that each tier has, to try it with."""
        for level in self._levels:
            if level.index in found:
                first = found.index(level.index)
                at = [i for i in range(first, min(first + SAMPLE_KEYS, len(found)))
                      if found[i] == level.index]  # fmt: skip
                self._habits[level.index].sample = [keys[i] for i in at], [sizes[i] for i in at]

    def try_again(self, keys: Keys) -> None:
        """Try tiers that are out of service and whose cool-down is over, without waiting for them."""
        for level in self._levels:
            if level.reading.state is BreakerState.CLOSED:
                continue
            habits = self._habits[level.index]
            with self._shared.lock:
                # Where every thread hangs, trials would only queue up.
                can_run = habits.num_trials < level.loads.num_threads
                is_due = can_run and level.reading.take_trial()
                habits.num_trials += is_due
            if is_due:

                def done(habits: _Habits = habits) -> None:
                    habits.num_trials -= 1

                wanted, sizes = habits.sample
                self._measure(level, wanted or list(keys[:1]), sizes, done)

    def probe(self, level: Level, keys: Keys, found: Sequence[int], sizes: Sequence[int]) -> None:
        """Measure a tier that the gate refuses, now and then, with keys that it has."""
        shared, habits, now = self._shared, self._habits[level.index], self._shared.lanes.now()
        with shared.lock:
            if habits.is_probed or 0 <= now - habits.probed_at < PROBE_S:
                return
            habits.is_probed, habits.probed_at = True, now
            self._num_probes += 1
            chunks = _CHUNKS[self._num_probes % len(_CHUNKS)]
            affordable = PROBE_SHARE * PROBE_S * level.estimate.bandwidth
        room = min(chunks * int(shared.settings.chunk_bytes), affordable)
        chosen: list[int] = []
        for at, where in enumerate(found):
            if where == level.index and (not chosen or room >= sizes[at]):
                chosen.append(at)
                room -= sizes[at]

        def done() -> None:
            habits.is_probed = False

        self._measure(level, [keys[at] for at in chosen], [sizes[at] for at in chosen], done)

    def _look_again(self, level: Level, keys: Keys) -> None:
        """See whether a tier whose lookups take too long has become faster, without waiting for it."""
        habits, now = self._habits[level.index], self._shared.lanes.now()
        with self._shared.lock:
            if now - habits.asked_at < PROBE_S:
                return
            habits.asked_at = now
        self._measure(level, keys, [], lambda: None)

    def _measure(
        self, level: Level, keys: Keys, sizes: Sequence[int], done: Callable[[], None]
    ) -> None:
        """Load records of these sizes, or without any look for the keys; `done` is called with the lock held.

        Nobody waits: what it takes and whether it is answered is told to whoever decides about the tier.
        """
        shared = self._shared
        buffers = shared.pool.take(sizes)

        def ask() -> None:
            began_s, settings = shared.lanes.now(), shared.settings
            if sizes:
                load_s = settings.load_timeout_s
                outcomes = guarded(lambda: level.tier.get(keys, buffers, load_s), len(keys))
            else:
                look_s = settings.lookup_timeout_s
                outcomes = guarded(lambda: level.tier.lookup(keys, look_s)[1], 1)
            took_s = max(0.0, shared.lanes.now() - began_s)
            with shared.lock:
                level.answered("load" if sizes else "lookup", outcomes)
                if not sizes:
                    self._took(level, began_s)
                elif outcomes.count(Outcome.HIT) == len(keys):
                    level.estimate.observe(sum(sizes), took_s)
            end()

        def end() -> None:
            shared.pool.give_back(buffers)
            with shared.lock:
                done()

        level.loads.submit(self, LaneJob(ask, end))


def _windows(level: Level, missing: list[int], *, contiguous: bool) -> list[list[int]]:
    """Return the keys to ask a tier for, in one question or in growing ones.

    Looking for thousands of keys that no one has is what a cold prompt must not cost.
    """
    if not contiguous or (level.tier.is_local and not level.answers_at_once):
        return [missing]
    windows: list[list[int]] = []
    first, size = 0, FIRST_WINDOW_HERE if level.answers_at_once else FIRST_WINDOW
    while first < len(missing):
        windows.append(missing[first : first + size])
        first += size
        size *= 4
    return windows
