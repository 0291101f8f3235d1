"""The slot store: what slots hold and who may have them, nothing about running requests."""

from __future__ import annotations

from collections.abc import Sequence as Items

import numpy as np

from quire0.core.interrupts import Interruptible, mutating
from quire0.core.scope import MediaItem, MediaTable, Scope, check_media, check_scope
from quire0.core.slots.contents import NO_SCOPE, Found, Ghosts, SlotContents
from quire0.core.slots.copies import SlotCopy, SlotCopyPlan
from quire0.core.slots.handles import SlotCounters, SlotMatch, SlotPin, SlotStats
from quire0.core.slots.order import SlotOrder
from quire0.core.tokens import TOKEN_BYTES, Key, TokenIds, array_of, check_sign, key_of
from quire.errors import OutOfSlots, SlotError, TokensError

MAX_MEDIA = 1024
"""Beyond so many media contents, those that no slot holds any more are forgotten."""


class SlotStore(Interruptible):
    """The half of `SlotCache` that knows no requests: lookups, pins, copies, statistics.

    num_free + num_busy == num_slots
    """

    def __init__(
        self, num_slots: int, max_tokens: int, copy_ratio: int, generation: int = 0
    ) -> None:
        self.num_slots = num_slots
        self.max_tokens = max_tokens
        self.copy_ratio = copy_ratio
        self.num_free: int = num_slots
        self.contents = SlotContents(num_slots, generation)
        self.order = SlotOrder(self.contents)
        self.pins: list[list[SlotPin]] = [[] for _ in range(num_slots)]
        self.copies = SlotCopyPlan()
        self.ghosts = Ghosts(num_slots)
        self.media = MediaTable()
        self.counters = SlotCounters()
        self._max_media = MAX_MEDIA

    @property
    def num_busy(self) -> int:
        """Slots that a request holds."""
        return self.num_slots - self.num_free

    @property
    def stats(self) -> SlotStats:
        """What was counted since the cache was made."""
        return self.counters.stats()

    def is_free(self, slot: int) -> bool:
        """Whether no request holds a slot. Raises `SlotError` for an unknown one."""
        return not self.order.busy[self._known(slot)]

    def generation(self, slot: int) -> int:
        """Return a slot's generation: it rises whenever tokens in it are cut off or replaced.

        Raises `SlotError` for an unknown slot.
        """
        return self.contents.generations[self._known(slot)]

    def find(
        self, tokens: TokenIds, scope: Scope | None = None, media: Items[MediaItem] = ()
    ) -> SlotMatch | None:
        """Return the longest prefix that `open` would find, and a slot that holds it. Pure.

        The last token is not part of it: it is always computed. A free slot is named before a
        busy one. None: no slot holds the first token. Raises `TokensError`, `ScopeError`,
        `MediaError`.
        """
        key, where = self._read(tokens, scope, media)
        found = self.contents.find(where, key[:-TOKEN_BYTES])
        if not found.num_tokens:
            return None
        slot = self._cheapest(found)
        if slot is None:
            slot = found.slots[0]
        return SlotMatch(found.num_tokens, slot, self.contents.generations[slot])

    @mutating
    def pin(
        self, tokens: TokenIds, scope: Scope | None = None, *, media: Items[MediaItem] = ()
    ) -> SlotPin:
        """Keep what is held of these tokens, the last one included, until the pin is closed.

        The whole slot goes to no other request meanwhile, but to one that starts with what is
        pinned. Raises `TokensError`, `ScopeError`, `MediaError`.
        """
        key, where = self._read(tokens, scope, media)
        found = self.contents.find(where, key)
        order = self.order
        slot = max(found.slots, key=lambda each: (order.pinned[each], order.used[each]), default=0)
        pin = SlotPin(slot, found.num_tokens, self._unpin)
        if found.num_tokens:
            self.pins[slot].append(pin)
            self._count_pins(slot)
        return pin

    @mutating
    def take_copies(self) -> list[SlotCopy]:
        """Return the copies to do before the next forward, as one simultaneous assignment.

        Every source must be read before any destination is written.
        """
        return self.copies.take()

    @mutating
    def clear(self) -> None:
        """Forget the contents of all free slots, but for what pins keep."""
        self.ghosts.forget()
        for slot in range(self.num_slots):
            if not self.order.busy[slot]:
                self._forget(slot)

    # -- which slot ------------------------------------------------------------------------

    def _known(self, slot: int) -> int:
        """Return a slot's number; raise `SlotError` if there is no such slot."""
        if type(slot) is not int or not 0 <= slot < self.num_slots:
            raise SlotError(f"there is no slot {slot!r}; slots are 0 to {self.num_slots - 1}")
        return slot

    def _victim(self, what: str) -> int:
        """Return the slot to give away next; raise `OutOfSlots` if there is none. Pure."""
        slot = self.order.victim()
        if slot is None:
            pinned = int((~self.order.busy).sum())
            raise OutOfSlots(
                f"{what} needs a slot; of {self.num_slots} slots {self.num_busy} are busy and "
                f"{pinned} more are pinned; close requests or pins, or make more slots",
                num_slots=self.num_slots,
                busy=self.num_busy,
                pinned=pinned,
            )
        return slot

    def _choose(self, found: Found, scope: Scope, key: Key) -> int:
        """Return the slot for a request that found this: one of those found, or a victim. Pure."""
        slot = self._cheapest(found)
        if slot is None:
            return self._victim("open")
        lost = self._lost(slot, found.num_tokens)
        victim = self.order.victim()
        if not lost or victim is None:
            return slot
        there = self.contents.common(victim, scope, key[: found.num_tokens * TOKEN_BYTES])
        return slot if lost * self.copy_ratio <= found.num_tokens - there else victim

    def _cheapest(self, found: Found) -> int | None:
        """Return the free slot among those found in which the least would be overwritten."""
        slots, order = np.array(found.slots, np.int64), self.order
        free = slots[~order.busy[slots] & (order.pinned[slots] <= found.num_tokens)]
        if not free.size:
            return None
        # Where several slots hold the match, what one of them holds alone is all beyond it.
        first = np.lexsort((order.used[free], self.contents.alone[free]))[0]
        return int(free[first])

    def _lost(self, slot: int, num_tokens: int) -> int:
        """Return how many tokens nobody would hold if a slot were cut to `num_tokens`."""
        return min(int(self.contents.alone[slot]), self.contents.length(slot) - num_tokens)

    # -- what it holds ---------------------------------------------------------------------

    def _copy(self, source: int, slot: int, num_tokens: int) -> None:
        """Make a slot hold the first tokens of another one, by a planned copy."""
        with memoryview(self.contents.keys[source]) as key:
            head = key[: num_tokens * TOKEN_BYTES]
            there = self.contents.common(slot, self.contents.scopes[source], head)
            head.release()
        self._remember(slot, there)
        self.contents.copy(slot, source, num_tokens)
        self.copies.plan(SlotCopy(source, slot, num_tokens, there))
        self.order.use(source)
        self.counters.copied_slots += 1
        self.counters.copied_tokens += num_tokens - there

    def _reoccupy(self, slot: int, num_tokens: int) -> None:
        """Keep the first tokens of a slot for a request that starts with them."""
        self._remember(slot, num_tokens)
        self._cut(slot, num_tokens)

    def _empty(self, slot: int, scope: Scope) -> None:
        """Make a slot ready for a request of a scope that starts from nothing."""
        self._reoccupy(slot, 0)
        self.contents.clear(slot, scope)

    def _cut(self, slot: int, num_tokens: int) -> None:
        """Forget the tokens of a slot from position `num_tokens` on."""
        self.contents.cut(slot, num_tokens)
        self.copies.cut(slot, num_tokens)

    def _forget(self, slot: int) -> None:
        """Forget the tokens of a slot that no pin keeps."""
        kept = int(self.order.pinned[slot])
        self._cut(slot, kept)
        if not kept:
            self.order.used[slot] = 0

    def _remember(self, slot: int, num_tokens: int) -> None:
        """Note what nobody holds any more when a slot keeps so many tokens."""
        lost = self._lost(slot, num_tokens)
        if lost > 0:
            self.counters.evicted_tokens += lost
            self.ghosts.remember(self.contents.keys[slot], self.contents.scopes[slot])

    @mutating
    def _unpin(self, pin: SlotPin) -> None:
        if not self.interrupted and pin in self.pins[pin.slot]:
            self.pins[pin.slot].remove(pin)
            self._count_pins(pin.slot)

    def _count_pins(self, slot: int) -> None:
        self.order.pinned[slot] = max((pin.num_tokens for pin in self.pins[slot]), default=0)

    # -- reading and counting --------------------------------------------------------------

    def _read(
        self, tokens: TokenIds, scope: Scope | None, media: Items[MediaItem]
    ) -> tuple[Key, Scope]:
        """Return the key and scope to look up; raise what `find` raises."""
        key = key_of(tokens)
        if not key:
            raise TokensError("the prompt is empty; it needs at least one token")
        if scope is not None:
            check_scope(scope)
        check_sign(key)
        if media:
            check_media(media, len(key) // TOKEN_BYTES)
            key = self.media.peek(key, media)
        return key, scope or NO_SCOPE

    def _store_media(self, key: Key, media: Items[MediaItem], known: Items[bytes]) -> Key:
        """Encode a prompt's media, forgetting those in no slot and not `known` to a request."""
        if len(self.media) >= self._max_media:
            keys = [*self.contents.keys, *self.ghosts.keys, *known]
            found = {number for each in keys for number in set(array_of(each).tolist())}
            self.media.keep({number for number in found if number < 0})
            self._max_media = max(MAX_MEDIA, 2 * len(self.media))
        return self.media.encode(key, media)

    def _count_open(self, num_cached: int, scope: Scope, key: Key) -> None:
        """Count a request, and why not more of its prompt was found."""
        counters = self.counters
        num_tokens = len(key) // TOKEN_BYTES
        counters.num_requests += 1
        counters.prompt_tokens += num_tokens
        counters.hit_tokens += num_cached
        counters.missed["last_token"] += 1
        asked, missed = key[:-TOKEN_BYTES], num_tokens - 1 - num_cached
        if missed:
            evicted = max(self.ghosts.find(scope, asked) - num_cached, 0)
            counters.missed["evicted"] += evicted
            counters.missed["cold"] += missed - evicted
