"""KV events on the wire, in the format of vLLM, SGLang and Dynamo.

A batch is one msgpack array, `[seconds, events, data parallel rank]`. An event is a map with its type; before June 2026 it
was an array that begins with it, and both are read. Fields that are not known are passed over, and of an event of another
type there is its type. What is written is what vLLM 0.32 writes, byte for byte.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from contextlib import suppress
from typing import Annotated, Any, TypeAlias, cast

import msgspec

from quire.errors import RecordError

BlockHash: TypeAlias = int | bytes
"""The name of a block and all before it: 64 bits of a hash, or all of it."""

TokenId: TypeAlias = Annotated[int, msgspec.Meta(ge=-(2**31), lt=2**31)]


class StoredEvent(msgspec.Struct, tag="BlockStored", omit_defaults=True, gc=False):
    """Blocks that a cache holds now, each behind the one before, the first behind `parent_block_hash` (None: a prompt's start).

    `token_ids`     of all the blocks; of more blocks than there are hashes, where a group does not keep all of them
    `medium`        "GPU", "CPU", "STORAGE" and others; None is the device
    `extra_keys`    per block what else its hash is made of: LoRA, media with their places, salt
    `group_idx`     the layer group, None for the only one
    `kv_cache_spec_kind`, `kv_cache_spec_sliding_window`  what a hit needs of that group, the window in tokens
    """

    block_hashes: list[BlockHash]
    parent_block_hash: BlockHash | None
    token_ids: list[TokenId]
    block_size: Annotated[int, msgspec.Meta(ge=1)]
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[Any] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    ownership: str | None = None
    session_id: str | None = None


class RemovedEvent(msgspec.Struct, tag="BlockRemoved", omit_defaults=True, gc=False):
    """Blocks that one layer group holds no more on a medium."""

    block_hashes: list[BlockHash]
    medium: str | None
    group_idx: int | None = None
    locality: str | None = None
    ownership: str | None = None


class ClearedEvent(msgspec.Struct, tag="AllBlocksCleared", gc=False):
    """A cache that holds nothing any more, on any medium."""


class UnknownEvent(msgspec.Struct, gc=False):
    """An event of a type that is not known; a newer version published it."""

    type: str


CacheEvent: TypeAlias = StoredEvent | RemovedEvent | ClearedEvent | UnknownEvent


class EventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """Events that were published together: `time_s` since the epoch, the data parallel rank that they are of."""

    time_s: float
    events: Items[CacheEvent]
    rank: int | None = None


class _MapBatch(msgspec.Struct, array_like=True):
    time_s: float
    events: list[StoredEvent | RemovedEvent | ClearedEvent]
    rank: int | None = None


_KINDS: dict[str, type[Any]] = {
    "BlockStored": StoredEvent,
    "BlockRemoved": RemovedEvent,
    "AllBlocksCleared": ClearedEvent,
}
_LATER = {"parent_block_hash": None, "lora_id": None, "medium": None, "lora_name": None}
"""Fields that older versions leave out."""

_SALT = b"cache_salt"
"""SGLang's field of a salt, which vLLM has in the extra keys of a prompt's first block."""

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_MapBatch)


def encode_batch(batch: EventBatch) -> bytes:
    """Return a batch as it is published."""
    return _encoder.encode(batch)


def decode_batch(payload: bytes | memoryview) -> EventBatch:
    """Return the batch of a message. Raises `RecordError` for bytes that are none."""
    if _SALT not in bytes(payload):
        with suppress(msgspec.DecodeError):
            batch = _decoder.decode(payload)
            return EventBatch(batch.time_s, batch.events, batch.rank)
    return _decoded_singly(payload)


def event_fields(raw: Any) -> dict[str, Any]:
    """Return an event as a map of its fields; an array of an unknown type gives only its type.

    Raises `TypeError` for a value that is neither a map nor an array.
    """
    if isinstance(raw, dict):
        return cast("dict[str, Any]", raw)
    if not (isinstance(raw, list) and raw and isinstance(raw[0], str)):
        msg = "an event is a map with a type, or a list that begins with it"
        raise TypeError(msg)
    name, *values = cast("list[Any]", raw)
    kind = _KINDS.get(name)
    fields = () if kind is None else kind.__struct_fields__
    return {"type": name, **dict(zip(fields, values, strict=False))}


def wire_hash(digest: bytes) -> int:
    """Return the number that stands for a digest: its low 64 bits, as every consumer takes it."""
    return int.from_bytes(digest[-8:], "big")


def _decoded_singly(payload: bytes | memoryview) -> EventBatch:
    """Decode events one by one, of any version."""
    try:
        raw = msgspec.msgpack.decode(payload)
        time_s, events, *rest = raw
        head = msgspec.convert([time_s, [], *rest[:1]], _MapBatch)
        return EventBatch(head.time_s, [_event(each) for each in events], head.rank)
    except (msgspec.MsgspecError, TypeError, ValueError, LookupError) as error:
        msg = f"a message of {len(payload)} bytes is no batch of KV events: {error}"
        raise RecordError(msg) from error


def _event(raw: Any) -> CacheEvent:
    fields = event_fields(raw)
    kind = _KINDS.get(fields["type"])
    if kind is None:
        return UnknownEvent(str(fields["type"]))
    event = msgspec.convert({**_LATER, **fields}, kind)
    if isinstance(event, StoredEvent) and event.parent_block_hash is None:
        salt = fields.get(_SALT.decode())
        if isinstance(salt, str) and event.extra_keys is None:
            event.extra_keys = [[salt], *[None] * (len(event.block_hashes) - 1)]
    return event
