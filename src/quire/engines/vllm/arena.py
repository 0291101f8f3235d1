"""The arena: memory that vLLM's scheduler and its workers share, in slots for one payload each."""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from quire.errors import InvariantError

ALIGNED = 64


class ArenaPlace(NamedTuple):
    """The place where workers find an arena, and its size."""

    path: str
    slot_bytes: int
    num_slots: int

    def map(self) -> mmap.mmap:
        """Map its memory into this process."""
        fd = os.open(self.path, os.O_RDWR)
        try:
            return mmap.mmap(fd, self.slot_bytes * self.num_slots)
        finally:
            os.close(fd)


class SharedArena:
    """Slots of equal size, each the owner's or free: `free + taken == num_slots`.

    A file in memory without a name (`memfd_create`): it is gone with the last process that has it, however that ends.
    Memory is used for slots that have been used. Any thread may call.
    """

    def __init__(self, slot_bytes: int, num_bytes: int) -> None:
        slot_bytes = -(-slot_bytes // ALIGNED) * ALIGNED
        num_slots = max(1, num_bytes // slot_bytes)
        self._fd = os.memfd_create("quire")
        os.ftruncate(self._fd, slot_bytes * num_slots)
        self.place = ArenaPlace(f"/proc/{os.getpid()}/fd/{self._fd}", slot_bytes, num_slots)
        self._memory = memoryview(mmap.mmap(self._fd, slot_bytes * num_slots))
        self._free = list(range(num_slots - 1, -1, -1))
        self._taken: set[int] = set()
        self._lock = threading.Lock()

    @property
    def num_free(self) -> int:
        """Slots that are free."""
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """Take up to `count` slots, fewer if fewer are free.

        They are in order: adjacent slots are copied in one go.
        """
        with self._lock:
            slots = sorted(self._free.pop() for _ in range(min(count, len(self._free))))
            self._taken.update(slots)
        return slots

    def give_back(self, slots: Iterable[int]) -> None:
        """Give slots back. Raises `InvariantError` for one that is not taken."""
        with self._lock:
            for slot in slots:
                if slot not in self._taken:
                    raise InvariantError(
                        f"slot {slot} of the arena is given back twice; a bug in quire"
                    )
                self._taken.remove(slot)
                self._free.append(slot)

    def view(self, slot: int, num_bytes: int) -> memoryview:
        """View the first bytes of a slot."""
        first = slot * self.place.slot_bytes
        return self._memory[first : first + num_bytes]

    def check(self, taken: Sequence[int] = ()) -> None:
        """Raise `InvariantError` unless every slot is free or one of `taken`."""
        with self._lock:
            if sorted([*self._free, *taken]) != list(range(self.place.num_slots)):
                raise InvariantError(
                    f"{len(self._free)} slots of the arena are free, {sorted(self._taken)} taken, {list(taken)} used"
                )

    def close(self) -> None:
        """Give the memory back, when no process has it mapped any more."""
        os.close(self._fd)
