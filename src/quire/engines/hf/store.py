"""A manager and a pool together: sequences whose KV can be loaded and saved."""

from collections.abc import Callable
from collections.abc import Sequence as Items

import numpy as np
import numpy.typing as npt

from quire.core import CacheManager, MediaItem, Scope, Sequence
from quire.errors import OutOfBlocks
from quire.tensors.copy import KV, apply_copies, gather_into, scatter
from quire.tensors.pool import KVPool

Tokens = npt.NDArray[np.int32]


class BlockStore:
    """Keeps the pool's bytes in step with the manager's decisions.

    Whatever the manager plans is done here before anything is read or written: copies first,
    then gather or scatter, then commit. A block is never committed before its bytes are there.
    """

    def __init__(self, manager: CacheManager, pool: KVPool) -> None:
        self.manager = manager
        self.pool = pool

    def open(
        self,
        tokens: Tokens,
        scope: Scope,
        priority: int,
        retain_s: float | None,
        media: Items[MediaItem] = (),
    ) -> Sequence:
        """Open a sequence for a prompt, or for its head where the pool cannot hold it all."""
        head = tokens[: self.pool.num_blocks * self.manager.block_size]
        if head.size < tokens.size:
            media = media_before(media, head.size)
        seq = self.manager.open(head, scope, media=media, priority=priority, retain_s=retain_s)
        apply_copies(self.pool, self.manager.take_copies())
        return seq

    def load(self, seq: Sequence, num_tokens: int, out: list[KV]) -> None:
        """Gather K and V of the first `num_tokens` cached tokens into `out`, a pair per layer."""
        gather_into(self.pool, seq.block_ids(), num_tokens, out)

    def save(self, seq: Sequence, tokens: Tokens, read: Callable[[int, int], list[KV]]) -> int:
        """Keep what is not kept yet of the whole blocks of `tokens`; return the tokens kept.

        `tokens` are the sequence's from its start; `read(start, stop)` gives their K and V per
        layer. Where the pool has no room for all, as many leading blocks as fit are kept.
        """
        start = seq.computed
        whole = tokens.size - tokens.size % self.manager.block_size
        stop = start + self._reserve(seq, whole - start)
        if stop == start:
            return 0
        scatter(self.pool, seq.block_ids(), start, read(start, stop))
        self.manager.commit(seq, tokens[start:stop])
        return stop - start

    def _reserve(self, seq: Sequence, num_tokens: int) -> int:
        """Reserve `num_tokens`, or as many as end a block and fit; return how many."""
        size = self.manager.block_size
        before = seq.block_ids()
        while num_tokens > 0:
            try:
                self.manager.reserve(seq, num_tokens)
            except OutOfBlocks as error:
                fit = (error.free + error.cached) * size + -seq.computed % size
                num_tokens = min(num_tokens - size, fit - (seq.computed + fit) % size)
                continue
            fresh = np.setdiff1d(seq.block_ids(), before) if self.pool.debug_nan else ()
            apply_copies(self.pool, self.manager.take_copies(), fresh)
            return num_tokens
        return 0


def media_before(media: Items[MediaItem], num_tokens: int) -> list[MediaItem]:
    """Return the items that begin before `num_tokens`, the last one cut to end there."""
    return [
        MediaItem(item.digest, item.start, min(item.length, num_tokens - item.start))
        for item in media
        if item.start < num_tokens
    ]
