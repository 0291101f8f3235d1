"""What happened to cached blocks, for routers and indexes outside the process."""

from __future__ import annotations

from collections import deque
from typing import Literal, TypeAlias

import msgspec

from quire0.core.digests import Digests
from quire0.core.node import Node
from quire0.core.scope import Scope
from quire0.core.tokens import TOKEN_BYTES

RemovalReason: TypeAlias = Literal["evicted", "invalidated", "truncated"]


class BlockStored(msgspec.Struct, frozen=True, tag=True):
    """Blocks became findable: a run that follows `parent_hash` (None: starts at the root).

    `token_bytes` are the tokens of all these blocks, native int32; a media position holds a
    negative number.
    """

    block_hashes: list[bytes]
    parent_hash: bytes | None
    token_bytes: bytes
    block_size: int
    scope: Scope

    @property
    def token_ids(self) -> list[int]:
        """The tokens of all these blocks; a media position holds a negative number."""
        return memoryview(self.token_bytes).cast("i").tolist()


class BlockRemoved(msgspec.Struct, frozen=True, tag=True):
    """Blocks are findable no more; deepest first."""

    block_hashes: list[bytes]
    reason: RemovalReason


class AllBlocksCleared(msgspec.Struct, frozen=True, tag=True):
    """Nothing is findable any more."""


Event: TypeAlias = "BlockStored | BlockRemoved | AllBlocksCleared"

MAX_EVENTS = 10_000


class EventLog:
    """Events since the last `take`. The oldest are dropped beyond `MAX_EVENTS`, and counted.

    A consumer that sees `num_dropped` grow has missed events and must rebuild its index.
    Events follow the nodes of the tree: a block that one sparse group drops or heals by itself
    makes none, so that with such groups a consumer knows where at best to look for a prefix.
    """

    def __init__(self, block_bytes: int, digests: Digests) -> None:
        self._block_bytes = block_bytes
        self._digests = digests
        self._events: deque[Event] = deque()
        self.num_dropped = 0

    def __len__(self) -> int:
        return len(self._events)

    def stored(self, node: Node, scope: Scope, num_blocks: int) -> None:
        """The last `num_blocks` of this node became findable."""
        digests = self._digests.of(node)
        first = len(digests) - num_blocks
        parent = digests[first - 1] if first else self._parent(node)
        tokens = bytes(node.key[first * self._block_bytes :])
        block_size = self._block_bytes // TOKEN_BYTES
        self._add(BlockStored(digests[first:], parent, tokens, block_size, scope))

    def removed(self, node: Node, num_blocks: int, reason: RemovalReason) -> None:
        """The last `num_blocks` of this node are about to go."""
        digests = node.hashes
        assert digests is not None
        self._add(BlockRemoved(digests[: -num_blocks - 1 : -1], reason))

    def cleared(self) -> None:
        """Nothing is cached any more."""
        self._add(AllBlocksCleared())

    def take(self) -> list[Event]:
        """Return the events and start anew."""
        events = list(self._events)
        self._events.clear()
        return events

    def _parent(self, node: Node) -> bytes | None:
        above = node.above
        return self._digests.of(above)[-1] if above is not None else None

    def _add(self, event: Event) -> None:
        if len(self._events) >= MAX_EVENTS:
            self._events.popleft()
            self.num_dropped += 1
        self._events.append(event)
