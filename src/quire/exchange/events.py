"""What happened to cached blocks, for routers and indexes outside the process."""

from __future__ import annotations

from collections import deque
from contextlib import suppress
from typing import Literal, TypeAlias

import msgspec

from quire.config import check_count
from quire.core.kernel import Kernel, Leaving, Watcher
from quire.core.node import Node
from quire.core.scope import Scope
from quire.core.sequence import Sequence
from quire.core.tokens import TOKEN_BYTES
from quire.exchange.digests import Digests

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


class EventLog(Watcher):
    """Events since the last `take`. The oldest are dropped beyond `max_events`, and counted.

        manager = CacheManager(1000, watchers=[log := EventLog()])

    A consumer that sees `num_dropped` grow has missed events and must rebuild its index.
    Events follow the nodes of the tree: a block that one sparse group drops or heals by itself
    makes none, so that with such groups a consumer knows where at best to look for a prefix.
    """

    needs = (Digests,)

    def __init__(self, max_events: int = MAX_EVENTS) -> None:
        self._events: deque[Event] = deque(maxlen=check_count("max_events", max_events))
        self.num_dropped = 0
        self._has_begun = False

    def __len__(self) -> int:
        return len(self._events)

    def begin(self, kernel: Kernel) -> None:
        self._tree, self._digests = kernel.tree, kernel.watchers.of(Digests)
        if self._has_begun:
            self._events.clear()
            self._add(AllBlocksCleared())
        self._has_begun = True

    def stored(self, seq: Sequence, node: Node, num_blocks: int) -> None:
        digests, size = self._digests.of(node), self._tree.block_bytes
        first = len(digests) - num_blocks
        parent = digests[first - 1] if first else self._parent(node)
        tokens = bytes(node.key[first * size :])
        self._add(BlockStored(digests[first:], parent, tokens, size // TOKEN_BYTES, seq.scope))

    def leaving(self, node: Node, blocks: range, group: int | None, why: Leaving) -> None:
        if why == "cleared":
            if not any(root.children for root in self._tree.roots.values()):
                self._add(AllBlocksCleared())
        elif group is None:
            self._add(BlockRemoved(self._digests.of(node)[: -len(blocks) - 1 : -1], why))

    def take(self) -> list[Event]:
        """Return the events since the last call, and start anew. Any one thread may take them."""
        events: list[Event] = []
        with suppress(IndexError):
            while True:
                events.append(self._events.popleft())
        return events

    def _parent(self, node: Node) -> bytes | None:
        above = node.parent
        if above is None or above.parent is None:
            return None
        return self._digests.of(above)[-1]

    def _add(self, event: Event) -> None:
        self.num_dropped += len(self._events) == self._events.maxlen
        self._events.append(event)
