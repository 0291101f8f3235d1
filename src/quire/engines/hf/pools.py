"""`HfStore`: a manager and its pools together; sequences whose KV and states can be loaded and kept."""

from collections.abc import Callable
from collections.abc import Sequence as Items
from typing import TYPE_CHECKING, Unpack

import numpy as np
import numpy.typing as npt

from quire import ops
from quire.core import (
    CacheManager,
    FullAttention,
    MediaItem,
    Scope,
    Sequence,
)
from quire.core.groups import Kind
from quire.core.terms import RequestTerms
from quire.engines.models.states import RowStates, Snapshot
from quire.engines.tiered.store import NOTHING, Onboarded
from quire.errors import OutOfBlocks
from quire.groups import ChunkedAttention, SlidingWindow, checkpoint
from quire.tensors.copy import KV, do_copies, gather_into, scatter
from quire.tensors.model import ModelLayout
from quire.tensors.pool import KVPool, Pool, StatePool
from quire.tensors.transfers import Step, Transfers

if TYPE_CHECKING:
    from quire.engines.tiered.store import TieredStore

Tokens = npt.NDArray[np.int32]
ReadKV = Callable[[Items[int], int, int], list[KV]]
"""K and V of these layers, for the tokens from a start to a stop."""


class HfStore:
    """Keeps the bytes of all pools in step with the manager's decisions.

    Whatever the manager plans is done here before anything is read or written: copies first,
    then gather or scatter, then commit. A block is never committed before its bytes are there.

    pools, layout   `pools[g]` and `layout.groups[g]` belong to `manager.pools[g]`
    tiers           what lies below the pools, if anything does
    transfers       write and gather what tiers bring; joined before K and V of the pools are touched otherwise
    """

    def __init__(
        self,
        manager: CacheManager,
        pools: list[Pool],
        layout: ModelLayout,
        transfers: Transfers,
    ) -> None:
        self.manager = manager
        self.tiers: TieredStore | None = None
        self.transfers = transfers
        self._kept: set[int] = set()
        self.pools = pools
        self.layout = layout
        self._tokens = [(g, pool) for g, pool in enumerate(pools) if isinstance(pool, KVPool)]
        self._states = [(g, pool) for g, pool in enumerate(pools) if isinstance(pool, StatePool)]

    def onboard(
        self, tokens: Tokens, scope: Scope | None = None, media: Items[MediaItem] = ()
    ) -> Onboarded:
        """Bring back from tiers what the pools lack of a prompt and can hold, before it is opened."""
        if self.tiers is None:
            return NOTHING
        head, media = self._head(tokens, media)
        return self.tiers.onboard(head, scope, media)

    def open(
        self,
        tokens: Tokens,
        scope: Scope | None = None,
        media: Items[MediaItem] = (),
        **terms: Unpack[RequestTerms],
    ) -> Sequence:
        """Open a sequence for a prompt, or for its head where the pools cannot hold it all."""
        head, given = self._head(tokens, media)
        seq = self.manager.open(head, scope, media=given, **terms)
        # Nobody is refused: what finds no room is computed, and not kept.
        ops.admit(self.manager, seq)
        if any(item.start + item.length > head.size for item in media):
            # What follows the head has no names: windows may make room for it, and it is not kept.
            seq.store_until = min(seq.store_until, head.size // self.manager.block_size)
        self._copy()
        return seq

    def fork(self, seq: Sequence) -> Sequence | None:
        """Return another sequence at the same tokens; None where a block it needs is not to be had."""
        self._settle_for(self.manager.block_size)
        try:
            twin = self.manager.fork(seq)
        except OutOfBlocks:
            return None
        self._copy()
        return twin

    def close(self, seq: Sequence) -> None:
        """Close a sequence; what was kept of it is handed down to the tiers that want it."""
        if self.manager.interrupted:
            return  # nobody holds anything any more
        if self.tiers is not None and id(seq) in self._kept:
            self._kept.discard(id(seq))
            self.tiers.offload_later(seq)
        self.manager.close(seq)

    def recover(self) -> None:
        """Start the manager anew, empty, after a call of it was cut off half-way.

        What is on its way down to tiers is copied before: no block has been written to since.
        """
        self.transfers.give_up()
        if self.tiers is not None:
            self.tiers.offloading.recover()
        self._kept.clear()
        self.manager.reset()

    def join(self) -> None:
        """Wait for all that is on its way, up or down."""
        self.transfers.join()
        self.settle()

    def settle(self) -> None:
        """Wait until blocks that go down to tiers are copied: no sooner may they be evicted or moved."""
        if self.tiers is not None:
            self.tiers.offloading.settle()

    def load(self, seq: Sequence, num_tokens: int, out: Items[list[KV]]) -> None:
        """Gather K and V of cached tokens up to `num_tokens`, per group with tokens, per layer.

        `out[i]` are the layers of the i-th group with tokens, from `first_token` on. They are
        not to be touched before `transfers.arrival` of a layer was called, where there is one.
        """
        for (group, pool), layers in zip(self._tokens, out, strict=True):
            held = self.layout.groups[group]
            tokens = first_token(held.kind, num_tokens), num_tokens
            self.transfers.add_behind(
                held.layers, _gathering(pool, seq.block_ids(group), tokens, layers)
            )

    def load_states(self, seq: Sequence) -> RowStates | None:
        """Return the states at the end of a sequence's cached tokens: views, per recurrent layer.

        None when no block is to be had to work on: then nothing of the sequence can be reused.
        """
        if not self._reserve(seq, 1):
            return None
        return [
            layer
            for group, pool in self._states
            for layer in pool.read(int(seq.block_ids(group)[0]))
        ]

    def keep(
        self, seq: Sequence, tokens: Tokens, read: ReadKV, snapshot: Snapshot | None = None
    ) -> int:
        """Keep what is not kept yet of the whole blocks of `tokens`; return the tokens kept.

        `tokens` are the sequence's from its start. With recurrent groups exactly as many are kept as
        `snapshot` has states for, and these with them. Where there is no room for all, as many leading
        blocks as fit; windows need room for a piece at a time, as what lies behind them gives way.
        """
        start = seq.computed
        stop = tokens.size - tokens.size % self.manager.block_size
        stop = min(stop, seq.store_until * self.manager.block_size)
        if self._states:
            stop = snapshot.length if snapshot and snapshot.length <= min(tokens.size, stop) else 0
        if seq.computed < stop:
            self.transfers.join()
        while seq.computed < stop:
            begin, num_tokens = seq.computed, self._reserve(seq, stop - seq.computed)
            if self._states and 0 < num_tokens < stop - begin:
                num_tokens -= 1  # the manager keeps states where a block ends; there are none here
            if num_tokens <= 0:
                break
            for group, pool in self._tokens:
                layers = self.layout.groups[group].layers
                kv = read(layers, begin, begin + num_tokens)
                scatter(pool, seq.block_ids(group), begin, kv)
            if snapshot and begin + num_tokens == snapshot.length:
                self._write_states(seq, snapshot.states)
            self.manager.commit(seq, tokens[begin : begin + num_tokens])
            self._copy()
        if snapshot and self._states and start < seq.computed == snapshot.length:
            checkpoint(self.manager, seq)
            self._copy()
        if self.tiers is not None and seq.computed > start:
            self._kept.add(id(seq))
        return seq.computed - start

    def _write_states(self, seq: Sequence, states: RowStates) -> None:
        first = 0
        for group, pool in self._states:
            num_layers = len(pool.layers)
            pool.write(int(seq.block_ids(group)[0]), states[first : first + num_layers])
            first += num_layers

    def _reserve(self, seq: Sequence, num_tokens: int) -> int:
        """Reserve `num_tokens`, or as many as end a block and fit; return how many."""
        self._settle_for(num_tokens, seq)
        size = self.manager.block_size
        before = [seq.block_ids(group) for group in range(len(self.pools))]
        available = min(self.manager.pools[group].num_available for group, _ in self._tokens)
        fit = available * size + -seq.computed % size
        if num_tokens > fit:
            num_tokens = fit - (seq.computed + fit) % size
        while num_tokens > 0:
            try:
                self.manager.reserve(seq, num_tokens)
            except OutOfBlocks:
                num_tokens -= size
                continue
            self._copy(
                {
                    group: np.setdiff1d(seq.block_ids(group), [*before[group], -1])
                    for group, pool in enumerate(self.pools)
                    if pool.debug_nan
                }
            )
            return num_tokens
        return 0

    def _settle_for(self, num_tokens: int, seq: Sequence | None = None) -> None:
        """Wait for what goes down to tiers until there is room for so many tokens more, of a sequence."""
        if self.tiers is not None:
            num_blocks = num_tokens // self.manager.block_size + 2
            self.tiers.offloading.settle_for(num_blocks, None if seq is None else seq.node)

    def _copy(self, fresh: dict[int, npt.NDArray[np.int32]] | None = None) -> None:
        if self.tiers is not None:
            self.tiers.spill()
        do_copies(self.manager, self.pools, fresh, self.transfers.join)

    def _head(self, tokens: Tokens, media: Items[MediaItem]) -> tuple[Tokens, Items[MediaItem]]:
        """Return what the pools can hold at once of a prompt, with room for it as far as there can be."""
        head = tokens[: self._most_tokens()]
        self._settle_for(head.size)
        return head, media if head.size == tokens.size else media_before(media, head.size)

    def _most_tokens(self) -> int:
        """Return the longest prompt that the pools can hold at once, what windows drop not counted."""
        size = self.manager.block_size
        limits: list[int] = []
        for group, pool in self._tokens:
            kind = self.layout.groups[group].kind
            if isinstance(kind, FullAttention):
                limits.append(pool.num_blocks * size)
            elif _most_blocks(kind, size) >= pool.num_blocks:
                limits.append((pool.num_blocks - 1) * size)
        return max(min(limits), size) if limits else 2**31 - 1


def _gathering(
    pool: KVPool, ids: npt.NDArray[np.int32], tokens: tuple[int, int], out: list[KV]
) -> Step:
    start, stop = tokens
    return lambda layer: gather_into(pool, ids, stop, out, start, layer=layer)


def first_token(kind: Kind, num_tokens: int) -> int:
    """Return the first token whose K and V layers of a kind need to go on after `num_tokens`."""
    match kind:
        case SlidingWindow(window):
            return max(num_tokens - window + 1, 0)
        case ChunkedAttention(chunk):
            return num_tokens // chunk * chunk
        case _:
            return 0


def media_before(media: Items[MediaItem], num_tokens: int) -> list[MediaItem]:
    """Return the items that begin before `num_tokens`, the last one cut to end there."""
    return [
        MediaItem(item.digest, item.start, min(item.length, num_tokens - item.start))
        for item in media
        if item.start < num_tokens
    ]


def _most_blocks(kind: Kind, block_size: int) -> int:
    """Return the most blocks that a window of a kind can touch."""
    match kind:
        case SlidingWindow(window, sinks):
            return -(-window // block_size) + 1 + -(-sinks // block_size)
        case ChunkedAttention(chunk):
            return -(-chunk // block_size) + 1
        case _:
            return 0
