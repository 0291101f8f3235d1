"""The cache manager: requests in, block tables out."""

from __future__ import annotations

from collections.abc import Sequence as Items
from typing import Unpack

from quire.config import check_count, check_text
from quire.core import decode, give, publish, take
from quire.core.blocks import BlockCopy
from quire.core.decode import NO_BLOCK, BlockTables, DecodeBatch, block_tables
from quire.core.groups import LayerGroup, check_group
from quire.core.kernel import Kernel, Watcher, check_watchers
from quire.core.lookup import Hit
from quire.core.node import Node
from quire.core.policy import PolicyFactory
from quire.core.room import check_fits
from quire.core.sequence import Sequence
from quire.core.settings import ManagerSettings, Options, settings_of
from quire.core.stats import Stats
from quire.core.terms import ORDINARY, RequestTerms, terms_of
from quire.core.tokens import TOKEN_BYTES, Key, TokenIds, check_sign, key_of
from quire.errors import ConfigError, SequenceError, TokensError
from quire.interrupts import Interruptible, bar, mutating, unbar
from quire.media import NO_MEDIA, MediaItem, check_media
from quire.scope import NO_SCOPE, Scope, check_scope


class CacheManager(Interruptible):
    """The control plane of a KV cache: which blocks hold which tokens, and who may share them.

    `num_blocks`  blocks of a single full-attention layer group; or give `groups`
    `block_size`  tokens per block, from 1
    `policy`      "lru", "fifo", "lfu", "learned" or another package's name, or what makes `Policy` objects
    `sub_block`   reuse the shared head of a block where a prompt diverges, through a copy
    `pin_budget`  share of the smallest full group's blocks that pins may hold (`quire.ops.pin`), 0 to 1
    `pool`        the class of the block pools; `quire.ops.CheckedPool` checks every block, for tests
    `clock`       seconds, rising; needed for `retain_s` and `ttl_s` only
    `watchers`    told of requests and blocks, in this order: `EventLog`, `LiveCurve`, `Recorder`

    It has `pools`, the blocks of each layer group, and `sequences`, the open and suspended ones by identity.
    For every group, after every call: free + active + cached == num_blocks. A call that
    raises changes nothing, unless something else than an error of quire's leaves it (Ctrl-C, no memory): then every
    further call raises `Interrupted`, until `reset`. A manager belongs to one thread. Raises `ConfigError`.
    """

    def __init__(
        self,
        num_blocks: int | None = None,
        block_size: int = 16,
        *,
        groups: Items[LayerGroup] | None = None,
        policy: str | PolicyFactory = "lru",
        watchers: Items[Watcher] = (),
        **options: Unpack[Options],
    ) -> None:
        if (num_blocks is None) == (groups is None):
            raise ConfigError(f"give num_blocks or groups, one of them; got {num_blocks}, {groups}")
        if groups is None:
            groups = [LayerGroup("full", check_count("num_blocks", num_blocks))]
        if not isinstance(groups, tuple | list):
            raise ConfigError(f"groups is a list of LayerGroup objects, got {groups!r}")
        settings = settings_of(groups, block_size, policy, options)
        told = [settings.policy] if isinstance(settings.policy, Watcher) else []
        check_watchers(watchers)
        check_watchers(told)
        self._begin(settings, [*watchers, *told])

    def _begin(self, settings: ManagerSettings, watchers: Items[Watcher]) -> None:
        self.settings = settings
        self.block_size = settings.block_size
        self.kernel = Kernel(settings, watchers, self.cut_off)
        self.pools = self.kernel.pools
        self.sequences = self.kernel.sequences
        self.default_root = self.kernel.tree.root(NO_SCOPE)

    @property
    def num_free(self) -> int:
        """Free blocks of the first group."""
        return self.pools[0].num_free

    @property
    def num_active(self) -> int:
        """Blocks that a sequence or a pin references, of the first group."""
        return self.pools[0].num_active

    @property
    def num_cached(self) -> int:
        """Cached blocks of the first group: findable and without a reference."""
        return self.pools[0].num_cached

    @property
    def stats(self) -> Stats:
        """Counters since the manager was made."""
        return self.kernel.counters.stats()

    # -- what is cached --------------------------------------------------------------------

    def probe(
        self, tokens: TokenIds, scope: Scope | None = None, media: Items[MediaItem] = ()
    ) -> Hit:
        """Return the hit that `open` would find for a prompt. Changes nothing, counts nothing.

        A negative id in an int32 array is not seen here: nothing is found from it on.

        Raises `TokensError`, `ScopeError`, `MediaError`.
        """
        root, key = self.default_root, key_of(tokens)
        if scope is not None or media is not NO_MEDIA or len(self.kernel.tree.media) or not key:
            root, key = self.read(key, scope, media)
        return self.kernel.lookup.hit(root, key)

    @mutating
    def end_session(self, session_id: str, scope: Scope | None = None) -> int:
        """Say that no other request of a session of this scope follows, as `Hint` has it.

        The blocks that only this session has used are evicted before all others from now on.
        Returns how many these are; 0 for a session that is not known in the scope. Raises `ConfigError`, `ScopeError`.
        """
        check_text("session_id", session_id)
        check_scope(NO_SCOPE if scope is None else scope)
        return self.kernel.owners.end(scope or NO_SCOPE, session_id)

    # -- requests --------------------------------------------------------------------------

    def open(
        self,
        tokens: TokenIds,
        scope: Scope | None = None,
        *,
        media: Items[MediaItem] = (),
        **terms: Unpack[RequestTerms],
    ) -> Sequence:
        """Start a request: reference the cached part of its prompt.

        The first successful `reserve` (or fork) counts the request, marks its blocks as used, and copies a block of which
        only the head was found. A request that is closed or suspended before that changes nothing, unless `take_copies`
        gave it the copy. At least one token is left to compute. `terms`: `priority`, `retain_s`, `store_until`, `hint`,
        as `Terms` says. Raises `TokensError`, `ScopeError`, `MediaError`, `ConfigError` and, for
        a prompt that no empty pool could hold, `OutOfBlocks`.
        """
        kernel = self.kernel
        wanted = terms_of(self.settings.clock, terms) if terms else ORDINARY
        root, given = self.default_root, key_of(tokens)
        key = given
        if scope is not None or media is not NO_MEDIA or len(kernel.tree.media) or not key:
            root, key = self.read(key, scope, media)
        check_fits(kernel, len(key) // TOKEN_BYTES)
        found = kernel.lookup.find(root, key, len(key) // TOKEN_BYTES - 1)
        try:
            return take.open_sequence(kernel, scope or NO_SCOPE, (given, media), found, wanted)
        except BaseException as error:
            self.cut_off("open", error)
            raise

    def reserve(self, seq: Sequence, num_tokens: int) -> None:
        """Make room for the KV of `num_tokens` more tokens than computed, in every group.

        A partly filled last block that others read too is copied first (`take_copies`).
        All or nothing: raises `OutOfBlocks`, `SequenceError`, `ConfigError`.
        """
        self.check_open(seq)
        try:
            take.reserve(self.kernel, seq, check_count("num_tokens", num_tokens))
        except BaseException as error:
            self.cut_off("reserve", error)
            raise

    def commit(self, seq: Sequence, token_ids: TokenIds) -> None:
        """Declare that the KV of these next tokens exists; blocks that are full are published.

        Where the tree has a block already, the sequence's table points to that one from now
        on and its own goes back to the pool. Raises `CommitError` for more tokens than
        reserved or others than the prompt's, `CopyError` when a copy was not taken,
        `TokensError`, `SequenceError`.
        """
        self.check_open(seq)
        kernel = self.kernel
        try:
            publish.commit(kernel, seq, publish.checked(kernel, seq, key_of(token_ids)))
            kernel.rows.version += 1
        except BaseException as error:
            self.cut_off("commit", error)
            raise

    @mutating
    def fork(self, seq: Sequence) -> Sequence:
        """Start another sequence at the same tokens, sharing all blocks.

        The first write of either into the shared, partly filled last block copies it. If
        `seq` has reserved room in that block already, the fork gets its copy now, and `seq` its own where it has none
        yet; this may raise `OutOfBlocks`. Raises `SequenceError`.
        """
        self.check_open(seq)
        return take.fork(self.kernel, seq)

    def close(self, seq: Sequence) -> None:
        """End a sequence: published blocks become cached, the rest free."""
        self.check_known(seq)
        try:
            for tell in self.kernel.watchers.closed if seq.number else ():
                tell(seq)
            give.close(self.kernel, seq)
        except BaseException as error:
            self.cut_off("close", error)
            raise

    @mutating
    def suspend(self, seq: Sequence) -> None:
        """Preempt: private blocks are freed, published ones are cached until evicted."""
        self.check_open(seq)
        give.suspend(self.kernel, seq)

    @mutating
    def resume(self, seq: Sequence) -> int:
        """Reference the remaining blocks of a suspended sequence; return the tokens to recompute.

        They are reserved and committed again, as a prompt's are. Raises `SequenceError`.
        """
        self.check_known(seq)
        if seq.state != "suspended":
            raise SequenceError(f"resume of a sequence that is {seq.state}, not suspended")
        return take.resume(self.kernel, seq)

    # -- steps of a batch ------------------------------------------------------------------

    def batch(self, seqs: Items[Sequence]) -> DecodeBatch:
        """Prepare sequences for decode steps together; stays valid while all are open."""
        return decode.make_batch(self.kernel, seqs)

    def reserve_step(self, batch: DecodeBatch | Items[Sequence]) -> None:
        """Make room for one more token in every sequence of a batch, all or nothing.

        Raises `OutOfBlocks`, `SequenceError`.
        """
        batch = batch if isinstance(batch, DecodeBatch) else self.batch(batch)
        try:
            decode.reserve_step(self.kernel, batch)
        except BaseException as error:
            self.cut_off("reserve_step", error)
            raise

    def commit_step(self, batch: DecodeBatch | Items[Sequence], token_ids: TokenIds) -> None:
        """Commit one token per sequence of a batch, in the order of the batch.

        Raises `CommitError`, `CopyError`, `TokensError`, `SequenceError`, and commits nothing.
        """
        batch = batch if isinstance(batch, DecodeBatch) else self.batch(batch)
        try:
            decode.commit_step(self.kernel, batch, token_ids)
        except BaseException as error:
            self.cut_off("commit_step", error)
            raise

    def tables(self, seqs: Items[Sequence], group: int = 0, pad: int = NO_BLOCK) -> BlockTables:
        """Return the block tables of sequences in both common shapes, as copies.

        `pad` stands after a table's end and, in a windowed group, for what lies behind the window of the next
        token. A kernel must not read there: every number from 0 on is somebody's block. Raises `ConfigError`,
        `SequenceError`.
        """
        if not isinstance(seqs, tuple | list):
            raise SequenceError(f"tables of a list of sequences, got {seqs!r}")
        for seq in seqs:
            self.check_open(seq)
        check_group(group, len(self.pools))
        return block_tables(self.kernel.rows, seqs, group, pad)

    @mutating
    def take_copies(self) -> list[BlockCopy]:
        """Return the block copies to do before the next forward, and forget them.

        They are one simultaneous assignment: every source is read before any destination is
        written. Nothing else may write to the pool between planning and doing them. A request that has
        reserved nothing yet gets its copy here, if a block is free: nothing is evicted.
        """
        for seq in [*self.sequences.values()] if self.kernel.tree.waiting else ():
            found_head = seq.pending is not None and seq.pending.source is not None
            if found_head and all(pool.num_free for pool in self.kernel.pools):
                take.reserve(self.kernel, seq, 0, admits=False)
        plan = self.kernel.copies.take()
        self.kernel.counters.copied_blocks += len(plan)
        return plan

    # -- after an interrupt ----------------------------------------------------------------

    @mutating
    def reset(self) -> None:
        """Start anew, empty, with the sizes that the groups have: the only call after `Interrupted`.

        Running sequences, pins, restores and holds of before are none of this manager's any more: using them raises, so does
        `close` of such a sequence, and letting go of the others does nothing. What the pools hold is found no more. Counters start again; of events
        the first one says that all was cleared.
        """
        unbar(self)
        kernel = self.kernel
        kernel.holds.all.clear()
        bar(kernel.rows, "the manager was reset")
        self._begin(self.settings, kernel.watchers.all)

    def give_up(self, why: str) -> None:
        kernel = self.kernel
        bar(self, why)
        bar(kernel.rows, why)  # sequences read their tokens and tables from it
        kernel.holds.all.clear()

    # -- arguments -------------------------------------------------------------------------

    def read_whole(
        self, tokens: TokenIds, scope: Scope | None, media: Items[MediaItem]
    ) -> tuple[Node, Key]:
        """Return the root and the key of a prompt; raise `TokensError` for a negative id too, wherever it stands."""
        given = key_of(tokens)
        prompt = self.read(given, scope, media)
        check_sign(given)
        return prompt

    def read(self, key: Key, scope: Scope | None, media: Items[MediaItem]) -> tuple[Node, Key]:
        """Return the root and the key to look up; an unknown scope gives an empty root.

        Raises `TokensError`, `ScopeError`, `MediaError`.
        """
        if not key:
            raise TokensError("the prompt is empty; a lookup needs at least one token")
        root, known = self.root(scope), self.kernel.tree.media
        if media is not NO_MEDIA:
            check_media(media, len(key) // TOKEN_BYTES)
        if media:
            key = known.peek(key, media)
        elif len(known):
            check_sign(key)
        return root, key

    def check_known(self, seq: Sequence) -> None:
        """Raise `SequenceError` unless this is a sequence of this manager that was not closed."""
        if id(seq) not in self.sequences:
            known = type(seq) is Sequence and seq.rows is self.kernel.rows
            what = "was closed already" if known else "does not belong to this manager"
            raise SequenceError(f"{seq!r} {what}; open one first")

    def check_open(self, seq: Sequence) -> None:
        """Raise `SequenceError` unless this is an open sequence of this manager."""
        if type(seq) is not Sequence or seq.state != "open" or seq.rows is not self.kernel.rows:
            self.check_known(seq)
            raise SequenceError(f"{seq!r} is {seq.state}; resume it first")

    def root(self, scope: Scope | None) -> Node:
        """Return the root of a scope, an empty one for a scope that is not known; raise `ScopeError`."""
        if scope is None:
            return self.default_root
        check_scope(scope)
        return self.kernel.tree.roots.get(scope) or Node()

    def __repr__(self) -> str:
        pool = self.pools[0]
        return (
            f"<CacheManager {self.settings.policy_name}, {pool.num_blocks} blocks of "
            f"{self.block_size}: {pool.num_free} free, {pool.num_active} active, "
            f"{pool.num_cached} cached; {len(self.sequences)} sequences, "
            f"hit rate {self.stats.hit_rate:.1%}>"
        )
