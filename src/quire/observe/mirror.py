"""The contents of a cache according to its events."""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Sequence as Items
from typing import Any, TypeAlias

import msgspec

from quire.exchange.wire import (
    BlockHash,
    CacheEvent,
    ClearedEvent,
    EventBatch,
    RemovedEvent,
    StoredEvent,
)

DEVICE = "GPU"
"""The medium of an event that names none."""

Place: TypeAlias = tuple[int, str]
"""A layer group and a medium."""

WINDOWS = ("sliding_window", "sliding_window_mla")
STATES = ("mamba",)
CHUNKS = ("chunked_local_attention",)


class MirroredBlock(msgspec.Struct, gc=False, eq=False):
    """A block that some group holds: `key` finds it, None where no event told its tokens; `copies` in all places."""

    key: tuple[Any, ...] | None = None
    copies: int = 0


class MirroredGroup(msgspec.Struct, frozen=True):
    """A layer group as its events describe it; `window` in tokens, of a group with chunks their length."""

    block_size: int
    kind: str | None
    window: int | None


class Mirror:
    """The contents of a cache by layer group and medium, according to its events.

        mirror = Mirror()
        for batch in batches:
            mirror.receive(batch)
        mirror.lookup(token_ids)

    Engines may keep two blocks with one hash, store it twice and remove it once for each: copies are counted. A
    block whose tokens no event told is held, and no lookup finds it. Memory: about 500 bytes per block.

        num_copies[place][hash] >= 1, and blocks[hash].copies == the sum of these over all places
        names[block.key] is the hash of a block with this key
    """

    def __init__(self) -> None:
        self.num_copies: dict[Place, dict[BlockHash, int]] = defaultdict(dict)
        self.groups: dict[int, MirroredGroup] = {}
        self.blocks: dict[BlockHash, MirroredBlock] = {}
        self.names: dict[tuple[Any, ...], BlockHash] = {}

    def __len__(self) -> int:
        return len(self.blocks)

    def receive(self, batch: EventBatch) -> None:
        """Take in the events of a batch."""
        for event in batch.events:
            self.apply(event)

    def begin(self, batches: Items[EventBatch]) -> None:
        """Replace the contents by those of these batches."""
        self.clear()
        for batch in batches:
            self.receive(batch)

    def apply(self, event: CacheEvent) -> None:
        """Take in one event; one of an unknown type changes nothing."""
        match event:
            case StoredEvent():
                self._store(event)
            case RemovedEvent():
                self._remove(event)
            case ClearedEvent():
                self.clear()
            case _:
                pass

    def clear(self) -> None:
        """Forget everything."""
        self.num_copies.clear()
        self.blocks.clear()
        self.names.clear()

    def lookup(
        self,
        tokens: Items[int],
        *,
        medium: str = DEVICE,
        lora_name: str | None = None,
        extra_keys: Items[Any] = (),
    ) -> int:
        """Return how many tokens of a prompt every layer group has on a medium, in whole blocks.

        `extra_keys`: of the first blocks, as `StoredEvent` has them. An engine computes at least the last token of a prompt
        anew: ask for the prompt without it to have what a request would find.
        """
        path: dict[int, BlockHash] = {}
        ids = array("i", tokens)
        for size in {group.block_size for group in self.groups.values()}:
            parent: BlockHash | None = None
            for at, end in enumerate(range(size, len(ids) + 1, size)):
                extra = extra_keys[at] if at < len(extra_keys) else None
                key = (parent, lora_name, _frozen(extra), ids[end - size : end].tobytes())
                parent = self.names.get(key)
                if parent is None:
                    break
                path[end] = parent
        places = [
            (group, self.num_copies.get((index, medium), {}))
            for index, group in self.groups.items()
        ]
        if not places:
            return 0
        return next(
            (
                end
                for end in sorted(path, reverse=True)
                if all(_accepts(*each, path, end) for each in places)
            ),
            0,
        )

    def prefix(self, name: BlockHash) -> array[int] | None:
        """Return the tokens up to the end of a block; None where some were never told, or are not cached."""
        parts: list[bytes] = []
        each: BlockHash | None = name
        while each is not None:
            block = self.blocks.get(each)
            if block is None or block.key is None:
                return None
            parts.append(block.key[3])
            if len(parts) > len(self.blocks):
                return None  # who follows whom goes round in a circle
            each = block.key[0]
        return array("i", b"".join(reversed(parts)))

    def held(self, medium: str = DEVICE, group: int = 0) -> set[BlockHash]:
        """Return the hashes of the blocks that a layer group has on a medium."""
        return set(self.num_copies.get((group, medium), ()))

    def events(self) -> list[CacheEvent]:
        """Return events that make an empty mirror equal to this one; a block behind another comes after it."""
        told: list[CacheEvent] = [
            StoredEvent(
                [],
                None,
                [],
                group.block_size,
                None,
                DEVICE,
                None,
                None,
                index,
                group.kind,
                group.window,
            )
            for index, group in self.groups.items()
            if not self.num_copies.get((index, DEVICE))
        ]
        for (index, medium), copies in self.num_copies.items():
            group = self.groups[index]
            event, end = None, None
            for name, count in self._in_order(copies):
                key = self.blocks[name].key
                ids = array("i", key[3]).tolist() if key else []
                extra = msgspec.msgpack.decode(key[2]) if key and key[2] else None
                if event is not None and key and key[:2] == (end, event.lora_name) and count == 1:
                    event.block_hashes.append(name)
                    event.token_ids += ids
                    assert event.extra_keys is not None
                    event.extra_keys.append(extra)
                else:
                    parent, lora = key[:2] if key else (None, None)
                    event = StoredEvent([name], parent, ids, group.block_size, None, medium, lora)
                    event.extra_keys, event.group_idx = [extra], index
                    event.kv_cache_spec_kind = group.kind
                    event.kv_cache_spec_sliding_window = group.window
                    told += [event] * count
                    event = event if key and count == 1 else None
                end = name
        return told

    def check(self) -> None:
        """Raise `AssertionError` unless the laws above hold."""
        totals: dict[BlockHash, int] = defaultdict(int)
        for copies in self.num_copies.values():
            for name, count in copies.items():
                assert count >= 1, (name, count)
                totals[name] += count
        assert totals == {name: block.copies for name, block in self.blocks.items()}
        for key, name in self.names.items():
            assert self.blocks[name].key == key, (key, name)

    def _store(self, event: StoredEvent) -> None:
        size, index = event.block_size, event.group_idx or 0
        window = event.kv_cache_spec_sliding_window
        self.groups[index] = MirroredGroup(size, event.kv_cache_spec_kind, window)
        copies = self.num_copies[index, event.medium or DEVICE]
        ids = array("i", event.token_ids)
        is_told = len(ids) == size * len(event.block_hashes)
        parent, extras = event.parent_block_hash, event.extra_keys or ()
        for at, name in enumerate(event.block_hashes):
            copies[name] = copies.get(name, 0) + 1
            block = self.blocks.setdefault(name, MirroredBlock())
            block.copies += 1
            if is_told and block.key is None:
                extra = _frozen(extras[at]) if at < len(extras) else b""
                block.key = (
                    parent,
                    event.lora_name,
                    extra,
                    ids[at * size : (at + 1) * size].tobytes(),
                )
                self.names[block.key] = name
            parent = name

    def _remove(self, event: RemovedEvent) -> None:
        copies = self.num_copies.get((event.group_idx or 0, event.medium or DEVICE), {})
        for name in event.block_hashes:
            if name not in copies:
                continue  # it was stored before this began
            block = self.blocks[name]
            block.copies -= 1
            copies[name] -= 1
            if not copies[name]:
                del copies[name]
            if not block.copies:
                del self.blocks[name]
                if block.key is not None and self.names.get(block.key) == name:
                    del self.names[block.key]

    def _in_order(self, copies: dict[BlockHash, int]) -> list[tuple[BlockHash, int]]:
        """Return blocks with their counts, each after the one before it where that is among them."""
        done: dict[BlockHash, int] = {}
        for name in copies:
            chain: dict[BlockHash, None] = {}
            each: BlockHash | None = name
            while each is not None and each in copies and each not in done and each not in chain:
                chain[each] = None
                key = self.blocks[each].key
                each = key[0] if key else None
            done.update((each, copies[each]) for each in reversed(chain))
        return list(done.items())


def _accepts(
    group: MirroredGroup, held: dict[BlockHash, int], path: dict[int, BlockHash], end: int
) -> bool:
    """Whether a group has what a hit of `end` tokens needs, whose blocks `path` names by where they end."""
    size, window = group.block_size, group.window or 0
    if end % size:
        return False
    first = 0
    if group.kind in WINDOWS and window:
        first = max(end - -(-(window - 1) // size) * size, 0)
    elif group.kind in CHUNKS and window:
        first = end // window * window // size * size
    elif group.kind in STATES:
        first = end - size
    return all(path.get(at) in held for at in range(first + size, end + 1, size))


def _frozen(extra: Any) -> bytes:
    """Return what else names a block as bytes, none for nothing."""
    return msgspec.msgpack.encode(extra) if extra else b""
