"""Feeding: records that are made and stored beside their caller, as if they had been stored at once."""

from __future__ import annotations

from quire.tiers.base import Keys
from quire.tiers.stack.lanes import Deadline, Job, Lane, Signal, Work
from quire.tiers.stack.level import Shared

LATER_S = 0.02
"""Work that nobody waits for begins so much later, with what came meanwhile.

By then the next request computes its prompt: long operations, beside which Python runs. At its start, and when
it decodes, the two threads would take the interpreter from each other after every few microseconds.
"""

MUCH_BYTES = 32 << 20
"""So much is copied at once: it takes longer than a prompt's start anyway."""


class Fed:
    """Work that is under way. `wait` until it is done; then `error` is what it raised, or None."""

    def __init__(self, keys: Keys, work: Work, done: Signal, hurry: Signal) -> None:
        self.keys = frozenset(keys)
        self.error: BaseException | None = None
        self.is_over = False
        self._work = work
        self._done, self._hurry = done, hurry

    def wait(self, timeout_s: float | None = None) -> bool:
        """Return whether it is done, or was dropped because the stack was closed."""
        if self.is_over:
            return True
        self._hurry.set()
        return self._done.wait(timeout_s)

    def run(self) -> None:
        """Do the work and say that it is done."""
        try:
            self._work()
        except BaseException as error:  # noqa: BLE001 - whoever waits raises it
            self.error = error
        self.end()

    def end(self) -> None:
        """Say that it is done, or never will be."""
        self.is_over = True
        self._done.set()


class Feeding:
    """Work that ends in `TierStack.store`, in order, on a thread of its own.

    It copies and seals in memory, so that waiting for it takes milliseconds. Whoever asks for a key
    that is being made waits for it, and so sees what was stored at once.
    """

    def __init__(self, shared: Shared) -> None:
        self._shared = shared
        self._lane = Lane(shared.lanes, "feeding", 1, lambda: None)
        self._hurry = shared.lanes.signal()
        self._under_way: list[Fed] = []
        self._gathered: list[Fed] = []
        self._gathered_bytes = 0

    def begin(self, keys: Keys, work: Work, num_bytes: int) -> Fed:
        """Do work that makes and stores these keys, of so many bytes."""
        fed = Fed(keys, work, self._shared.lanes.signal(), self._hurry)
        with self._shared.lock:
            self._under_way = [each for each in self._under_way if not each.is_over]
            self._under_way.append(fed)
            self._gathered.append(fed)
            self._gathered_bytes += num_bytes
            is_first, is_much = len(self._gathered) == 1, self._gathered_bytes >= MUCH_BYTES
        if is_much:
            self._hurry.set()
        if is_first:
            self._lane.submit(self, Job(self._run, self._drop))
        return fed

    def wait(self, timeout_s: float, keys: Keys | None = None) -> bool:
        """Wait for what makes one of these keys, or for all; return whether that is done."""
        if not self._under_way:
            return True
        with self._shared.lock:
            waiting = [fed for fed in self._under_way if not fed.is_over]
        deadline = Deadline(self._shared.lanes, timeout_s)
        return all(
            fed.wait(deadline.left_s)
            for fed in waiting
            if keys is None or not fed.keys.isdisjoint(keys)
        )

    def close(self) -> None:
        """Drop what has not begun."""
        self._hurry.set()
        self._lane.close()

    # In the lane

    def _run(self) -> None:
        self._hurry.wait(LATER_S)
        for fed in self._taken():
            fed.run()

    def _drop(self) -> None:
        for fed in self._taken():
            fed.end()

    def _taken(self) -> list[Fed]:
        with self._shared.lock:
            taken, self._gathered, self._gathered_bytes = self._gathered, [], 0
            self._hurry.clear()
        return taken
