"""A CacheManager beside a model of its memory, and all that is compared between them."""

from dataclasses import dataclass

import msgspec
from model import Identities, Memory, Published

from quire.core import CacheManager, LayerGroup


@dataclass(frozen=True)
class Settings:
    """One configuration of the manager under test."""

    policy: str = "lru"
    block_size: int = 3
    pools: tuple[int, ...] = (10,)
    sub_block: bool = True
    events: bool = False
    debug: bool = False


def state_of(manager):
    """Return the whole state as comparable bytes and text."""
    return msgspec.msgpack.encode(manager.snapshot()), manager.dump()


class Comparison:
    """One manager, its model, and what must hold between them.

    Checked after every operation: `check()`; free + active + cached == total in each group;
    published <= computed <= capacity; every table reads back its own prefix; no reserved block
    has two owners; an operation that raised changed nothing.
    """

    def __init__(self, settings):
        self.settings = settings
        self.now = 0.0
        pools = settings.pools
        where = (
            {"num_blocks": pools[0]}
            if len(pools) == 1
            else {"groups": [LayerGroup(f"g{i}", n) for i, n in enumerate(pools)]}
        )
        self.manager = CacheManager(
            block_size=settings.block_size,
            policy=settings.policy,
            sub_block=settings.sub_block,
            events=settings.events,
            debug=settings.debug,
            clock=lambda: self.now,
            **where,
        )
        self.names = Identities()
        self.memory = [Memory(n, settings.block_size) for n in pools]
        self.published = Published(settings.block_size)
        self.intact = True  # nothing published has ever been dropped
        self.copies_taken = True
        self.live = []
        self.closed = []
        self.pins = []
        self.history = []

    # -- helpers ---------------------------------------------------------------------------

    @property
    def running(self):
        return [live for live in self.live if not live.suspended]

    @property
    def decoding(self):
        return [live for live in self.running if len(live.tokens) >= len(live.known)]

    @property
    def groups(self):
        return range(len(self.memory))

    def call(self, function, *args, may_raise=(), **kwargs):
        """Call; an allowed error is returned, after a check that it changed nothing."""
        before = state_of(self.manager)
        dropped, expiring = self.dropped_blocks(), self.expiring
        raised = None
        try:
            result = function(*args, **kwargs)
        except may_raise as error:
            raised = error
        if raised:
            assert expiring or state_of(self.manager) == before, f"{raised!r} changed the state"
            self.manager.check()
            return raised
        if self.dropped_blocks() != dropped:
            self.intact = False
        self.check_evicted(self.manager.take_evicted())
        return result

    def check_evicted(self, evicted):
        """What made room is still there under its name: tests of these settings override it."""
        assert evicted == []

    def must_raise(self, error_type, function, *args, **kwargs):
        error = self.call(function, *args, may_raise=error_type, **kwargs)
        assert isinstance(error, error_type), f"{function} raised nothing"
        return error

    def pure(self, function, *args, **kwargs):
        before = state_of(self.manager)
        result = function(*args, **kwargs)
        assert state_of(self.manager) == before, f"{function} changed the state"
        return result

    @property
    def expiring(self):
        """Whether a pin ran out that the manager has not noticed yet."""
        return self.manager.snapshot()["num_pins"] > len(self.pins)

    def dropped_blocks(self):
        stats = self.manager.stats
        return stats.evicted_blocks + stats.invalidated_blocks

    def free_blocks(self):
        return sum(group.num_free for group in self.manager.pools)

    def check_exhausted(self, error):
        """An OutOfBlocks speaks of one group, and of blocks that this group cannot give."""
        short = [
            group
            for group in self.manager.pools
            if (group.num_free, group.num_cached, group.num_active)
            == (error.free, error.cached, error.active)
        ]
        assert short, f"{error!r} describes no group"
        assert error.needed > error.free + error.cached, f"{error!r}: there was room"

    # -- comparison ------------------------------------------------------------------------

    def take_copies(self):
        copies = self.manager.take_copies()
        for group in self.groups:
            mine = [copy for copy in copies if copy.group == group]
            assert len({copy.dst for copy in mine}) == len(mine), "a block is written twice"
            self.memory[group].copy(mine)
            for live in self.running:
                beyond = -(-len(live.tokens) // self.settings.block_size)
                for block in live.seq.block_ids(group)[beyond:]:
                    self.memory[group].poison(block)
        assert self.manager.take_copies() == []
        self.copies_taken = True

    def verify(self, live, num_tokens):
        for group in self.groups:
            found = self.memory[group].read(live.seq.block_ids(group), num_tokens)
            assert found == live.path[:num_tokens], f"group {group}: KV of another prefix"

    def after(self):
        manager, size = self.manager, self.settings.block_size
        manager.check()
        for group, total in zip(manager.pools, self.settings.pools, strict=True):
            assert group.num_free + group.num_active + group.num_cached == total
        assert manager.num_free + manager.num_active + manager.num_cached == self.settings.pools[0]
        stats = manager.stats
        assert stats.hit_tokens + sum(stats.missed.values()) == stats.prompt_tokens
        for live in self.running:
            seq = live.seq
            assert 0 <= seq.published <= seq.computed <= seq.capacity
            assert seq.published == seq.computed // size * size
            assert seq.computed == len(live.tokens)
            assert seq.prompt_len == len(live.prompt)
            if not live.media:
                assert seq.tokens.tolist() == live.tokens
            for group in self.groups:
                assert len(seq.block_ids(group)) == -(-seq.capacity // size)
        for group in self.groups:
            self.check_owners(group)
        if self.copies_taken:
            for live in self.running:
                self.verify(live, len(live.tokens))

    def check_owners(self, group):
        """Reserved blocks have one owner; what is held is what tables and pins name."""
        size = self.settings.block_size
        tables = [live.seq.block_ids(group).tolist() for live in self.running]
        used = [block for table in tables for block in table]
        for live, table in zip(self.running, tables, strict=True):
            assert len(set(table)) == len(table), "one block twice in a table"
            for block in table[-(-len(live.tokens) // size) :]:
                assert used.count(block) == 1, "a reserved block has two owners"
        active = self.manager.pools[group].num_active
        assert active >= len(set(used))
        if self.copies_taken and not self.pins and not self.expiring:
            assert active == len(set(used)), "blocks are held by nobody"

    def check_pins(self):
        for pin, tokens, scope, media, _ in self.pins:
            hit = self.manager.probe([*tokens, 0], scope, media)
            assert hit.num_tokens >= pin.num_tokens, "a pinned prefix was lost"

    def check_tables(self, group, pad):
        lives = self.running
        got = self.manager.tables([live.seq for live in lives], group=group, pad=pad)
        for row, live in enumerate(lives):
            table = live.seq.block_ids(group).tolist()
            n = len(table)
            assert got.num_blocks[row] == n
            assert got.padded[row].tolist() == table + [pad] * (got.padded.shape[1] - n)
            assert got.indices[got.indptr[row] : got.indptr[row + 1]].tolist() == table
            assert got.lengths[row] == live.seq.capacity
