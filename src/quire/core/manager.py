"""The cache manager: requests in, block tables out."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Items
from typing import Any

from quire.core.drafts import TokenMove, check_parents, check_path, check_settled, moves
from quire.core.eviction import Clock
from quire.core.fits import Fit, fit_prompt, fit_sequence
from quire.core.groups import LayerGroup, check_count, check_group
from quire.core.hints import keep_outlooks
from quire.core.interrupts import bar, mutating, unbar
from quire.core.memory import Usage, compact, resize, usage
from quire.core.policies import PolicyFactory, Visit
from quire.core.restore import Restores
from quire.core.scope import MediaItem, Scope
from quire.core.sequence import Observer, Sequence
from quire.core.store import Settings
from quire.core.terms import Term, nothing_more
from quire.core.tokens import TOKEN_BYTES, TokenIds, key_of
from quire.core.whatif import WhatIf
from quire.errors import ConfigError, SequenceError


class CacheManager(Restores):
    """The control plane of a KV cache: which blocks hold which tokens, and who may share them.

    `num_blocks`  blocks of a single full-attention layer group; or give `groups`
    `block_size`  tokens per block, from 1
    `policy`      a name in `quire.core.policies.POLICIES`, or a factory of `Policy` objects
    `sub_block`   reuse the shared head of a block where a prompt diverges, through a copy
    `pin_budget`  share of the smallest group's blocks that pins may hold, 0 to 1
    `events`      record what is stored and removed, for `take_events`
    `evictions`   record which blocks made room, for `take_evicted`
    `debug`       check every allocation and free, block by block
    `clock`       seconds, rising; needed for `retain_s` and `ttl_s` only
    `observer`    told of every request, for instance `quire.observe.Recorder`
    `curve`       note each request for `what_if`; up to 4 MB

    For every group, after every call: free + active + cached == num_blocks. A call that
    raises changes nothing, unless something else than an error of quire's leaves it (Ctrl-C, no memory): then every
    further call raises `Interrupted`, until `reset`. A manager belongs to one thread. Raises `ConfigError`.
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
        evictions: bool = False,
        debug: bool = False,
        clock: Clock | None = None,
        curve: bool = False,
        observer: Observer | None = None,
    ) -> None:
        if (num_blocks is None) == (groups is None):
            raise ConfigError(f"give num_blocks or groups, one of them; got {num_blocks}, {groups}")
        if groups is None:
            groups = [LayerGroup("full", check_count("num_blocks", num_blocks))]
        super().__init__(
            Settings(
                groups=tuple(groups),
                block_size=block_size,
                policy=policy,
                sub_block=sub_block,
                pin_budget=pin_budget,
                events=events,
                evictions=evictions,
                debug=debug,
                clock=clock,
                curve=curve,
                observer=observer,
            )
        )

    def fits(
        self,
        request: TokenIds | Sequence,
        num_new: int | None = None,
        scope: Scope | None = None,
        *,
        media: Items[MediaItem] = (),
    ) -> Fit:
        """Return whether a request would get its blocks now; true if so. Changes nothing, counts nothing.

        Of a prompt: whether `open` and then `reserve` of `num_new` tokens would find room; of a sequence, whether
        `reserve` would, after `resume` where it is suspended. None: all tokens that are known and not computed.
        What is cached counts, what can be evicted, and what pins and running sequences hold. Raises
        `SequenceError`, `ConfigError` and what `probe` raises.
        """
        if num_new is not None:
            check_count("num_new", num_new)
        if isinstance(request, Sequence):
            self._check_known(request)
            return fit_sequence(self, request, num_new)
        key, root = self._read(key_of(request), scope, media)
        return fit_prompt(self, root, key, num_new)

    @mutating
    def stop_storing(self, seq: Sequence) -> None:
        """Publish nothing of this sequence from its next block on (a part not to be reused).

        Raises `SequenceError`.
        """
        self._check_open(seq)
        seq.terms = nothing_more(seq.terms, Term(0, seq.priority, seq.keep_for))
        seq.node.writer = None

    # -- preemption ------------------------------------------------------------------------

    @mutating
    def suspend(self, seq: Sequence) -> None:
        """Preempt: private blocks are freed, published ones are cached until evicted."""
        self._check_open(seq)
        seq.resume_key = seq.token_bytes()
        seq.resume_key += seq.known[(seq.computed - seq.known_start) * TOKEN_BYTES :]
        seq.num_cached = seq.computed  # until resumed: the tokens that had KV
        keep_outlooks(seq)
        self._rollback.let_go(seq, self._visit_time())
        seq.state = "suspended"

    @mutating
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
        if seq.visit is not None:
            seq.visit = Visit(seq.number, self._visit_time(), seq.prompt_len, self.block_size)
        self._claims.attach(seq, key, found)
        seq.resume_key = b""
        to_compute = max(had - seq.num_cached, 0)
        self.counters.recomputed_tokens += to_compute
        return to_compute

    # -- states of recurrent groups --------------------------------------------------------

    def stops(self, seq: Sequence) -> list[int]:
        """Return the lengths, rising, at which a forward over the prompt should end.

        A commit that ends there keeps a snapshot of the states: at multiples of the interval,
        at a branch point that `open` found, at the last block boundary before the end of the
        prompt. Empty without recurrent groups. Raises `SequenceError`.
        """
        self._check_open(seq)
        return self._checkpoints.stops(seq)

    @mutating
    def checkpoint(self, seq: Sequence) -> bool:
        """Keep a snapshot of the states at the computed length; False if no block is to be had.

        Take the copies before the next forward. Raises `CheckpointError` where no block
        ends, or before anything was computed; `DraftError` while drafts wait to be accepted; `SequenceError`.
        """
        self._check_open(seq)
        check_settled(self.rows, seq, "checkpoint")
        return self._checkpoints.keep(seq)

    # -- speculation -----------------------------------------------------------------------

    @mutating
    def draft(self, seq: Sequence, parents: Items[int] | int) -> None:
        """Reserve room for drafted tokens: a tree by its parents, or a chain of so many.

        Draft i is written to token position `seq.computed + i`; parents[i] is a draft before
        it, or -1 if it follows the sequence. Raises `DraftError`, `OutOfBlocks`,
        `ConfigError`, `SequenceError`.
        """
        self._check_open(seq)
        tree = check_parents(self.rows, seq, parents)
        self._claims.reserve(seq, len(tree))
        seq.drafts, seq.drafted_at = tuple(tree), seq.computed

    @mutating
    def accept(self, seq: Sequence, path: Items[int], token_ids: TokenIds) -> list[TokenMove]:
        """Commit the drafts of a path, each one's parent before it, and drop the others.

        Returns the copies that bring the KV of accepted tokens together: do them at once,
        every source read before any destination is written. A recurrent state has gone on to
        the end of the draft: bring it back to the accepted length before the planned copies
        are done. Raises `DraftError` and what `commit` raises.
        """
        self._check_open(seq)
        key = key_of(token_ids)
        steps = check_path(self.rows, seq, path, len(key) // TOKEN_BYTES)
        key = self._publisher.checked(seq, key)
        planned = moves(self.rows, seq, steps)
        if steps:
            self._publisher.commit(seq, key)
        self._rollback.truncate(seq, seq.computed)
        self.rows.version += 1
        self.rows.epoch += 1
        return planned

    # -- memory ----------------------------------------------------------------------------

    @mutating
    def compact(self, group: int = 0) -> int:
        """Move the held blocks of a group to its lowest ids; return how many were moved.

        Tables and tree point to the new places; the copies stand in the plan. Raises
        `CopyError` while copies wait to be taken or a restore or hold is open, `ConfigError`.
        """
        check_group(group, len(self.groups))
        return compact(self, group)

    @mutating
    def resize(self, num_blocks: Mapping[str, int]) -> None:
        """Change the number of blocks of named groups, for instance to move memory between them.

        Where a pool shrinks, cached blocks are evicted and held ones moved to ids below the
        new end: take the copies and do them, then shrink the tensors. Where it grows, grow the
        tensors first. All or nothing: raises `OutOfBlocks` when active blocks do not fit,
        `CopyError` while copies wait to be taken or, where a pool shrinks, a restore or hold
        is open; `ConfigError`.
        """
        resize(self, num_blocks)

    def usage(self, group: int = 0) -> Usage:
        """Return how full a group is, who shares what, and how much room is in vain."""
        check_group(group, len(self.groups))
        return usage(self, group)

    @mutating
    def what_if(self) -> WhatIf:
        """Return what any capacity would have found of the latest requests, under LRU.

        Mostly within a tenth of a point; needs `curve=True`. Raises `ConfigError`.
        """
        if self.live_curve is None:
            raise ConfigError("what_if needs notes of the requests: CacheManager(..., curve=True)")
        return self.live_curve.what_if(self._capacity())

    def reset(self) -> None:
        """Start anew, empty, with the sizes that the groups have: the only call after `Interrupted`.

        Running sequences, pins, restores and holds of before are none of this manager's any more: using them raises, and
        letting go of them does nothing. What the pools hold is found no more. Counters start again; of events
        the first one says that all was cleared.
        """
        try:
            unbar(self)
            self.pins.held.clear()
            bar(self.rows, "the manager was reset")
            public = self.digests.public
            super().__init__(self.settings)
            self.digests.public = public
            if self.event_log is not None:
                self.event_log.cleared()
        except BaseException as error:
            self.cut_off("reset", error)
            raise

    # -- for people and tests --------------------------------------------------------------

    @mutating
    def check(self) -> None:
        """Verify every invariant of pools, tree, policies and sequences.

        O(blocks + tokens); raises `InvariantError` with what is broken.
        """
        from quire.core import checks  # noqa: PLC0415 - engines never load it

        checks.check(self)

    @mutating
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
