"""The slot of a request, and the free slot that is given away next."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from quire.core.tokens import INT32, TOKEN_BYTES, IntArray, Key
from quire.errors import OutOfSlots
from quire.scope import Scope
from quire.slots.contents import SlotContents
from quire.slots.handles import SlotPin
from quire.slots.sorted import Sharers

HOLDS_MORE = 1 << 48
"""Above every tick: a slot that holds tokens alone goes after all those that do not."""

NEVER = 1 << 62


class SlotOrder:
    """Uses of the slots, and the order in which those without a user are given away.

    Empty slots first; then those whose tokens another slot of the same scope holds as well;
    then the least recently used. Ties are given away by number. A slot that a request holds
    or a pin keeps is not given away.

    `busy[slot]`    whether a request holds it
    `pinned[slot]`  tokens that pins keep
    `pins[slot]`    the open pins behind that
    `used[slot]`    tick of the last use, 0 for a slot that was emptied

    One vector operation over the slots finds the first, so that nothing else is kept in step.
    Least recently used is the only policy: slots are few, and each holds one request's text.
    """

    def __init__(self, contents: SlotContents) -> None:
        num_slots = len(contents.keys)
        self.busy = np.zeros(num_slots, np.bool_)
        self.pinned: IntArray = np.zeros(num_slots, INT32)
        self.pins: list[list[SlotPin]] = [[] for _ in range(num_slots)]
        self.used = np.zeros(num_slots, np.int64)
        self._contents = contents
        self._tick = 0

    def use(self, slot: int) -> None:
        """Note that a slot's content was used now."""
        self._tick += 1
        self.used[slot] = self._tick

    @property
    def num_busy(self) -> int:
        """Slots that a request holds."""
        return int(np.count_nonzero(self.busy))

    def victim(self, what: str) -> int:
        """Return the slot that a call gives away next; raise `OutOfSlots` if there is none. Pure."""
        slot = self._first()
        if slot is None:
            num_slots, busy = len(self.pins), self.num_busy
            raise OutOfSlots(
                f"{what} needs a slot; of {num_slots} slots {busy} are busy and "
                f"{num_slots - busy} more are pinned; close requests or pins, or make more slots",
                num_slots=num_slots,
                busy=busy,
                pinned=num_slots - busy,
            )
        return slot

    def victims(self) -> list[int]:
        """Return the slots that may be given away, first one first."""
        rank = self._rank()
        slots: list[int] = np.argsort(rank, kind="stable").tolist()
        return [slot for slot in slots if rank[slot] < NEVER]

    def pin(self, pin: SlotPin) -> None:
        """Keep what a pin names."""
        self.pins[pin.slot].append(pin)
        self._count_pins(pin.slot)

    def unpin(self, pin: SlotPin) -> None:
        """Keep it no more; nothing to do for a pin of before a reset."""
        if pin in self.pins[pin.slot]:
            self.pins[pin.slot].remove(pin)
            self._count_pins(pin.slot)

    def most_pinned(self, found: Sharers) -> int:
        """Return the slot among those found that is kept, or was used, more than the others."""
        return max(found.slots, key=lambda slot: (self.pinned[slot], self.used[slot]), default=0)

    def cheapest(self, found: Sharers) -> int | None:
        """Return the free slot among those found in which the least would be overwritten."""
        slots = np.array(found.slots, np.int64)
        free = slots[~self.busy[slots] & (self.pinned[slots] <= found.num_tokens)]
        if not free.size:
            return None
        # Where several slots hold the match, what one of them holds alone is all beyond it.
        first = np.lexsort((self.used[free], self._contents.alone[free]))[0]
        return int(free[first])

    def choose(self, found: Sharers, scope: Scope, key: Key, copy_ratio: int) -> int:
        """Return the slot for a request that found this: one of those found, or a victim. Pure.

        A free slot's rest is worth keeping where computing it again takes longer than copying the match:
        at one token for every `copy_ratio` tokens to copy. Raises `OutOfSlots`.
        """
        slot = self.cheapest(found)
        if slot is None:
            return self.victim("open")
        contents = self._contents
        lost = contents.lost(slot, found.num_tokens)
        victim = self._first() if lost else None
        if victim is None:
            return slot
        there = contents.common(victim, scope, key[: found.num_tokens * TOKEN_BYTES])
        return slot if lost * copy_ratio <= found.num_tokens - there else victim

    def _first(self) -> int | None:
        rank = self._rank()
        slot = int(rank.argmin())
        return slot if rank[slot] < NEVER else None

    def _count_pins(self, slot: int) -> None:
        self.pinned[slot] = max((pin.num_tokens for pin in self.pins[slot]), default=0)

    def _rank(self) -> npt.NDArray[np.int64]:
        rank = self.used + (self._contents.alone > 0) * HOLDS_MORE
        rank[self.busy | (self.pinned > 0)] = NEVER
        return rank
