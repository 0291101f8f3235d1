"""Random requests with hints against a small model of who is expected back, under every policy.

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
from quire.core.policies import policy_names
from quire.errors import OutOfBlocks, PinBudgetExceeded

SEED = int(os.environ.get("QUIRE_SEED", "20260101"))
EXAMPLES = int(os.environ.get("QUIRE_EXAMPLES", "30"))

BLOCK = 2
FOREVER = float("inf")

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
    st.builds(lambda name: Hint("never", session_id=name), names),
    st.builds(lambda name, ttl: Hint("session", ttl_s=ttl, session_id=name), names, seconds),
)


class ForecastOwner:
    """A session, or a single request with a forecast: how many of its requests run, and when nobody comes back."""

    def __init__(self):
        self.num_open = 0
        self.due = FOREVER


class Block:
    """One resident block: who alone has used it (None: nobody in particular), until when it is retained."""

    def __init__(self, owner):
        self.owner = owner
        self.keep = 0


class HintsMachine(RuleBasedStateMachine):
    """Requests are served at once, or stay open; a block is known by its path.

    A path is of one scope: pairs of it and a block. Both scopes have the same tokens and names of sessions.
    """

    @initialize(
        policy=st.sampled_from(policy_names()),
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
        self.sessions = {}
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
        return block.keep <= self.now and block.owner is not None and block.owner.due <= self.now

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
        return [path for _, path, _, _ in self.held]

    def pinned(self):
        return [path for _, path in self.pins]

    def begin(self, path, hint):
        """A request begins; return the owner of what it stores."""
        if hint.reuse == "never" or (hint.ttl_s and not hint.session_id):
            owner = ForecastOwner()
        elif hint.session_id:
            owner = self.sessions.setdefault((self.scope(path), hint.session_id), ForecastOwner())
        else:
            return None
        owner.num_open += 1
        owner.due = FOREVER
        return owner

    def use(self, path, owner):
        """A request uses this path, and stores what was not there."""
        for head in self.heads(path):
            block = self.blocks.setdefault(head, Block(owner))
            if block.owner is not owner:
                block.owner = None

    def close(self, seq, owner, hint):
        """A request ends."""
        self.manager.close(seq)
        if owner is not None:
            owner.num_open -= 1
            if not owner.num_open and owner.due == FOREVER:
                owner.due = (
                    self.now if hint.reuse == "never" else self.now + (hint.ttl_s or FOREVER)
                )

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
        owner = self.begin(path, hint)
        seq, path = self.compute(path, hint, priority=priority, retain_s=retain)
        self.use(path, owner)
        self.close(seq, owner, hint)
        for head in self.heads(path) if retain else ():
            self.blocks[head].keep = max(self.blocks[head].keep, self.now + retain)
        self.after()

    @rule(path=paths, hint=hints)
    def hold(self, path, hint):
        if len(path) >= self.manager.pools[0].num_blocks:
            return
        owner = self.begin(path, hint)
        seq, path = self.compute(path, hint)
        self.held.append((seq, path, owner, hint))
        self.use(path, owner)
        self.after()

    @rule(choice=st.integers(0, 7))
    def fork(self, choice):
        if self.held:
            seq, path, owner, hint = self.held[choice % len(self.held)]
            self.held.append((self.manager.fork(seq), path, owner, hint))
            if owner is not None:
                owner.num_open += 1

    @rule(choice=st.integers(0, 7))
    def let_go(self, choice):
        if self.held:
            seq, _, owner, hint = self.held.pop(choice % len(self.held))
            self.close(seq, owner, hint)
            self.after()

    @rule(path=paths)
    def pin(self, path):
        scope = self.scope(path)
        length = self.manager.probe(self.prompt(path), scope).num_blocks
        try:
            pin = ops.pin(self.manager, self.prompt(path[:length]), scope)
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
        owner = self.sessions.pop((SCOPES[scope], session_id), None)
        own = [block for block in self.blocks.values() if owner and block.owner is owner]
        assert self.manager.end_session(session_id, SCOPES[scope]) == len(own)
        if owner is not None:
            owner.due = self.now
        self.after()

    @rule(num_blocks=st.sampled_from([1, 1, 1, 2, 3, 7]))
    def reclaim(self, num_blocks):
        ops.reclaim(self.manager, num_blocks)
        self.after()

    @rule(waited=seconds)
    def wait(self, waited):
        self.now += waited
        self.after()

    def teardown(self):
        if hasattr(self, "manager") and sys.exc_info()[0] is None:
            for seq, *_ in self.held:
                self.manager.close(seq)
            for pin, _ in self.pins:
                pin.close()
            ops.clear(self.manager)
            ops.check(self.manager)
            assert self.manager.num_free == self.manager.pools[0].num_blocks


@pytest.mark.slow
@pytest.mark.parametrize(
    "examples", [EXAMPLES, pytest.param(20 * EXAMPLES, marks=pytest.mark.long)]
)
def test_blocks_forecast_as_unused_are_evicted_before_all_others(examples):
    run_machine(HintsMachine, SEED, examples, steps_per_example=40)
