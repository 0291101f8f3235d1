"""Lookups: the cached part of a prompt, and the reason of its end.

Nothing of the cache changes; `PrefixTree.match_partial` alone may keep the sorted names of a node with many children.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import msgspec

from quire.core.blocks import GAP
from quire.core.node import Match, Node
from quire.core.stats import Missed
from quire.core.tokens import TOKEN_BYTES, Key
from quire.core.tree import PrefixTree

AskEvicted: TypeAlias = Callable[[Node, int, Key], tuple[int, int, object]]
"""The memory of what was evicted, asked with a node, the bytes of the key that match, and the key.

It answers up to which byte of the key the rest was evicted, the number of the request that used it last, and a memo.
"""

LAST_TOKEN, COLD = Missed("last_token"), Missed("cold")


class Hit(msgspec.Struct, frozen=True, gc=False):
    """The cached part of a prompt as `open` would find it; never the whole prompt.

    `num_tokens` of the prompt are cached: `num_blocks` whole blocks are shared, `partial_tokens` more come
    out of a copy of one block. `reason` says why it is not more, see `stats.MISS_REASONS`.
    """

    num_tokens: int
    num_blocks: int
    partial_tokens: int
    reason: str


class Lookup:
    """Finds prefixes in a tree, with sub-block reuse.

    `ask_evicted`  set by a watcher that remembers what was evicted
    """

    def __init__(self, tree: PrefixTree, block_size: int, *, sub_block: bool) -> None:
        self._tree = tree
        self._block_size = block_size
        self._block_bytes = block_size * TOKEN_BYTES
        self.ask_evicted: AskEvicted | None = None
        self._sub_block = sub_block and block_size > 1 and not tree.states

    def find(self, root: Node, key: Key, limit: int) -> Match:
        """Find the cached part of the first `limit` tokens of a key."""
        block_bytes = self._block_bytes
        num_bytes = limit * TOKEN_BYTES
        match = self._tree.match(root, key, num_bytes - num_bytes % block_bytes)
        if self._tree.sparse and match.num_blocks:
            match = self.lowered(match)
        end = match.num_blocks * block_bytes
        goes_on = match.into or match.node.children
        if not self._sub_block or end == num_bytes or match.refused or not goes_on:
            return match
        rest = key[end : min(end + block_bytes, num_bytes)]
        partial = self._tree.match_partial(match, rest)
        # No group is recurrent here: a state cannot be cut inside a block.
        if partial is not None and all(
            partial[0].blocks[group.index][match.into] != GAP for group in self._tree.sparse
        ):
            match.source, match.partial_tokens = partial
        return match

    def lowered(self, match: Match) -> Match:
        """Shorten a match of tokens to the largest boundary that every group accepts."""
        node, end, tried = match.last, match.num_blocks, -1
        while tried != end:
            tried = end
            for group in self._tree.sparse:
                end = group.accepted(node, end)
        refused = match.num_blocks - end
        if not refused:
            return match
        node = node.holding(end - 1)
        if end == node.end:
            return Match(node, end, refused=refused)
        assert node.parent is not None
        return Match(node.parent, end, node, end - node.start, refused)

    def hit(self, root: Node, key: Key) -> Hit:
        """Return the hit of a request for this prompt."""
        num_tokens = len(key) // TOKEN_BYTES
        found = self.find(root, key, num_tokens - 1)
        cached = found.num_blocks * self._block_size + found.partial_tokens
        reason = "last_token" if cached == num_tokens - 1 else self.why(key, found).reason
        return Hit(cached, found.num_blocks, found.partial_tokens, reason)

    def why(self, key: Key, found: Match) -> Missed:
        """Return the reason why a hit ends where it does, and how many tokens it explains.

        No other scope is looked at: the time that this takes would tell what somebody else has cached.
        """
        limit = len(key) // TOKEN_BYTES - 1
        whole = found.num_blocks * self._block_size
        cached = whole + found.partial_tokens
        if cached == limit:
            return LAST_TOKEN
        if found.refused:
            return Missed("window", min(limit - cached, found.refused * self._block_size))
        if limit - whole < self._block_size:
            return Missed("partial_block", limit - cached)
        if self.ask_evicted is not None:
            end, user, memo = self.ask_evicted(found.last, whole * TOKEN_BYTES, key)
            if end > whole * TOKEN_BYTES:
                explained = min(limit - cached, max(end // TOKEN_BYTES - cached, 1))
                return Missed("evicted", explained, user, memo)
            return Missed("cold", memo=memo)
        return COLD
