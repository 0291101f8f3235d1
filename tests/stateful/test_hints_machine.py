"""Random requests with hints against a small model of who is expected back, under three policies.

One property: as long as an evictable block is foreseen to be used no more, no other goes.
"""

import os
import sys

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule
from running import run_machine

from quire import ops
from quire.core import CacheManager, Hint, Scope
from quire.errors import OutOfBlocks, PinBudgetExceeded

SEED = int(os.environ.get("QUIRE_SEED", "20260101"))
EXAMPLES = int(os.environ.get("QUIRE_EXAMPLES", "50"))

BLOCK = 2
SPENT = -1

SCOPES = (Scope(), Scope(salt="x"))
scopes = st.sampled_from([0, 0, 1])
paths = st.builds(
    lambda scope, blocks: tuple((scope, block) for block in blocks),
    scopes,
    st.lists(st.integers(0, 2), min_size=1, max_size=5),
)
names = st.sampled_from("ab")
seconds = st.integers(1, 9)
hints = st.one_of(
    st.just(Hint()),
    st.just(Hint("never")),
    st.builds(lambda ttl: Hint(ttl_s=ttl), seconds),
    st.builds(lambda name: Hint("session", session_id=name), names),
    st.builds(lambda name, ttl: Hint("session", ttl_s=ttl, session_id=name), names, seconds),
)


class Block:
    """One resident block: from when on nobody comes back (0: unknown), until when it is retained."""

    def __init__(self, outlook, owner):
        self.outlook = outlook
        self.owner = owner
        self.keep = 0


