"""Lookups for models that compute media whole: a hit ends inside no image."""

import numpy as np

from quire.core import Watcher
from quire.core.kernel import Kernel
from quire.core.lookup import Lookup
from quire.core.node import Match, Node
from quire.core.tokens import INT32, Key


class WholeMedia(Watcher):
    """Has a manager find only what ends inside no media item.

    A model is given the content of an item for all of its placeholders. A window, or tokens that see all of their
    image, allow no going back from inside: what is found is lowered to where the item begins, and there once
    more to what every group accepts.
    """

    def begin(self, kernel: Kernel) -> None:
        lookup = _WholeLookup(kernel.tree, kernel.rows.block_size, sub_block=True)
        lookup.ask_evicted = kernel.lookup.ask_evicted
        kernel.lookup = lookup


class _WholeLookup(Lookup):
    """Finds prefixes that end inside no item."""

    def find(self, root: Node, key: Key, limit: int) -> Match:
        """Find what is cached of the first `limit` tokens of a key."""
        while True:
            match = super().find(root, key, limit)
            end = match.num_blocks * self._block_size + match.partial_tokens
            limit = item_start(key, end)
            if limit == end:
                return match


def item_start(key: Key, end: int) -> int:
    """Return the start of the item that goes on across a boundary; the boundary itself where none does.

    Neighbouring items of the same content count as one.
    """
    tokens = np.frombuffer(key, INT32)
    if not 0 < end < len(tokens) or tokens[end] >= 0 or tokens[end] != tokens[end - 1]:
        return end
    others = np.flatnonzero(tokens[:end] != tokens[end])
    return int(others[-1]) + 1 if len(others) else 0
