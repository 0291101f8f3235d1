"""A slot cache's state: recounted, and as data."""

from __future__ import annotations

from typing import Any

import msgspec

from quire.core.tokens import TOKEN_BYTES, array_of
from quire.errors import InvariantError
from quire.slots.cache import SlotCache
from quire.slots.handles import SlotHandle


def check(cache: SlotCache) -> None:
    """Recount everything that a slot cache keeps; raise `InvariantError` if something differs."""
    cache.contents.check()
    busy = [slot for slot, handle in enumerate(cache.handles) if handle is not None]
    _require(cache.order.busy.nonzero()[0].tolist() == busy, f"slots {busy} are held, not busy")
    for slot, handle in enumerate(cache.handles):
        length = cache.contents.length(slot)
        _require(length <= cache.max_tokens, f"slot {slot} holds {length} tokens")
        pinned = max((pin.num_tokens for pin in cache.order.pins[slot]), default=0)
        _require(cache.order.pinned[slot] == pinned, f"slot {slot}: pinned is {pinned}")
        _require(pinned <= length, f"slot {slot}: {pinned} of {length} tokens pinned")
        if handle is not None:
            _require(handle.is_open and handle.slot == slot, f"slot {slot} has a wrong handle")
            end = handle.known_start + len(handle.known) // TOKEN_BYTES
            _require(end == handle.prompt_len, f"slot {slot}: its prompt is known up to {end}")
    for slot, copy in cache.contents.copies.waiting.items():
        _require(copy.dst == slot != copy.src, f"{copy} under slot {slot}")
        _require(0 <= copy.start < copy.num_tokens, f"{copy} copies nothing")
        _require(copy.num_tokens <= cache.contents.length(slot), f"{copy} beyond the content")
    numbers = {n for key in cache.contents.keys for n in array_of(key).tolist() if n < 0}
    _require(numbers <= cache.media.contents.keys(), "a content that a slot holds is forgotten")


def snapshot(cache: SlotCache) -> dict[str, Any]:
    """Return all state that later calls depend on, as plain data, by slot; equal data acts alike."""
    contents, order = cache.contents, cache.order
    return {
        "max_tokens": cache.max_tokens,
        "tokens": [array_of(key).tolist() for key in contents.keys],
        "scopes": [repr(scope) for scope in contents.scopes],
        "generations": list(contents.generations),
        "alone": contents.alone.tolist(),
        "used": order.used.tolist(),
        "pins": [[pin.num_tokens for pin in pins] for pins in order.pins],
        "handles": [handle and _handle_data(handle) for handle in cache.handles],
        "given_away_next": order.victims(),
        "copies": [list(copy) for copy in contents.copies.waiting.values()],
        "num_media": len(cache.media),
        "stats": msgspec.to_builtins(cache.counts),
    }


def _handle_data(handle: SlotHandle) -> list[Any]:
    known = array_of(handle.known).tolist()
    return [handle.num_cached, handle.prompt_len, handle.known_start, known]


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise InvariantError(what)
