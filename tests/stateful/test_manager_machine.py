"""Random operation sequences against a model of the memory (see model.py, world.py).

The default run is short and always the same. `QUIRE_STEPS=100000` runs at least that many
steps, `QUIRE_SEED` chooses others; docs/testing.md says how.
"""

import os
import sys

import numpy as np
import pytest
from compare import Settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
)
from running import run_machine
from small_rows import patched_rows, row_sizes
from world import World

from quire.core import CacheManager, Hint, MediaItem, Scope
from quire.core.decode import NO_BLOCK
from quire.core.hints import NO_HINT
from quire.core.policies import POLICIES
from quire.errors import SequenceError

STEPS = int(os.environ.get("QUIRE_STEPS", "0"))
SEED = int(os.environ.get("QUIRE_SEED", "20260101"))
EXAMPLES, LONG = 200, 1600

# Each picture always has the same length: what the digest names is the whole picture.
PICTURES = ((b"a" * 32, 2), (b"b" * 32, 4))
SCOPES = (None, Scope(salt="x"), Scope(salt="y"))

index = st.integers(0, 7)
symbol = st.integers(0, 2)
runs = st.lists(st.tuples(symbol, st.integers(1, 20)), max_size=3)
filler = st.lists(symbol, min_size=1, max_size=3)
small = st.integers(0, 20)
some = st.integers(1, 20)

sessions = st.sampled_from(["one", "two", "three"])

steps = 0


@st.composite
def prompts(draw):
    """A recipe: which earlier prompt, how much of it, what follows, which picture where."""
    return (
        draw(st.none() | index),
        draw(st.integers(0, 60)),
        draw(runs),
        draw(st.sampled_from([0, 0, 0, 1, 2])),
        draw(small),
        draw(st.sampled_from([0, 0, 1, 2])),
    )


@st.composite
def hints(draw):
    """Mostly nothing; else any mix of what a caller may foresee."""
    if draw(st.integers(0, 2)):
        return NO_HINT
    session = draw(st.none() | sessions)
    reuse = draw(
        st.sampled_from(["unknown", "never", "session"] if session else ["unknown", "never"])
    )
    return Hint(reuse, ttl_s=draw(st.none() | some), session_id=session)


