"""Calls of a tier that somebody waits for, but not longer than a deadline: lookups, trials, probes."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from quire.tiers.base import Keys, Outcome, Tier
from quire.tiers.stack.breaker import BreakerState
from quire.tiers.stack.lanes import Deadline, Job, TierLane
from quire.tiers.stack.level import Level, Shared, guarded

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


class Call(Generic[T]):
    """A call in a lane; `result` is `None` until it returned, and where it was dropped or raised."""

    def __init__(self, shared: Shared, lane: TierLane, function: Callable[[], T]) -> None:
        self.result: T | None = None
        self._done = shared.lanes.signal()
        self._function = function
        lane.submit(self, Job(self._run, self._done.set))

    def wait(self, timeout_s: float) -> bool:
        """Return whether it has returned or was dropped, now or within so long."""
        return self._done.wait(timeout_s)

    def _run(self) -> None:
        try:
            self.result = self._function()
        except Exception:  # noqa: BLE001 - a tier that raises has not answered
            self.result = None
        self._done.set()


class Asking:
    """Finds out which tier has what, and whether tiers that are out of service answer again."""

    def __init__(self, shared: Shared, levels: Sequence[Level]) -> None:
        self._shared = shared
        self._levels = levels
        self._samples: dict[int, tuple[list[bytes], list[int]]] = {}
        self._probed_at: dict[int, float] = {}
        self._num_probes = 0
        self._busy: set[int] = set()
        self._num_trials: Counter[int] = Counter()
        self._lookups_s: dict[int, tuple[float, float]] = {}
        self._asked_at: dict[int, float] = {}

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
                usual_s = min(self._lookups_s.get(level.index, (0.0, 0.0)))
            if usual_s > patience_s:
                self._look_again(level, keys[:1])
                continue
            if gains_s and usual_s > gains_s[level.index] and not self._is_due(level):
                continue
            for window in _windows(level, missing, contiguous=contiguous):
                wanted = keys if len(window) == len(keys) else [keys[at] for at in window]
                answers = self._lookup(level, wanted, deadline)
                for at, is_there in zip(window, answers, strict=False):
                    if is_there:
                        found[at] = level.index
                if contiguous and not all(answers):
                    break
                if not answers:
                    break
            missing = [at for at in missing if found[at] < 0]
        if contiguous and missing:
            found[missing[0] :] = [-1] * (len(found) - missing[0])
        return found

    def _is_due(self, level: Level) -> bool:
        """Return whether to ask a tier even though that will not pay: it may have become faster."""
        if level.answers_at_once:
            return True
        now = self._shared.lanes.now()
        return now - self._asked_at.get(level.index, -math.inf) >= PROBE_S

    def _lookup(self, level: Level, keys: Keys, deadline: Deadline) -> list[bool]:
        """Return which keys a tier has; nothing where it does not say so in time."""
        shared, left_s = self._shared, deadline.left_s
        if any(other.reading.allows for other in self._levels[level.index + 1 :]):
            left_s /= 2
        left_s = min(left_s, level.settings.lookup_timeout_s or left_s)
        began_s = shared.lanes.now()
        if level.answers_at_once:
            answer = _looked(level, keys, left_s)
        else:
            call = Call(shared, level.loads, lambda: _looked(level, keys, left_s))
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
        """Note what a lookup took; of the last two the shorter counts, so that one hiccup does not."""
        now = self._asked_at[level.index] = self._shared.lanes.now()
        before = self._lookups_s.get(level.index, (0.0, 0.0))[1]
        self._lookups_s[level.index] = (before, max(0.0, now - began_s))

    # Trials and probes: in the background, so that no request pays for them

    def remember(self, keys: Keys, found: Sequence[int], sizes: Sequence[int]) -> None:
        """Keep a few keys that each tier has, to try it with."""
        for level in self._levels:
            if level.index in found:
                first = found.index(level.index)
                at = [i for i in range(first, min(first + SAMPLE_KEYS, len(found)))
                      if found[i] == level.index]  # fmt: skip
                self._samples[level.index] = ([keys[i] for i in at], [sizes[i] for i in at])

    def in_all_lanes(self, function: Callable[[Tier], None], timeout_s: float) -> None:
        """Call a function of every tier behind what waits to be written to it; wait so long for all together."""
        if self._shared.is_closed:
            return
        deadline = Deadline(self._shared.lanes, timeout_s)
        calls = [
            Call(self._shared, level.stores, lambda tier=level.tier: function(tier))
            for level in self._levels
        ]
        for call in calls:
            call.wait(deadline.left_s)

    def try_again(self, keys: Keys) -> None:
        """Try tiers that are out of service and whose cool-down is over, without waiting for them."""
        for level in self._levels:
            if level.reading.state is BreakerState.CLOSED:
                continue
            with self._shared.lock:
                # Where every thread hangs, trials would only queue up.
                can_run = self._num_trials[level.index] < level.loads.num_threads
                is_due = can_run and level.reading.take_trial()
                self._num_trials[level.index] += is_due
            if is_due:
                self._try(level, list(keys[:1]))

    def _look_again(self, level: Level, keys: Keys) -> None:
        """See whether a tier whose lookups take too long has become faster, without waiting for it."""
        shared, now = self._shared, self._shared.lanes.now()
        with shared.lock:
            if now - self._asked_at.get(level.index, now) < PROBE_S:
                return
            self._asked_at[level.index] = now

        def look() -> None:
            began_s, timeout_s = shared.lanes.now(), shared.settings.lookup_timeout_s
            outcomes = guarded(lambda: level.tier.lookup(keys, timeout_s)[1], 1)
            with shared.lock:
                self._took(level, began_s)
                level.answered("lookup", outcomes)

        level.loads.submit(self, Job(look, lambda: None))

    def probe(self, level: Level, keys: Keys, found: Sequence[int], sizes: Sequence[int]) -> None:
        """Measure a tier that the gate refuses, now and then, with keys that it has."""
        shared, now = self._shared, self._shared.lanes.now()
        with shared.lock:
            last = self._probed_at.get(level.index)
            if last is not None and 0 <= now - last < PROBE_S:
                return
            if level.index in self._busy:
                return
            self._busy.add(level.index)
            self._probed_at[level.index] = now
            self._num_probes += 1
            chunks = _CHUNKS[self._num_probes % len(_CHUNKS)]
            affordable = PROBE_SHARE * PROBE_S * level.estimate.bandwidth
        room = min(chunks * int(shared.settings.chunk_bytes), affordable)
        chosen: list[int] = []
        for at, where in enumerate(found):
            if where == level.index and (not chosen or room >= sizes[at]):
                chosen.append(at)
                room -= sizes[at]
        wanted = [keys[at] for at in chosen]
        buffers = shared.pool.take([sizes[at] for at in chosen])

        def measure() -> None:
            began_s, timeout_s = now, shared.settings.load_timeout_s
            outcomes = guarded(lambda: level.tier.get(wanted, buffers, timeout_s), len(wanted))
            took_s = max(0.0, shared.lanes.now() - began_s)
            with shared.lock:
                level.answered("load", outcomes)
                if all(outcome is Outcome.HIT for outcome in outcomes):
                    level.estimate.observe(sum(map(len, buffers)), took_s)
            done()

        def done() -> None:
            shared.pool.give_back(buffers)
            with shared.lock:
                self._busy.discard(level.index)

        level.loads.submit(self, Job(measure, done))

    def _try(self, level: Level, keys: list[bytes]) -> None:
        shared = self._shared
        wanted, sizes = self._samples.get(level.index, ([], []))

        def attempt() -> None:
            if wanted:
                buffers = shared.pool.take(sizes)
                timeout_s = shared.settings.load_timeout_s
                outcomes = guarded(lambda: level.tier.get(wanted, buffers, timeout_s), len(wanted))
                shared.pool.give_back(buffers)
            else:
                timeout_s = shared.settings.lookup_timeout_s
                outcomes = guarded(lambda: level.tier.lookup(keys, timeout_s)[1], 1)
            with shared.lock:
                level.answered("load" if wanted else "lookup", outcomes)
            done()

        def done() -> None:
            with shared.lock:
                self._num_trials[level.index] -= 1

        level.loads.submit(self, Job(attempt, done))


def _looked(level: Level, keys: Keys, timeout_s: float) -> tuple[list[bool], list[Outcome]]:
    return level.tier.lookup(keys, timeout_s)


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
