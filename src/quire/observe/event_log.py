"""Events of a running cache, kept in a file that `quire trace` and `quire replay` read."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from quire.errors import ConfigError
from quire.exchange.events import AllBlocksCleared, BlockRemoved, BlockStored, Event
from quire.exchange.wire import EventBatch, UnknownEvent

PRIVATE = ("token_ids", "extra_keys", "session_id")
"""Fields of events that say what was asked, or by whom."""


def save_events(path: str | Path, events: Iterable[Event], time_s: float, rank: int = 0) -> int:
    """Append events to a log, JSON Lines, as one batch, and return how many there were.

        save_events("events.jsonl", log.take(), time.time())

    `time_s` is when they happened, rising from call to call; without events nothing is written.
    A line is `[time, events, rank]`, each event a map as engines publish them, its hashes as hex
    digits and without token ids. The hashes are not salted: who guesses the tokens of a
    prompt can see whether it was there. `quire.Recorder` says less, and sees every request.
    Raises `ConfigError` for a file that cannot be written.
    """
    maps = [_map(event) for event in events]
    if maps:
        _append(path, [time_s, maps, rank])
    return len(maps)


def save_batch(path: str | Path, batch: EventBatch) -> None:
    """Append a published batch of events, without tokens and salts, to a log for `quire replay`.

    Raises `ConfigError` for a file that cannot be written.
    """
    maps: list[dict[str, Any]] = [
        {name: value for name, value in msgspec.to_builtins(event).items() if name not in PRIVATE}
        for event in batch.events
        if not isinstance(event, UnknownEvent)
    ]
    _append(path, [batch.time_s, maps, batch.rank])


def _append(path: str | Path, line: list[Any]) -> None:
    path = Path(path).expanduser()
    try:
        with path.open("ab") as log:
            log.write(msgspec.json.encode(line) + b"\n")
    except OSError as error:
        msg = f"cannot write events to {str(path)!r}: {error.strerror}"
        raise ConfigError(msg) from error


def _map(event: Event) -> dict[str, Any]:
    match event:
        case BlockStored():
            return {
                "type": "BlockStored",
                "block_hashes": [digest.hex() for digest in event.block_hashes],
                "parent_block_hash": event.parent_hash and event.parent_hash.hex(),
                "block_size": event.block_size,
                "medium": "GPU",
                "group_idx": event.group,
            }
        case BlockRemoved():
            return {
                "type": "BlockRemoved",
                "block_hashes": [digest.hex() for digest in event.block_hashes],
                "medium": "GPU",
            }
        case AllBlocksCleared():
            return {"type": "AllBlocksCleared"}
