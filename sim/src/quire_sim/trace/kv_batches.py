"""Batches of KV events as engines publish them, from a file of JSON Lines."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, TypeAlias, cast

import msgspec

from quire.errors import TraceError
from quire.exchange.wire import event_fields
from quire_sim.trace.chunks import lines_of
from quire_sim.trace.schemas import MAX_BLOCK_SIZE, NO_ROW, shortened, why, why_not

BlockHash: TypeAlias = int | str
"""A block's name in the log: 64 bits of its hash, or all of it as text."""

BATCH = ("ts", "events", "data_parallel_rank")
"""Fields of a batch in the order in which a positional one has them."""

DEVICE = "GPU"
"""The medium of an event that names none."""


class Stored(
    msgspec.Struct,
    rename={
        "hashes": "block_hashes",
        "parent": "parent_block_hash",
        "group": "group_idx",
        "session": "session_id",
    },
):
    """Blocks that were stored, each following the one before, the first one `parent`."""

    hashes: Annotated[list[BlockHash], msgspec.Meta(min_length=1)]
    block_size: Annotated[int, msgspec.Meta(ge=1, le=MAX_BLOCK_SIZE)]
    parent: BlockHash | None = None
    medium: str | None = None
    group: int | None = None
    session: str | int | None = None

    def __post_init__(self) -> None:
        self.medium = (self.medium or DEVICE).upper()
        self.group = self.group or 0


class Batch(msgspec.Struct, rename={"time_s": "ts", "rank": "data_parallel_rank"}):
    """Events that were published together, `number` counted from 1; a rank of None is 0.

    `events`   as they stand in the file
    `stored`   what was stored, runs that continue each other made one
    `clears`   whether everything was cleared, before what is in `stored`
    `unknown`  events of a kind that is not known
    """

    time_s: float
    events: list[Any]
    rank: int | None = None
    number: int = 0
    stored: list[Stored] = []
    clears: bool = False
    unknown: int = 0


def read_batches(path: Path) -> Iterator[Batch]:
    """Yield the batches of a log in the order of the file. Raises `TraceError`."""
    decode = msgspec.json.Decoder[Any]().decode
    for number, line in enumerate(lines_of(path), 1):
        try:
            yield _batch(number, decode(line))
        except NO_ROW as error:
            raise TraceError(f"{path}, batch {number:,}: {why(error, line)}") from None
        except _NotABatchError as error:
            raise TraceError(f"{path}, batch {number:,}: {error}") from None


class _NotABatchError(Exception):
    pass


def _batch(number: int, raw: Any) -> Batch:
    fields: dict[str, Any]
    if isinstance(raw, list):
        fields = dict(zip(BATCH, cast("list[Any]", raw), strict=False))
    elif isinstance(raw, dict):
        fields = cast("dict[str, Any]", raw)
    else:
        raise _NotABatchError(f"a batch is [time, events, rank], this is {shortened(repr(raw))}")
    if "timestamp" in fields:
        fields.setdefault("ts", fields["timestamp"])
    batch = _converted({name: fields[name] for name in BATCH if name in fields}, Batch)
    batch.number = number
    ends: dict[tuple[BlockHash, str | None, int | None], Stored] = {}
    for place, event in enumerate(batch.events, 1):
        try:
            told = event_fields(event)
        except TypeError as error:
            raise _NotABatchError(f"event {place:,}: {error}: {shortened(repr(event))}") from None
        match told.get("type"):
            case "BlockStored":
                _add(batch, _converted(told, Stored, f"event {place:,}: "), ends)
            case "BlockRemoved":
                pass
            case "AllBlocksCleared":
                batch.clears = True
                ends.clear()
            case str():
                batch.unknown += 1
            case _:
                raise _NotABatchError(f"event {place:,} has no type: {shortened(repr(event))}")
    return batch


def _converted(fields: Any, kind: type[Any], where: str = "") -> Any:
    try:
        return msgspec.convert(fields, kind)
    except msgspec.ValidationError as error:
        raise _NotABatchError(where + why_not(error, fields)) from None


def _add(
    batch: Batch,
    stored: Stored,
    ends: dict[tuple[BlockHash, str | None, int | None], Stored],
) -> None:
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
