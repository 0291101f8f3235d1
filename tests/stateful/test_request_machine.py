"""Random requests over layers of every kind, against a model of their memory.

`QUIRE_STEPS` and `QUIRE_SEED` make other and longer runs; docs/testing.md says how.
"""

import os
import sys
from unittest import mock

import pytest
from checked_manager import CheckedManager
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
CHANGES = ("evict", "purge", "demote", "reclaim", "reclaim_group", "clear", "resize", "wait")

steps = 0


class RequestMachine(RuleBasedStateMachine):
    """Every rule is one operation of `CheckedManager`, which compares after each."""

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
        self.checked = CheckedManager(
            Settings(groups, block_size, policy, sub_block, events, debug)
        )
        self.batch = None
        self.foreign = CacheManager(num_blocks=4, block_size=4).open([1])
        self.count()

    def count(self):
        global steps  # noqa: PLW0603 - the run reports how many steps it made
        steps += 1
        if self.eager and not self.checked.copies_taken:
            self.checked.take_copies()
            self.checked.after()

    def teardown(self):
        failed = sys.exc_info()[0] is not None
        try:
            if hasattr(self, "checked") and not failed:
                self.checked.finish()
        finally:
            if hasattr(self, "patch"):
                self.patch.stop()
                self.media.stop()

    def pick(self, choice, among):
        return among[choice % len(among)]

    def has_idle(self):
        return bool(self.checked.idle)

    def has_decoding(self):
        return bool(self.checked.decoding)

    def has_drafting(self):
        return bool(self.checked.drafting)

    def has_running(self):
        return bool(self.checked.running)

    def has_suspended(self):
        return any(live.suspended for live in self.checked.live)

    def has_live(self):
        return bool(self.checked.live)

    def build(self, recipe):
        """Return tokens, scope and media of a recipe; no more than some blocks of tokens."""
        checked = self.checked
        earlier = checked.history[-8:] + [
            (live.tokens, live.scope, live.media) for live in checked.live
        ]
        return build(recipe, earlier, longest=max(36, 6 * checked.settings.block_size))

    # -- rules -----------------------------------------------------------------------------

    @rule(name=st.sampled_from(SESSIONS), scope=st.sampled_from(SCOPES))
    def end_session(self, name, scope):
        self.checked.end_session(name, scope)
        self.count()

    @rule(recipe=prompts(), options=open_options(), num_tokens=small, filler=filler)
    def open(self, recipe, options, num_tokens, filler):
        """A request that stays: nothing, a part or all of its prompt is computed."""
        checked = self.checked
        if len(checked.live) < 5:
            live = checked.open(*self.build(recipe), **options)
            if live is not None and num_tokens > 6:
                checked.prefill(live, filler)
            elif live is not None and checked.reserve(live, num_tokens):
                checked.commit(live, num_tokens, filler)
        self.count()

    @rule(recipe=prompts(), options=open_options(), generated=small, filler=filler)
    def serve(self, recipe, options, generated, filler):
        """One whole request: open, prefill by its stops, generate, close."""
        live = self.checked.open(*self.build(recipe), **options)
        if live is not None:
            self.checked.prefill(live, filler, generated)
            self.checked.close(live)
        self.count()

    @rule(recipe=prompts(), options=open_options())
    def refuse(self, recipe, options):
        """A request that asks for more than there is."""
        if len(self.checked.live) < 5:
            self.checked.refuse(*self.build(recipe), **options)
        self.count()

    @rule(recipe=prompts(), meanwhile=st.sampled_from(MEANWHILE), blocks=some, stays=st.booleans())
    def wait_for_room(self, recipe, meanwhile, blocks, stays):
        """A request waits while others change what it found, or what lies beyond; then it is admitted, or waits on."""
        checked = self.checked
        tokens, scope, _ = prompt = self.build(recipe)
        live = checked.open(*prompt) if len(checked.live) < 4 else None
        if live is None:
            return
        if meanwhile == "restore" and not checked.restores:
            handle = checked.begin_restore(prompt, blocks, 0)
            if handle is not None:
                checked.end_restore(handle, commit=True)
        elif meanwhile == "purge":
            checked.purge(scope)
        elif meanwhile == "serve":
            other = checked.open([*tokens[: blocks * checked.settings.block_size], 1], scope)
            if other is not None:
                checked.prefill(other, [1])
                checked.close(other)
        if not stays:
            checked.prefill(live, [0])
            checked.close(live)
        self.count()

    @rule(recipe=prompts(), computed=st.booleans(), backwards=st.booleans())
    def branch_everywhere(self, recipe, computed, backwards):
        """Others leave a prompt after each of its blocks and are dropped; then it is used again."""
        checked, size = self.checked, self.checked.settings.block_size
        tokens, scope, _ = self.build(recipe)
        branches = [[*tokens[:end], *[3] * size] for end in range(size, len(tokens), size)][-6:]
        for prompt in (tokens, *branches, tokens):
            if prompt is tokens:
                for branch in branches[:: -1 if backwards else 1]:
                    checked.drop(ops.invalidate, checked.manager, branch, scope)
            live = checked.open(prompt, scope)
            if live is not None:
                if computed or prompt is tokens:
                    checked.prefill(live, [1])
                checked.close(live)
        self.count()

    @rule(recipe=prompts(), blocks=some, extra=st.integers(0, 255), end=st.sampled_from("cdw"))
    def restore(self, recipe, blocks, extra, end):
        """A prefix comes back from elsewhere and is read by a request, or its restore waits open."""
        checked = self.checked
        tokens, scope, media = prompt = self.build(recipe)
        handle = checked.begin_restore(prompt, blocks, extra) if not checked.restores[1:] else None
        if handle is not None and end != "w":
            checked.end_restore(handle, commit=end == "c")
            live = checked.open([*tokens, 0], scope, media) if len(checked.live) < 5 else None
            if live is not None:
                checked.prefill(live, [0])
                checked.close(live)
        self.count()

    @precondition(lambda self: self.checked.restores)
    @rule(choice=index, commit=st.booleans())
    def end_restore(self, choice, commit):
        self.checked.end_restore(self.pick(choice, self.checked.restores), commit)
        self.count()

    @precondition(has_running)
    @rule(choice=index, let_go=st.booleans())
    def hold(self, choice, let_go):
        """Blocks are kept where they are, whatever becomes of their sequence."""
        checked = self.checked
        if checked.holds and (let_go or checked.holds[1:]):
            checked.let_go(self.pick(choice, checked.holds))
        else:
            checked.hold(self.pick(choice, checked.running))
        self.count()

    @precondition(has_idle)
    @rule(choice=index, action=st.sampled_from(ACTIONS), num_tokens=small, filler=filler)
    def act(self, choice, action, num_tokens, filler):
        """One call of one sequence."""
        checked = self.checked
        live = self.pick(choice, checked.idle)
        if action == "reserve":
            checked.reserve(live, num_tokens)
        elif action == "commit" or (action == "compute" and checked.reserve(live, num_tokens)):
            checked.commit(live, num_tokens, filler)
        elif action == "prefill":
            checked.prefill(live, filler, num_tokens)
        elif action == "checkpoint":
            rest = -len(live.tokens) % checked.settings.block_size if num_tokens else 0
            if checked.reserve(live, rest):
                checked.commit(live, rest, filler)
                checked.checkpoint(live)
        self.count()

    @precondition(has_running)
    @rule(choice=index, back=small)
    def truncate(self, choice, back):
        live = self.pick(choice, self.checked.running)
        self.checked.truncate(live, max(0, len(live.tokens) - back))
        self.count()

    @precondition(has_running)
    @rule(choice=index)
    def fork(self, choice):
        """Fork, drafts or not; a state that has gone on with drafts is not that of the computed tokens."""
        checked = self.checked
        lives = checked.idle if checked.settings.recurrent else checked.running
        if lives and len(checked.live) < 5:
            checked.fork(self.pick(choice, lives))
        self.count()

    @precondition(has_decoding)
    @rule(choice=index, num_drafts=st.integers(1, 9), filler=filler, keep=st.none() | small)
    def draft(self, choice, num_drafts, filler, keep):
        """A line of drafts, which is accepted in part at once or waits while other rules run."""
        live = self.pick(choice, self.checked.decoding)
        self.checked.draft(live, num_drafts, filler)
        if live.drafts is not None and keep is not None:
            self.checked.accept(live, keep)
        self.count()

    @precondition(has_drafting)
    @rule(choice=index, keep=small)
    def accept(self, choice, keep):
        self.checked.accept(self.pick(choice, self.checked.drafting), keep)
        self.count()

    @precondition(has_decoding)
    @rule(first=index, num_seqs=st.integers(1, 3), filler=filler, times=st.integers(1, 20))
    def decode(self, first, num_seqs, filler, times):
        """Steps of a batch that lives on while other rules change its sequences."""
        checked = self.checked
        if self.batch is None:
            lives = checked.decoding[first % len(checked.decoding) :][:num_seqs]
            self.batch = (checked.manager.batch([live.seq for live in lives]), lives)
        batch, lives = self.batch
        if any(live not in checked.decoding for live in lives):
            if not any(live in checked.drafting for live in lives):
                checked.must_raise(SequenceError, checked.manager.reserve_step, batch)
            self.batch = None
        else:
            for _ in range(times):
                checked.decode(batch, lives, filler)
        self.count()

    @precondition(has_decoding)
    @rule(first=index, num_seqs=st.integers(1, 3), filler=filler)
    def decode_list(self, first, num_seqs, filler):
        lives = self.checked.decoding[first % len(self.checked.decoding) :][:num_seqs]
        self.checked.decode([live.seq for live in lives], lives, filler)
        self.count()

    @precondition(has_live)
    @rule(choice=index, suspend=st.booleans())
    def leave(self, choice, suspend):
        """Suspend or close a sequence."""
        live = self.pick(choice, self.checked.live)
        if suspend and not live.suspended:
            self.checked.suspend(live)
            self.batch = None if self.batch and live in self.batch[1] else self.batch
        else:
            self.checked.close(live)
        self.count()

    @precondition(has_suspended)
    @rule(choice=index, num_new=st.none() | some)
    def resume(self, choice, num_new):
        suspended = [one for one in self.checked.live if one.suspended]
        self.checked.resume(self.pick(choice, suspended), num_new)
        self.count()

    @rule(recipe=prompts(), num_new=st.none() | st.integers(1, 40))
    def fits(self, recipe, num_new):
        if len(self.checked.live) < 5:
            self.checked.try_to_fit(*self.build(recipe), num_new)
        self.count()

    @rule(recipe=prompts(), ttl=st.none() | some, close=st.booleans())
    def pin(self, recipe, ttl, close):
        checked = self.checked
        if checked.pins and (close or len(checked.pins) == 2):
            checked.unpin(0)
        else:
            checked.pin(*self.build(recipe), ttl)
        self.count()

    @rule(change=st.sampled_from(CHANGES), recipe=prompts(), group=index, amount=st.integers(1, 24))
    def memory(self, change, recipe, group, amount):
        """A call that takes memory away, moves it or brings more."""
        checked, groups = self.checked, len(self.checked.memory)
        tokens, scope, media = self.build(recipe)
        if change == "evict" and amount > 20:
            checked.drop(ops.invalidate, checked.manager, None, scope)
        elif change == "evict":
            checked.drop(ops.invalidate, checked.manager, tokens, scope, media=media)
        elif change == "purge" and amount > 16:
            checked.purge(scope)
        elif change == "demote":
            checked.call(ops.demote, checked.manager, tokens, amount - 1, scope, media=media)
            checked.after()
        elif change == "reclaim":
            checked.drop(ops.reclaim, checked.manager, amount)
        elif change == "reclaim_group":
            checked.drop(ops.reclaim, checked.manager, amount, group % groups)
        elif change == "clear" and amount > 12:
            checked.drop(ops.clear, checked.manager)
            assert all(pool.num_cached == 0 for pool in checked.pools)
        elif change == "resize":
            checked.resize({group % groups: amount, (group + amount) % groups: amount})
        elif change == "wait":
            checked.wait(amount)
        self.count()

    @rule()
    def take_copies(self):
        self.checked.take_copies()
        self.checked.after()
        self.count()

    @rule(pad=st.sampled_from([NO_BLOCK, 0, -1]))
    def tables(self, pad):
        self.checked.check_pins()
        for group in self.checked.groups:
            self.checked.pure(self.checked.check_tables, group, pad)
        self.count()

    @precondition(has_live)
    @rule(choice=index)
    def misuse(self, choice):
        self.checked.misuse(self.pick(choice, self.checked.live), self.foreign)
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
