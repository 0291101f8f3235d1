"""Requests: the life of a sequence, from the lookup of its prompt to the release of its blocks."""

from __future__ import annotations

from collections.abc import Sequence as Items

from quire.core.checkpoints import Checkpoints
from quire.core.claim import Claims
from quire.core.copies import BlockCopy
from quire.core.decode import NO_BLOCK, BlockTables, DecodeBatch, DecodeSteps, block_tables
from quire.core.drafts import check_settled
from quire.core.groups import check_count, check_group
from quire.core.hints import NO_HINT, Hint, set_outlooks
from quire.core.interrupts import bar, mutating
from quire.core.livecurve import PACK_EVERY
from quire.core.node import Node
from quire.core.policies import Visit
from quire.core.publish import Publisher
from quire.core.rollback import Rollback
from quire.core.rows import Rows
from quire.core.scope import MediaItem, Scope
from quire.core.sequence import Sequence
from quire.core.store import NO_SCOPE, BlockStore, Settings
from quire.core.terms import Term, TokenRange, check_priority, terms_of
from quire.core.tokens import TOKEN_BYTES, TokenIds, check_sign, key_of
from quire.errors import ConfigError, SequenceError


class Requests(BlockStore):
    """Running requests on top of the cached prefixes: the calls that engines make at every step."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.sequences: dict[int, Sequence] = {}
        # Of restores and holds: the end of what is locked for them.
        self.anchors: dict[int, Node] = {}
        self.rows = Rows(self.block_size, len(self.groups), self.tree, self.cut_off)
        tree, rows, log = self.tree, self.rows, self.event_log
        self._checkpoints = Checkpoints(rows, self.copies, self.room)
        self._publisher = Publisher(tree, rows, self.counters, log, self._checkpoints)
        self._rollback = Rollback(tree, rows, log)
        self._claims = Claims(tree, rows, self.copies, self._make_room)
        self._steps = DecodeSteps(rows, self.groups, self._publisher, self._claims, self._make_room)
        self._observer = settings.observer

    def open(
        self,
        tokens: TokenIds,
        scope: Scope | None = None,
        *,
        media: Items[MediaItem] = (),
        priority: int = 0,
        retain_s: float | None = None,
        ranges: Items[TokenRange] = (),
        hint: Hint = NO_HINT,
    ) -> Sequence:
        """Start a request: reference what is cached of its prompt.

        At least one token is left to compute. A higher `priority` is evicted later than any
        lower one; for `retain_s` seconds after its last use the path is evicted only when
        nothing else is left; `ranges` sets either, or that nothing is published, for a part
        of the tokens; `hint` says what the caller foresees. Raises `TokensError`, `ScopeError`, `MediaError`, `ConfigError` and, for
        a prompt that no empty pool could hold, `OutOfBlocks`.
        """
        check_priority(priority)
        keep_for = self.check_duration("retain_s", retain_s)
        self._check_hint(hint)
        terms = None
        if ranges:
            default = Term(0, priority, keep_for)
            terms = terms_of(ranges, self.block_size, default, self.check_duration)
        key = key_of(tokens)
        num_tokens = len(key) // TOKEN_BYTES
        root = self.default_root
        if scope is not None or media or len(self.media) or not key:
            key, root = self._read(key, scope, media)
        self._check_fits(num_tokens)
        found = self.lookup.find(root, key, num_tokens - 1)
        try:
            raw_prompt = b""
            if media:
                key = self.media.encode(key_of(tokens), media)
                raw_prompt = key_of(tokens).tobytes()
            else:
                check_sign(key[found.match.num_bytes :])
            reason, explained, lost_by = self.lookup.why(key, found)
            if scope is not None:
                root = self.tree.root(scope)
                if found.match.node.parent is None:
                    found.match.node = root
            counters = self.counters
            number = counters.num_requests + 1
            row = self.rows.take()
            seq = Sequence(
                self.rows,
                row,
                root,
                root,
                scope or NO_SCOPE,
                num_tokens,
                priority,
                keep_for,
                number,
            )
            if media:
                seq.raw_prompt = raw_prompt
                seq.media = self.media.hold(key)
            seq.terms = terms
            if hint is not NO_HINT:
                self.sessions.hinted = True
                seq.hint = hint
                seq.session = (
                    self.sessions.join(seq.scope, hint.session_id) if hint.session_id else None
                )
            if self.tree.evictor.watches:
                lost = -(-explained // self.block_size) if lost_by else 0
                now = self._visit_time()
                seq.visit = Visit(number, now, num_tokens, self.block_size, lost, lost_by)
            since = self._claims.attach(seq, key, found)
            self._adopt(seq)
            live_curve = self.live_curve
            if live_curve is None:
                counters.prompt_tokens += num_tokens
                counters.hit_tokens += seq.num_cached
                counters.missed["last_token"] += 1
                if explained:
                    counters.missed[reason] += explained
                if reason != "last_token":
                    counters.missed["cold"] += num_tokens - 1 - seq.num_cached - explained
            else:
                # In line: here even an empty call would be felt. What is noted is counted later.
                if not number % PACK_EVERY:
                    live_curve.pack()
                reused = seq.num_cached
                if explained:
                    counters.missed[reason] += explained
                    if reason == "evicted":
                        counters.hit_tokens += reused
                        reused, since = -reused - explained, lost_by
                if seq.num_foreign and reused > 0:
                    counters.hit_tokens += reused
                    reused = seq.num_foreign - reused
                notes = live_curve.notes
                notes += (num_tokens, reused, since)  # whole, whatever interrupts
            counters.num_requests = number
            if self._observer is not None:
                self._observer.opened(seq, key, self.media)
        except BaseException as error:
            self.cut_off("open", error)
            raise
        return seq

    def reserve(self, seq: Sequence, num_tokens: int) -> None:
        """Make room for the KV of `num_tokens` more tokens than computed, in every group.

        A partly filled last block that others read too is copied first (`take_copies`).
        All or nothing: raises `OutOfBlocks`, `SequenceError`, `ConfigError`.
        """
        self._check_open(seq)
        try:
            self._claims.reserve(seq, check_count("num_tokens", num_tokens))
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
        self._check_open(seq)
        try:
            self._publisher.commit(seq, self._publisher.checked(seq, key_of(token_ids)))
            self.rows.version += 1
        except BaseException as error:
            self.cut_off("commit", error)
            raise

    @mutating
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
        raise `OutOfBlocks`. Raises `DraftError` while drafts wait in a recurrent group, `SequenceError`.
        """
        self._check_open(seq)
        if seq.drafts:
            check_settled(self.rows, seq, "fork")
        try:
            twin = self._claims.fork(seq)
            if twin.media:
                self.media.hold_again(twin.media)
            self._adopt(twin)
        except BaseException as error:
            self.cut_off("fork", error)
            raise
        return twin

    def close(self, seq: Sequence) -> None:
        """End a sequence: published blocks become cached, the rest free."""
        self._check_known(seq)
        if self._observer is not None:
            self._observer.closed(seq)
        try:
            now = self._visit_time()
            if seq.state == "open":
                last = seq.node
                if self.sessions.hinted:
                    set_outlooks(seq, last, now)
                self._rollback.let_go(seq, now)
            else:
                last = self._left_by(seq)
                set_outlooks(seq, last, now)
                self.tree.evictor.review(last)
            if seq.session is not None:
                self.sessions.closed(seq, last.path())
            seq.state = "closed"
            if seq.media:
                self.media.release(seq.media)
            seq.root.locks -= 1
            del self.sequences[id(seq)]
        except BaseException as error:
            self.cut_off("close", error)
            raise

    # -- steps of a batch ------------------------------------------------------------------

    def batch(self, seqs: Items[Sequence]) -> DecodeBatch:
        """Prepare sequences for decode steps together; stays valid while all are open."""
        return self._steps.batch(seqs)

    def reserve_step(self, batch: DecodeBatch | Items[Sequence]) -> None:
        """Make room for one more token in every sequence of a batch, all or nothing.

        Raises `OutOfBlocks`, `SequenceError`.
        """
        try:
            self._steps.reserve(batch if isinstance(batch, DecodeBatch) else self.batch(batch))
        except BaseException as error:
            self.cut_off("reserve_step", error)
            raise

    def commit_step(self, batch: DecodeBatch | Items[Sequence], token_ids: TokenIds) -> None:
        """Commit one token per sequence of a batch, in the order of the batch.

        Raises `CommitError`, `CopyError`, `TokensError`, `SequenceError`, and commits nothing.
        """
        try:
            batch = batch if isinstance(batch, DecodeBatch) else self.batch(batch)
            self._steps.commit(batch, token_ids)
        except BaseException as error:
            self.cut_off("commit_step", error)
            raise

    def tables(self, seqs: Items[Sequence], group: int = 0, pad: int = NO_BLOCK) -> BlockTables:
        """Return the block tables of sequences in both common shapes, as copies.

        `pad`, `quire.core.decode.NO_BLOCK`, stands after a table's end and, in a windowed group, for what lies behind the window of the
        next token. A kernel must not read there: every number from 0 on is somebody's block. Raises
        `ConfigError`, `SequenceError`.
        """
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
        try:
            plan = self.copies.take()
            self.counters.copied_blocks += len(plan)
        except BaseException as error:
            self.cut_off("take_copies", error)
            raise
        return plan

    def give_up(self, why: str) -> None:
        pins, rows = self.pins, self.rows
        bar(self, why)
        bar(rows, why)  # sequences read their tokens and tables from it
        pins.held.clear()

    def _adopt(self, seq: Sequence) -> None:
        self.sequences[id(seq)] = seq
        seq.root.locks += 1

    def _make_room(self, needed: list[int]) -> None:
        self.room.make(needed, self.pins.release_expired)

    def _left_by(self, seq: Sequence) -> Node:
        """Return the deepest node that is left of what a suspended sequence stored."""
        if seq.hint is NO_HINT:
            return seq.root
        key = memoryview(seq.resume_key)
        whole = len(key) - len(key) % self.tree.block_bytes
        return self.tree.match(seq.root, key, whole).node

    def _check_hint(self, hint: object) -> None:
        if hint is NO_HINT:
            return
        if not isinstance(hint, Hint):
            raise ConfigError(f"hint must be a quire.Hint, got {hint!r}")
        self.check_duration("a hint's ttl_s", hint.ttl_s)

    def _visit_time(self) -> float:
        """Seconds of the clock; without one, requests opened so far."""
        return self.tree.evictor.now() if self.clock is not None else self.counters.num_requests

    def least(self, num_tokens: int) -> tuple[int, ...]:
        """Return the blocks that each group must have at least for so many tokens."""
        whole = -(-num_tokens // self.block_size)
        needed = [whole] * len(self.groups)
        for sparse in self.tree.sparse:
            needed[sparse.index] = min(whole, sparse.least(whole))
        return tuple(needed)

    def stale_slots(self, seq: Sequence) -> list[tuple[int, int]]:
        """Return which entries of its tables an open sequence must replace before it writes."""
        return self._claims.stale_slots(seq)

    def _check_fits(self, num_tokens: int) -> None:
        whole = -(-num_tokens // self.block_size)
        for pool in self.groups:
            if whole > pool.num_blocks:
                break
        else:
            return
        for pool, needed in zip(self.groups, self.least(num_tokens), strict=True):
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
