"""Random requests over layers of every kind, against a model of their memory.

`QUIRE_STEPS` and `QUIRE_SEED` make other and longer runs; docs/testing.md says how.
"""

import os
import sys
from unittest import mock

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
)
from kinds import Settings
from request_recipes import (
    SCOPES,
    SESSIONS,
    build,
    filler,
    index,
    layer_groups,
    open_options,
    prompts,
    small,
    some,
)
from running import run_machine
from small_rows import patched_rows, row_sizes
from world import World

from quire import ops
from quire.core import CacheManager
from quire.core.decode import NO_BLOCK
from quire.core.policies import policy_names
from quire.errors import SequenceError

STEPS = int(os.environ.get("QUIRE_STEPS", "0"))
SEED = int(os.environ.get("QUIRE_SEED", "20260101"))
EXAMPLES, LONG = 15, 1000
STEPS_PER_EXAMPLE = 40

ACTIONS = ("reserve", "commit", "compute", "compute", "prefill", "checkpoint")
MEANWHILE = ("restore", "restore", "purge", "serve")
CHANGES = ("evict", "purge", "reclaim", "reclaim_group", "clear", "resize", "wait")

steps = 0


class RequestMachine(RuleBasedStateMachine):
    """Every rule is one operation of `World`, which compares after each."""

    @initialize(
        groups=layer_groups(),
        block_size=st.sampled_from([1, 2, 3, 4, 16]),
        policy=st.sampled_from(["lru", "lru", *policy_names()]),
        flags=st.tuples(st.booleans(), st.booleans(), st.booleans(), st.booleans()),
        rows=row_sizes,
    )
    def start(self, groups, block_size, policy, flags, rows):
        sub_block, events, debug, self.eager = flags
        self.patch = patched_rows(rows)
        self.media = mock.patch("quire.core.media.MAX_MEDIA", 1)  # of those that nothing needs
        self.media.start()
        self.world = World(Settings(groups, block_size, policy, sub_block, events, debug))
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
                self.media.stop()

    def pick(self, choice, among):
        return among[choice % len(among)]

    def has_idle(self):
        return bool(self.world.idle)

    def has_decoding(self):
        return bool(self.world.decoding)

    def has_drafting(self):
        return bool(self.world.drafting)

    def has_running(self):
        return bool(self.world.running)

    def has_suspended(self):
        return any(live.suspended for live in self.world.live)

    def has_live(self):
        return bool(self.world.live)

    def build(self, recipe):
        """Return tokens, scope and media of a recipe; no more than some blocks of tokens."""
        world = self.world
        earlier = world.history[-8:] + [
            (live.tokens, live.scope, live.media) for live in world.live
        ]
        return build(recipe, earlier, longest=max(36, 6 * world.settings.block_size))

    # -- rules -----------------------------------------------------------------------------

    @rule(name=st.sampled_from(SESSIONS), scope=st.sampled_from(SCOPES))
    def end_session(self, name, scope):
        self.world.end_session(name, scope)
        self.count()

    @rule(recipe=prompts(), options=open_options(), num_tokens=small, filler=filler)
    def open(self, recipe, options, num_tokens, filler):
        """A request that stays: nothing, a part or all of its prompt is computed."""
        world = self.world
        if len(world.live) < 5:
            live = world.open(*self.build(recipe), **options)
            if live is not None and num_tokens > 6:
                world.prefill(live, filler)
            elif live is not None and world.reserve(live, num_tokens):
                world.commit(live, num_tokens, filler)
        self.count()

    @rule(recipe=prompts(), options=open_options(), generated=small, filler=filler)
    def serve(self, recipe, options, generated, filler):
        """One whole request: open, prefill by its stops, generate, close."""
        live = self.world.open(*self.build(recipe), **options)
        if live is not None:
            self.world.prefill(live, filler, generated)
            self.world.close(live)
        self.count()

    @rule(recipe=prompts(), options=open_options())
    def refuse(self, recipe, options):
        """A request that asks for more than there is."""
        if len(self.world.live) < 5:
            self.world.refuse(*self.build(recipe), **options)
        self.count()

    @rule(recipe=prompts(), meanwhile=st.sampled_from(MEANWHILE), blocks=some, stays=st.booleans())
    def wait_for_room(self, recipe, meanwhile, blocks, stays):
        """A request waits while others change what it found, or what lies beyond; then it is admitted, or waits on."""
        world = self.world
        tokens, scope, _ = prompt = self.build(recipe)
        live = world.open(*prompt) if len(world.live) < 4 else None
        if live is None:
            return
        if meanwhile == "restore" and not world.restores:
            handle = world.begin_restore(prompt, blocks, 0)
            if handle is not None:
                world.end_restore(handle, commit=True)
        elif meanwhile == "purge":
            world.purge(scope)
        elif meanwhile == "serve":
            other = world.open([*tokens[: blocks * world.settings.block_size], 1], scope)
            if other is not None:
                world.prefill(other, [1])
                world.close(other)
        if not stays:
            world.prefill(live, [0])
            world.close(live)
        self.count()

    @rule(recipe=prompts(), computed=st.booleans(), backwards=st.booleans())
    def branch_everywhere(self, recipe, computed, backwards):
        """Others leave a prompt after each of its blocks and are dropped; then it is used again."""
        world, size = self.world, self.world.settings.block_size
        tokens, scope, _ = self.build(recipe)
        branches = [[*tokens[:end], *[3] * size] for end in range(size, len(tokens), size)][-6:]
        for prompt in (tokens, *branches, tokens):
            if prompt is tokens:
                for branch in branches[:: -1 if backwards else 1]:
                    world.drop(ops.invalidate, world.manager, branch, scope)
            live = world.open(prompt, scope)
            if live is not None:
                if computed or prompt is tokens:
                    world.prefill(live, [1])
                world.close(live)
        self.count()

    @rule(recipe=prompts(), blocks=some, extra=st.integers(0, 255), end=st.sampled_from("cdw"))
    def restore(self, recipe, blocks, extra, end):
        """A prefix comes back from elsewhere and is read by a request, or its restore waits open."""
        world = self.world
        tokens, scope, media = prompt = self.build(recipe)
        handle = world.begin_restore(prompt, blocks, extra) if not world.restores[1:] else None
        if handle is not None and end != "w":
            world.end_restore(handle, commit=end == "c")
            live = world.open([*tokens, 0], scope, media) if len(world.live) < 5 else None
            if live is not None:
                world.prefill(live, [0])
                world.close(live)
        self.count()

    @precondition(lambda self: self.world.restores)
    @rule(choice=index, commit=st.booleans())
    def end_restore(self, choice, commit):
        self.world.end_restore(self.pick(choice, self.world.restores), commit)
        self.count()

    @precondition(has_running)
    @rule(choice=index, let_go=st.booleans())
    def hold(self, choice, let_go):
        """Blocks are kept where they are, whatever becomes of their sequence."""
        world = self.world
        if world.holds and (let_go or world.holds[1:]):
            world.let_go(self.pick(choice, world.holds))
        else:
            world.hold(self.pick(choice, world.running))
        self.count()

    @precondition(has_idle)
    @rule(choice=index, action=st.sampled_from(ACTIONS), num_tokens=small, filler=filler)
    def act(self, choice, action, num_tokens, filler):
        """One call of one sequence."""
        world = self.world
        live = self.pick(choice, world.idle)
        if action == "reserve":
            world.reserve(live, num_tokens)
        elif action == "commit" or (action == "compute" and world.reserve(live, num_tokens)):
            world.commit(live, num_tokens, filler)
        elif action == "prefill":
            world.prefill(live, filler, num_tokens)
        elif action == "checkpoint":
            rest = -len(live.tokens) % world.settings.block_size if num_tokens else 0
            if world.reserve(live, rest):
                world.commit(live, rest, filler)
                world.checkpoint(live)
        self.count()

    @precondition(has_running)
    @rule(choice=index, back=small)
    def truncate(self, choice, back):
        live = self.pick(choice, self.world.running)
        self.world.truncate(live, max(0, len(live.tokens) - back))
        self.count()

    @precondition(has_running)
    @rule(choice=index)
    def fork(self, choice):
        """Fork, drafts or not; a state that has gone on with drafts is not that of the computed tokens."""
        world = self.world
        lives = world.idle if world.settings.recurrent else world.running
        if lives and len(world.live) < 5:
            world.fork(self.pick(choice, lives))
        self.count()

    @precondition(has_decoding)
    @rule(choice=index, num_drafts=st.integers(1, 9), filler=filler, keep=st.none() | small)
    def draft(self, choice, num_drafts, filler, keep):
        """A line of drafts, which is accepted in part at once or waits while other rules run."""
        live = self.pick(choice, self.world.decoding)
        self.world.draft(live, num_drafts, filler)
        if live.drafts is not None and keep is not None:
            self.world.accept(live, keep)
        self.count()

    @precondition(has_drafting)
    @rule(choice=index, keep=small)
    def accept(self, choice, keep):
        self.world.accept(self.pick(choice, self.world.drafting), keep)
        self.count()

    @precondition(has_decoding)
    @rule(first=index, num_seqs=st.integers(1, 3), filler=filler, times=st.integers(1, 20))
    def decode(self, first, num_seqs, filler, times):
        """Steps of a batch that lives on while other rules change its sequences."""
        world = self.world
        if self.batch is None:
            lives = world.decoding[first % len(world.decoding) :][:num_seqs]
            self.batch = (world.manager.batch([live.seq for live in lives]), lives)
        batch, lives = self.batch
        if any(live not in world.decoding for live in lives):
            if not any(live in world.drafting for live in lives):
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

    @precondition(has_live)
    @rule(choice=index, suspend=st.booleans())
    def leave(self, choice, suspend):
        """Suspend or close a sequence."""
        live = self.pick(choice, self.world.live)
        if suspend and not live.suspended:
            self.world.suspend(live)
            self.batch = None if self.batch and live in self.batch[1] else self.batch
        else:
            self.world.close(live)
        self.count()

    @precondition(has_suspended)
    @rule(choice=index, num_new=st.none() | some)
    def resume(self, choice, num_new):
        suspended = [one for one in self.world.live if one.suspended]
        self.world.resume(self.pick(choice, suspended), num_new)
        self.count()

    @rule(recipe=prompts(), num_new=st.none() | st.integers(1, 40))
    def fits(self, recipe, num_new):
        if len(self.world.live) < 5:
            self.world.try_to_fit(*self.build(recipe), num_new)
        self.count()

    @rule(recipe=prompts(), ttl=st.none() | some, close=st.booleans())
    def pin(self, recipe, ttl, close):
        world = self.world
        if world.pins and (close or len(world.pins) == 2):
            world.unpin(0)
        else:
            world.pin(*self.build(recipe), ttl)
        self.count()

    @rule(change=st.sampled_from(CHANGES), recipe=prompts(), group=index, amount=st.integers(1, 24))
    def memory(self, change, recipe, group, amount):
        """A call that takes memory away, moves it or brings more."""
        world, groups = self.world, len(self.world.memory)
        tokens, scope, media = self.build(recipe)
        if change == "evict" and amount > 20:
            world.drop(ops.invalidate, world.manager, None, scope)
        elif change == "evict":
            world.drop(ops.invalidate, world.manager, tokens, scope, media=media)
        elif change == "purge" and amount > 16:
            world.purge(scope)
        elif change == "reclaim":
            world.drop(ops.reclaim, world.manager, amount)
        elif change == "reclaim_group":
            world.drop(ops.reclaim, world.manager, amount, group % groups)
        elif change == "clear" and amount > 12:
            world.drop(ops.clear, world.manager)
            assert all(pool.num_cached == 0 for pool in world.pools)
        elif change == "resize":
            world.resize({group % groups: amount, (group + amount) % groups: amount})
        elif change == "wait":
            world.wait(amount)
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
def test_every_request_reads_its_own_prefix(examples, capfd):
    number = SEED
    run_machine(RequestMachine, number, examples, STEPS_PER_EXAMPLE)
    while steps < STEPS:
        number += 1
        run_machine(RequestMachine, number, examples, STEPS_PER_EXAMPLE)
    with capfd.disabled():
        sys.stdout.write(f"\nrequests: {steps} steps, seeds {SEED}..{number}\n")
