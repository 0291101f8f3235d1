"""The cache manager: requests in, block tables out."""

from __future__ import annotations

from collections.abc import Sequence as Items
from typing import Any

from quire.core.checkpoints import Checkpoints
from quire.core.claim import Claims
from quire.core.copies import BlockCopy
from quire.core.decode import BlockTables, DecodeBatch, DecodeSteps, block_tables
from quire.core.drafts import TokenMove, check_parents, check_path, moves
from quire.core.eviction import Clock
from quire.core.groups import LayerGroup, check_count, check_group
from quire.core.policies import PolicyFactory
from quire.core.publish import Publisher
from quire.core.rollback import Rollback
from quire.core.scope import MediaItem, Scope
from quire.core.sequence import Rows, Sequence, media_numbers
from quire.core.store import NO_SCOPE, BlockStore, Settings
from quire.core.terms import Term, TokenRange, check_priority, ending_at, terms_of
from quire.core.tokens import TOKEN_BYTES, Key, TokenIds, check_sign, key_of
from quire.errors import ConfigError, SequenceError

MAX_MEDIA = 4096
"""Beyond so many media contents, those that no block holds any more are forgotten."""


class CacheManager(BlockStore):
    """The control plane of a KV cache: which blocks hold which tokens, and who may share them.

    `num_blocks`  blocks of a single full-attention layer group; or give `groups`
    `block_size`  tokens per block, from 1
    `policy`      "lru", "fifo", "lfu", or a factory of `Policy` objects
    `sub_block`   reuse the shared head of a block where a prompt diverges, through a copy
    `pin_budget`  share of the smallest group's blocks that pins may hold, 0 to 1
    `events`      record what is stored and removed, for `take_events`
    `debug`       check every allocation and free, block by block
    `clock`       seconds, rising; needed for `retain_s` and `ttl_s` only

    For every group, after every call: free + active + cached == num_blocks. A call that
    raises changes nothing. A manager belongs to one thread. Raises `ConfigError`.
    """

    def __init__(
        self,
        num_blocks: int | None = None,
        block_size: int = 16,
        *,
        policy: str | PolicyFactory = "lru",
        groups: Items[LayerGroup] | None = None,
        sub_block: bool = True,
        pin_budget: float = 0.5,
        events: bool = False,
        debug: bool = False,
        clock: Clock | None = None,
    ) -> None:
        if (num_blocks is None) == (groups is None):
            raise ConfigError(f"give num_blocks or groups, one of them; got {num_blocks}, {groups}")
        if groups is None:
            groups = [LayerGroup("full", check_count("num_blocks", num_blocks))]
        super().__init__(
            Settings(tuple(groups), block_size, policy, sub_block, pin_budget, events, debug, clock)
        )
        self.sequences: dict[int, Sequence] = {}
        self.rows = Rows(block_size, len(self.groups), self.tree)
        tree, rows, log = self.tree, self.rows, self.event_log
        self._checkpoints = Checkpoints(rows, self.copies, self.room)
        self._publisher = Publisher(tree, rows, self.counters, log, self._checkpoints)
        self._rollback = Rollback(tree, rows, self.copies, log)
        self._claims = Claims(tree, rows, self.copies, self._make_room)
        self._steps = DecodeSteps(rows, self.groups, self._publisher, self._claims, self._make_room)
        self._max_media = MAX_MEDIA

    def open(
        self,
        tokens: TokenIds,
        scope: Scope | None = None,
        *,
        media: Items[MediaItem] = (),
        priority: int = 0,
        retain_s: float | None = None,
        ranges: Items[TokenRange] = (),
    ) -> Sequence:
        """Start a request: reference what is cached of its prompt.

        At least one token is left to compute. A higher `priority` is evicted later than any
        lower one; for `retain_s` seconds after its last use the path is evicted only when
        nothing else is left; `ranges` sets either, or that nothing is published, for a part
        of the tokens. Raises `TokensError`, `ScopeError`, `MediaError`, `ConfigError` and, for
        a prompt that no empty pool could hold, `OutOfBlocks`.
        """
        check_priority(priority)
        keep_for = self.check_duration("retain_s", retain_s)
        default = Term(0, priority, keep_for)
        terms = terms_of(ranges, self.block_size, default, self.check_duration)
        key = key_of(tokens)
        num_tokens = len(key) // TOKEN_BYTES
        root = self.default_root
        if scope is not None or media or len(self.media) or not key:
            key, root = self._read(key, scope, media)
        self._check_fits(num_tokens)
        found = self.lookup.find(root, key, num_tokens - 1)
        raw_prompt = b""
        if media:
            key = self._store_media(tokens, media)
            raw_prompt = key_of(tokens).tobytes()
        else:
            check_sign(key[found.match.num_bytes :])
        reason, explained = self.lookup.why(root, key, found)
        if scope is not None:
            root = self.tree.root(scope)
            if found.match.node.parent is None:
                found.match.node = root
        row = self.rows.take()
        seq = Sequence(
            self.rows, row, root, root, scope or NO_SCOPE, num_tokens, priority, keep_for
        )
        seq.raw_prompt = raw_prompt
        seq.terms = terms
        self._claims.attach(seq, key, found)
        self._adopt(seq)
        counters = self.counters
        counters.num_requests += 1
        counters.prompt_tokens += num_tokens
        counters.hit_tokens += seq.num_cached
        counters.missed["last_token"] += 1
        if reason != "last_token":
            counters.missed[reason] += explained
            counters.missed["cold"] += num_tokens - 1 - seq.num_cached - explained
        return seq

    def reserve(self, seq: Sequence, num_tokens: int) -> None:
        """Make room for the KV of `num_tokens` more tokens than computed, in every group.

        A partly filled last block that others read too is copied first (`take_copies`).
        All or nothing: raises `OutOfBlocks`, `SequenceError`, `ConfigError`.
        """
        self._check_open(seq)
        self._claims.reserve(seq, check_count("num_tokens", num_tokens))

    def commit(self, seq: Sequence, token_ids: TokenIds) -> None:
        """Declare that the KV of these next tokens exists; blocks that are full are published.

        Where the tree has a block already, the sequence's table points to that one from now
        on and its own goes back to the pool. Raises `CommitError` for more tokens than
        reserved or others than the prompt's, `CopyError` when a copy was not taken,
        `TokensError`, `SequenceError`.
        """
        self._check_open(seq)
        self._publisher.commit(seq, self._publisher.checked(seq, key_of(token_ids)))
        self.rows.version += 1

    def truncate(self, seq: Sequence, num_tokens: int) -> None:
        """Take the sequence back to its first `num_tokens` tokens, reservations included.

        Blocks beyond are freed, or stay cached where others use them too. Raises
        `TruncateError` beyond what is computed, or inside a published block that is not the
        sequence's alone; `SequenceError`.
        """
        self._check_open(seq)
        self._rollback.truncate(seq, num_tokens)
        self.rows.version += 1
        self.rows.epoch += 1

    def fork(self, seq: Sequence) -> Sequence:
        """Start another sequence at the same tokens, sharing all blocks.

        The first write of either into the shared, partly filled last block copies it. If
        `seq` has reserved room in that block already, the fork gets its copy now; this may
        raise `OutOfBlocks`. Raises `SequenceError`.
        """
        self._check_open(seq)
        twin = self._claims.fork(seq)
        self._adopt(twin)
        return twin

    def suspend(self, seq: Sequence) -> None:
        """Preempt: private blocks are freed, published ones are cached until evicted."""
        self._check_open(seq)
        seq.resume_key = seq.token_bytes()
        seq.resume_key += seq.known[(seq.computed - seq.known_start) * TOKEN_BYTES :]
        seq.num_cached = seq.computed  # until resumed: the tokens that had KV
        self._rollback.let_go(seq, self.tree.evictor.now())
        seq.state = "suspended"

    def resume(self, seq: Sequence) -> int:
        """Reference what is left of a suspended sequence; return the tokens to recompute.

        They are reserved and committed again, as a prompt's are. Raises `SequenceError`.
        """
        self._check_known(seq)
        if seq.state != "suspended":
            raise SequenceError(f"resume of a sequence that is {seq.state}, not suspended")
        key = memoryview(seq.resume_key)
        num_tokens = len(key) // TOKEN_BYTES
        had = seq.num_cached
        limit = num_tokens if num_tokens == had else num_tokens - 1
        found = self.lookup.find(seq.root, key, limit)
        seq.state = "open"
        seq.row = self.rows.take()
        self._claims.attach(seq, key, found)
        seq.resume_key = b""
        to_compute = max(had - seq.num_cached, 0)
        self.counters.recomputed_tokens += to_compute
        return to_compute

    def close(self, seq: Sequence) -> None:
        """End a sequence: published blocks become cached, the rest free."""
        self._check_known(seq)
        if seq.state == "open":
            self._rollback.let_go(seq, self.tree.evictor.now())
        seq.state = "closed"
        seq.root.locks -= 1
        del self.sequences[id(seq)]

    def stop_storing(self, seq: Sequence) -> None:
        """Publish nothing of this sequence from its next block on (a part not to be reused).

        Raises `SequenceError`.
        """
        self._check_open(seq)
        seq.terms = ending_at(seq.terms, seq.node.end, Term(0, seq.priority, seq.keep_for))
        seq.node.writer = None

    # -- states of recurrent groups --------------------------------------------------------

    def stops(self, seq: Sequence) -> list[int]:
        """Return the lengths, rising, at which a forward over the prompt should end.

        A commit that ends there keeps a snapshot of the states: at multiples of the interval,
        at a branch point that `open` found, at the last block boundary before the end of the
        prompt. Empty without recurrent groups. Raises `SequenceError`.
        """
        self._check_open(seq)
        return self._checkpoints.stops(seq)

    def checkpoint(self, seq: Sequence) -> bool:
        """Keep a snapshot of the states at the computed length; False if no block is to be had.

        Take the copies before the next forward. Raises `CheckpointError` where no block
        ends, or before anything was computed; `SequenceError`.
        """
        self._check_open(seq)
        return self._checkpoints.keep(seq)

    # -- speculation -----------------------------------------------------------------------

    def draft(self, seq: Sequence, parents: Items[int] | int) -> None:
        """Reserve room for drafted tokens: a tree by its parents, or a chain of so many.

        Draft i is written to token position `seq.computed + i`; parents[i] is a draft before
        it, or -1 if it follows the sequence. Raises `DraftError`, `OutOfBlocks`,
        `ConfigError`, `SequenceError`.
        """
        self._check_open(seq)
        tree = check_parents(self.rows, seq, parents)
        self._claims.reserve(seq, len(tree))
        seq.drafts = (seq.computed, tree)

    def accept(self, seq: Sequence, path: Items[int], token_ids: TokenIds) -> list[TokenMove]:
        """Commit the drafts of a path, each one's parent before it, and drop the others.

        Returns the copies that bring the KV of accepted tokens together: do them at once,
        every source read before any destination is written. Raises `DraftError` and what
        `commit` raises.
        """
        self._check_open(seq)
        key = key_of(token_ids)
        steps = check_path(self.rows, seq, path, len(key) // TOKEN_BYTES)
        key = self._publisher.checked(seq, key)
        planned = moves(self.rows, seq, steps)
        if steps:
            self._publisher.commit(seq, key)
        seq.drafts = (0, [])
        self._rollback.truncate(seq, seq.computed)
        self.rows.version += 1
        self.rows.epoch += 1
        return planned

    # -- steps of a batch ------------------------------------------------------------------

    def batch(self, seqs: Items[Sequence]) -> DecodeBatch:
        """Prepare sequences for decode steps together; stays valid while all are open."""
        return self._steps.batch(seqs)

    def reserve_step(self, batch: DecodeBatch | Items[Sequence]) -> None:
        """Make room for one more token in every sequence of a batch, all or nothing.

        Raises `OutOfBlocks`, `SequenceError`.
        """
        self._steps.reserve(batch if isinstance(batch, DecodeBatch) else self.batch(batch))

    def commit_step(self, batch: DecodeBatch | Items[Sequence], token_ids: TokenIds) -> None:
        """Commit one token per sequence of a batch, in the order of the batch.

        Raises `CommitError`, `CopyError`, `TokensError`, `SequenceError`, and commits nothing.
        """
        batch = batch if isinstance(batch, DecodeBatch) else self.batch(batch)
        self._steps.commit(batch, token_ids)

    def tables(self, seqs: Items[Sequence], group: int = 0, pad: int = 0) -> BlockTables:
        """Return the block tables of sequences in both common shapes, as copies."""
        seqs = list(seqs)
        for seq in seqs:
            self._check_open(seq)
        check_group(group, len(self.groups))
        if type(pad) is not int or not -(2**31) <= pad < 2**31:
            raise ConfigError(f"pad must be an int32, got {pad!r}")
        return block_tables(self.rows, seqs, group, pad)

    def take_copies(self) -> list[BlockCopy]:
        """Return the block copies to do before the next forward, and forget them.

        They are one simultaneous assignment: every source is read before any destination is
        written. Nothing else may write to the pool between planning and doing them.
        """
        plan = self.copies.take()
        self.counters.copied_blocks += len(plan)
        return plan

    def check(self) -> None:
        """Verify every invariant of pools, tree, policies and sequences.

        O(blocks + tokens); raises `InvariantError` with what is broken.
        """
        from quire.core import checks  # noqa: PLC0415 - engines never load it

        checks.check(self)

    def snapshot(self) -> dict[str, Any]:
        """Return the whole state as plain data (JSON can hold it): equal states, equal data."""
        from quire.core import drawing  # noqa: PLC0415 - engines never load it

        return drawing.snapshot(self)

    def dump(self) -> str:
        """Draw the pools, the tree and the sequences for a person."""
        from quire.core import drawing  # noqa: PLC0415 - engines never load it

        return drawing.draw(self.snapshot())

    def __repr__(self) -> str:
        pool = self.groups[0]
        return (
            f"<CacheManager {self.settings.policy_name}, {pool.num_blocks} blocks of "
            f"{self.block_size}: {pool.num_free} free, {pool.num_active} active, "
            f"{pool.num_cached} cached; {len(self.sequences)} sequences, "
            f"hit rate {self.stats.hit_rate:.1%}>"
        )

    def _adopt(self, seq: Sequence) -> None:
        self.sequences[id(seq)] = seq
        seq.root.locks += 1

    def _make_room(self, needed: list[int]) -> None:
        self.room.make(needed, self.pins.release_expired)

    def _store_media(self, tokens: TokenIds, media: Items[MediaItem]) -> Key:
        """Encode a prompt's media, forgetting contents that no block holds any more."""
        if len(self.media) >= self._max_media:
            self.media.keep(media_numbers(self.tree, self.sequences.values()))
            self._max_media = max(MAX_MEDIA, 2 * len(self.media))
        return self.media.encode(key_of(tokens), media)

    def _check_fits(self, num_tokens: int) -> None:
        whole = -(-num_tokens // self.block_size)
        for group, pool in enumerate(self.groups):
            if whole <= pool.num_blocks:
                continue
            needed = whole
            for sparse in self.tree.sparse:
                if sparse.index == group:
                    needed = sparse.reach(whole) + 1
            if needed > pool.num_blocks:
                what = f"a prompt of {num_tokens} tokens is larger than the pool"
                raise pool.shortage(what, needed, "enlarge the pool or shorten the prompt")

    def _check_known(self, seq: Sequence) -> None:
        if id(seq) not in self.sequences:
            known = type(seq) is Sequence and seq.rows is self.rows
            what = "was closed already" if known else "does not belong to this manager"
            raise SequenceError(f"{seq!r} {what}; open one first")

    def _check_open(self, seq: Sequence) -> None:
        if type(seq) is not Sequence or seq.state != "open" or seq.rows is not self.rows:
            self._check_known(seq)
            raise SequenceError(f"{seq!r} is {seq.state}; resume it first")
