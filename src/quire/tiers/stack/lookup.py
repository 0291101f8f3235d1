"""Lookups: the tier of each key, asked within a deadline, and probes of suspended tiers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Generic, TypeVar

from quire.tiers.base import Keys, Outcome, Tier
from quire.tiers.format import tag_of_key
from quire.tiers.stack.asking import PROBE_S, Kind
from quire.tiers.stack.lanes import Deadline, TierLane
from quire.tiers.stack.member import Shared, StackMember, guarded

T = TypeVar("T")

FIRST_WINDOW, GROWTH = 64, 16
FIRST_WINDOW_HERE, GROWTH_HERE = 8, 4
"""Keys in the first question to a tier that others write to, and to one that answers at once; each
next one asks for so many times as many. A prompt's first keys also tell whether to ask for it."""

SAMPLE_KEYS = 256
_BATCHES = (4.0, 0.25, 1.0)
"""Sizes of loads that measure a tier, in turn, so that latency and bandwidth show; in batches."""

PROBE_SHARE = 0.05
"""The most of a tier's bandwidth, as far as it is known, that measuring it may take."""


def patience_s(saved_s: float) -> float:
    """Return how long a request may wait in vain for tiers, where all that they have would save so much.

    With that, it loses half of computing and 50 ms at most: what saving takes is an estimate, and to notice the end
    and to begin computing takes some of it.
    """
    return saved_s / 2 + 0.015


class LaneCall(Generic[T]):
    """A call in a lane; `result` is `None` until it returned, and where it was dropped or raised.

    `owner`  whose jobs there it comes behind; None: of nobody's
    """

    def __init__(
        self, shared: Shared, lane: TierLane, function: Callable[[], T], owner: object = None
    ) -> None:
        self.result: T | None = None
        self._done = shared.lanes.signal()
        self._function = function
        lane.submit(owner or self, self._run, self._done.set)

    def wait(self, timeout_s: float) -> bool:
        """Return whether it has returned or was dropped, now or within so long."""
        return self._done.wait(timeout_s)

    def _run(self) -> None:
        try:
            self.result = self._function()
        except Exception:  # noqa: BLE001 - a tier that raises has not answered
            self.result = None
        self._done.set()


