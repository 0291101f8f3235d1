"""The slot cache: requests in, slots and copies out."""

from __future__ import annotations

from collections.abc import Sequence as Items
from typing import Any

from quire0.core.groups import check_count
from quire0.core.interrupts import bar, mutating, unbar
from quire0.core.scope import MediaItem, Scope, check_scope
from quire0.core.slots.checks import check_slots, draw_slots, slots_snapshot
from quire0.core.slots.contents import NO_SCOPE
from quire0.core.slots.handles import SlotHandle
from quire0.core.slots.store import SlotStore
from quire0.core.tokens import TOKEN_BYTES, Key, TokenIds, array_of, check_sign, key_of
from quire.errors import (
    CommitError,
    CopyError,
    SlotError,
    StaleSlot,
    TokensError,
    TruncateError,
)


class SlotCache(SlotStore):
    """`num_slots` slots of `max_tokens` positions each, and what every position holds.

        handle = cache.open(prompt)               # handle.num_cached tokens are there already
        for copy in cache.take_copies(): ...      # do these before the next forward
        ...                                       # the model computes the rest into handle.slot
        cache.commit(handle, prompt[handle.num_cached:])   # their KV exists now
        cache.close(handle)                       # the slot is free, its content findable

    A prompt finds the longest prefix of it that any slot holds, at any token. If a free slot
    holds it, the request takes that slot over and nothing is copied; what the slot held beyond
    is overwritten. If only busy or pinned slots hold it, or if the free slot's rest is worth
    keeping, it is copied into the slot whose content is worth least (see `SlotOrder`).

    copy_ratio  how many tokens can be copied in the time that computing one takes. The rest of
                a free slot is worth keeping if computing it again takes longer than the copy

    Content is compared token by token, within one scope; a prompt keeps at least one token to
    compute; only computed tokens can be found. An operation that raises changes nothing, unless
    something else than an error of quire's leaves it (Ctrl-C, no memory): then every further
    call raises `Interrupted`, until `reset`.
    Raises `ConfigError` for settings that are not positive integers.
    """

    def __init__(self, num_slots: int, max_tokens: int, *, copy_ratio: int = 256) -> None:
        super().__init__(
            check_count("num_slots", num_slots, limit=2**20),
            check_count("max_tokens", max_tokens),
            check_count("copy_ratio", copy_ratio),
        )
        self.holders: list[SlotHandle | None] = [None] * self.num_slots

    @mutating
    def open(
        self, tokens: TokenIds, scope: Scope | None = None, *, media: Items[MediaItem] = ()
    ) -> SlotHandle:
        """Give a request a slot, with as much of its prompt as any slot holds.

        `take_copies` afterwards. Raises `OutOfSlots` when all slots are busy or pinned,
        `TokensError` for an empty prompt or one of more than `max_tokens` tokens, `ScopeError`,
        `MediaError`.
        """
        key, where = self._read(tokens, scope, media)
        prompt_len = len(key) // TOKEN_BYTES
        if prompt_len > self.max_tokens:
            raise TokensError(
                f"a prompt of {prompt_len} tokens does not fit a slot of {self.max_tokens}; "
                "shorten it or make the slots larger"
            )
        found = self.contents.find(where, key[:-TOKEN_BYTES])
        num_cached = found.num_tokens
        slot = self._choose(found, where, key)
        raw = b""
        if media:
            raw = key_of(tokens).tobytes()
            known = [holder.known for holder in self.holders if holder is not None]
            key = self._store_media(memoryview(raw), media, known)
        self._count_open(num_cached, where, key)
        if slot in found.slots:
            self._reoccupy(slot, num_cached)
            self.counters.reoccupied_slots += 1
        elif num_cached:
            self._copy(found.slots[0], slot, num_cached)
        else:
            self._empty(slot, where)
        return self._hold(slot, num_cached, prompt_len, key[num_cached * TOKEN_BYTES :], raw)

    @mutating
    def allocate(self, scope: Scope | None = None) -> SlotHandle:
        """Give away the slot whose content is worth least, emptied.

        Raises `OutOfSlots`, `ScopeError`.
        """
        if scope is not None:
            check_scope(scope)
        slot = self._victim("allocate")
        self._empty(slot, scope or NO_SCOPE)
        return self._hold(slot)

    @mutating
    def occupy(self, slot: int, generation: int | None = None) -> SlotHandle:
        """Take a free slot with all that it holds, for instance one that `find` named.

        With a generation, only if the content is still what it was. `truncate` says how much of
        it counts. Raises `SlotError` for an unknown or busy slot, `StaleSlot`.
        """
        if not self.is_free(slot):
            raise SlotError(
                f"slot {slot} is busy: {self.holders[slot]!r}; close that first, or take another"
            )
        current = self.contents.generations[slot]
        if generation is not None and generation != current:
            raise StaleSlot(
                f"slot {slot} is of generation {current}, not {generation!r}: its content was "
                "overwritten or cut since; look it up again"
            )
        return self._hold(slot, self.contents.length(slot))

    @mutating
    def commit(self, handle: SlotHandle, token_ids: TokenIds) -> None:
        """Add tokens whose KV exists now in the slot; they can be found from here on.

        Raises `CommitError` beyond `max_tokens` and for other tokens than the prompt's,
        `CopyError` when a planned copy of the slot was not taken, `SlotError` for a handle
        that is closed, `TokensError`.
        """
        key = self._checked(handle, token_ids)
        self.contents.append(handle.slot, key)
        self.counters.computed_tokens += len(key) // TOKEN_BYTES
        if handle.known and handle.computed >= handle.prompt_len:
            handle.known, handle.known_start = b"", handle.prompt_len

    def check_commit(self, handle: SlotHandle, token_ids: TokenIds) -> None:
        """Raise what `commit` would; for engines that want to know before they compute."""
        self._checked(handle, token_ids)

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
        if num_tokens < handle.known_start:
            end = min(handle.known_start, handle.prompt_len) * TOKEN_BYTES
            cut = bytes(self.contents.keys[slot][num_tokens * TOKEN_BYTES : end])
            handle.known, handle.known_start = cut + handle.known, num_tokens
        self._cut(slot, num_tokens)

    @mutating
    def fork(self, handle: SlotHandle) -> SlotHandle:
        """Copy a running request into another slot: same tokens, same prompt to come.

        `take_copies` afterwards. Raises `OutOfSlots`, `SlotError`.
        """
        source = self._held(handle)
        slot = self._victim("fork")
        computed = self.contents.length(source)
        if computed:
            self._copy(source, slot, computed)
        else:
            self._empty(slot, self.contents.scopes[source])
        twin = self._hold(slot, handle.num_cached, handle.prompt_len)
        twin.known, twin.known_start = handle.known, handle.known_start
        twin.raw_prompt = handle.raw_prompt
        return twin

    @mutating
    def close(self, handle: SlotHandle) -> None:
        """End a request: its slot is free, and what it computed stays findable there.

        Raises `SlotError` for a handle that is closed, or another cache's.
        """
        slot = self._held(handle)
        handle.is_open = False
        handle.known = handle.raw_prompt = b""
        self.holders[slot] = None
        self.order.busy[slot] = False
        self.order.use(slot)
        self.num_free += 1

    @mutating
    def free(self, handle: SlotHandle) -> None:
        """End a request and forget what it computed, but for what a pin keeps. Raises as `close`."""
        self.close(handle)
        self._forget(handle.slot)

    def give_up(self, why: str) -> None:
        contents = self.contents
        bar(self, why)
        bar(contents, why)  # handles read their tokens from it

    def reset(self) -> None:
        """Start anew, empty: the only call after `Interrupted`.

        Handles of before are none of this cache's any more; closing a pin of before does nothing. Counters start again.
        """
        try:
            unbar(self)
            first = max(vars(self.contents)["generations"]) + 1
            bar(self.contents, "the cache was reset")
            super().__init__(self.num_slots, self.max_tokens, self.copy_ratio, first)
            self.holders = [None] * self.num_slots
        except BaseException as error:
            self.cut_off("reset", error)
            raise

    def snapshot(self) -> dict[str, Any]:
        """Return the state as plain data; two caches with equal data act alike."""
        return slots_snapshot(self)

    def check(self) -> None:
        """Recount every invariant from scratch; raise `InvariantError` if one is broken."""
        check_slots(self)

    def __repr__(self) -> str:
        return draw_slots(self)

    def _hold(
        self,
        slot: int,
        num_cached: int = 0,
        prompt_len: int = 0,
        known: Key | bytes = b"",
        raw_prompt: bytes = b"",
    ) -> SlotHandle:
        handle = SlotHandle(
            contents=self.contents,
            slot=slot,
            max_tokens=self.max_tokens,
            num_cached=num_cached,
            prompt_len=prompt_len,
            known=bytes(known),
            known_start=num_cached,
            raw_prompt=raw_prompt,
        )
        self.holders[slot] = handle
        self.order.busy[slot] = True
        self.num_free -= 1
        return handle

    def _checked(self, handle: SlotHandle, token_ids: TokenIds) -> Key:
        """Return the key to store for tokens to commit; raise if they are refused."""
        slot = self._held(handle)
        key = key_of(token_ids)
        computed = self.contents.length(slot)
        num_tokens = len(key) // TOKEN_BYTES
        if computed + num_tokens > self.max_tokens:
            raise CommitError(
                f"commit of {num_tokens} tokens behind {computed} computed ones: a slot holds "
                f"{self.max_tokens}; close the request, or make the slots larger"
            )
        if self.copies.waiting and (copy := self.copies.in_the_way(slot, computed)) is not None:
            raise CopyError(
                f"commit into slot {slot} while {copy} waits; take_copies and do them before the "
                "forward"
            )
        stored, given = handle.expected(computed, computed + num_tokens)
        head, rest = key[: len(given)], key[len(given) :]
        if not given.startswith(head):
            at = computed + int((array_of(given) != array_of(head)).argmax())
            raise CommitError(
                f"commit of another token than the prompt's at position {at}; the prompt comes "
                "first, as it was given to open"
            )
        check_sign(rest)
        return memoryview(stored + rest.tobytes()) if handle.raw_prompt else key

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
