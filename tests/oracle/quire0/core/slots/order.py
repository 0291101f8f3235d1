"""Which free slot is given away next: the one whose content is worth least."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from quire0.core.slots.contents import SlotContents
from quire0.core.tokens import INT32, IntArray

HOLDS_MORE = 1 << 48
"""Above every tick: a slot that holds tokens alone goes after all those that do not."""

NEVER = 1 << 62


class SlotOrder:
    """Who uses the slots, and in which order those that nobody uses are given away.

    Empty slots first; then those whose tokens another slot of the same scope holds as well;
    then the least recently used. Ties are given away by number. A slot that a request holds
    or a pin keeps is not given away.

    `busy[slot]`    whether a request holds it
    `pinned[slot]`  tokens that pins keep
    `used[slot]`    tick of the last use, 0 for a slot that was emptied

    One vector operation over the slots finds the first, so that nothing else is kept in step.
    Least recently used is the only policy: slots are few, and each holds one request's text.
    """

    def __init__(self, contents: SlotContents) -> None:
        num_slots = len(contents.keys)
        self.busy = np.zeros(num_slots, np.bool_)
        self.pinned: IntArray = np.zeros(num_slots, INT32)
        self.used = np.zeros(num_slots, np.int64)
        self._contents = contents
        self._tick = 0

    def use(self, slot: int) -> None:
        """Note that a slot's content was used now."""
        self._tick += 1
        self.used[slot] = self._tick

    def victim(self) -> int | None:
        """Return the slot to give away next, None if all are busy or pinned. Pure."""
        rank = self._rank()
        slot = int(rank.argmin())
        return slot if rank[slot] < NEVER else None

    def order(self) -> list[int]:
        """Return the slots that may be given away, first one first."""
        rank = self._rank()
        slots: list[int] = np.argsort(rank, kind="stable").tolist()
        return [slot for slot in slots if rank[slot] < NEVER]

    def _rank(self) -> npt.NDArray[np.int64]:
        rank = self.used + (self._contents.alone > 0) * HOLDS_MORE
        rank[self.busy | (self.pinned > 0)] = NEVER
        return rank
