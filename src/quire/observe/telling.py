"""The events of a manager as other engines publish theirs."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

import numpy as np

from quire.core import CacheManager, FullAttention, LayerGroup, Scope
from quire.core.tokens import INT32
from quire.exchange.events import AllBlocksCleared, BlockRemoved, BlockStored, Event
from quire.exchange.wire import (
    BlockHash,
    CacheEvent,
    ClearedEvent,
    RemovedEvent,
    StoredEvent,
    wire_hash,
)
from quire.groups import ChunkedAttention, Recurrent, SlidingWindow
from quire.observe.mirror import DEVICE


class Telling:
    """Puts a manager's events into the form of the wire, with what each layer group is.

    Hashes are the low 64 bits of quire's own. LoRA names stand as they are. A salt stands as `salt_key` in the
    extra keys of a prompt's first block: it may be a secret.
    """

    def __init__(self, manager: CacheManager) -> None:
        groups, self._block_size = manager.settings.groups, manager.block_size
        self._groups = [_described(group, manager.block_size) for group in groups]
        self._full = [
            index for index, group in enumerate(groups) if isinstance(group.kind, FullAttention)
        ]

    def described(self) -> list[CacheEvent]:
        """Return events that store nothing, and say what each group is, where there are several."""
        nothing = BlockStored([], None, b"", self._block_size, Scope())
        several = range(len(self._groups) if len(self._groups) > 1 else 0)
        return [self._stored(nothing, index) for index in several]

    def told(self, events: Iterable[Event]) -> list[CacheEvent]:
        """Return events as they are published, in their order."""
        return [each for event in events for each in self._told(event)]

    def _told(self, event: Event) -> list[CacheEvent]:
        match event:
            case BlockStored():
                alike = self._full if event.group in self._full else [event.group]
                return [self._stored(event, index) for index in alike]
            case BlockRemoved():
                hashes: list[BlockHash] = list(map(wire_hash, event.block_hashes))
                every = range(len(self._groups)) if event.group is None else [event.group]
                return [RemovedEvent(hashes, DEVICE, index) for index in every]
            case AllBlocksCleared():
                return [ClearedEvent()]

    def _stored(self, event: BlockStored, index: int) -> StoredEvent:
        scope, parent = event.scope, event.parent_hash
        lora = None if scope.lora is None else str(scope.lora)
        every = [] if lora is None else [lora]
        first = [*every, *([salt_key(scope)] if is_divided(scope) and not parent else [])]
        extra: list[Any] | None = None
        if first:
            extra = [first or None, *[every or None] * (len(event.block_hashes) - 1)]
        kind, window = self._groups[index]
        return StoredEvent(
            list(map(wire_hash, event.block_hashes)),
            None if parent is None else wire_hash(parent),
            np.frombuffer(event.token_bytes, INT32).tolist(),
            event.block_size,
            None,
            DEVICE,
            lora,
            extra,
            index,
            kind,
            window,
        )


def salt_key(scope: Scope) -> str:
    """Return the text that stands for the salt and the tenant of a scope in events."""
    return hashlib.sha256(repr((scope.tenant, scope.salt)).encode()).hexdigest()[:32]


def is_divided(scope: Scope) -> bool:
    """Return whether a scope has a salt or a tenant."""
    return scope.salt is not None or scope.tenant is not None


def _described(group: LayerGroup, block_size: int) -> tuple[str, int | None]:
    """Return the kind of a layer group in vLLM's words, and its window in tokens."""
    match group.kind:
        case SlidingWindow():
            # Consumers count the token to be computed among the window's, quire's groups do not.
            return "sliding_window", group.kind.window + (group.kind.window % block_size == 1)
        case ChunkedAttention():
            return "chunked_local_attention", group.kind.chunk
        case Recurrent():
            return "mamba", None
        case FullAttention():
            return "full_attention", None
        case _:
            return "unknown", None
