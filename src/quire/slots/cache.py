"""The slot cache: requests in, slots and copies out."""

from __future__ import annotations

from collections.abc import Sequence as Items

import msgspec

from quire.config import check_count
from quire.core.tokens import TOKEN_BYTES, Key, TokenIds, key_of
from quire.errors import CommitError, CopyError, SlotError, StaleSlot, TokensError, TruncateError
from quire.interrupts import Interruptible, bar, mutating, unbar
from quire.media import MediaItem
from quire.scope import NO_SCOPE, Scope, check_scope
from quire.slots.contents import SlotContents
from quire.slots.copies import SlotCopy
from quire.slots.handles import SlotHandle, SlotMatch, SlotPin, SlotStats
from quire.slots.order import SlotOrder
from quire.slots.prompts import SlotMedia


class SlotCache(Interruptible):
    """`num_slots` slots of `max_tokens` positions each, and their contents.

        handle = cache.open(prompt)               # handle.num_cached tokens are there already
        for copy in cache.take_copies(): ...      # do these before the next forward
        ...                                       # the model computes the rest into handle.slot
        cache.commit(handle, prompt[handle.num_cached:])   # their KV exists now
        cache.close(handle)                       # the slot is free, its content findable

    A prompt finds the longest prefix of it that any slot holds, at any token. If a free slot
    holds it, the request takes that slot over and nothing is copied; what the slot held beyond
    is overwritten. If only busy or pinned slots hold it, or if the free slot's rest is worth
    keeping, it is copied into the slot whose content is worth least (see `SlotOrder`).

    copy_ratio  tokens that can be copied in the time that computing one takes

    Content is compared token by token, within one scope; a prompt keeps at least one token to
    compute; only computed tokens can be found. An operation that raises changes nothing, unless
    something else than an error of quire's leaves it (Ctrl-C, no memory): then every further
    call raises `Interrupted`, until `reset`. Raises `ConfigError` for settings that are not positive integers.

    num_free + num_busy == num_slots; `quire.slots.check(cache)` recounts everything
    """

    def __init__(self, num_slots: int, max_tokens: int, *, copy_ratio: int = 256) -> None:
        self.num_slots = check_count("num_slots", num_slots, limit=2**20)
        self.max_tokens = check_count("max_tokens", max_tokens)
        self.copy_ratio = check_count("copy_ratio", copy_ratio)
        self._start(generation=0)

    def _start(self, generation: int) -> None:
        self.handles: list[SlotHandle | None] = [None] * self.num_slots
        self.contents = SlotContents(self.num_slots, generation)
        self.order = SlotOrder(self.contents)
        self.media = SlotMedia()
        self.counts = SlotStats()

    @property
    def num_busy(self) -> int:
        """Slots that a request holds."""
        return self.order.num_busy

    @property
    def num_free(self) -> int:
        """Slots that no request holds."""
        return self.num_slots - self.order.num_busy

    @property
    def stats(self) -> SlotStats:
        """Counters since the cache was made, as they are now."""
        return msgspec.structs.replace(self.counts)

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
        key, where = self.media.read(tokens, scope, media)
        found = self.contents.find(where, key[:-TOKEN_BYTES])
        if not found.num_tokens:
            return None
        slot = self.order.cheapest(found)
        if slot is None:
            slot = found.slots[0]
        return SlotMatch(found.num_tokens, slot, self.contents.generations[slot])

    @mutating
    def open(
        self, tokens: TokenIds, scope: Scope | None = None, *, media: Items[MediaItem] = ()
    ) -> SlotHandle:
        """Give a request a slot, with as much of its prompt as any slot holds.

        `take_copies` afterwards. Raises `OutOfSlots` when all slots are busy or pinned,
        `TokensError` for an empty prompt or one of more than `max_tokens` tokens, `ScopeError`,
        `MediaError`.
        """
        key, where = self.media.read(tokens, scope, media)
        prompt_len = len(key) // TOKEN_BYTES
        if prompt_len > self.max_tokens:
            raise TokensError(
                f"a prompt of {prompt_len} tokens does not fit a slot of {self.max_tokens}; "
                "shorten it or make the slots larger"
            )
        found = self.contents.find(where, key[:-TOKEN_BYTES])
        num_cached = found.num_tokens
        slot = self.order.choose(found, where, key, self.copy_ratio)
        raw_prompt = b""
        if media:
            raw_prompt = key_of(tokens).tobytes()
            prompts = [handle.known for handle in self.handles if handle is not None]
            self.media.forget([*self.contents.keys, *prompts])
            key = self.media.encode(memoryview(raw_prompt), media)
        self.counts.num_requests += 1
        self.counts.prompt_tokens += prompt_len
        self.counts.hit_tokens += num_cached
        if slot in found.slots:
            self.contents.cut(slot, num_cached)
        elif num_cached:
            self._copy(found.slots[0], slot, num_cached)
        else:
            self.contents.clear(slot, where)
        handle = self._hold(slot, num_cached)
        handle.prompt_len = prompt_len
        handle.known, handle.known_start = bytes(key[num_cached * TOKEN_BYTES :]), num_cached
        handle.raw_prompt = raw_prompt
        return handle

    @mutating
    def allocate(self, scope: Scope | None = None) -> SlotHandle:
        """Give away the slot whose content is worth least, emptied.

        Raises `OutOfSlots`, `ScopeError`.
        """
        if scope is not None:
            check_scope(scope)
        slot = self.order.victim("allocate")
        self.contents.clear(slot, scope or NO_SCOPE)
        return self._hold(slot, 0)

    @mutating
    def occupy(self, slot: int, generation: int | None = None) -> SlotHandle:
        """Take a free slot with all that it holds, for instance one that `find` named.

        With a generation, only if the content is still what it was. `truncate` says how much of
        it counts. Raises `SlotError` for an unknown or busy slot, `StaleSlot`.
        """
        if not self.is_free(slot):
            raise SlotError(
                f"slot {slot} is busy: {self.handles[slot]!r}; close that first, or take another"
            )
        current = self.contents.generations[slot]
        if generation is not None and generation != current:
            raise StaleSlot(
                f"slot {slot} is of generation {current}, not {generation!r}: its content was "
                "overwritten or cut since; look it up again"
            )
        return self._hold(slot, self.contents.length(slot))

    @mutating
    def fork(self, handle: SlotHandle) -> SlotHandle:
        """Copy a running request into another slot: same tokens, same prompt to come.

        `take_copies` afterwards. Raises `OutOfSlots`, `SlotError`.
        """
        source, contents = self._held(handle), self.contents
        slot = self.order.victim("fork")
        if contents.keys[source]:
            self._copy(source, slot, contents.length(source))
        else:
            self.contents.clear(slot, contents.scopes[source])
        twin = self._hold(slot, handle.num_cached)
        twin.prompt_len, twin.raw_prompt = handle.prompt_len, handle.raw_prompt
        twin.known, twin.known_start = handle.known, handle.known_start
        return twin

    @mutating
    def take_copies(self) -> list[SlotCopy]:
        """Return the copies to do before the next forward, as one simultaneous assignment.

        Every source must be read before any destination is written.
        """
        return self.contents.copies.take()

    @mutating
    def commit(self, handle: SlotHandle, token_ids: TokenIds) -> None:
        """Add tokens whose KV exists now in the slot; they can be found from here on.

        Raises `CommitError` beyond `max_tokens` and for other tokens than the prompt's,
        `CopyError` when a planned copy of the slot was not taken, `SlotError` for a handle
        that is closed, `TokensError`.
        """
        key = self.check_commit(handle, token_ids)
        self.contents.append(handle.slot, key)
        self.counts.computed_tokens += len(key) // TOKEN_BYTES

    @mutating
    def truncate(self, handle: SlotHandle, num_tokens: int) -> None:
        """Forget the tokens of a running request from position `num_tokens` on.

        Within its prompt, what is committed next must be the prompt again. Raises
        `TruncateError` beyond what is computed or below what a pin keeps, `SlotError`.
        """
        slot = self._held(handle)
        computed, pinned = self.contents.length(slot), int(self.order.pinned[slot])
        if type(num_tokens) is not int or not 0 <= num_tokens <= computed:
            raise TruncateError(
                f"truncate to {num_tokens!r} tokens; it must be an integer from 0 to the "
                f"{computed} computed"
            )
        if num_tokens < pinned:
            raise TruncateError(
                f"truncate to {num_tokens} tokens, but a pin keeps the first {pinned} of slot "
                f"{slot}; close the pin first"
            )
        start = handle.known_start
        if num_tokens < start:
            again = self.contents.keys[slot][num_tokens * TOKEN_BYTES : start * TOKEN_BYTES]
            handle.known, handle.known_start = bytes(again) + handle.known, num_tokens
        self.contents.cut(slot, num_tokens)

    @mutating
    def close(self, handle: SlotHandle) -> None:
        """End a request: its slot is free, and its computed tokens stay findable there.

        Raises `SlotError` for a handle that is closed, or another cache's.
        """
        slot = self._held(handle)
        handle.is_open = False
        self.handles[slot] = None
        self.order.busy[slot] = False
        self.order.use(slot)

    @mutating
    def free(self, handle: SlotHandle) -> None:
        """End a request and forget its computed tokens, except pinned ones. Raises as `close`."""
        self.close(handle)
        self._forget(handle.slot)

    @mutating
    def clear(self) -> None:
        """Forget the contents of all free slots, except pinned ones."""
        for slot, handle in enumerate(self.handles):
            if handle is None:
                self._forget(slot)

    @mutating
    def pin(
        self, tokens: TokenIds, scope: Scope | None = None, *, media: Items[MediaItem] = ()
    ) -> SlotPin:
        """Keep the cached part of these tokens, the last one included, until the pin is closed.

        The whole slot goes to no other request meanwhile, but to one that starts with what is
        pinned. Raises `TokensError`, `ScopeError`, `MediaError`.
        """
        key, where = self.media.read(tokens, scope, media)
        found = self.contents.find(where, key)
        pin = SlotPin(self.order.most_pinned(found), found.num_tokens, self._unpin)
        if found.num_tokens:
            self.order.pin(pin)
        return pin

    @mutating
    def _unpin(self, pin: SlotPin) -> None:
        if not self.interrupted:
            self.order.unpin(pin)

    def give_up(self, why: str) -> None:
        contents = self.contents
        bar(self, why)
        bar(contents, why)  # handles read their tokens from it

    def reset(self) -> None:
        """Start anew, empty: the only call after `Interrupted`.

        Handles of before are none of this cache's any more; closing a pin of before does nothing.
        Counters start again.
        """
        try:
            unbar(self)
            first = max(vars(self.contents)["generations"]) + 1
            bar(self.contents, "the cache was reset")
            self._start(first)
        except BaseException as error:
            self.cut_off("reset", error)
            raise

    def check_commit(self, handle: SlotHandle, token_ids: TokenIds) -> Key:
        """Raise the exception that `commit` would, for engines that want to know before they compute.

        Returns the key to store.
        """
        slot = self._held(handle)
        key = key_of(token_ids)
        computed = self.contents.length(slot)
        num_tokens = len(key) // TOKEN_BYTES
        if computed + num_tokens > self.max_tokens:
            raise CommitError(
                f"commit of {num_tokens} tokens behind {computed} computed ones: a slot holds "
                f"{self.max_tokens}; close the request, or make the slots larger"
            )
        copies = self.contents.copies
        if copies.waiting and (copy := copies.in_the_way(slot, computed)) is not None:
            raise CopyError(
                f"commit into slot {slot} while {copy} waits; take_copies and do them before the "
                "forward"
            )
        return handle.stored_key(key, computed)

    def _known(self, slot: int) -> int:
        """Return a slot's number; raise `SlotError` if there is no such slot."""
        if type(slot) is not int or not 0 <= slot < self.num_slots:
            raise SlotError(f"there is no slot {slot!r}; slots are 0 to {self.num_slots - 1}")
        return slot

    def _held(self, handle: SlotHandle) -> int:
        """Return the slot of an open handle of this cache."""
        if not isinstance(handle, SlotHandle):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise SlotError(f"expected the handle that open returned, got {handle!r}")
        if handle.contents is not self.contents:
            raise SlotError(f"{handle!r} belongs to another SlotCache")
        if not handle.is_open:
            raise SlotError(
                f"the handle of slot {handle.slot} was closed already; open the request again"
            )
        return handle.slot

    def _hold(self, slot: int, num_cached: int) -> SlotHandle:
        handle = SlotHandle(self.contents, slot, self.max_tokens, num_cached)
        self.handles[slot] = handle
        self.order.busy[slot] = True
        return handle

    def _copy(self, source: int, slot: int, num_tokens: int) -> None:
        """Make a slot hold the first tokens of another one, by a planned copy."""
        contents = self.contents
        with memoryview(contents.keys[source]) as key, key[: num_tokens * TOKEN_BYTES] as head:
            there = contents.common(slot, contents.scopes[source], head)
        contents.copy(slot, source, num_tokens, there)
        self.order.use(source)
        self.counts.copied_tokens += num_tokens - there

    def _forget(self, slot: int) -> None:
        """Forget the tokens of a slot that no pin keeps."""
        kept = int(self.order.pinned[slot])
        self.contents.cut(slot, kept)
        if not kept:
            self.order.used[slot] = 0

    def __repr__(self) -> str:
        lengths = [self.contents.length(slot) for slot in range(self.num_slots)]
        held = sum(1 for slot, n in enumerate(lengths) if n and self.handles[slot] is None)
        pinned = int((self.order.pinned > 0).sum())
        return (
            f"SlotCache({self.num_slots} slots of {self.max_tokens:,} tokens: {self.num_busy} busy, "
            f"{held} free with content, {self.num_free - held} empty, {pinned} pinned; "
            f"{sum(lengths):,} tokens held, hit rate {self.counts.hit_rate:.1%})"
        )
