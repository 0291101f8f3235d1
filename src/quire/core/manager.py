"""The cache manager: requests in, block tables out."""

from __future__ import annotations

from collections.abc import Sequence as Items
from typing import Any

import msgspec

from quire.core.copies import BlockCopy, CopyPlan
from quire.core.decode import BlockTables, DecodeBatch, DecodeSteps, block_tables
from quire.core.eviction import Clock
from quire.core.groups import LayerGroup, check_count
from quire.core.lookup import Found
from quire.core.policies import PolicyFactory
from quire.core.publish import Publisher
from quire.core.rollback import Rollback
from quire.core.scope import MediaItem, Scope
from quire.core.sequence import Rows, Sequence, check_group, media_numbers
from quire.core.store import NO_SCOPE, BlockStore, Settings
from quire.core.tokens import TOKEN_BYTES, Key, TokenIds, check_sign, key_of
from quire.errors import ConfigError, SequenceError

MAX_MEDIA = 4096
"""Beyond so many media contents, those that no block holds any more are forgotten."""

MAX_PRIORITY = 100


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
        self.copies = CopyPlan()
        self.rows = Rows(block_size, len(self.groups), self.tree)
        tree, log = self.tree, self.event_log
        self._publisher = Publisher(tree, self.rows, self.copies, self.counters, log)
        self._rollback = Rollback(tree, self.rows, self.copies, log)
        self._steps = DecodeSteps(
            self.rows, self.groups, self._publisher, self.reserve, self._make_room
        )
        self._max_media = MAX_MEDIA
        self._smallest = min(pool.num_blocks for pool in self.groups)

    def open(
        self,
        tokens: TokenIds,
        scope: Scope | None = None,
        *,
        media: Items[MediaItem] = (),
        priority: int = 0,
        retain_s: float | None = None,
    ) -> Sequence:
        """Start a request: reference what is cached of its prompt.

        At least one token is left to compute. A higher `priority` is evicted later than any
        lower one; for `retain_s` seconds after its last use the path is evicted only when
        nothing else is left. Raises `TokensError`, `ScopeError`, `MediaError`, `ConfigError`
        and, for a prompt that no empty pool could hold, `OutOfBlocks`.
        """
        if type(priority) is not int or abs(priority) > MAX_PRIORITY:
            msg = f"priority must be an integer from {-MAX_PRIORITY} to {MAX_PRIORITY}"
            raise ConfigError(f"{msg}, got {priority!r}")
        keep_for = self.check_duration("retain_s", retain_s)
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
        self._attach(seq, key, found)
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
        num_tokens = check_count("num_tokens", num_tokens)
        rows, row, size = self.rows, seq.row, self.block_size
        computed, capacity = rows.computed[row], rows.capacity[row]
        wanted = computed + num_tokens
        if wanted <= capacity:
            return
        held = -(-capacity // size)
        num_new = -(-wanted // size) - held
        tail = computed // size if computed % size and capacity == computed else -1
        copied = [
            tail >= 0 and rows.slots(g, row, tail, tail + 1)[0] in pool.shared
            for g, pool in enumerate(self.groups)
        ]
        self._make_room(num_new + any(copied))
        rows.widen(held + num_new)
        for g, pool in enumerate(self.groups):
            if copied[g]:
                self._own_tail(seq, g, tail, computed % size)
            if num_new:
                rows.slots(g, row, held, held + num_new)[:] = pool.allocate(num_new)
        rows.capacity[row] = wanted
        rows.version += 1

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
        rows, size = self.rows, self.block_size
        computed, capacity = rows.computed[seq.row], rows.capacity[seq.row]
        tail, in_tail = computed // size, computed % size
        copy_now = in_tail > 0 and capacity > computed
        if copy_now:
            self._make_room(1)
        row = rows.take()
        twin = msgspec.structs.replace(seq, row=row)
        rows.computed[row] = rows.capacity[row] = computed
        num_shared = tail + (in_tail > 0)
        for g, pool in enumerate(self.groups):
            slots = rows.slots(g, row, 0, num_shared)
            slots[:] = rows.slots(g, seq.row, 0, num_shared)
            if in_tail:
                pool.share(slots[tail])
                if copy_now:
                    self._own_tail(twin, g, tail, in_tail)
        if in_tail:
            rows.write_tail(row, 0, rows.tail(seq.row, in_tail))
        for node in twin.node.path():
            self.tree.lock(node)
        self._adopt(twin)
        rows.version += 1
        return twin

    def suspend(self, seq: Sequence) -> None:
        """Preempt: private blocks are freed, published ones are cached until evicted."""
        self._check_open(seq)
        seq.resume_key = seq.token_bytes()
        seq.resume_key += seq.known[(seq.computed - seq.known_start) * TOKEN_BYTES :]
        seq.num_cached = seq.computed  # until resumed: the tokens that had KV
        self._rollback.let_go(seq, self._keep_until(seq))
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
        self._attach(seq, key, found)
        seq.resume_key = b""
        to_compute = max(had - seq.num_cached, 0)
        self.counters.recomputed_tokens += to_compute
        return to_compute

    def close(self, seq: Sequence) -> None:
        """End a sequence: published blocks become cached, the rest free."""
        self._check_known(seq)
        if seq.state == "open":
            self._rollback.let_go(seq, self._keep_until(seq))
        seq.state = "closed"
        seq.root.locks -= 1
        del self.sequences[id(seq)]

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

    def _attach(self, seq: Sequence, key: Key, found: Found) -> None:
        """Reference what was found, fill the row, and leave the rest as the prompt to compute."""
        match, num_tokens = found.match, found.partial_tokens
        tree, rows, row = self.tree, self.rows, seq.row
        sources = [ids[found.index] for ids in found.edge.blocks] if found.edge else []
        num_cached = match.num_bytes // TOKEN_BYTES
        rows.widen(num_cached // self.block_size + 1)
        node = seq.node = tree.cut(match)
        while node.parent is not None:
            tree.lock(node)
            tree.evictor.touched(node)
            node.priority = max(node.priority, seq.priority)
            for group, ids in enumerate(node.blocks):
                rows.slots(group, row, node.parent.end, node.end)[:] = memoryview(ids)
            node = node.parent
        if num_tokens:
            self._make_room(1)
            tail = seq.node.end
            for group, pool in enumerate(self.groups):
                block = pool.allocate(1)[0]
                rows.slots(group, row, tail, tail + 1)[0] = block
                self.copies.plan(BlockCopy(group, sources[group], block, num_tokens))
            start = match.num_bytes
            rows.write_tail(row, 0, key[start : start + num_tokens * TOKEN_BYTES])
            num_cached += num_tokens
        rows.computed[row] = rows.capacity[row] = num_cached
        seq.num_cached = seq.known_start = num_cached
        seq.known = key[num_cached * TOKEN_BYTES :].tobytes()

    def _adopt(self, seq: Sequence) -> None:
        self.sequences[id(seq)] = seq
        seq.root.locks += 1

    def _own_tail(self, seq: Sequence, group: int, tail: int, num_tokens: int) -> None:
        """Copy the shared last block of a sequence into a new one of its own."""
        pool = self.groups[group]
        slot = self.rows.slots(group, seq.row, tail, tail + 1)
        source, slot[0] = slot[0], pool.allocate(1)[0]
        pool.unshare(source)
        self.copies.plan(BlockCopy(group, source, slot[0], num_tokens))

    def _make_room(self, num_blocks: int) -> None:
        self.room.make(num_blocks, self.pins.release_expired)

    def _keep_until(self, seq: Sequence) -> float:
        return self.tree.evictor.now() + seq.keep_for if seq.keep_for else 0.0

    def _store_media(self, tokens: TokenIds, media: Items[MediaItem]) -> Key:
        """Encode a prompt's media, forgetting contents that no block holds any more."""
        if len(self.media) >= self._max_media:
            self.media.keep(media_numbers(self.tree, self.sequences.values()))
            self._max_media = max(MAX_MEDIA, 2 * len(self.media))
        return self.media.encode(key_of(tokens), media)

    def _check_fits(self, num_tokens: int) -> None:
        needed = -(-num_tokens // self.block_size)
        for pool in self.groups if needed > self._smallest else ():
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
