"""A manager of several layer kinds beside the memory of each: what must hold after every call."""

from compare import Comparison, Settings
from hybrid_model import (
    AttentionMemory,
    StateMemory,
    is_needed,
    window_blocks,
)
from model import Identities, Published

from quire.core import CacheManager, LayerGroup, Scope, block_hashes


class HybridComparison(Comparison):
    """One manager with groups of any kind, its memories, and what must hold between them.

    After every call: `check()`; free + active + cached == num_blocks in each group; a table
    leaves out exactly what is behind its group's window; what a table names below `computed`
    holds the sequence's own prefix, a working state that of the whole of it; what windows and
    snapshots protect is bounded. Free blocks and everything beyond `computed` are poisoned.
    """

    def __init__(self, settings):
        self.now = 0.0
        super().__init__(Settings(pools=(4,)))
        self.settings = settings
        self.manager = CacheManager(
            groups=[LayerGroup(f"g{i}", n, kind) for i, (kind, n) in enumerate(settings.groups)],
            block_size=settings.block_size,
            policy=settings.policy,
            sub_block=settings.sub_block,
            events=settings.events,
            debug=settings.debug,
            clock=lambda: self.now,
            evictions=True,
        )
        self.names = Identities()
        self.memory = [
            (StateMemory if i in settings.recurrent else AttentionMemory)(n, settings.block_size)
            for i, (_, n) in enumerate(settings.groups)
        ]
        self.published = Published(settings.block_size)
        self.snapshots = [set() for _ in settings.groups]
        self.restores, self.holds = [], []

    @property
    def idle(self):
        """Running sequences without a draft."""
        return [live for live in self.running if live.drafts is None]

    @property
    def decoding(self):
        return [live for live in self.idle if len(live.tokens) >= len(live.known)]

    @property
    def drafting(self):
        return [live for live in self.running if live.drafts is not None]

    # -- what can be found -----------------------------------------------------------------

    def findable(self, scope, path):
        """Return how many tokens of a prefix were ever published: no hit is longer."""
        sub_block = self.settings.sub_block and not self.settings.recurrent
        return self.published.findable(self.names.root(scope), path, sub_block=sub_block)

    def accepted(self, scope, path):
        """Return the longest whole-block length that must be found while nothing was dropped."""
        size, root = self.settings.block_size, self.names.root(scope)
        whole = self.published.findable(root, path, sub_block=False)
        for length in range(whole, 0, -size):
            states = (self.snapshots[group] for group in self.settings.recurrent)
            if all(path[length - 1] in kept for kept in states):
                return length
        return 0

    # -- memory ----------------------------------------------------------------------------

    def check_evicted(self, evicted):
        """The bytes of what made room are in place, and are those that its digest names."""
        size = self.settings.block_size
        named = [(each.group, each.block) for each in evicted]
        assert len(set(named)) == len(named)
        for each in evicted:
            content = self.memory[each.group].blocks[each.block]
            assert None not in content, "a block without content made room"
            parts, tokens = self.names.tokens(content[-1])
            scope = Scope(*parts)
            assert len(tokens) % size == 0
            assert block_hashes(tokens, size, scope)[-1] == each.digest

    def take_copies(self):
        """Do what is planned, note new snapshots, then poison all that nobody may read."""
        copies = self.manager.take_copies()
        for group in self.groups:
            mine = [copy for copy in copies if copy.group == group]
            assert len({copy.dst for copy in mine}) == len(mine), "a block is written twice"
            self.memory[group].copy(mine)
        for group in self.settings.recurrent:
            working = {i for live in self.running for i in live.seq.block_ids(group).tolist()}
            for copy in copies:
                if copy.group == group and copy.dst not in working:
                    self.snapshots[group].add(self.memory[group].blocks[copy.dst][0])
        assert self.manager.take_copies() == []
        self.copies_taken = True
        for group, pool in enumerate(self.manager.pools):
            self.memory[group].shrink(pool.num_blocks)
        self.poison()
        return copies

    def poison(self):
        """Forget the content of free blocks, and of what is reserved beyond `computed`."""
        size = self.settings.block_size
        for group, state in enumerate(self.manager.snapshot()["groups"]):
            for start, length in state["free_runs"]:
                for block in range(start, start + length):
                    self.memory[group].poison(block)
        for group in self.settings.attention:
            filled = {}
            for live in self.running:
                for i, block in enumerate(live.seq.block_ids(group).tolist()):
                    used = size if live.drafts else min(size, max(0, len(live.tokens) - i * size))
                    filled[block] = max(used, filled.get(block, 0))
            for block, used in filled.items():
                if block >= 0:
                    self.memory[group].poison_from(block, used)

    def verify(self, live):
        """What the next token reads is there, and is the sequence's own."""
        size, num_tokens, seq = self.settings.block_size, len(live.tokens), live.seq
        for group in self.settings.attention:
            blocks = self.memory[group].blocks
            for i, block in enumerate(seq.block_ids(group).tolist()):
                own = live.path[i * size : (i + 1) * size]
                if block >= 0 and own:
                    found = blocks[block][: len(own)]
                    assert found == own, f"group {group}, block {i}: KV of another prefix"
        for group in self.settings.recurrent:
            path = live.path if live.drafts is None else live.drafts.names
            for block in seq.block_ids(group).tolist():
                if num_tokens:
                    (found,) = self.memory[group].blocks[block]
                    assert found == path[-1], f"group {group}: the state of another prefix"

    # -- after every call ------------------------------------------------------------------

    def after(self):
        manager, size = self.manager, self.settings.block_size
        manager.check()
        for pool in manager.pools:
            assert pool.num_free + pool.num_active + pool.num_cached == pool.num_blocks
        stats = manager.stats
        assert stats.hit_tokens + sum(stats.missed.values()) == stats.prompt_tokens
        for live in self.running:
            seq = live.seq
            assert 0 <= seq.published <= seq.computed <= seq.capacity
            if live.stopped:
                live.store_limit = min(live.store_limit, seq.published)
            if seq.computed <= live.store_limit:
                assert seq.published == seq.computed // size * size
            assert seq.computed == len(live.tokens)
            assert seq.prompt_len == len(live.prompt)
            assert seq.tokens.tolist() == live.tokens
            self.check_table(live)
        for group in self.groups:
            self.check_owners(group)
        self.check_holds()
        if self.copies_taken:
            self.poison()
            for live in self.running:
                self.verify(live)

    def check_table(self, live):
        """A table names what is in the window, the sinks and what is reserved; no more."""
        size, seq = self.settings.block_size, live.seq
        for group, kind in enumerate(self.settings.kinds):
            table = seq.block_ids(group).tolist()
            if group in self.settings.recurrent:
                assert len(table) <= 1
                assert table or seq.capacity == seq.computed, "room without a working state"
                continue
            assert len(table) == -(-seq.capacity // size)
            for i, block in enumerate(table):
                wanted = is_needed(kind, seq.computed, i, size)
                assert (block >= 0) == wanted, f"group {group}: entry {i} of {table}"

    def check_owners(self, group):
        """Reserved blocks have one owner; what is active is named by tables, or protected."""
        size, kind = self.settings.block_size, self.settings.kinds[group]
        tables = [live.seq.block_ids(group).tolist() for live in self.running]
        named = [block for table in tables for block in table if block >= 0]
        for live, table in zip(self.running, tables, strict=True):
            present = [block for block in table if block >= 0]
            assert len(set(present)) == len(present), "one block twice in a table"
            assert all(block < self.manager.pools[group].num_blocks for block in present)
            if group in self.settings.attention:
                for block in table[-(-len(live.tokens) // size) :]:
                    assert named.count(block) == 1, "a reserved block has two owners"
        given = {block for each in self.restores for block in each.restore.blocks[group]}
        assert given.isdisjoint(named), "blocks of a restore stand in a table"
        active, used = self.manager.pools[group].num_active, len(given.union(named))
        assert active >= used
        if group in self.settings.windowed or group in self.settings.recurrent:
            holders = len(self.running) + self.manager.snapshot()["num_pins"]
            # A sequence that publishes no more holds the window where it stopped, and its own.
            holders += sum(
                live.seq.published < len(live.tokens) // size * size for live in self.running
            )
            holders += 2 * len(self.restores) + len(self.holds)
            limit = used + holders * (window_blocks(kind, size) + 1)
            assert active <= limit, f"group {group} holds {active} blocks, {used} in tables"
        elif self.copies_taken and not (self.pins or self.expiring or self.restores or self.holds):
            assert active == used, "blocks are held by nobody"

    def check_tables(self, group, pad):
        """Batch tables are the tables of the sequences, with `pad` where these say -1."""
        lives = self.running
        got = self.manager.tables([live.seq for live in lives], group=group, pad=pad)
        for row, live in enumerate(lives):
            table = [block if block >= 0 else pad for block in live.seq.block_ids(group).tolist()]
            n = len(table)
            assert got.num_blocks[row] == n
            assert got.padded[row].tolist() == table + [pad] * (got.padded.shape[1] - n)
            assert got.indices[got.indptr[row] : got.indptr[row + 1]].tolist() == table
            assert got.lengths[row] == live.seq.capacity
