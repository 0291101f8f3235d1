"""A shadow of LRU: what LRU would have found, from sizes alone."""

from __future__ import annotations

from quire.foresight.reentry import Record

MIN_SLOTS = 1024


class LruShadow:
    """The stack of LRU as records in order of their end, each with the blocks it used last.

    The blocks of a record lie in one piece of the stack, the ones nearer to the root above the
    others, and below all blocks of newer records. LRU holds what lies within the capacity.
    Records that lie beyond it altogether are dropped. A Fenwick tree over the records
    makes each call O(log records).

    sum of all cells == the tree's total; a record's slot is -1 when it is not there
    """

    def __init__(self) -> None:
        self._records: list[Record] = []
        self._blocks: list[int] = []
        self._sums = [0] * (MIN_SLOTS + 1)
        self._total = 0

    def push(self, record: Record, num_blocks: int, capacity: int) -> None:
        """Put a record on top, with so many blocks."""
        if len(self._records) == len(self._sums) - 1:
            self._compact(capacity)
        record.slot = len(self._records)
        self._records.append(record)
        self._blocks.append(0)
        self._add(record.slot, num_blocks)

    def take(self, record: Record, num_blocks: int) -> None:
        """A newer request used so many blocks of a record."""
        if record.slot >= 0:
            self._add(record.slot, -min(num_blocks, self._blocks[record.slot]))

    def above(self, record: Record, capacity: int) -> int:
        """Return the blocks of newer records; the capacity for a record that was dropped."""
        if record.slot < 0:
            return capacity
        below, at = 0, record.slot + 1
        while at:
            below += self._sums[at]
            at &= at - 1
        return self._total - below

    def _add(self, slot: int, num_blocks: int) -> None:
        self._blocks[slot] += num_blocks
        self._total += num_blocks
        at, size = slot + 1, len(self._sums)
        while at < size:
            self._sums[at] += num_blocks
            at += at & -at

    def _compact(self, capacity: int) -> None:
        """Keep the records within the capacity, and room for as many again."""
        kept: list[tuple[Record, int]] = []
        depth = 0
        for record, num_blocks in zip(reversed(self._records), reversed(self._blocks), strict=True):
            record.slot = -1
            if num_blocks and depth < capacity:
                kept.append((record, num_blocks))
                depth += num_blocks
        self._sums = [0] * (max(MIN_SLOTS, 2 * len(kept)) + 1)
        self._records, self._blocks, self._total = [], [], 0
        for record, num_blocks in reversed(kept):
            self.push(record, num_blocks, capacity)
