"""Names to numbers, many at once: a hash table in two arrays."""

from typing import TypeAlias

import numpy as np

from quire.errors import InvariantError

Names: TypeAlias = np.ndarray[tuple[int], np.dtype[np.uint64]]
Numbers: TypeAlias = np.ndarray[tuple[int], np.dtype[np.int64]]

FREE, GONE = 0, -1
_SPREAD = np.uint64(0x9E3779B97F4A7C15)


class NumberTable:
    """Numbers below `capacity`, each under a 64-bit name or unnamed; no two have the same name.

    Open addressing with triangular steps: a slot holds a number + 1, `FREE`, or `GONE` where one was
    taken out. `names[n]` is the name of a number that has one. A table takes 8 + 4 x `slots_per_name`
    bytes per number, of which untouched pages cost nothing. Arguments are arrays [n] of distinct values.
    """

    def __init__(self, capacity: int, slots_per_name: int) -> None:
        bits = max((capacity * slots_per_name - 1).bit_length(), 4)
        self.names: Names = np.zeros(max(capacity, 2), np.uint64)
        self._slots = np.zeros(1 << bits, np.int32)
        self._mask, self._shift = (1 << bits) - 1, np.uint64(64 - bits)
        self._most_used = (len(self._slots) + capacity) // 2
        self._num_used = 0

    def find(self, names: Names) -> Numbers:
        """Return the numbers that have these names, -1 for a name that none has; names may repeat."""
        slots = self._slots.take(self._starts(names))
        found = slots.astype(np.int64) - 1
        is_it = self.names.take(found, mode="wrap") == names  # a slot that holds none: in vain
        is_it &= slots > 0
        if is_it.all():
            return found
        found[~is_it] = -1
        left = np.flatnonzero((slots != FREE) & ~is_it)
        step = 1
        while left.size:
            at = (self._starts(names[left]) + step * (step + 1) // 2) & self._mask
            slots = self._slots[at]
            is_it = (self.names[slots - 1] == names[left]) & (slots > 0)
            found[left[is_it]] = slots[is_it] - 1
            left = left[(slots != FREE) & ~is_it]
            step += 1
        return found

    def add(self, numbers: Numbers, names: Names) -> None:
        """Name unnamed numbers; nothing may have these names yet."""
        if self._num_used + len(numbers) > self._most_used:
            self._rebuild()
        self.names[numbers] = names
        self._place(numbers)

    def remove(self, numbers: Numbers) -> None:
        """Take the names of numbers away. Raises `InvariantError` for one that has none."""
        if not numbers.size:
            return
        starts, step = self._starts(self.names[numbers]), 0
        while numbers.size:
            at = (starts + step * (step + 1) // 2) & self._mask
            right = self._slots[at] == numbers + 1
            self._slots[at[right]] = GONE
            numbers, starts, step = numbers[~right], starts[~right], step + 1
            if step > self._mask:
                raise InvariantError(f"{numbers.size} numbers have no name in the table")

    def clear(self) -> None:
        """Take all names away."""
        self._slots[:] = FREE
        self._num_used = 0

    def named(self) -> Numbers:
        """Return all numbers that have a name, in no order."""
        return self._slots[self._slots > 0].astype(np.int64) - 1

    def _place(self, numbers: Numbers) -> None:
        starts, step = self._starts(self.names[numbers]), 0
        while numbers.size:
            at = (starts + step * (step + 1) // 2) & self._mask
            slots = self._slots[at]
            open_ = slots <= 0
            self._slots[at[open_]] = numbers[open_] + 1
            placed = self._slots[at] == numbers + 1  # of several that wanted one slot, one has it
            self._num_used += int(np.count_nonzero(placed & (slots == FREE)))
            numbers, starts, step = numbers[~placed], starts[~placed], step + 1

    def _rebuild(self) -> None:
        numbers = self.named()
        self.clear()
        self._place(numbers)

    def _starts(self, names: Names) -> Numbers:
        return ((names * _SPREAD) >> self._shift).astype(np.int64)