class ManagerMachine(RuleBasedStateMachine):
    """Every rule is one operation of `World`, which compares after each."""

    @initialize(
        policy=st.sampled_from(sorted(POLICIES)),
        block_size=st.sampled_from([1, 3, 16]),
        pools=st.sampled_from([(4,), (8,), (80,), (6, 9), (12, 12)]),
        flags=st.tuples(st.booleans(), st.booleans(), st.booleans(), st.booleans()),
        rows=row_sizes,
    )
    def start(self, policy, block_size, pools, flags, rows):
        sub_block, events, debug, self.eager = flags
        self.patch = patched_rows(rows)
        self.world = World(Settings(policy, block_size, pools, sub_block, events, debug))
        self.batch = None
        self.foreign = CacheManager(num_blocks=4, block_size=4).open([1])
        self.count()

    def count(self):
        global steps  # noqa: PLW0603 - the run reports how many steps it made
        steps += 1
        if self.eager and not self.world.copies_taken:
            self.world.take_copies()
            self.world.after()

    def teardown(self):
        failed = sys.exc_info()[0] is not None
        try:
            if hasattr(self, "world") and not failed:
                self.world.finish()
        finally:
            if hasattr(self, "patch"):
                self.patch.stop()

    def pick(self, choice, among):
        return among[choice % len(among)]

    def has_running(self):
        return bool(self.world.running)

    def has_decoding(self):
        return bool(self.world.decoding)

    def has_live(self):
        return bool(self.world.live)

    def build(self, recipe):
        """Return tokens, scope and media of a recipe; at most 100 tokens."""
        earlier, cut, tail, picture, place, scope = recipe
        world = self.world
        longest = 6 * world.settings.block_size
        tokens, media = [], ()
        if earlier is not None and world.history:
            pool = [(live.tokens, live.scope, live.media) for live in world.live]
            tokens, where, media = self.pick(earlier, (world.history[-8:] + pool)[::-1])
            cut = min(cut, len(tokens))
            tokens = tokens[:cut]
            media = tuple(item for item in media if item.start + item.length <= cut)
            scope = where if scope == 0 else SCOPES[scope]
        else:
            scope = SCOPES[scope]
        tokens = (tokens + [s for s, length in tail for _ in range(length)])[:longest] or [0]
        media = tuple(item for item in media if item.start + item.length <= len(tokens))
        if picture:
            digest, length = PICTURES[picture - 1]
            begin = max((item.start + item.length for item in media), default=0) + place
            if begin + length <= len(tokens):
                media += (MediaItem(digest, begin, length),)
        return tokens, scope, media

    # -- rules -----------------------------------------------------------------------------

    @rule(
        recipe=prompts(),
        priority=st.sampled_from([0, 0, 1]),
        retain=st.none() | some,
        hint=hints(),
    )
    def open(self, recipe, priority, retain, hint):
        if len(self.world.live) < 6:
            self.world.open(*self.build(recipe), priority, retain, hint=hint)
        self.count()

    @rule(name=sessions, scope=st.sampled_from(SCOPES))
    def end_session(self, name, scope):
        self.world.end_session(name, scope)
        self.count()

    @rule(recipe=prompts(), generated=small, filler=filler, hint=hints())
    def serve(self, recipe, generated, filler, hint):
        """One whole request: open, prefill, generate, close."""
        world = self.world
        tokens, scope, media = self.build(recipe)
        live = world.open(tokens, scope, media, hint=hint)
        if live is not None:
            wanted = len(tokens) - len(live.tokens) + generated
            if world.reserve(live, wanted):
                world.commit(live, wanted, filler)
            world.close(live)
        self.count()

    @rule(recipe=prompts(), computed=st.booleans(), backwards=st.booleans())
    def branch_everywhere(self, recipe, computed, backwards):
        """Others leave a prompt after each of its blocks and are dropped; then it is used again."""
        world, size = self.world, self.world.settings.block_size
        tokens, scope, _ = self.build(recipe)
        branches = [[*tokens[:end], *[3] * size] for end in range(size, len(tokens), size)]
        for prompt in (tokens, *branches, tokens):
            if prompt is tokens:
                for branch in branches[:: -1 if backwards else 1]:
                    world.drop(world.manager.evict, branch, scope)
            live = world.open(prompt, scope)
            if live is not None:
                wanted = len(prompt) - len(live.tokens)
                if (computed or prompt is tokens) and world.reserve(live, wanted):
                    world.commit(live, wanted, [1])
                world.close(live)
        self.count()

    @precondition(has_running)
    @rule(choice=index, num_tokens=some)
    def reserve(self, choice, num_tokens):
        self.world.reserve(self.pick(choice, self.world.running), num_tokens)
        self.count()

    @precondition(has_running)
    @rule(choice=index, num_tokens=small, filler=filler)
    def commit(self, choice, num_tokens, filler):
        self.world.commit(self.pick(choice, self.world.running), num_tokens, filler)
        self.count()

    @precondition(has_running)
    @rule(choice=index, generated=small, filler=filler)
    def prefill(self, choice, generated, filler):
        live = self.pick(choice, self.world.running)
        wanted = len(live.known) - len(live.tokens) + generated
        if wanted > 0 and self.world.reserve(live, wanted):
            self.world.commit(live, wanted, filler)
        self.count()

    @precondition(has_running)
    @rule(choice=index)
    def fork(self, choice):
        if len(self.world.live) < 6:
            self.world.fork(self.pick(choice, self.world.running))
        self.count()

    @precondition(has_running)
    @rule(choice=index, back=small)
    def truncate(self, choice, back):
        live = self.pick(choice, self.world.running)
        self.world.truncate(live, max(0, len(live.tokens) - back))
        self.count()

    @precondition(has_live)
    @rule(choice=index)
    def suspend_or_resume(self, choice):
        live = self.pick(choice, self.world.live)
        (self.world.resume if live.suspended else self.world.suspend)(live)
        self.count()

    @precondition(has_live)
    @rule(choice=index)
    def close(self, choice):
        self.world.close(self.pick(choice, self.world.live))
        self.count()

    @precondition(has_decoding)
    @rule(first=index, num_seqs=st.integers(1, 3), filler=filler, times=st.integers(1, 4))
    def decode(self, first, num_seqs, filler, times):
        """Steps of a batch that lives on while other rules change its sequences."""
        world = self.world
        if self.batch is None:
            lives = world.decoding[first % len(world.decoding) :][:num_seqs]
            self.batch = (world.manager.batch([live.seq for live in lives]), lives)
        batch, lives = self.batch
        if any(live not in world.decoding for live in lives):
            world.must_raise(SequenceError, world.manager.reserve_step, batch)
            self.batch = None
        else:
            for _ in range(times):
                world.decode(batch, lives, filler)
        self.count()

    @precondition(has_decoding)
    @rule(first=index, num_seqs=st.integers(1, 3), filler=filler)
    def decode_list(self, first, num_seqs, filler):
        lives = self.world.decoding[first % len(self.world.decoding) :][:num_seqs]
        self.world.decode([live.seq for live in lives], lives, filler)
        self.count()

    @rule(recipe=prompts(), ttl=st.none() | some)
    def pin(self, recipe, ttl):
        tokens, scope, media = self.build(recipe)
        if len(self.world.pins) < 3:
            self.world.pin(tokens, scope, media, ttl)
        self.count()

    @precondition(lambda self: self.world.pins)
    @rule(choice=index)
    def unpin(self, choice):
        self.world.unpin(choice % len(self.world.pins))
        self.count()

    @rule(recipe=prompts(), whole_scope=st.booleans())
    def evict(self, recipe, whole_scope):
        world = self.world
        tokens, scope, media = self.build(recipe)
        if whole_scope:
            world.drop(world.manager.evict, None, scope)
        else:
            world.drop(lambda: world.manager.evict(tokens, scope, media=media))
        self.count()

    @rule(num_blocks=some)
    def reclaim(self, num_blocks):
        self.world.drop(self.world.manager.reclaim, num_blocks)
        self.count()

    @rule()
    def clear(self):
        world = self.world
        world.drop(world.manager.clear)
        assert all(group.num_cached == 0 for group in world.manager.pools)
        self.count()

    @rule(seconds=small)
    def wait(self, seconds):
        self.world.wait(seconds)
        self.count()

    @rule()
    def take_copies(self):
        self.world.take_copies()
        self.world.after()
        self.count()

    @rule(pad=st.sampled_from([NO_BLOCK, 0, -1]))
    def tables(self, pad):
        self.world.check_pins()
        for group in self.world.groups:
            self.world.pure(self.world.check_tables, group, pad)
        self.count()

    @precondition(has_live)
    @rule(choice=index)
    def misuse(self, choice):
        self.world.misuse(self.pick(choice, self.world.live), self.foreign)
        self.count()


@pytest.mark.parametrize("examples", [EXAMPLES, pytest.param(LONG, marks=pytest.mark.long)])
def test_every_operation_sequence_reads_its_own_prefix(examples, capfd):
    number = SEED
    run_machine(ManagerMachine, number, examples)
    while steps < STEPS:
        number += 1
        run_machine(ManagerMachine, number, examples)
    with capfd.disabled():
        sys.stdout.write(f"\nstateful: {steps} steps, seeds {SEED}..{number}\n")


def test_numpy_and_list_prompts_are_the_same_prompt():
    world = World(Settings(pools=(8,)))
    live = world.open([1, 2, 3, 4])
    world.reserve(live, 4)
    world.commit(live, 4, [0])
    found = {
        world.manager.probe(kind([1, 2, 3, 4])).num_tokens
        for kind in (list, tuple, np.array, lambda x: np.array(x, dtype=np.int32))
    }
    assert found == {3}
