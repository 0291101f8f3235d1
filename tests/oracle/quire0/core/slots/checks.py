"""A slot cache's state: recounted, as data, and as a line for people."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from quire0.core.tokens import array_of
from quire.errors import InvariantError

if TYPE_CHECKING:
    from quire0.core.slots.cache import SlotCache


def check_slots(cache: SlotCache) -> None:
    """Recount everything that a slot cache keeps; raise `InvariantError` if something differs."""
    cache.contents.check()
    cache.ghosts.check()
    busy = [slot for slot, holder in enumerate(cache.holders) if holder is not None]
    _require(cache.order.busy.nonzero()[0].tolist() == busy, f"slots {busy} are held, not busy")
    _require(cache.num_free == cache.num_slots - len(busy), f"num_free is {cache.num_free}")
    for slot, holder in enumerate(cache.holders):
        length = cache.contents.length(slot)
        _require(length <= cache.max_tokens, f"slot {slot} holds {length} tokens")
        pinned = max((pin.num_tokens for pin in cache.pins[slot]), default=0)
        _require(cache.order.pinned[slot] == pinned, f"slot {slot}: pinned is {pinned}")
        _require(pinned <= length, f"slot {slot}: {pinned} of {length} tokens pinned")
        if holder is not None:
            _require(holder.is_open and holder.slot == slot, f"slot {slot} has a wrong holder")
            rest = len(holder.known) // 4
            _require(
                holder.known_start + rest == max(holder.prompt_len, holder.known_start),
                f"slot {slot}: {rest} tokens of the prompt are known from {holder.known_start} on",
            )
    for slot, copy in cache.copies.waiting.items():
        _require(copy.dst == slot != copy.src, f"{copy} under slot {slot}")
        _require(0 <= copy.start < copy.num_tokens, f"{copy} copies nothing")
        _require(copy.num_tokens <= cache.contents.length(slot), f"{copy} beyond the content")
        _require(copy.num_tokens <= cache.max_tokens, f"{copy} beyond the slot")
    numbers = {n for key in cache.contents.keys for n in array_of(key).tolist() if n < 0}
    for number in numbers:
        cache.media.content(number)
    stats = cache.stats
    missed = sum(stats.missed.values())
    _require(stats.hit_tokens + missed == stats.prompt_tokens, "hits and misses are not all tokens")


def slots_snapshot(cache: SlotCache) -> dict[str, Any]:
    """Return all state that later calls depend on, as plain data."""
    contents, order = cache.contents, cache.order
    return {
        "num_slots": cache.num_slots,
        "max_tokens": cache.max_tokens,
        "free": cache.num_free,
        "slots": [
            {
                "tokens": array_of(contents.keys[slot]).tolist(),
                "scope": repr(contents.scopes[slot]),
                "generation": contents.generations[slot],
                "alone": int(contents.alone[slot]),
                "last_used": int(order.used[slot]),
                "pins": [pin.num_tokens for pin in cache.pins[slot]],
                "holder": None
                if holder is None
                else {
                    "num_cached": holder.num_cached,
                    "prompt_len": holder.prompt_len,
                    "known": array_of(holder.known).tolist(),
                    "known_start": holder.known_start,
                },
            }
            for slot, holder in enumerate(cache.holders)
        ],
        "given_away_next": order.order(),
        "copies": [list(copy) for copy in cache.copies.waiting.values()],
        "overwritten": [array_of(key).tolist() for key in cache.ghosts.keys],
        "num_media": len(cache.media),
        "stats": msgspec.to_builtins(cache.stats) | {"hit_rate": cache.stats.hit_rate},
    }


def draw_slots(cache: SlotCache) -> str:
    """Return one line: who has the slots, and what they hold."""
    lengths = [cache.contents.length(slot) for slot in range(cache.num_slots)]
    held = sum(1 for slot, n in enumerate(lengths) if n and not cache.order.busy[slot])
    pinned = int((cache.order.pinned > 0).sum())
    return (
        f"SlotCache({cache.num_slots} slots of {cache.max_tokens:,} tokens: {cache.num_busy} busy, "
        f"{held} free with content, {cache.num_free - held} empty, {pinned} pinned; "
        f"{sum(lengths):,} tokens held, hit rate {cache.stats.hit_rate:.1%})"
    )


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise InvariantError(what)
