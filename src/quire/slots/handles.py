"""Matches, handles of running requests, pins and counters: the objects that `SlotCache` returns."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Self

import msgspec

from quire.core.tokens import TOKEN_BYTES, IntArray, Key, array_of, check_sign
from quire.errors import CommitError, PinError
from quire.slots.contents import SlotContents


class SlotMatch(NamedTuple):
    """A slot whose first `num_tokens` positions hold the prompt's.

    True as long as the slot's generation is `generation`, whether it is free or busy.
    """

    num_tokens: int
    slot: int
    generation: int


class SlotHandle(msgspec.Struct, gc=False, eq=False):
    """One running request and the slot that is its own until `close` or `free`.

    Made by `SlotCache.open`, `allocate`, `occupy` and `fork`; all changes go through the cache.

    `slot`        which one
    `num_cached`  tokens found in it or copied into it, no compute needed
    `prompt_len`  tokens of the prompt given at `open`, else 0
    `known`       key bytes of prompt tokens [known_start, prompt_len), which commits must repeat
    `raw_prompt`  the whole prompt with its placeholder tokens, if media stand in it
    `is_open`     False after `close` and `free`
    """

    contents: SlotContents
    slot: int
    max_tokens: int
    num_cached: int = 0
    prompt_len: int = 0
    known: bytes = b""
    known_start: int = 0
    raw_prompt: bytes = b""
    is_open: bool = True

    @property
    def computed(self) -> int:
        """Tokens whose KV exists, 0 once it is closed."""
        return self.contents.length(self.slot) if self.is_open else 0

    @property
    def room(self) -> int:
        """Tokens that still fit."""
        return self.max_tokens - self.computed if self.is_open else 0

    @property
    def generation(self) -> int:
        """The slot's generation now."""
        return self.contents.generations[self.slot]

    @property
    def tokens(self) -> IntArray:
        """The computed tokens, int32, as a copy; media stand in it as placeholder tokens."""
        key = bytes(self.contents.keys[self.slot]) if self.is_open else b""
        in_prompt = min(len(key), len(self.raw_prompt))
        return array_of(self.raw_prompt[:in_prompt] + key[in_prompt:])

    def stored_key(self, key: Key, computed: int) -> Key:
        """Return what to store of tokens that follow `computed` ones; media stand in it by their numbers.

        Raises `CommitError` for other tokens than the prompt's, `TokensError` for negative ones.
        """
        given = stored = b""
        if computed < self.prompt_len:
            stop = computed * TOKEN_BYTES + len(key)
            stored = self.known[(computed - self.known_start) * TOKEN_BYTES :][: len(key)]
            given = self.raw_prompt[computed * TOKEN_BYTES : stop] if self.raw_prompt else stored
        head, rest = key[: len(given)], key[len(given) :]
        if not given.startswith(head):
            at = computed + int((array_of(given) != array_of(head)).argmax())
            raise CommitError(
                f"commit of another token than the prompt's at position {at}; the prompt comes "
                "first, as it was given to open"
            )
        check_sign(rest)
        return memoryview(stored + rest.tobytes()) if self.raw_prompt else key

    def __repr__(self) -> str:
        if self.contents.interrupted:
            return f"<SlotHandle of slot {self.slot}, of before a reset>"
        if not self.is_open:
            return f"<SlotHandle of slot {self.slot}, closed>"
        return (
            f"<SlotHandle of slot {self.slot}, generation {self.generation}: {self.computed} of "
            f"{self.max_tokens} tokens computed, {self.num_cached} were cached>"
        )


class SlotPin:
    """A prefix of `num_tokens` tokens that its slot keeps until the pin is closed.

    Closed once, by `close` or at the end of a `with` block; twice raises `PinError`. A pin of
    0 tokens, where nothing was found, holds no slot.
    """

    __slots__ = ("_release", "is_open", "num_tokens", "slot")

    def __init__(self, slot: int, num_tokens: int, release: Callable[[SlotPin], None]) -> None:
        self.slot = slot
        self.num_tokens = num_tokens
        self.is_open = True
        self._release = release

    def close(self) -> None:
        """Let go of the prefix: it may be overwritten again."""
        if not self.is_open:
            raise PinError(f"{self!r} was closed already; a pin is closed once")
        self._release(self)
        self.is_open = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "open" if self.is_open else "closed"
        return f"<SlotPin {self.num_tokens} tokens of slot {self.slot}, {state}>"


class SlotStats(msgspec.Struct):
    """Counters since the cache was made. Tokens unless the name says otherwise.

    hit rate = hit_tokens / prompt_tokens: token-weighted, counted once per request, at `open`.

    `copied_tokens`  tokens planned to be copied
    """

    num_requests: int = 0
    prompt_tokens: int = 0
    hit_tokens: int = 0
    computed_tokens: int = 0
    copied_tokens: int = 0

    @property
    def hit_rate(self) -> float:
        """Share of prompt tokens found, 0 to 1; 0 before the first request."""
        return self.hit_tokens / self.prompt_tokens if self.prompt_tokens else 0.0
