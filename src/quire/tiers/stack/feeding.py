"""Feeding: records that are made and stored beside their caller, as if they had been stored at once."""

from __future__ import annotations

from collections.abc import Callable

from quire.tiers.base import Keys
from quire.tiers.stack.lanes import Deadline, Job, Lane, Signal
from quire.tiers.stack.level import Shared


class Fed:
    """Work that is under way. `wait` until it is done; then `error` is what it raised, or None."""

    def __init__(self, keys: Keys, done: Signal) -> None:
        self.keys = frozenset(keys)
        self.error: BaseException | None = None
        self.is_over = False
        self._done = done

    def wait(self, timeout_s: float | None = None) -> bool:
        """Return whether it is done, or was dropped because the stack was closed."""
        return self._done.wait(timeout_s)

    def run(self, work: Callable[[], object]) -> None:
        """Do the work and say that it is done."""
        try:
            work()
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
        self._under_way: list[Fed] = []

    def begin(self, keys: Keys, work: Callable[[], object]) -> Fed:
        """Do work that makes and stores these keys."""
        fed = Fed(keys, self._shared.lanes.signal())
        with self._shared.lock:
            self._under_way = [each for each in self._under_way if not each.is_over]
            self._under_way.append(fed)
        self._lane.submit(self, Job(lambda: fed.run(work), fed.end))
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
        self._lane.close()
