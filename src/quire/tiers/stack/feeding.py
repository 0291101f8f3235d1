"""Feeding: records that are made and stored beside their caller, as if they had been stored at once.

On a CPU this competes with the model. So it waits for a moment in which nothing computes. While something does it
takes a small share of the time, and, where that is not enough, as much more as hits have saved; beyond that
prompts are passed over.
"""

from __future__ import annotations

from collections import deque

import numpy as np
from numpy.typing import NDArray

from quire.tiers.base import Keys
from quire.tiers.stack.lanes import Deadline, LaneJob, Lanes, Signal, TierLane, Work
from quire.tiers.stack.level import Shared
from quire.tiers.stack.placing import Placing

LOOK_S = 0.03
"""So long the process is watched before work begins that nobody waits for."""

LONGEST_LOOK_S = 0.24
"""A busy process is watched for twice as long each time, up to so long: each look takes the interpreter from it."""

IDLE_CORES = 0.7
"""A process that uses less of the processor meanwhile computes nothing."""

SPELL_S = 0.02
"""So long is worked before the process is watched again."""

LATEST_S = 30.0
"""What has waited for so long is late."""

MOST_CREDIT_S = 60.0
"""Of what hits have saved, so much is kept in mind."""


class Fed:
    """Work that is under way. `wait` until it is done; then `error` is what it raised, or None."""

    def __init__(self, feeding: Feeding, keys: Keys, work: Work, num_bytes: int) -> None:
        self.keys = frozenset(keys)
        self.num_bytes = num_bytes
        self.error: BaseException | None = None
        self.is_over = False
        self.latest = Deadline(feeding.lanes, LATEST_S)
        self._feeding = feeding
        self._work = work
        self._done: Signal = feeding.lanes.signal()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Return whether it is done, or was dropped. It is done next."""
        if self.is_over:
            return True
        self._feeding.prefer([self])
        return self._done.wait(timeout_s)

    def run(self) -> None:
        """Do the work."""
        try:
            self._work()
        except BaseException as error:  # noqa: BLE001 - whoever waits raises it
            self.error = error

    def end(self) -> None:
        """Say that it is done, or never will be."""
        self.is_over = True
        self._done.set()


class Feeding:
    """Work that ends in `TierStack.store`, the oldest first, on a thread of its own.

    It copies and seals in memory, so that waiting for it takes milliseconds. Whoever asks for a key
    that is being made waits for it, and so sees what was stored at once. It is *behind* when as much waits as
    may, or what waits is late: then a busy process pays with what hits have saved, and else has no room.

    `passed_over`  prompts that were not fed, or not to the end, since nobody had the time

    under way == preferred + gathered + the one that runs; no key is in two of them
    In a process that never rests, what nobody waits for takes at most its share of the time and what hits have saved.
    """

    def __init__(self, shared: Shared, placing: Placing) -> None:
        self.passed_over = 0
        self.lanes: Lanes = shared.lanes
        self._placing = placing
        self._shared = shared
        self._lane = TierLane(shared.lanes, "feeding", 1, lambda: None)
        self._wake = shared.lanes.signal()
        self._under_way: dict[Fed, None] = {}
        self._preferred: deque[Fed] = deque()
        self._gathered: dict[Fed, None] = {}
        self._most_bytes = 0
        self._is_running = self._is_busy = False
        self._look_s = LOOK_S
        self._spell = Deadline(shared.lanes, 0.0)
        self._counted_s = 0.0
        self._share_s = self._credit_s = 0.0

    def has_room(self, most_bytes: int) -> bool:
        """Return whether to `begin` work of one more prompt; if not, counts it as passed over."""
        with self._shared.lock:
            self._most_bytes = most_bytes
            has_room = not (self._must_spare and self._is_behind)
            self.passed_over += not has_room
        return has_room

    def finish(self, fed: Fed) -> None:
        """Wait until this is done; if it has not begun and nobody has the time for it, it is passed over."""
        with self._shared.lock:
            is_passed_over = fed in self._gathered and self._must_spare
            if is_passed_over:
                del self._gathered[fed]
                self.passed_over += 1
        if is_passed_over:
            self._end(fed)
        else:
            fed.wait()

    def begin(self, keys: Keys, work: Work, num_bytes: int, most_bytes: int) -> Fed:
        """Have `work`, which waits for memory only, make and store these keys when nothing computes.

        To all who ask the stack it is as if that were done: who looks for one of them, drains or closes waits.
        `num_bytes` are made; from `most_bytes` on that wait, in all, it is behind.
        """
        fed = Fed(self, keys, work, num_bytes)
        with self._shared.lock:
            self._under_way[fed] = self._gathered[fed] = None
            self._most_bytes = most_bytes
            is_first, self._is_running = not self._is_running, True
        if is_first:
            self._lane.submit(self, LaneJob(self._run, self._drop))
        return fed

    def has(self, keys: Keys) -> NDArray[np.bool_]:
        """Return the keys that are under way and not stored yet: bool [keys]. They are not given again."""
        with self._shared.lock:
            under_way = frozenset[bytes]().union(*(fed.keys for fed in self._under_way))
        return np.array([key in under_way for key in keys], np.bool_)

    def prefer(self, chosen: list[Fed]) -> None:
        """Do these next: somebody waits."""
        with self._shared.lock:
            for fed in chosen:
                if fed in self._gathered:
                    del self._gathered[fed]
                    self._preferred.append(fed)
        self._wake.set()

    def wait(self, timeout_s: float, keys: Keys) -> bool:
        """Wait for what makes one of these keys; return whether it is done."""
        if not self._under_way:
            return True
        with self._shared.lock:
            waiting = [fed for fed in self._under_way if not fed.keys.isdisjoint(keys)]
        if waiting:
            self.prefer(waiting)
        deadline = Deadline(self.lanes, timeout_s)
        return all(fed.wait(deadline.left_s) for fed in waiting)

    def earn(self, seconds: float) -> None:
        """Say what a hit has saved."""
        with self._shared.lock:
            self._credit_s = min(max(0.0, self._credit_s + seconds), MOST_CREDIT_S)

    def catch_up(self) -> None:
        """Wait until what was fed is stored; some seconds at most."""
        self.drain(Deadline(self.lanes, self._shared.settings.load_timeout_s))

    def drain(self, deadline: Deadline) -> bool:
        """Do all that is under way now, the oldest first, not faster than tiers write it; return whether it is."""
        with self._shared.lock:
            waiting = list(self._under_way)
        for fed in waiting:
            with self._shared.lock:
                is_filling = self._placing.is_filling
            if is_filling:
                self._placing.drain(deadline)
            if not fed.wait(deadline.left_s):
                return False
        return True

    def close(self) -> None:
        """Drop what has not begun."""
        self._drop()
        self._wake.set()
        self._lane.close()

    def _drop(self) -> None:
        with self._shared.lock:
            dropped = [*self._preferred, *self._gathered]
            self._preferred.clear()
            self._gathered.clear()
            self._is_running = False
        for fed in dropped:
            self._end(fed)

    # In the lane

    def _run(self) -> None:
        self._look_s, self._is_busy = LOOK_S, False
        self._counted_s = self.lanes.now()
        while True:
            with self._shared.lock:
                self._wake.clear()
                fed = self._next()
                if fed is None and not self._gathered:
                    self._is_running = False
                    return
            if fed is None:
                self._watch()
                continue
            begun_s = self.lanes.now()
            fed.run()
            self._end(fed)
            if self._is_busy:
                self._pay(max(0.0, self.lanes.now() - begun_s))

    def _next(self) -> Fed | None:
        """Take what is to be done now, if anything is. The lock is held."""
        if self._preferred:
            return self._preferred.popleft()
        if not self._gathered or self._spell.passed or (self._is_busy and not self._may_work):
            return None
        oldest = next(iter(self._gathered))
        if self._placing.is_filling and not oldest.latest.passed:
            return None
        del self._gathered[oldest]
        return oldest

    def _watch(self) -> None:
        """See for a while whether anything computes, and let work go on for a spell.

        Beside what computes it does not begin at once: at the start of a request and between tokens two threads take
        the interpreter from each other every few microseconds; in a prompt's long operations they do not.
        """
        begun_s, used_s = self.lanes.now(), self.lanes.cpu_s()
        if self._wake.wait(self._look_s):
            return
        now_s = self.lanes.now()
        took_s = max(now_s - begun_s, self._look_s)
        self._is_busy = self.lanes.cpu_s() - used_s >= IDLE_CORES * took_s
        with self._shared.lock:
            if self._is_busy:
                share = self._shared.settings.busy_share
                self._share_s += share * max(0.0, now_s - self._counted_s)
            is_patient = self._is_busy and not (self._is_behind and self._pays)
        self._look_s = min(2 * self._look_s, LONGEST_LOOK_S) if is_patient else LOOK_S
        self._spell = Deadline(self.lanes, SPELL_S)
        self._counted_s = now_s

    def _pay(self, took_s: float) -> None:
        """Count what work took beside what computes: first as its share of the time."""
        if self._share_s > 0:
            self._share_s -= took_s
        else:
            self.earn(-took_s)

    # The lock is held

    @property
    def _may_work(self) -> bool:
        return self._share_s > 0 or (self._is_behind and self._pays)

    @property
    def _pays(self) -> bool:
        return self._credit_s > 0 or self._shared.settings.busy_share >= 1

    @property
    def _must_spare(self) -> bool:
        return self._is_busy and not self._pays

    @property
    def _is_behind(self) -> bool:
        """Whether much waits, or something is late."""
        oldest = next(iter(self._gathered), None)
        if oldest is None:
            return False
        return oldest.latest.passed or (
            sum(fed.num_bytes for fed in self._gathered) >= self._most_bytes
        )

    def _end(self, fed: Fed) -> None:
        with self._shared.lock:
            del self._under_way[fed]
        fed.end()
