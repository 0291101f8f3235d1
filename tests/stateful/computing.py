"""Requests over several layer kinds beside the model of their memory: open to accepted drafts."""

import numpy as np
from compare import Comparison
from kinds import window_blocks
from model import Drafts, Live

from quire import groups, ops
from quire.core import FullAttention
from quire.errors import (
    CheckpointError,
    ConfigError,
    OutOfBlocks,
)


class Computing(Comparison):
    """Each call that computes, with what it must return, raise and leave behind."""

    # -- requests --------------------------------------------------------------------------

    def open(self, tokens, scope=None, media=(), *, store_until=None, **options):
        """Open a prompt. `options` are those of `CacheManager.open`."""
        tokens, manager, size = list(tokens), self.manager, self.settings.block_size
        path = self.names.path(scope, tokens, media)
        hit = self.pure(manager.probe, tokens, scope, media)
        assert self.pure(ops.explain, manager, tokens, scope, media).hit == hit
        fit = self.pure(ops.fits, manager, tokens, None, scope, media=media)
        limit = self.findable(scope, path[:-1])
        assert hit.num_tokens <= limit <= len(tokens) - 1, "found what was never published"
        assert hit.num_tokens == hit.num_blocks * size + hit.partial_tokens
        if self.intact:
            least = self.accepted(scope, path[:-1])
            whole = hit.num_blocks * size
            assert whole >= least, "lost a published prefix without any eviction"
            is_there = not self.settings.windowed or all(pool.num_free for pool in self.pools)
            if whole == limit // size * size and is_there:
                assert hit.num_tokens == limit, "lost the head of a block"
        seq = self.call(
            manager.open,
            np.array(tokens, dtype=np.int32),
            scope,
            media=media,
            store_until=store_until,
            **options,
            may_raise=OutOfBlocks,
        )
        if isinstance(seq, OutOfBlocks):
            assert self.is_too_long(len(tokens)), "the prompt would have fit"
            assert not fit
            assert fit.room == tuple(pool.num_blocks for pool in self.pools)
            return None
        assert seq.num_cached == fit.num_cached
        assert bool(fit) == bool(self.pure(ops.fits, manager, seq)), "the rest of the prompt"
        assert seq.num_cached == seq.computed == hit.num_tokens, "open found other than probe"
        n = seq.computed
        live = Live(seq, scope, media, tokens, tokens, tokens[:n], path[:n], found=n)
        if store_until is not None:
            live.store_limit = store_until // size * size
        self.live.append(live)
        self.history.append((tokens, scope, media))
        self.copies_taken = False
        self.after()
        return live

    def is_too_long(self, num_tokens):
        """Whether an empty pool could not hold a prompt: all of it, a window, or two states."""
        blocks = -(-num_tokens // self.settings.block_size)
        for kind, pool in zip(self.settings.kinds, self.pools, strict=True):
            most = (
                blocks
                if isinstance(kind, FullAttention)
                else window_blocks(kind, self.settings.block_size) + 2
            )
            if min(blocks, most) > pool.num_blocks:
                return True
        return False

    def reserve(self, live, num_tokens):
        """Reserve; a refusal must be true."""
        seq = live.seq
        if num_tokens == 0:
            self.must_raise(ConfigError, self.manager.reserve, seq, 0)
            return True
        wanted = max(seq.capacity, seq.computed + num_tokens)
        fit = self.pure(ops.fits, self.manager, seq, num_tokens)
        error = self.call(self.manager.reserve, seq, num_tokens, may_raise=OutOfBlocks)
        if isinstance(error, OutOfBlocks):
            self.check_exhausted(error)
            assert not fit, f"it fits, it was said, with {fit}"
            assert error.needed <= -(-num_tokens // self.settings.block_size) + 1
            return False
        self.admit(live)
        assert seq.capacity == wanted
        assert fit, f"it does not fit, it was said, with {fit}"
        self.copies_taken = False
        self.after()
        return True

    def refuse(self, tokens, scope, media, **options):
        """A request that finds no room and is closed: all is what it was."""
        before = self.lasting()
        live = self.open(tokens, scope, media, **options)
        if live is None:
            return
        most = sum(pool.num_blocks for pool in self.pools) + 1
        assert not self.reserve(live, most * self.settings.block_size) or self.settings.recurrent
        if live.admitted:
            self.close(live)
            return
        self.close(live)
        after = self.lasting()
        changed = {
            name: (before[name], after[name]) for name in after if after[name] != before[name]
        }
        assert not changed, f"a refused request changed {changed}"

    def forward(self, lives, ids):
        """Compute `ids` the way a model would: copies first, then through the own tables."""
        self.take_copies()
        for live in lives:
            self.verify(live)
        for live, new in zip(lives, ids, strict=True):
            start = len(live.tokens)
            live.tokens = live.tokens + new
            live.path = self.path_of(live, live.tokens)
            for group in self.settings.attention:
                table = live.seq.block_ids(group)
                self.memory[group].write(table, start, live.path[start:])
            for group in self.settings.recurrent if new else ():
                (block,) = live.seq.block_ids(group).tolist()
                self.memory[group].blocks[block] = [live.path[-1]]
        for live in self.running:
            self.verify(live)

    def publish(self, live):
        """Note what may be found from now on."""
        self.published.add(self.names.root(live.scope), live.storable)

    def commit(self, live, num_tokens, filler):
        """Compute and commit; a commit that ends at a stop keeps a snapshot if there is room."""
        manager, seq = self.manager, live.seq
        num_tokens = min(num_tokens, seq.capacity - seq.computed)
        ids = live.next_tokens(num_tokens, filler)
        stops = self.check_stops(live)
        self.forward([live], [ids])
        room = self.room_for_states()
        self.call(manager.commit, seq, ids)
        self.publish(live)
        self.copies_taken = not self.settings.recurrent
        self.after()
        if ids and seq.computed in stops and seq.computed <= live.store_limit and room:
            self.check_snapshot(live)

    def check_stops(self, live):
        """Return the stops of a sequence: whole blocks of its prompt that are still to compute."""
        stops = self.pure(groups.stops, self.manager, live.seq)
        assert stops == sorted(set(stops))
        assert not stops or self.settings.recurrent
        for stop in stops:
            assert live.seq.computed < stop < len(live.known)
            assert stop % self.settings.block_size == 0
        return stops

    def room_for_states(self):
        pools = [self.pools[group] for group in self.settings.recurrent]
        return all(pool.num_free + pool.num_cached for pool in pools)

    def check_snapshot(self, live):
        """The snapshot of all that is computed is kept in every recurrent group."""
        self.take_copies()
        self.after()
        for group in self.settings.recurrent:
            assert live.path[-1] in self.snapshots[group], "a snapshot was not kept"

    def prefill(self, live, filler, generated=0):
        """Compute what is known, ending a forward at each stop, and some tokens more."""
        while len(live.tokens) < len(live.known):
            end = min([*self.check_stops(live), len(live.known)])
            wanted = end - len(live.tokens)
            if not self.reserve(live, wanted):
                return
            self.commit(live, wanted, filler)
        if generated and self.reserve(live, generated):
            self.commit(live, generated, filler)

    def decode(self, batch, lives, filler):
        """One step of a batch."""
        ids = [live.next_tokens(1, filler[i % len(filler) :]) for i, live in enumerate(lives)]
        error = self.call(self.manager.reserve_step, batch, may_raise=OutOfBlocks)
        if isinstance(error, OutOfBlocks):
            self.check_exhausted(error)
            return
        self.copies_taken = False
        self.after()
        self.forward(lives, ids)
        self.call(self.manager.commit_step, batch, [new for (new,) in ids])
        for live in lives:
            self.publish(live)
        self.copies_taken = not self.settings.recurrent
        self.after()

    def checkpoint(self, live):
        """Ask for a snapshot of now."""
        seq, size = live.seq, self.settings.block_size
        if not self.settings.recurrent:
            return
        working = all(len(seq.block_ids(group)) for group in self.settings.recurrent)
        stored = seq.computed <= live.store_limit
        possible = seq.computed and seq.computed % size == 0 and working
        room = self.room_for_states()
        allowed = () if possible and stored else CheckpointError
        kept = self.call(groups.checkpoint, self.manager, seq, may_raise=allowed)
        if isinstance(kept, CheckpointError):
            return
        assert possible, "a checkpoint without a state at a block boundary"
        assert kept or not (room and stored), "there was room for a checkpoint"
        self.copies_taken = False
        if kept:
            self.check_snapshot(live)
        self.after()

    # -- drafts ----------------------------------------------------------------------------

    def draft(self, live, num_drafts, filler):
        """Reserve room for a line of drafts and compute them."""
        if not self.reserve(live, num_drafts):
            return
        self.take_copies()
        tokens = [filler[i % len(filler)] for i in range(num_drafts)]
        names = self.path_of(live, live.tokens + tokens)[len(live.tokens) :]
        for group in self.settings.attention:
            self.memory[group].write(live.seq.block_ids(group), len(live.tokens), names)
        live.drafts = Drafts(tokens, names)
        self.write_states(live, names[-1])
        self.after()

    def write_states(self, live, name):
        """The states of a sequence are those after a prefix of this name now."""
        for group in self.settings.recurrent:
            for block in live.seq.block_ids(group).tolist():
                self.memory[group].blocks[block] = [name]

    def accept(self, live, keep):
        """Commit the first `keep` drafts, and give back the room of the others."""
        drafts, seq, manager = live.drafts, live.seq, self.manager
        self.take_copies()
        accepted = drafts.tokens[:keep]
        live.tokens = live.tokens + accepted
        live.path = self.path_of(live, live.tokens)
        live.drafts = None
        if live.path:
            self.write_states(live, live.path[-1])
        self.call(manager.commit, seq, accepted)
        self.publish(live)
        self.copies_taken = not self.settings.recurrent
        self.after()
        self.truncate(live, seq.computed)
