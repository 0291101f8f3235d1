"""Every operation of a CacheManager with layers of any kind, beside the model of its memory."""

from functools import partial

from handles import Handles
from kinds import window_start

from quire import groups, ops
from quire.core import Scope
from quire.errors import (
    CommitError,
    ConfigError,
    OutOfBlocks,
    PinBudgetExceeded,
    PinError,
    SequenceError,
    TokensError,
    TruncateError,
)
from quire.ops.purging import num_held, purge


class CheckedManager(Handles):
    """Each operation, with what it must return, raise and leave behind."""

    def try_to_fit(self, tokens, scope, media, num_new):
        """Ask whether a prompt and some room fit, then open it and reserve them: it says what happens."""
        fit = self.pure(ops.fits, self.manager, tokens, num_new, scope, media=media)
        live = self.open(tokens, scope, media)
        if live is None:
            assert not fit
            return
        assert fit.num_cached == live.seq.computed
        wanted = num_new or len(tokens) - fit.num_cached
        assert self.reserve(live, wanted) == bool(fit), f"{fit} was said"
        self.take_copies()
        self.after()
        self.close(live)

    # -- forks, rollback, preemption -------------------------------------------------------

    def fork(self, live):
        """Fork; without reserved room it costs no block, but for the copy of a shared head."""
        room = live.seq.capacity - live.seq.computed
        room = room or (not live.admitted and live.seq.computed % self.settings.block_size)
        seq = self.call(self.manager.fork, live.seq, may_raise=OutOfBlocks)
        if isinstance(seq, OutOfBlocks):
            assert room, "a fork of a sequence without reserved room costs no block"
            self.check_exhausted(seq)
            return
        assert seq.computed == live.seq.computed
        self.admit(live)
        self.copies_taken = self.copies_taken and not room
        self.live.append(live.twin(seq))
        self.after()

    def truncate(self, live, num_tokens):
        """Cut; whether it must work, must fail or may do either is computed beforehand."""
        seq = live.seq
        verdict = self.may_truncate(live, num_tokens)
        published = seq.published
        allowed = () if verdict else (TruncateError, OutOfBlocks)
        error = self.call(ops.truncate, self.manager, seq, num_tokens, may_raise=allowed)
        if isinstance(error, (TruncateError, OutOfBlocks)):
            return
        assert verdict is not False, "cut to where there is no state"
        assert (seq.computed, seq.capacity) == (num_tokens, num_tokens)
        if num_tokens < published and live.admitted:
            self.intact = False
            if num_tokens % self.settings.block_size:
                start = num_tokens // self.settings.block_size * self.settings.block_size
                root = self.names.root(live.scope)
                self.published.remove_below(root, live.path, start)
        drafts, live.drafts = live.drafts, None
        live.cut(num_tokens)
        if drafts is not None and live.path:
            self.write_states(live, live.path[-1])
        self.copies_taken = self.copies_taken and not self.settings.recurrent
        self.after()

    def may_truncate(self, live, num_tokens):
        """True: it must work. False: it must not. None: either."""
        seq, size = live.seq, self.settings.block_size
        if num_tokens == seq.computed:
            return True
        aligned = num_tokens % size == 0
        if self.settings.recurrent:
            if num_tokens == 0:
                return None
            kept = [self.snapshots[group] for group in self.settings.recurrent]
            if not aligned:
                return False
            if self.copies_taken and not all(live.path[num_tokens - 1] in k for k in kept):
                return False
        stored = seq.computed <= live.store_limit
        if num_tokens < seq.published and not aligned:
            return None
        if self.intact and stored and (aligned or not self.settings.windowed):
            return True if self.copies_taken or not self.settings.recurrent else None
        if self.settings.recurrent:
            return None
        if num_tokens >= seq.published and stored:
            return True
        return True if self.window_is_there(live, num_tokens) else None

    def window_is_there(self, live, num_tokens):
        """Whether the table still names every block that a length needs."""
        size = self.settings.block_size
        for group in self.settings.windowed:
            kind = self.settings.kinds[group]
            table = live.seq.block_ids(group).tolist()
            first = window_start(kind, num_tokens) // size
            if any(block < 0 for block in table[first : -(-num_tokens // size)]):
                return False
        return True

    def suspend(self, live):
        """Preempt."""
        self.call(self.manager.suspend, live.seq)
        assert live.seq.state == "suspended"
        live.known = live.tokens + live.known[len(live.tokens) :]
        live.suspended, live.drafts = True, None
        self.after()

    def resume(self, live, num_new):
        """Resume on what is left of it, with room for some more tokens if they fit."""
        path = self.path_of(live, live.known)
        fit = self.pure(ops.fits, self.manager, live.seq, num_new)
        missing = self.call(self.manager.resume, live.seq, may_raise=OutOfBlocks)
        if isinstance(missing, OutOfBlocks):
            self.check_exhausted(missing)
            return
        found = live.seq.computed
        assert missing == max(0, len(live.tokens) - found)
        assert found <= self.findable(live.scope, path), "resumed onto what was never published"
        if self.intact:
            least = self.accepted(live.scope, path[:-1])
            assert found >= least, "resume lost published blocks without any eviction"
        live.suspended = False
        live.tokens, live.path = live.known[:found], path[:found]
        live.found = live.found if live.admitted else found
        self.copies_taken = False
        self.after()
        wanted = num_new or len(live.known) - found
        if wanted:
            assert fit.num_cached == found
            assert self.reserve(live, wanted) == bool(fit), f"{fit} was said"

    def close(self, live):
        """Close."""
        self.call(self.manager.close, live.seq)
        self.live.remove(live)
        self.closed = [*self.closed[-3:], live]
        self.after()

    # -- pins, eviction, memory ------------------------------------------------------------

    def end_session(self, name, scope):
        """End a session; a second time it is not known."""
        num_blocks = self.call(self.manager.end_session, name, scope)
        assert num_blocks >= 0
        if self.settings.is_full:
            assert num_blocks <= self.manager.num_cached + self.manager.num_active
        assert not self.call(self.manager.end_session, name, scope), "a session ends once"
        self.after()

    def pin(self, tokens, scope, media, ttl_s):
        """Pin what is cached of a prefix."""
        path = self.names.path(scope, tokens, media)
        limit = self.published.findable(self.names.root(scope), path, sub_block=False)
        options = {"media": media, "ttl_s": ttl_s}
        pin = self.call(
            ops.pin, self.manager, tokens, scope, **options, may_raise=PinBudgetExceeded
        )
        if isinstance(pin, PinBudgetExceeded):
            return
        assert pin.num_tokens <= limit
        if self.intact:
            assert pin.num_tokens >= self.accepted(scope, path)
        until = float("inf") if ttl_s is None else self.now + ttl_s
        self.pins.append((pin, tokens, scope, media, until))
        self.after()

    def unpin(self, index):
        """Close a pin; twice is refused."""
        pin, *_ = self.pins.pop(index)
        self.call(pin.close)
        self.must_raise(PinError, pin.close)
        self.after()

    def wait(self, seconds):
        """Let time pass."""
        self.now += seconds
        self.pins = [pin for pin in self.pins if pin[-1] > self.now]
        self.check_pins()
        self.after()

    def drop(self, function, *args, **options):
        """evict, reclaim or clear."""
        before = self.free_blocks()
        freed = self.call(function, *args, **options)
        assert freed >= 0
        assert self.free_blocks() >= before
        if self.settings.is_full:
            assert self.free_blocks() - before == freed * len(self.memory)
        self.intact = self.intact and self.free_blocks() == before
        self.after()

    def purge(self, scope):
        """Drop all of a scope, and its pins; what others reference stays until they leave."""

        def is_own(other):
            return other == (scope or Scope())

        own = [each for each in self.pins if each[2] == scope and each[0].num_tokens]
        num_pins = self.call(purge, self.manager, is_own)
        assert not any(pin.is_held for pin, *_ in own)
        self.pins = [each for each in self.pins if each[0].is_held]
        assert num_pins >= len(own), "a pin of nothing may go as well"
        self.intact = False
        self.after()
        if not (self.restores or self.holds or any(live.scope == scope for live in self.live)):
            assert not num_held(self.manager, is_own), "a purge left what nobody references"

    def resize(self, sizes):
        """Give groups other sizes, by group index; memory grows before and shrinks after."""
        manager = self.manager
        if not self.copies_taken:
            self.take_copies()
        shrinks = any(n < self.pools[i].num_blocks for i, n in sizes.items())
        named = {f"g{group}": num_blocks for group, num_blocks in sizes.items()}
        if shrinks and self.refused_for_handles(ops.resize, manager, named):
            return
        possible = all(self.pools[i].num_active <= n for i, n in sizes.items())
        for group, num_blocks in sizes.items():
            self.memory[group].grow(num_blocks)
        expiring = self.expiring
        allowed = PinBudgetExceeded if possible else OutOfBlocks
        error = self.call(ops.resize, manager, named, may_raise=allowed)
        if not isinstance(error, OutOfBlocks):
            assert possible or expiring, "a pool shrank below what is active"
            for group, num_blocks in sizes.items():
                assert self.pools[group].num_blocks == num_blocks
        self.copies_taken = False
        self.after()
        self.take_copies()
        self.after()

    # -- misuse ----------------------------------------------------------------------------

    def misuse(self, live, foreign):
        """Calls that must fail, whatever the state is, and change nothing."""
        manager, seq = self.manager, live.seq
        raises = self.must_raise
        raises(TokensError, manager.open, [])
        raises(ConfigError, ops.resize, manager, {"g0": 0})
        raises(ConfigError, ops.resize, manager, {"other": 4})
        dead = [foreign, *[old.seq for old in self.closed]]
        dead += [seq] if live.suspended else []
        calls = (
            (partial(groups.checkpoint, manager),),
            (partial(groups.stops, manager),),
            (manager.reserve, 1),
            (manager.commit, [1]),
            (partial(ops.truncate, manager), 0),
        )
        for gone in dead:
            for function, *args in calls:
                raises(SequenceError, function, gone, *args)
            raises(SequenceError, manager.reserve_step, [gone])
        for gone in dead[: len(dead) - live.suspended]:
            for function in (manager.close, manager.fork, manager.suspend, manager.resume):
                raises(SequenceError, function, gone)
        if live.suspended:
            return
        raises(SequenceError, manager.resume, seq)
        raises(TruncateError, ops.truncate, manager, seq, seq.computed + 1)
        raises(TruncateError, ops.truncate, manager, seq, -1)
        tokens = min(pool.num_blocks for pool in self.pools) * self.settings.block_size + 1
        if self.settings.attention == tuple(self.groups) and live.drafts is None:
            raises(OutOfBlocks, manager.reserve, seq, tokens)
        if self.copies_taken and live.drafts is None:
            room = seq.capacity - seq.computed
            raises(CommitError, manager.commit, seq, live.next_tokens(room + 1, [0]))
            if room and len(live.tokens) < len(live.known):
                raises(CommitError, manager.commit, seq, [live.known[len(live.tokens)] + 1])

    def finish(self):
        """Close all; what is still found reads right; then nothing may be held."""
        self.take_copies()
        for number, handle in enumerate(list(self.restores)):
            self.end_restore(handle, commit=number % 2 == 0)
        for hold in list(self.holds):
            self.let_go(hold)
        for live in list(self.live):
            self.close(live)
        while self.pins:
            self.unpin(0)
        for tokens, scope, media in {repr(item): item for item in self.history}.values():
            live = self.open([*tokens, 0], scope, media)
            if live is not None:
                if self.reserve(live, 1):
                    self.take_copies()
                    self.after()
                self.close(live)
        ops.clear(self.manager)
        ops.check(self.manager)
        assert [pool.num_free for pool in self.pools] == [pool.num_blocks for pool in self.pools], (
            "blocks leaked"
        )
