"""Batches of KV events as engines publish them, from a file of JSON Lines."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeAlias, cast

import msgspec
import numpy as np

from quire.errors import TraceError
from quire.sim.trace.chunks import line_chunks
from quire.sim.trace.schemas import MAX_BLOCK_SIZE, NO_ROW, shortened, why

BlockHash: TypeAlias = int | str
"""A block's name in the log: 64 bits of its hash, or all of it as text."""

STORED = ("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium",
          "lora_name", "extra_keys", "group_idx", "kv_cache_spec_kind",
          "kv_cache_spec_sliding_window", "locality", "ownership", "session_id")  # fmt: skip
"""Fields of BlockStored in the order in which positional events have them."""

DEVICE = "GPU"
"""The medium of an event that names none."""


class Stored(msgspec.Struct):
    """Blocks that were stored, each following the one before, the first one `parent`."""

    hashes: list[BlockHash]
    parent: BlockHash | None
    block_size: int
    medium: str
    group: int
    session: str | None = None


class Batch(msgspec.Struct):
    """Events that were published together, `number` counted from 1.

    `stored`   what was stored, runs that continue each other made one
    `clears`   whether everything was cleared, before what is in `stored`
    `removed`  events that say that blocks were removed
    `unknown`  events of a kind that is not known
    """

    number: int
    time_s: float
    rank: int
    stored: list[Stored]
    clears: bool = False
    removed: int = 0
    unknown: int = 0


def read_batches(path: Path) -> Iterator[Batch]:
    """Yield the batches of a log in the order of the file. Raises `TraceError`."""
    decode = msgspec.json.Decoder[Any]().decode
    lines = (line for chunk in line_chunks(path) for line in chunk.split(b"\n") if line.strip())
    for number, line in enumerate(lines, 1):
        try:
            yield _batch(number, decode(line))
        except NO_ROW as error:
            raise TraceError(f"{path}, batch {number:,}: {why(error, line)}") from None
        except _NotABatchError as error:
            raise TraceError(f"{path}, batch {number:,}: {error}") from None


class _NotABatchError(Exception):
    pass


def _batch(number: int, raw: Any) -> Batch:
    if isinstance(raw, dict):
        named = cast("dict[str, Any]", raw)
        time_s = named.get("ts", named.get("timestamp"))
        events, rank = named.get("events"), named.get("data_parallel_rank")
    elif isinstance(raw, list) and len(cast("list[Any]", raw)) >= 2:
        time_s, events, rank = (*cast("list[Any]", raw), None)[:3]
    else:
        raise _NotABatchError(f"a batch is [time, events, rank], this is {_shown(raw)}")
    if isinstance(time_s, bool) or not isinstance(time_s, (int, float)) or not np.isfinite(time_s):
        raise _NotABatchError(f"its time is a number of seconds, got {_shown(time_s)}")
    if not isinstance(events, list):
        raise _NotABatchError(f"its events are a list, got {_shown(events)}")
    if rank is not None and (isinstance(rank, bool) or not isinstance(rank, int)):
        raise _NotABatchError(f"its rank is a whole number, got {_shown(rank)}")
    batch = Batch(number, float(time_s), rank or 0, [])
    ends: dict[tuple[BlockHash, str, int], Stored] = {}
    for place, event in enumerate(cast("list[Any]", events), 1):
        tag, fields = _fields(place, event)
        if tag == "BlockStored":
            _add(batch, _stored(place, fields), ends)
        elif tag == "BlockRemoved":
            batch.removed += 1
        elif tag == "AllBlocksCleared":
            batch.clears = True
            ends.clear()
        else:
            batch.unknown += 1
    return batch


def _add(batch: Batch, stored: Stored, ends: dict[tuple[BlockHash, str, int], Stored]) -> None:
    """Add a run of blocks to a batch, to the run that it continues if there is one."""
    run = stored
    if stored.parent is not None:
        before = ends.pop((stored.parent, stored.medium, stored.group), None)
        if before is not None and before.block_size == stored.block_size:
            before.hashes += stored.hashes
            run = before
    if run is stored:
        batch.stored.append(stored)
    ends[run.hashes[-1], run.medium, run.group] = run


def _fields(place: int, event: Any) -> tuple[str, dict[str, Any]]:
    if isinstance(event, dict):
        fields = cast("dict[str, Any]", event)
        tag = fields.get("type")
    elif isinstance(event, list) and event:
        tag, *values = cast("list[Any]", event)
        fields = dict[str, Any](zip(STORED, values, strict=False))
    else:
        tag, fields = None, {}
    if not isinstance(tag, str):
        raise _NotABatchError(
            f"event {place:,} is a map with a type, or a list that begins with it: {_shown(event)}"
        )
    return tag, fields


def _stored(place: int, fields: dict[str, Any]) -> Stored:
    hashes: Any = fields.get("block_hashes")
    if not isinstance(hashes, list) or not hashes:
        raise _NotABatchError(f"event {place:,}: block_hashes is {_shown(hashes)}, not a list")
    names = [_name(place, value) for value in cast("list[Any]", hashes)]
    parent = fields.get("parent_block_hash")
    size: Any = fields.get("block_size")
    if isinstance(size, bool) or not isinstance(size, int) or not 1 <= size <= MAX_BLOCK_SIZE:
        raise _NotABatchError(
            f"event {place:,}: block_size is {_shown(size)}, not 1 to {MAX_BLOCK_SIZE:,}"
        )
    group = fields.get("group_idx")
    session = fields.get("session_id")
    return Stored(
        names,
        None if parent is None else _name(place, parent),
        size,
        str(fields.get("medium") or DEVICE).upper(),
        group if isinstance(group, int) else 0,
        None if session is None else str(session),
    )


def _name(place: int, value: Any) -> BlockHash:
    if isinstance(value, (int, str)) and not isinstance(value, bool):
        return value
    raise _NotABatchError(f"event {place:,}: a block hash is a number or text, got {_shown(value)}")


def _shown(value: Any) -> str:
    return shortened(repr(value))
