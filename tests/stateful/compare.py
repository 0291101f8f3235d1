"""A CacheManager beside a model of the memory of each of its groups: what must hold after every call."""

import numpy as np
from kinds import AttentionMemory, StateMemory, is_needed, window_blocks
from model import Identities, Published

from quire import ops
from quire.core import CacheManager, FullAttention, LayerGroup, Scope
from quire.core.blocks import BlockPool
from quire.exchange import block_hashes
from watching import take_evicted, watchers


def without(names, node):
    """Return a node of a snapshot, and those below it, without some of what its parts say."""
    parts = [{**part, **dict.fromkeys(names)} for part in node.get("parts", ())]
    below = [without(names, each) for each in node["children"]]
    return {**node, "parts": parts, "children": below}


class Comparison:
    """One manager with groups of any kind, its memories, and what must hold between them.

    After every call: `check()`; free + active + cached == num_blocks in each group; a table
    leaves out exactly what is behind its group's window; what a table names below `computed`
    holds the sequence's own prefix, a working state that of the whole of it; what windows and
    snapshots protect is bounded. Free blocks and everything beyond `computed` are poisoned.
    A call that raised changed nothing.
    """

    def __init__(self, settings):
        self.settings = settings
        self.now = 0.0
        self.manager = CacheManager(
            groups=[LayerGroup(f"g{i}", n, kind) for i, (kind, n) in enumerate(settings.groups)],
            block_size=settings.block_size,
            policy=settings.policy,
            sub_block=settings.sub_block,
            watchers=watchers(events=settings.events, evictions=True),
            pool=ops.CheckedPool if settings.debug else BlockPool,
            clock=lambda: self.now,
        )
        self.names = Identities()
        self.memory = [
            (StateMemory if i in settings.recurrent else AttentionMemory)(n, settings.block_size)
            for i, (_, n) in enumerate(settings.groups)
        ]
        self.published = Published(settings.block_size)
        self.snapshots = [set() for _ in settings.groups]
        self.intact = True  # nothing published has ever been dropped
        self.copies_taken = True
        self.live, self.closed, self.history = [], [], []
        self.pins, self.restores, self.holds = [], [], []
        self.admitted = [0, 0, 0]  # requests that had room, their tokens, and those that they found
        self.seen = None  # the snapshot of now, once somebody asked

    @property
    def pools(self):
        return self.manager.pools

    @property
    def groups(self):
        return range(len(self.memory))

    @property
    def running(self):
        return [live for live in self.live if not live.suspended]

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

    @property
    def expiring(self):
        """Whether a pin ran out that the manager has not noticed yet."""
        return self.state["num_pins"] > len(self.pins)

    @property
    def state(self):
        """The manager's whole state, taken once after each change."""
        if self.seen is None:
            self.seen = ops.snapshot(self.manager)
        return self.seen

    # -- calls -----------------------------------------------------------------------------

    def call(self, function, *args, may_raise=(), **kwargs):
        """Call; an allowed error is returned, after a check that it changed nothing."""
        before, dropped = self.state, self.dropped_blocks()
        self.seen = None
        try:
            result = function(*args, **kwargs)
        except may_raise as error:
            refused = error
        else:
            if self.dropped_blocks() != dropped:
                self.intact = False
            self.check_evicted(take_evicted(self.manager))
            return result
        assert self.state == before, f"{refused!r} changed the state"
        ops.check(self.manager)
        return refused

    def admit(self, live):
        """A call succeeded that a request needs room for: it counts, once."""
        if not live.admitted:
            live.admitted = True
            self.admitted = [
                count + more
                for count, more in zip(
                    self.admitted, (1, len(live.prompt), live.found), strict=True
                )
            ]

    def lasting(self):
        """The state but for scopes and media without cached blocks, and for needs, which a leaf that grew learns late.

        Nor, with sinks, for the order of parts: one that has nothing but sinks, which it keeps, may stand in it or not.
        """
        names = (
            ["need", "rank"]
            if any(getattr(kind, "sinks", 0) for kind in self.settings.kinds)
            else ["need"]
        )
        roots = [without(names, root) for root in self.state["roots"] if root["children"]]
        order = self.state["sparse_order"] if "rank" not in names else None
        return {**self.state, "roots": roots, "num_media": 0, "sparse_order": order}

    def must_raise(self, error_type, function, *args, **kwargs):
        error = self.call(function, *args, may_raise=error_type, **kwargs)
        assert isinstance(error, error_type), f"{function} raised nothing"
        return error

    def pure(self, function, *args, **kwargs):
        """Call what changes nothing."""
        before, self.seen = self.state, None
        result = function(*args, **kwargs)
        assert self.state == before, f"{function} changed the state"
        return result

    def dropped_blocks(self):
        stats = self.manager.stats
        return stats.evicted_blocks + stats.invalidated_blocks

    def free_blocks(self):
        return sum(group.num_free for group in self.pools)

    def check_exhausted(self, error):
        """An OutOfBlocks speaks of one group, and of blocks that this group cannot give."""
        short = [
            group
            for group in self.pools
            if (group.num_free, group.num_cached, group.num_active)
            == (error.free, error.cached, error.active)
        ]
        assert short, f"{error!r} describes no group"
        assert error.needed > error.free + error.cached, f"{error!r}: there was room"

    # -- what can be found -----------------------------------------------------------------

    def path_of(self, live, tokens):
        """Return the identities of all prefixes of tokens, in the scope and with the media of a sequence."""
        return self.names.path(live.scope, tokens, live.media)

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
            parts, tokens, media = self.names.prefix(content[-1])
            digests = block_hashes([*tokens, *[0] * size], size, Scope(*parts), media)
            assert digests[each.index] == each.digest

    def take_copies(self):
        """Do what is planned, note new snapshots, then poison all that nobody may read."""
        dropped = self.dropped_blocks()
        copies = self.manager.take_copies()
        assert self.dropped_blocks() == dropped, (
            "what is evicted is read before the copies are done"
        )
        self.seen = None
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
        for group, pool in enumerate(self.pools):
            self.memory[group].shrink(pool.num_blocks)
        self.poison()
        return copies

    def poison(self):
        """Forget the content of free blocks, and of what is reserved beyond `computed`."""
        size = self.settings.block_size
        for group, state in enumerate(self.state["groups"]):
            for start, length in state["free_runs"]:
                for block in range(start, start + length):
                    self.memory[group].poison(block)
        for group in self.settings.attention:
            filled = {}
            for live in self.running:
                if not live.admitted:
                    continue  # the block whose head it found may be the tree's
                for i, block in enumerate(live.seq.block_ids(group).tolist()):
                    used = size if live.drafts else min(size, max(0, len(live.tokens) - i * size))
                    filled[block] = max(used, filled.get(block, 0))
            for block, used in filled.items():
                if block >= 0:
                    self.memory[group].poison_from(block, used)

    def verify(self, live):
        """Check that the tokens that the next one reads are there, and are the sequence's own."""
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
        self.seen = None
        ops.check(manager)
        for pool in self.pools:
            assert pool.num_free + pool.num_active + pool.num_cached == pool.num_blocks
        stats = manager.stats
        assert stats.hit_tokens + sum(stats.missed.values()) == stats.prompt_tokens
        counted = [stats.num_requests, stats.prompt_tokens, stats.hit_tokens]
        assert counted == self.admitted, "a request counts once, when it has room"
        for live in self.running:
            seq = live.seq
            assert 0 <= seq.published <= seq.computed <= seq.capacity
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

    def check_holds(self):
        """Check that held blocks are where they were."""
        for hold in self.holds if self.copies_taken else ():
            for group, block, names in hold.contents:
                assert self.memory[group].blocks[block] == names, "a held block was moved"

    def check_pins(self):
        for pin, tokens, scope, media, _ in self.pins:
            hit = self.manager.probe([*tokens, 0], scope, media)
            assert hit.num_tokens >= pin.num_tokens, "a pinned prefix was lost"

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
            assert all(block < self.pools[group].num_blocks for block in present)
            if group in self.settings.attention:
                for block in table[-(-len(live.tokens) // size) :]:
                    assert named.count(block) == 1, "a reserved block has two owners"
        given = {block for each in self.restores for block in each.restore.blocks[group]}
        assert given.isdisjoint(named), "blocks of a restore stand in a table"
        active, used = self.pools[group].num_active, len(given.union(named))
        assert active >= used
        if not isinstance(kind, FullAttention):
            holders = len(self.running) + self.state["num_pins"]
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
        lives, size = self.running, self.settings.block_size
        got = self.manager.tables([live.seq for live in lives], group=group, pad=pad)
        for row, live in enumerate(lives):
            table = [block if block >= 0 else pad for block in live.seq.block_ids(group).tolist()]
            n = len(table)
            assert got.num_blocks[row] == n
            assert got.padded[row].tolist() == table + [pad] * (got.padded.shape[1] - n)
            assert got.indices[got.indptr[row] : got.indptr[row + 1]].tolist() == table
            assert got.lengths[row] == live.seq.capacity
            last = got.last_block_len[row]
            assert (1 <= last <= size and (got.lengths[row] - last) % size == 0) if n else last == 0
        counts = got.num_blocks[:, None]
        at = np.concatenate([counts - 1, counts // 2, counts * 0], axis=1)[got.num_blocks > 0]
        some = [live.seq for live, count in zip(lives, got.num_blocks, strict=True) if count]
        kind = ("i4", "i8", "u2", "u8")[int(counts.sum()) % 4]
        single = ops.blocks_at(self.manager, some, at.astype(kind), group)
        assert single.dtype == np.int32
        expected = [seq.block_ids(group)[each].tolist() for seq, each in zip(some, at, strict=True)]
        assert single.tolist() == expected
