"""Lookups: what is cached of a prompt, and why not more. Nothing here changes any state."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import msgspec

from quire.core.blocks import GAP
from quire.core.node import Match, Node
from quire.core.stats import Missed
from quire.core.tokens import TOKEN_BYTES, Key
from quire.core.tree import PrefixTree

Evicted: TypeAlias = Callable[[Node, int, Key], tuple[int, int]]
"""The memory of what was evicted, asked with a node, the bytes of the key that match, and the key.

It answers up to which byte of the key the rest was evicted, and the number of the request that used it last.
"""

LAST_TOKEN, COLD = Missed("last_token"), Missed("cold")


class Hit(msgspec.Struct, frozen=True, gc=False):
    """What `open` would find cached: `num_tokens` of the prompt, never all of it.

    `num_blocks` whole blocks are shared; `partial_tokens` more come out of a copy of one
    block. `reason` says why it is not more, see `stats.MISS_REASONS`.
    """

    num_tokens: int
    num_blocks: int
    partial_tokens: int
    reason: str


class Found(msgspec.Struct, frozen=True, gc=False, eq=False):
    """A lookup's raw result: whole blocks, and maybe the head of one more block to copy.

    That block is number `index` of `edge`; its first `partial_tokens` tokens match. Where a
    sparse group refuses to go as far as tokens match, `refused` blocks follow the match.
    """

    match: Match
    partial_tokens: int = 0
    edge: Node | None = None
    index: int = 0
    refused: int = 0


class Lookup:
    """Finds prefixes in a tree, with sub-block reuse where the pools have room for a copy.

    `evicted`  set by a watcher that remembers what was evicted
    """

    def __init__(self, tree: PrefixTree, block_size: int, *, sub_block: bool) -> None:
        self._tree = tree
        self._block_size = block_size
        self._block_bytes = block_size * TOKEN_BYTES
        self.evicted: Evicted | None = None
        self._sub_block = sub_block and block_size > 1 and not tree.states

    def find(self, root: Node, key: Key, limit: int) -> Found:
        """Find what is cached of the first `limit` tokens of a key."""
        block_bytes = self._block_bytes
        num_bytes = limit * TOKEN_BYTES
        match = self._tree.match(root, key, num_bytes - num_bytes % block_bytes)
        end = match.num_bytes
        if self._tree.sparse and end:
            match = self.accepted(match)
            if match.num_bytes < end:
                return Found(match, refused=(end - match.num_bytes) // block_bytes)
        if self._sub_block and end < num_bytes and (match.into or match.node.children):
            rest = key[end : min(end + block_bytes, num_bytes)]
            partial = self._tree.match_partial(match, rest)
            if partial is not None and self._can_copy(match, partial[0], partial[1]):
                edge, index, num_tokens = partial
                return Found(match, num_tokens, edge, index)
        return Found(match)

    def accepted(self, match: Match) -> Match:
        """Shorten a match of tokens to the largest boundary that every group accepts."""
        block_bytes = self._block_bytes
        node = match.edge if match.edge is not None and match.into else match.node
        tried, end = -1, match.num_bytes // block_bytes
        while tried != end:
            tried = end
            for group in self._tree.sparse:
                end = group.accepted(node, end)
        if end * block_bytes == match.num_bytes:
            return match
        node = node.holding(end - 1)
        if end == node.end:
            return Match(node, end * block_bytes, None, 0)
        assert node.parent is not None
        return Match(node.parent, end * block_bytes, node, (end - node.start) * block_bytes)

    def hit(self, root: Node, key: Key) -> Hit:
        """Return what a request for this prompt would find."""
        num_tokens = len(key) // TOKEN_BYTES
        found = self.find(root, key, num_tokens - 1)
        num_blocks = found.match.num_bytes // self._block_bytes
        cached = num_blocks * self._block_size + found.partial_tokens
        if cached == num_tokens - 1:
            return Hit(cached, num_blocks, found.partial_tokens, "last_token")
        return Hit(cached, num_blocks, found.partial_tokens, self.why(key, found).reason)

    def why(self, key: Key, found: Found) -> Missed:
        """Return the reason why a hit ends where it does, and how many tokens it explains.

        No other scope is looked at: the time that this takes would tell what somebody else has cached.
        """
        num_tokens = len(key) // TOKEN_BYTES
        match = found.match
        cached = match.num_bytes // TOKEN_BYTES + found.partial_tokens
        missed = num_tokens - 1 - cached
        if not missed:
            return LAST_TOKEN
        if found.refused:
            return Missed("window", min(missed, found.refused * self._block_size))
        if num_tokens - 1 - match.num_bytes // TOKEN_BYTES < self._block_size:
            return Missed("partial_block", missed)
        if self.evicted is not None:
            holder = match.edge if match.edge is not None and match.into else match.node
            end, user = self.evicted(holder, match.num_bytes, key)
            if end > match.num_bytes:
                explained = min(missed, max(end // TOKEN_BYTES - cached, 1))
                return Missed("evicted", explained, user)
        return COLD

    def _can_copy(self, match: Match, edge: Node, index: int) -> bool:
        """Whether this block is there in every group, and one more can be had for its copy.

        No group is recurrent here: a state cannot be cut inside a block. The matched path will be
        referenced before the copy takes its block, so the cached blocks of the path are no room for it.
        """
        tree = self._tree
        if any(edge.blocks[group.index][index] == GAP for group in tree.sparse):
            return False
        if all(pool.num_free for pool in tree.pools):
            return True
        found_blocks = match.num_bytes // self._block_bytes
        path_cached = match.into // self._block_bytes if match.edge and not match.edge.locks else 0
        node = match.node
        while node.parent is not None and not node.locks:
            path_cached += node.num_blocks
            node = node.parent
        return all(pool.num_available > path_cached for _, pool in tree.full) and all(
            group.pool.num_available > group.reach(found_blocks) for group in tree.sparse
        )