class TierLookup:
    """Finds the tier of each key, and probes suspended tiers in the background."""

    def __init__(self, shared: Shared, levels: Sequence[StackMember]) -> None:
        self._shared = shared
        self._levels = levels
        self._num_probes = 0

    def find(self, keys: Keys, *, contiguous: bool, saved_s: float, num_bytes: int) -> list[int]:
        """Return the fastest tier that seems to have each key; see `TierStack.find`."""
        found = [-1] * len(keys)
        if keys and self._shared.writes.is_barred(tag_of_key(keys[0])):
            return found  # what is being purged is not there
        missing, is_passed_over = list(range(len(keys))), False
        most_s = min(self._shared.settings.lookup_timeout_s, patience_s(saved_s))
        deadline = Deadline(self._shared.lanes, most_s)
        for level in self._levels:
            if not missing:
                break
            windows = _windows(level, missing, contiguous=contiguous)
            if not self._is_asked(level, keys[:FIRST_WINDOW], len(windows), saved_s, num_bytes):
                is_passed_over |= level.reading.allows
                continue
            for window in windows:
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
        if is_passed_over and missing:
            self._shared.note_refused([keys[at] for at in missing])
        return found

    def surely_lacks(self, key: bytes) -> bool:
        """Return whether all tiers answer at once and are in service, and none has a key."""
        return all(
            level.answers_at_once
            and level.reading.allows
            and level.tier.lookup([key]) == ([False], [])
            for level in self._levels
        )

    def _is_asked(
        self, level: StackMember, first: Keys, num_questions: int, saved_s: float, num_bytes: int
    ) -> bool:
        """Return whether to wait for the answers of a tier, of which these are the first; else it is tried beside."""
        with self._shared.lock:
            if not level.reading.allows:
                return False
            # A guess of what loading takes must not keep a tier from being asked and measured.
            estimate = level.estimate
            load_s = estimate.careful_seconds(num_bytes) if estimate.num_observed else 0.0
            load_s += (num_questions - 1) * level.asking.ask_s
            in_time = num_questions * level.asking.ask_s <= patience_s(saved_s)
            if in_time and level.asking.pays(saved_s, load_s, lambda: self._known(level, first)):
                return True
        if saved_s <= load_s + level.asking.ask_s and level.asking.sample[0]:
            self.probe(level)
        else:
            self._try(level, "lookup", lambda: self._look_beside(level, first))
        return False

    def _known(self, level: StackMember, keys: Keys) -> float:
        """Return the share of keys that a tier is known to have had. The lock is held."""
        bits = self._shared.whereabouts.get(keys)
        return float((bits >> level.index & 1).mean())

    def _ask(self, level: StackMember, keys: Keys, deadline: Deadline) -> list[bool]:
        """Return the keys that a tier has, bool per key; nothing where it does not say so in time."""
        shared, left_s = self._shared, deadline.left_s
        if any(other.reading.allows for other in self._levels[level.index + 1 :]):
            left_s /= 2
        left_s = min(left_s, level.settings.lookup_timeout_s or left_s)
        began_s = shared.lanes.now()
        answers: list[bool] | None
        if level.answers_at_once:
            answers = self._look(level, keys, left_s, began_s)
        else:
            call = LaneCall(shared, level.loads, lambda: self._look(level, keys, left_s, began_s))
            answers = call.result if call.wait(left_s) else None
        if answers is None:
            with shared.lock:
                level.meter.loads["lookup_timeout"] += 1
                level.hung(left_s)
        return answers or []

    def _look(
        self, level: StackMember, keys: Keys, timeout_s: float, began_s: float
    ) -> list[bool] | None:
        """Ask a tier on this thread and note its answer, empty for a failure; None where it did not come in time."""
        shared = self._shared
        there, failures = _asked(level, keys, timeout_s)
        took_s = max(0.0, shared.lanes.now() - began_s)
        with shared.lock:
            known = 1.0 if failures else self._known(level, keys)
            level.asking.answered(took_s, known, sum(there) / len(keys))
            if failures == [Outcome.TIMEOUT] and took_s >= timeout_s:
                return None
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

    def in_all_lanes(self, function: Callable[[Tier], None], timeout_s: float) -> None:
        """Call a function of every tier behind what waits to be written to it; wait so long for all together."""
        if self._shared.is_closed:
            return
        deadline = Deadline(self._shared.lanes, timeout_s)
        calls = [
            LaneCall(self._shared, level.stores, lambda tier=level.tier: function(tier), level)
            for level in self._levels
        ]
        for call in calls:
            call.wait(deadline.left_s)

    def in_turn(self, function: Callable[[Tier], None], deadline: Deadline) -> None:
        """Call `function` with each tier, the fastest first.

        Each tier has half of the time left, the last one all of it.
        """
        if self._shared.is_closed:
            return
        for level in self._levels:
            call = LaneCall(
                self._shared, level.stores, lambda tier=level.tier: function(tier), level
            )
            is_last = level is self._levels[-1]
            call.wait(deadline.left_s if is_last else deadline.left_s / 2)

    # Trials: beside, so that no request pays for them

    def remember(self, keys: Keys, found: Sequence[int], sizes: Sequence[int]) -> None:
        """Keep some keys that each tier has, to measure it with."""
        for level in self._levels:
            if level.index in found:
                at = [i for i, where in enumerate(found) if where == level.index][:SAMPLE_KEYS]
                level.asking.sample = [keys[i] for i in at], [sizes[i] for i in at]

    def try_again(self, keys: Keys) -> None:
        """Try tiers that are out of service and whose cool-down is over; tell the log which these are."""
        for level in self._levels:
            level.say_changes()
            if not level.reading.allows:
                if level.asking.sample[0]:
                    self.probe(level)
                else:
                    self._try(
                        level, "lookup", lambda level=level: self._look_beside(level, keys[:1])
                    )

    def probe(self, level: StackMember) -> None:
        """Load some records of a tier, to measure it."""
        self._try(level, "load", lambda: self._load_beside(level))

    def _try(self, level: StackMember, kind: Kind, trial: Callable[[], None]) -> None:
        """Run a trial in a lane where one is due."""
        with self._shared.lock:
            if not level.asking.take_trial(kind):
                return

        def end() -> None:
            with self._shared.lock:
                level.asking.num_trials -= 1

        def run() -> None:
            trial()
            end()

        level.loads.submit(self, run, end)

    def _look_beside(self, level: StackMember, keys: Keys) -> None:
        lanes, timeout_s = self._shared.lanes, self._shared.settings.lookup_timeout_s
        if self._look(level, keys, timeout_s, lanes.now()) is None:
            with self._shared.lock:
                level.hung(timeout_s)

    def _load_beside(self, level: StackMember) -> None:
        """Ask for some of the sample and load it; where it is not there any more, there is none from now on."""
        shared, settings = self._shared, self._shared.settings
        with shared.lock:
            self._num_probes += 1
            batches = _BATCHES[self._num_probes % len(_BATCHES)]
            room = min(
                batches * int(settings.batch_bytes),
                PROBE_SHARE * PROBE_S * level.estimate.bandwidth,
            )
            sample, sizes = level.asking.sample
        ends = accumulate(sizes)
        count = max(1, sum(end <= room for end in ends))
        keys, sizes = sample[:count], sizes[:count]
        buffers = shared.pool.take(sizes)
        began_s = shared.lanes.now()
        there, failures = _asked(level, keys[:1], settings.lookup_timeout_s)
        asked_s = shared.lanes.now()
        outcomes = guarded(
            lambda: level.tier.get(keys, buffers, settings.load_timeout_s), len(keys)
        )
        took_s = max(0.0, shared.lanes.now() - asked_s)
        with shared.lock:
            if not failures:
                level.asking.answered(max(0.0, asked_s - began_s), 1.0, sum(there))
            level.answered("load", outcomes)
            if outcomes.count(Outcome.HIT) == len(keys):
                level.estimate.observe(sum(sizes), took_s)
            elif Outcome.ABSENT in outcomes:
                level.asking.sample = ([], [])
        shared.pool.give_back(buffers)


def _asked(level: StackMember, keys: Keys, timeout_s: float) -> tuple[list[bool], list[Outcome]]:
    """Return what a tier says that it has, and its failures."""
    try:
        return level.tier.lookup(keys, timeout_s)
    except Exception:  # noqa: BLE001 - whatever a tier raises, a request goes on without it
        return [], [Outcome.ERROR]


def _windows(level: StackMember, missing: list[int], *, contiguous: bool) -> list[list[int]]:
    """Return the keys to ask a tier for, in one question or in growing ones.

    Looking for thousands of keys that no one has is what a cold prompt must not cost.
    """
    if not contiguous or (level.tier.is_local and not level.answers_at_once):
        return [missing]
    windows: list[list[int]] = []
    here = level.answers_at_once
    size, growth = (FIRST_WINDOW_HERE, GROWTH_HERE) if here else (FIRST_WINDOW, GROWTH)
    first = 0
    while first < len(missing):
        windows.append(missing[first : first + size])
        first += size
        size *= growth
    return windows
