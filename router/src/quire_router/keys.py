"""Keys of blocks: 64 bits that stand for the tokens of a block and all before them.

Two processes need not name a block by the same hash, so what is compared is computed here from token ids. The
key of block `i` is the one before it plus `mixed(tokens of i) x a factor of depth i`, modulo 2**64: all keys of
a prompt are one cumulative sum. Two prompts with one key cost a miss at worst: a replica compares tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from hashlib import blake2b
from typing import Any, NamedTuple

import msgspec
import numpy as np

from quire.core.tokens import IntArray
from quire.errors import ConfigError
from quire.exchange.wire import BlockHash, CacheEvent, StoredEvent, wire_hash
from quire_router.numbers import Names, Numbers

ROOT = np.uint64(0)
"""The key before the first block."""

_DEPTHS = 1 << 16
_DEPTH_FACTORS = np.random.default_rng(0).integers(0, 1 << 64, _DEPTHS, np.uint64) | np.uint64(1)
_MIXERS = (np.uint64(0xFF51AFD7ED558CCD), np.uint64(0xC4CEB9FE1A85EC53))
_SHIFT = np.uint64(33)
_SALT = np.uint64(0x9E3779B97F4A7C15)
"""So that a block of zeros is something."""


class Chained(NamedTuple):
    """The keys of blocks and how many come before each in its prompt, [num_blocks]."""

    keys: Names
    depths: Numbers


class BlockKeys:
    """The keys of blocks of `block_size` tokens."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self._factors = np.random.default_rng(block_size).integers(
            0, 1 << 64, block_size, np.uint64
        )

    def of_prompt(
        self, tokens: IntArray, extra_keys: Sequence[Any] = (), lora_name: str | None = None
    ) -> Names:
        """Return the keys of the whole blocks of a prompt, uint64 [num_blocks]. Raises `ConfigError`."""
        array = np.asarray(tokens)
        if array.size and not np.issubdtype(array.dtype, np.integer):
            raise ConfigError(f"tokens are integers, got an array of {array.dtype}")
        num_blocks = len(array) // self.block_size
        tags = None
        if lora_name is not None or any(extra_keys):
            tags = names_of(_tags(num_blocks, extra_keys, lora_name))
        links = self._links(array[: num_blocks * self.block_size], tags, np.arange(num_blocks))
        return np.cumsum(links)

    def of_events(self, events: Sequence[StoredEvent], above: Names, starts: Numbers) -> Chained:
        """Return the keys of the blocks of events, [num_blocks].

        Each event continues the key in `above`, at the depth in `starts`.
        """
        flat = np.concatenate([np.array(event.token_ids, np.int64) for event in events])
        lengths = np.array([len(event.block_hashes) for event in events])
        tags = None
        if any(event.lora_name or event.extra_keys for event in events):
            tags = names_of(
                tag
                for event, length in zip(events, lengths, strict=True)
                for tag in _tags(length, event.extra_keys or (), event.lora_name)
            )
        firsts = np.cumsum(lengths) - lengths
        depths = np.repeat(starts - firsts, lengths) + np.arange(len(flat) // self.block_size)
        sums = np.cumsum(self._links(flat, tags, depths))
        before = np.where(firsts > 0, sums[firsts - 1], ROOT)
        return Chained(sums + np.repeat(above - before, lengths), depths)

    def _links(self, tokens: np.ndarray[Any, Any], tags: Names | None, depths: Numbers) -> Names:
        mixed = tokens.reshape(-1, self.block_size).astype(np.uint64) @ self._factors
        mixed += _SALT if tags is None else tags + _SALT
        for factor in _MIXERS:  # the finalizer of MurmurHash3
            mixed ^= mixed >> _SHIFT
            mixed *= factor
        mixed ^= mixed >> _SHIFT
        return mixed * _DEPTH_FACTORS.take(depths, mode="wrap")


def grouped(events: Iterable[CacheEvent]) -> Iterator[CacheEvent | list[StoredEvent]]:
    """Yield events in order, with runs of stored events as one list.

    The events of a list have one medium, and none has its parent in another.
    """
    group: list[StoredEvent] = []
    names: set[BlockHash] = set()
    for event in events:
        stored = event if isinstance(event, StoredEvent) else None
        if group and (
            stored is None or stored.medium != group[0].medium or stored.parent_block_hash in names
        ):
            yield group
            group, names = [], set()
        if stored is None:
            yield event
        else:
            group.append(stored)
            names.update(stored.block_hashes)
    if group:
        yield group


def names_of(hashes: Iterable[BlockHash]) -> Names:
    """Return hashes as 64 bits each."""
    return np.array(
        [each if isinstance(each, int) else wire_hash(each) for each in hashes], np.uint64
    )


def _tags(num_blocks: int, extra_keys: Sequence[Any], lora_name: str | None) -> list[int]:
    """Return what the names of blocks are made of beside tokens, 0 for nothing."""
    plain = _tag(lora_name, None)
    told = [
        extra[1:] if extra and lora_name is not None and extra[0] == lora_name else extra
        for extra in extra_keys[:num_blocks]  # engines tell the name of an adapter once more
    ]
    tags = [_tag(lora_name, list(extra)) if extra else plain for extra in told]
    return tags + [plain] * (num_blocks - len(tags))


def _tag(lora_name: str | None, extra: Any) -> int:
    if lora_name is None and not extra:
        return 0
    said = msgspec.msgpack.encode([lora_name, extra])
    return int.from_bytes(blake2b(said, digest_size=8).digest(), "big")
