"""Every operation of a CacheManager, done on the manager and on the model beside it."""

import numpy as np
from compare import Comparison
from model import Live

from quire.core.hints import NO_HINT
from quire.errors import (
    CommitError,
    OutOfBlocks,
    PinBudgetExceeded,
    PinError,
    SequenceError,
    TokensError,
    TruncateError,
)


class World(Comparison):
    """Each operation, with what it must return, raise and leave behind."""

    # -- operations ------------------------------------------------------------------------

    def open(self, tokens, scope=None, media=(), priority=0, retain_s=None, *, hint=NO_HINT):
        tokens, manager, size = list(tokens), self.manager, self.settings.block_size
        path = self.names.path(scope, tokens, media)
        hit = self.pure(manager.probe, tokens, scope, media)
        self.pure(manager.explain, tokens, scope, media)
        fit = self.pure(manager.fits, tokens, None, scope, media=media)
        limit = self.findable(scope, path[:-1])
        assert hit.num_tokens <= limit <= len(tokens) - 1, "found what was never published"
        if self.intact:
            room = all(group.num_free for group in manager.pools)  # a copy needs a block
            least = limit if room else limit // size * size
            assert hit.num_tokens >= least, "lost a published prefix without any eviction"
        assert hit.num_tokens == hit.num_blocks * size + hit.partial_tokens
        seq = self.call(
            manager.open,
            np.array(tokens, dtype=np.int32),
            scope,
            media=media,
            priority=priority,
            retain_s=retain_s,
            hint=hint,
            may_raise=OutOfBlocks,
        )
        if isinstance(seq, OutOfBlocks):
            assert -(-len(tokens) // size) > min(self.settings.pools), "the prompt would have fit"
            assert not fit
            return None
        assert seq.num_cached == fit.num_cached
        assert bool(fit) == bool(self.pure(manager.fits, seq)), "the rest of the prompt"
        assert seq.num_cached == seq.computed == hit.num_tokens, "open found other than probe"
        assert seq.prompt_len == len(tokens)
        n = seq.computed
        live = Live(seq, scope, media, tokens, tokens, tokens[:n], path[:n])
        self.live.append(live)
        self.history.append((tokens, scope, media))
        self.copies_taken = False
        self.after()
        return live

    def end_session(self, name, scope):
        assert (
            0
            <= self.call(self.manager.end_session, name, scope)
            <= self.manager.num_cached + self.manager.num_active
        )
        assert not self.call(self.manager.end_session, name, scope), "a session ends once"
        self.after()

    def findable(self, scope, path):
        root = self.names.root(scope)
        return self.published.findable(root, path, sub_block=self.settings.sub_block)

    def reserve(self, live, num_tokens):
        seq = live.seq
        wanted = max(seq.capacity, seq.computed + num_tokens)
        fit = self.pure(self.manager.fits, seq, num_tokens)
        error = self.call(self.manager.reserve, seq, num_tokens, may_raise=OutOfBlocks)
        assert bool(fit) == (error is None)
        if isinstance(error, OutOfBlocks):
            self.check_exhausted(error)
            blocks = -(-wanted // self.settings.block_size) - len(seq.block_ids())
            assert error.needed <= blocks + 1, "asked for more than the request needs"
            return False
        assert seq.capacity == wanted
        self.copies_taken = False
        self.after()
        return True

    def forward(self, lives, ids):
        """Write the KV of `ids` the way a model would: copies first, through the own table."""
        self.take_copies()
        for live, new in zip(lives, ids, strict=True):
            start = len(live.tokens)
            live.tokens += new
            live.path = self.names.path(live.scope, live.tokens, live.media)
            for group in self.groups:
                table = live.seq.block_ids(group)
                self.memory[group].write(table, start, live.path[start:])
        for live in self.running:
            self.verify(live, len(live.tokens))

    def publish(self, live):
        root = self.names.root(live.scope)
        self.published.add(root, live.path)

    def commit(self, live, num_tokens, filler):
        seq = live.seq
        num_tokens = min(num_tokens, seq.capacity - seq.computed)
        ids = live.next_tokens(num_tokens, filler)
        self.forward([live], [ids])
        self.call(self.manager.commit, seq, ids)
        self.publish(live)
        self.after()

    def decode(self, batch, lives, filler):
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
        self.after()

    def fork(self, live):
        room = live.seq.capacity - live.seq.computed
        seq = self.call(self.manager.fork, live.seq, may_raise=OutOfBlocks)
        if isinstance(seq, OutOfBlocks):
            assert room, "a fork of a sequence without reserved room costs no block"
            self.check_exhausted(seq)
            return
        assert seq.computed == live.seq.computed
        self.copies_taken = self.copies_taken and not room
        twin = Live(
            seq, live.scope, live.media, live.prompt, live.known, live.tokens[:], live.path[:]
        )
        self.live.append(twin)
        self.after()

    def truncate(self, live, num_tokens):
        size, seq = self.settings.block_size, live.seq
        cut = num_tokens < seq.published
        inside = cut and num_tokens % size != 0
        allowed = TruncateError if inside else ()
        error = self.call(self.manager.truncate, seq, num_tokens, may_raise=allowed)
        if isinstance(error, TruncateError):
            return
        assert (seq.computed, seq.capacity) == (num_tokens, num_tokens)
        self.intact = self.intact and not cut
        if inside:
            root = self.names.root(live.scope)
            self.published.remove_below(root, live.path, num_tokens // size * size)
        live.cut(num_tokens)
        self.after()

    def suspend(self, live):
        self.call(self.manager.suspend, live.seq)
        assert live.seq.state == "suspended"
        live.known = live.tokens + live.known[len(live.tokens) :]
        live.suspended = True
        self.after()

    def resume(self, live):
        path = self.names.path(live.scope, live.known, live.media)
        findable = self.findable(live.scope, path)
        missing = self.call(self.manager.resume, live.seq, may_raise=OutOfBlocks)
        if isinstance(missing, OutOfBlocks):
            self.check_exhausted(missing)
            return
        found = live.seq.computed
        assert missing == max(0, len(live.tokens) - found)
        assert found <= findable, "resumed onto what was never published"
        if self.intact:
            size = self.settings.block_size
            least = min(findable, len(live.known) - 1) // size * size
            assert found >= least, "resume lost published blocks without any eviction"
        live.suspended = False
        live.tokens, live.path = live.known[:found], path[:found]
        self.copies_taken = False
        self.after()

    def close(self, live):
        self.call(self.manager.close, live.seq)
        self.live.remove(live)
        self.closed = [*self.closed[-3:], live]
        self.after()

    def pin(self, tokens, scope, media, ttl_s):
        path = self.names.path(scope, tokens, media)
        root = self.names.root(scope)
        limit = self.published.findable(root, path, sub_block=False)
        pin = self.call(
            self.manager.pin, tokens, scope, media=media, ttl_s=ttl_s, may_raise=PinBudgetExceeded
        )
        if isinstance(pin, PinBudgetExceeded):
            return
        assert pin.num_tokens == limit if self.intact else pin.num_tokens <= limit
        until = float("inf") if ttl_s is None else self.now + ttl_s
        self.pins.append((pin, tokens, scope, media, until))
        self.after()

    def unpin(self, index):
        pin, *_ = self.pins.pop(index)
        self.call(pin.close)
        self.must_raise(PinError, pin.close)
        self.after()

    def wait(self, seconds):
        self.now += seconds
        self.pins = [pin for pin in self.pins if pin[-1] > self.now]
        self.check_pins()
        self.after()

    def drop(self, function, *args):
        """evict, reclaim or clear: what is freed is what is reported."""
        before = self.free_blocks()
        freed = self.call(function, *args)
        assert self.free_blocks() - before == freed * len(self.memory)
        self.intact = self.intact and freed == 0
        self.after()

    def misuse(self, live, foreign):
        """Operations that must fail, whatever the state is, and change nothing."""
        manager, seq = self.manager, live.seq
        self.must_raise(TokensError, manager.open, [])
        self.must_raise(SequenceError, manager.commit, foreign, [1])
        for dead in self.closed:
            for function in (manager.close, manager.fork, manager.suspend, manager.resume):
                self.must_raise(SequenceError, function, dead.seq)
            self.must_raise(SequenceError, manager.reserve_step, [dead.seq])
        if live.suspended:
            self.must_raise(SequenceError, manager.reserve, seq, 1)
            self.must_raise(SequenceError, manager.commit, seq, [1])
            return
        self.must_raise(SequenceError, manager.resume, seq)
        self.must_raise(TruncateError, manager.truncate, seq, seq.computed + 1)
        self.must_raise(TruncateError, manager.truncate, seq, -1)
        tokens = max(self.settings.pools) * self.settings.block_size + 1
        self.must_raise(OutOfBlocks, manager.reserve, seq, tokens)
        if not self.copies_taken:
            return
        room = seq.capacity - seq.computed
        self.must_raise(CommitError, manager.commit, seq, live.next_tokens(room + 1, [0]))
        if room and len(live.tokens) < len(live.known):
            wrong = live.known[len(live.tokens)] + 1
            self.must_raise(CommitError, manager.commit, seq, [wrong])

    def finish(self):
        """Close all; what is still found reads right; then nothing may be held."""
        self.take_copies()
        for live in list(self.live):
            self.close(live)
        while self.pins:
            self.unpin(0)
        for tokens, scope, media in {repr(item): item for item in self.history}.values():
            live = self.open([*tokens, 0], scope, media)
            if live is not None:
                self.take_copies()
                self.after()
                self.close(live)
        self.manager.clear()
        self.manager.check()
        assert self.free_blocks() == sum(self.settings.pools), "blocks leaked"
