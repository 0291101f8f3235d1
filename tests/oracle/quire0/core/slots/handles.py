"""What `SlotCache` hands out: matches, handles of running requests, pins, counts."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any, NamedTuple, Self

import msgspec

from quire0.core.scope import Scope
from quire0.core.slots.contents import SlotContents
from quire0.core.tokens import TOKEN_BYTES, IntArray, array_of
from quire.errors import PinError

SLOT_MISS_REASONS = ("last_token", "evicted", "cold")
"""Why prompt tokens were not found, counted once, at open:

last_token  the last token of every prompt is computed: it gives the next one
evicted     a slot held it and was overwritten since
cold        no slot of its scope held it, as far back as overwritten contents are remembered
"""


class SlotMatch(NamedTuple):
    """The first `num_tokens` positions of a slot hold what was asked for.

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
    `known`       key bytes of the prompt from token `known_start` on, which commits must repeat
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
    def scope(self) -> Scope:
        """Who may share its content."""
        return self.contents.scopes[self.slot]

    @property
    def tokens(self) -> IntArray:
        """The computed tokens, int32, as a copy; media stand in it as placeholder tokens."""
        key = bytes(self.contents.keys[self.slot]) if self.is_open else b""
        in_prompt = min(len(key), len(self.raw_prompt))
        return array_of(self.raw_prompt[:in_prompt] + key[in_prompt:])

    def expected(self, start: int, stop: int) -> tuple[bytes, bytes]:
        """Return what of tokens [start, stop) the prompt says: as stored, and as committed."""
        if not self.known:
            return b"", b""
        begin, end = start * TOKEN_BYTES, min(stop, self.prompt_len) * TOKEN_BYTES
        offset = self.known_start * TOKEN_BYTES
        stored = self.known[max(begin - offset, 0) : max(end - offset, 0)]
        return stored, self.raw_prompt[begin:end] if self.raw_prompt else stored

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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "open" if self.is_open else "closed"
        return f"<SlotPin {self.num_tokens} tokens of slot {self.slot}, {state}>"


class SlotStats(msgspec.Struct, frozen=True):
    """Counters since the cache was made. Tokens unless the name says otherwise.

    hit rate = hit_tokens / prompt_tokens: token-weighted, counted once per request, at `open`.

    `reoccupied_slots`  requests that took over a free slot which held their prefix: no copy
    `copied_slots`      requests and forks that got their prefix, or part of it, by a copy
    `copied_tokens`     tokens planned to be copied
    `evicted_tokens`    tokens overwritten or cut that no other slot held
    """

    num_requests: int = 0
    prompt_tokens: int = 0
    hit_tokens: int = 0
    missed: dict[str, int] = msgspec.field(default_factory=dict[str, int])
    computed_tokens: int = 0
    reoccupied_slots: int = 0
    copied_slots: int = 0
    copied_tokens: int = 0
    evicted_tokens: int = 0

    @property
    def hit_rate(self) -> float:
        """Share of prompt tokens found, 0 to 1; 0 before the first request."""
        return self.hit_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    @property
    def missed_tokens(self) -> int:
        """Prompt tokens that were not found: prompt_tokens - hit_tokens."""
        return self.prompt_tokens - self.hit_tokens


class SlotCounters:
    """The running counts, read through `SlotStats`."""

    __slots__ = tuple(SlotStats.__struct_fields__)

    num_requests: int
    prompt_tokens: int
    hit_tokens: int
    missed: dict[str, int]
    computed_tokens: int
    reoccupied_slots: int
    copied_slots: int
    copied_tokens: int
    evicted_tokens: int

    def __init__(self) -> None:
        for name in self.__slots__:
            setattr(self, name, 0)
        self.missed = dict.fromkeys(SLOT_MISS_REASONS, 0)

    def stats(self) -> SlotStats:
        """Return the counts as they are now."""
        counts: dict[str, Any] = {name: getattr(self, name) for name in self.__slots__}
        counts["missed"] = dict(self.missed)
        return SlotStats(**counts)
