"""Events of cached blocks, for routers and indexes outside the process."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Items
from contextlib import suppress
from functools import partial
from typing import Any, Literal, TypeAlias

import msgspec

from quire.config import check_count
from quire.core.blocks import GAP
from quire.core.kernel import Kernel, Leaving, Watcher
from quire.core.node import Node
from quire.core.sequence import Sequence
from quire.core.tokens import TOKEN_BYTES
from quire.exchange.digests import Digests
from quire.runs import runs_of
from quire.scope import Scope

RemovalReason: TypeAlias = Literal["evicted", "invalidated", "truncated"]


class BlockStored(msgspec.Struct, frozen=True, tag=True):
    """Blocks became findable: a run that follows `parent_hash` (None: starts at the root).

    `token_bytes` are the tokens of all these blocks, native int32; a media position holds a
    negative number. `group` is the layer group, the first of full attention for all of these.
    """

    block_hashes: list[bytes]
    parent_hash: bytes | None
    token_bytes: bytes
    block_size: int
    scope: Scope
    group: int = 0

    @property
    def token_ids(self) -> list[int]:
        """The tokens of all these blocks; a media position holds a negative number."""
        return memoryview(self.token_bytes).cast("i").tolist()


class BlockRemoved(msgspec.Struct, frozen=True, tag=True):
    """Blocks are findable no more in a layer group, or (None) in any; deepest first."""

    block_hashes: list[bytes]
    reason: RemovalReason
    group: int | None = None


class AllBlocksCleared(msgspec.Struct, frozen=True, tag=True):
    """Nothing is findable any more."""


Event: TypeAlias = "BlockStored | BlockRemoved | AllBlocksCleared"

MAX_EVENTS = 10_000


class EventLog(Watcher):
    """Events since the last `take`. The oldest are dropped beyond `max_events`, and counted.

        manager = CacheManager(1000, watchers=[log := EventLog()])

    A consumer that sees `num_dropped` grow has missed events and must rebuild its index.
    Of groups with windows and states, the kinds of `quire.groups` tell what they drop and what they have again; a
    kind from elsewhere does where it has `listeners`.
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
        for group in kernel.tree.sparse:
            listeners: list[Any] = getattr(group, "listeners", [])
            listeners.append(partial(self._changed, group.index))
        if self._has_begun:
            self._events.clear()
            self._add(AllBlocksCleared())
        self._has_begun = True

    def stored(self, seq: Sequence, node: Node, num_blocks: int) -> None:
        tree = self._tree
        first, places = node.end - num_blocks, range(node.end - num_blocks, node.end)
        if tree.full:
            self._store(node, places, seq.scope, tree.full[0][0])
        for window in tree.windows:
            ids = node.blocks[window.index][first - node.start :]
            there = [at for at, block in zip(places, ids, strict=True) if block != GAP]
            for run in runs_of(there):
                self._store(node, run, seq.scope, window.index)

    def leaving(self, node: Node, blocks: range, group: int | None, why: Leaving) -> None:
        if why == "cleared":
            if not any(root.children for root in self._tree.roots.values()):
                self._add(AllBlocksCleared())
        elif group is None:
            self._add(BlockRemoved(self._digests.of(node)[: -len(blocks) - 1 : -1], why))

    def _changed(self, group: int, node: Node, places: Items[int], is_there: bool) -> None:
        """A sparse group has blocks of a node again, or no more, while the node stays."""
        if is_there:
            scope = self._digests.scope_of(node)
            for run in runs_of(places):
                self._store(node, run, scope, group)
        else:
            digests, start = self._digests.of(node), node.start
            gone = [digests[at - start] for at in reversed(places)]
            self._add(BlockRemoved(gone, "evicted", group))

    def _store(self, node: Node, places: range, scope: Scope, group: int) -> None:
        """Tell of a run of blocks of a node in a group."""
        digests, size = self._digests.of(node), self._tree.block_bytes
        first, last = places.start - node.start, places.stop - node.start
        parent = digests[first - 1] if first else self._parent(node)
        tokens = bytes(node.key[first * size : last * size])
        self._add(
            BlockStored(digests[first:last], parent, tokens, size // TOKEN_BYTES, scope, group)
        )

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