class HintsMachine(RuleBasedStateMachine):
    """Requests are served at once, or are plain and stay open; a block is known by its path.

    A path is of one scope: pairs of it and a block. Both scopes have the same tokens and names of sessions.
    """

    @initialize(
        policy=st.sampled_from(["lru", "lfu", "learned"]),
        num_blocks=st.sampled_from([5, 9, 14]),
        sub_block=st.booleans(),
    )
    def start(self, policy, num_blocks, sub_block):
        self.now = 100
        self.manager = CacheManager(
            num_blocks=num_blocks,
            block_size=BLOCK,
            policy=policy,
            sub_block=sub_block,
            pin_budget=1.0,
            clock=lambda: self.now,
        )
        self.blocks = {}
        self.begun = {}
        self.num_requests = 0
        self.held = []
        self.pins = []

    # -- the model -------------------------------------------------------------------------

    def prompt(self, path):
        return [token for _, token in path for _ in range(BLOCK)] + [9]

    def scope(self, path):
        return SCOPES[path[0][0]]

    def is_resident(self, path):
        return self.manager.probe(self.prompt(path), self.scope(path)).num_blocks == len(path)

    def heads(self, path, start=0):
        return [path[:end] for end in range(start + 1, len(path) + 1)]

    def foreseen(self, path):
        block = self.blocks[path]
        return block.keep <= self.now and block.outlook != 0 and block.outlook <= self.now

    def after(self, *in_use):
        """Forget what was evicted; nothing foreseen may have outlived something that was not."""
        self.manager.take_copies()
        ops.check(self.manager)
        gone = [path for path in self.blocks if not self.is_resident(path)]
        locked = {
            head
            for path in [*in_use, *self.held_paths(), *self.pinned()]
            for head in self.heads(path)
        }
        if not all(map(self.foreseen, gone)):
            left = [
                path
                for path in self.blocks
                if path not in locked and path not in gone and self.foreseen(path)
            ]
            assert not left, f"{gone} went before {left}"
        for path in gone:
            assert path not in locked, "a block in use was evicted"
            del self.blocks[path]

    def held_paths(self):
        return [path for _, path in self.held]

    def pinned(self):
        return [path for _, path in self.pins]

    def use(self, path, owner, hint, retain=0):
        """A request that was in use of this path ends now, having stored what was not there."""
        ttl = self.now + hint.ttl_s if hint.ttl_s else 0
        for head in self.heads(path):
            block = self.blocks.get(head)
            if block is None:
                outlook = SPENT if hint.reuse == "never" else ttl
                block = self.blocks[head] = Block(outlook, owner)
            elif block.outlook:
                block.outlook = max(block.outlook, ttl) if ttl else 0
            if block.owner != owner:
                block.owner = None
            if retain:
                block.keep = max(block.keep, self.now + retain)

    def compute(self, path, hint, **options):
        """Open a request and compute it, if there is room; return it and the path that it uses."""
        seq = self.manager.open(self.prompt(path), self.scope(path), hint=hint, **options)
        whole = seq.num_cached // BLOCK
        found = path[:whole]
        assert found == () or found in self.blocks
        rest = self.prompt(path)[seq.num_cached :]
        try:
            self.manager.reserve(seq, len(rest))
        except OutOfBlocks:
            self.after(found)
            return seq, found
        self.after(found)
        self.manager.commit(seq, rest)
        return seq, path

    # -- operations ------------------------------------------------------------------------

    @rule(path=paths, hint=hints, priority=st.sampled_from([0, 0, 5]), retain=st.none() | seconds)
    def serve(self, path, hint, priority, retain):
        if len(path) >= self.manager.pools[0].num_blocks:
            return
        owner = None
        self.num_requests += 1
        if hint.session_id:
            name = (self.scope(path), hint.session_id)
            owner = (name, self.begun.setdefault(name, self.num_requests))
        seq, path = self.compute(path, hint, priority=priority, retain_s=retain)
        self.manager.close(seq)
        self.use(path, owner, hint, retain or 0)
        self.after()

    @rule(path=paths)
    def hold(self, path):
        if len(path) >= self.manager.pools[0].num_blocks:
            return
        seq, path = self.compute(path, Hint())
        self.held.append((seq, path))
        self.use(path, None, Hint())
        self.after()

    @rule(choice=st.integers(0, 7))
    def let_go(self, choice):
        if self.held:
            seq, _ = self.held.pop(choice % len(self.held))
            self.manager.close(seq)
            self.after()

    @rule(path=paths)
    def pin(self, path):
        scope = self.scope(path)
        length = self.manager.probe(self.prompt(path), scope).num_blocks
        try:
            pin = self.manager.pin(self.prompt(path[:length]), scope)
        except PinBudgetExceeded:
            return
        self.pins.append((pin, path[:length]))
        self.after()

    @rule(choice=st.integers(0, 7))
    def unpin(self, choice):
        if self.pins:
            pin, _ = self.pins.pop(choice % len(self.pins))
            pin.close()
            self.after()

    @rule(scope=scopes, session_id=names)
    def end_session(self, scope, session_id):
        name = (SCOPES[scope], session_id)
        owner = (name, self.begun.pop(name, None))
        own = [block for block in self.blocks.values() if block.owner == owner]
        assert self.manager.end_session(session_id, SCOPES[scope]) == len(own)
        for block in own:
            block.outlook = SPENT
            block.owner = None
        self.after()

    @rule(num_blocks=st.sampled_from([1, 1, 1, 2, 3, 7]))
    def reclaim(self, num_blocks):
        self.manager.reclaim(num_blocks)
        self.after()

    @rule(waited=seconds)
    def wait(self, waited):
        self.now += waited
        self.after()

    def teardown(self):
        if hasattr(self, "manager") and sys.exc_info()[0] is None:
            for seq, _ in self.held:
                self.manager.close(seq)
            for pin, _ in self.pins:
                pin.close()
            self.manager.clear()
            ops.check(self.manager)
            assert self.manager.num_free == self.manager.pools[0].num_blocks


@pytest.mark.slow
def test_what_is_foreseen_goes_before_all_others():
    run_machine(HintsMachine, SEED, EXAMPLES, steps_per_example=40)
