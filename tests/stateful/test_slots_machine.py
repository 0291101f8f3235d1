"""Random operation sequences on a `SlotCache` against a model of its memory.

The model knows for every slot which positions hold what: identities, as in `model.py`, which
stand for (scope, all tokens up to and with this one, media). `held[slot]` is what may be found
in a slot, `memory[slot]` what a data plane that does the planned copies has there.
"""

import os

import msgspec
import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
)
from model import Identities, Live, common_length
from running import run_machine
from slot_recipes import SCOPES, build, prompts

from quire.errors import (
    CommitError,
    CopyError,
    OutOfSlots,
    PinError,
    SlotError,
    StaleSlot,
    TokensError,
    TruncateError,
)
from quire.slots import SlotCache, check, snapshot

STEPS = int(os.environ.get("QUIRE_STEPS", "0"))
SEED = int(os.environ.get("QUIRE_SEED", "20260101"))
EXAMPLES, LONG = 40, 1200

index = st.integers(0, 7)
symbol = st.integers(0, 2)
small = st.integers(0, 12)
fillers = st.lists(symbol, min_size=1, max_size=3)

steps = 0


def state_of(cache):
    return msgspec.msgpack.encode(snapshot(cache))


def has_free(machine):
    return machine.cache.num_free > 0


class SlotsMachine(RuleBasedStateMachine):
    @initialize(
        num_slots=st.sampled_from([3, 1, 2, 4, 6]),
        max_tokens=st.sampled_from([24, 6]),
        copy_ratio=st.sampled_from([1, 4, 256]),
        whole_copies=st.booleans(),
    )
    def start(self, num_slots, max_tokens, copy_ratio, whole_copies):
        self.cache = SlotCache(num_slots, max_tokens, copy_ratio=copy_ratio)
        self.whole_copies = whole_copies
        self.names = Identities()
        self.held = [[] for _ in range(num_slots)]
        self.memory = [[None] * max_tokens for _ in range(num_slots)]
        self.live, self.closed, self.pins, self.history = [], [], [], []
        self.copies_taken = True
        self.foreign = SlotCache(8, 8).open([1])

    # -- helpers ---------------------------------------------------------------------------

    def prompt(self, recipe):
        return build(recipe, self.history, self.cache.max_tokens + 1)

    def call(self, function, *args, may_raise=(), **options):
        """Call; an allowed error is returned, after a check that it changed nothing."""
        before = state_of(self.cache)
        try:
            return function(*args, **options)
        except may_raise as error:
            raised = error
        assert state_of(self.cache) == before, f"{raised!r} changed the state"
        return raised

    def must_raise(self, kind, function, *args, **options):
        error = self.call(function, *args, may_raise=kind, **options)
        assert isinstance(error, kind), f"{function} raised nothing"

    def pick(self, choice, among):
        return among[choice % len(among)]

    def pinned(self, slot):
        return max((pin.num_tokens for pin in self.pins if pin.slot == slot), default=0)

    def replaced(self, slot, path, generation):
        """A slot holds `path` now: no pin may have lost a token, no generation may lie."""
        old = self.held[slot]
        assert common_length(old, path) >= self.pinned(slot), "a pinned prefix was lost"
        if self.cache.generation(slot) == generation:
            assert path[: len(old)] == old, "other content under the same generation"
        self.held[slot] = list(path)

    def after(self):
        global steps  # noqa: PLW0603 - a long run counts them
        steps += 1
        cache = self.cache
        check(cache)
        assert cache.num_free + cache.num_busy == cache.num_slots
        busy = {live.seq.slot for live in self.live}
        assert len(busy) == len(self.live), "two requests in one slot"
        assert [cache.is_free(slot) for slot in range(cache.num_slots)] == [
            slot not in busy for slot in range(cache.num_slots)
        ]
        for tokens, held in zip(snapshot(cache)["tokens"], self.held, strict=True):
            assert len(tokens) == len(held)
        for live in self.live:
            assert live.seq.computed == len(live.tokens)
            assert live.seq.tokens.tolist() == live.tokens
            assert self.held[live.seq.slot] == live.path
        if self.copies_taken:
            for slot, path in enumerate(self.held):
                assert self.memory[slot][: len(path)] == path, f"slot {slot}: another prefix's KV"

    # -- rules -----------------------------------------------------------------------------

    @precondition(has_free)
    @rule(recipe=prompts)
    def open(self, recipe):
        self.opened(*self.prompt(recipe))

    @precondition(has_free)
    @rule(recipe=prompts, generated=small, filler=fillers)
    def serve(self, recipe, generated, filler):
        """One whole request: open, prefill, generate, close."""
        live = self.opened(*self.prompt(recipe))
        if live is not None:
            self.computed(live, len(live.prompt) + generated, filler)
            self.closed_now(live, self.cache.close)

    def opened(self, tokens, scope, media):
        cache = self.cache
        if len(tokens) > cache.max_tokens:
            self.must_raise(TokensError, cache.open, tokens, scope, media=media)
            return None
        path = self.names.path(scope, tokens, media)
        best = max(common_length(held, path[:-1]) for held in self.held)
        before = state_of(cache)
        match = cache.find(tokens, scope, media)
        assert state_of(cache) == before, "find changed the state"
        assert (match.num_tokens if match else 0) == best
        if match:
            assert self.held[match.slot][:best] == path[:best]
            assert match.generation == cache.generation(match.slot)
        generations = [cache.generation(slot) for slot in range(cache.num_slots)]
        free = [slot for slot in range(cache.num_slots) if cache.is_free(slot)]
        handle = self.call(
            cache.open, np.array(tokens, np.int32), scope, media=media, may_raise=OutOfSlots
        )
        usable = [
            slot
            for slot in free
            if self.pinned(slot) <= common_length(self.held[slot], path[:best])
            and (not self.pinned(slot) or common_length(self.held[slot], path) >= best)
        ]
        if isinstance(handle, OutOfSlots):
            assert not usable, "there was a slot"
            return None
        assert handle.slot in usable
        assert handle.num_cached == handle.computed == best
        self.replaced(handle.slot, path[:best], generations[handle.slot])
        live = Live(handle, scope, media, tokens, tokens, tokens[:best], path[:best])
        self.live.append(live)
        self.history.append((tokens, scope, media))
        self.copies_taken = False
        self.after()
        return live

    @precondition(lambda self: self.live)
    @rule(choice=index, num_tokens=st.integers(1, 24), filler=fillers)
    def commit(self, choice, num_tokens, filler):
        live = self.pick(choice, self.live)
        self.computed(live, len(live.tokens) + num_tokens, filler)

    def computed(self, live, target, filler):
        """Make a request hold `target` tokens, or as many as fit."""
        handle = live.seq
        ids = live.next_tokens(min(target - len(live.tokens), handle.room), filler)
        self.take_copies()
        self.write(live, ids)
        self.cache.commit(handle, ids)
        self.after()

    def write(self, live, ids):
        start = len(live.tokens)
        live.tokens = live.tokens + ids
        live.path = self.names.path(live.scope, live.tokens, live.media)
        slot = live.seq.slot
        self.memory[slot][start : len(live.path)] = live.path[start:]
        self.held[slot] = list(live.path)
        self.history.append((live.tokens, live.scope, live.media))

    @rule()
    def take_copies(self):
        copies = self.cache.take_copies()
        assert len({copy.dst for copy in copies}) == len(copies), "a slot is written twice"
        sources = [list(self.memory[copy.src]) for copy in copies]
        for copy, source in zip(copies, sources, strict=True):
            start = 0 if self.whole_copies else copy.start
            self.memory[copy.dst][start : copy.num_tokens] = source[start : copy.num_tokens]
        self.copies_taken = True
        for live in self.live:
            rest = self.cache.max_tokens - len(live.path)
            self.memory[live.seq.slot][len(live.path) :] = [None] * rest
        self.after()

    @precondition(lambda self: self.live)
    @rule(choice=index, back=small)
    def truncate(self, choice, back):
        live = self.pick(choice, self.live)
        slot, target = live.seq.slot, max(0, len(live.tokens) - back)
        generation = self.cache.generation(slot)
        allowed = TruncateError if target < self.pinned(slot) else ()
        error = self.call(self.cache.truncate, live.seq, target, may_raise=allowed)
        if isinstance(error, TruncateError):
            return
        live.cut(target)
        self.replaced(slot, live.path, generation)
        self.after()

    @precondition(lambda self: self.live and self.cache.num_free)
    @rule(choice=index)
    def fork(self, choice):
        live = self.pick(choice, self.live)
        generations = [self.cache.generation(slot) for slot in range(self.cache.num_slots)]
        handle = self.call(self.cache.fork, live.seq, may_raise=OutOfSlots)
        if isinstance(handle, OutOfSlots):
            return
        self.replaced(handle.slot, live.path, generations[handle.slot])
        self.live.append(
            Live(
                handle, live.scope, live.media, live.prompt, live.known, live.tokens[:],
                live.path[:],
            )
        )  # fmt: skip
        self.copies_taken = False
        self.after()

    @precondition(lambda self: self.live)
    @rule(choice=index, forget=st.sampled_from([False, False, False, True]))
    def close(self, choice, forget):
        live = self.pick(choice, self.live)
        self.closed_now(live, self.cache.free if forget else self.cache.close)

    def closed_now(self, live, how):
        slot = live.seq.slot
        how(live.seq)
        self.live.remove(live)
        self.closed.append(live.seq)
        if how == self.cache.free:
            self.held[slot] = self.held[slot][: self.pinned(slot)]
        self.after()

    @precondition(lambda self: not self.cache.num_free)
    @rule(choice=index)
    def full(self, choice):
        cache = self.cache
        for call in (lambda: cache.open([1]), cache.allocate):
            self.must_raise(OutOfSlots, call)
        self.must_raise(OutOfSlots, cache.fork, self.pick(choice, self.live).seq)
        self.closed_now(self.pick(choice, self.live), cache.close)

    @precondition(lambda self: self.cache.num_free > 1)
    @rule(scope=st.sampled_from(SCOPES))
    def allocate(self, scope):
        generations = [self.cache.generation(slot) for slot in range(self.cache.num_slots)]
        handle = self.call(self.cache.allocate, scope, may_raise=OutOfSlots)
        if isinstance(handle, OutOfSlots):
            free = [s for s in range(self.cache.num_slots) if self.cache.is_free(s)]
            assert all(self.pinned(slot) for slot in free)
            return
        assert handle.computed == 0
        self.replaced(handle.slot, [], generations[handle.slot])
        self.live.append(Live(handle, scope, (), [], []))
        self.after()

    @rule(recipe=prompts)
    def find_and_occupy(self, recipe):
        """The low-level way to a prefix: what `open` does in one call."""
        cache = self.cache
        tokens, scope, media = self.prompt(recipe)
        match = cache.find(tokens, scope, media)
        if match is None or media:
            return
        if not cache.is_free(match.slot):
            self.must_raise(SlotError, cache.occupy, match.slot, match.generation)
            return
        self.must_raise(StaleSlot, cache.occupy, match.slot, match.generation + 1)
        held = self.held[match.slot]
        if self.pinned(match.slot) > match.num_tokens or not self.is_text(held, tokens, scope):
            return
        handle = cache.occupy(match.slot, match.generation)
        assert handle.computed == len(held)
        cache.truncate(handle, match.num_tokens)
        path = self.names.path(scope, tokens)[: match.num_tokens]
        self.replaced(match.slot, path, match.generation)
        text = tokens[: match.num_tokens]
        self.live.append(Live(handle, scope, (), [], [], list(text), path))
        self.after()

    def is_text(self, held, tokens, scope):
        path = self.names.path(scope, tokens)
        return common_length(held, path) > 0

    @precondition(lambda self: self.history and len(self.pins) < 3)
    @rule(recipe=prompts)
    def pin(self, recipe):
        tokens, scope, media = self.prompt(recipe)
        path = self.names.path(scope, tokens, media)
        best = max(common_length(held, path) for held in self.held)
        pin = self.cache.pin(tokens, scope, media=media)
        assert pin.num_tokens == best
        if best:
            assert self.held[pin.slot][:best] == path[:best]
            self.pins.append(pin)
        self.after()

    @precondition(lambda self: self.pins)
    @rule(choice=index)
    def unpin(self, choice):
        pin = self.pick(choice, self.pins)
        self.pins.remove(pin)
        pin.close()
        self.must_raise(PinError, pin.close)
        self.after()

    @rule()
    def clear(self):
        self.cache.clear()
        for slot in range(self.cache.num_slots):
            if self.cache.is_free(slot):
                self.held[slot] = self.held[slot][: self.pinned(slot)]
        self.after()

    @precondition(lambda self: self.live)
    @rule(choice=index)
    def misuse(self, choice):
        cache, live = self.cache, self.pick(choice, self.live)
        handle = live.seq
        self.must_raise(SlotError, cache.occupy, handle.slot)
        self.must_raise(SlotError, cache.occupy, cache.num_slots)
        self.must_raise(TruncateError, cache.truncate, handle, handle.computed + 1)
        self.must_raise(CommitError, cache.commit, handle, [0] * (handle.room + 1))
        wrong = [(token + 1) % 3 for token in live.next_tokens(1, [0])]
        if len(live.tokens) < len(live.prompt):
            self.must_raise((CommitError, CopyError), cache.commit, handle, wrong)
        for bad in [self.foreign, None, *self.closed[-1:]]:
            for call in (cache.close, cache.free, cache.fork):
                self.must_raise(SlotError, call, bad)
            self.must_raise(SlotError, cache.commit, bad, [0])
            self.must_raise(SlotError, cache.truncate, bad, 0)
        if cache.contents.copies.waiting.get(handle.slot) and handle.room:
            ids = live.next_tokens(1, [0])
            self.must_raise(CopyError, cache.commit, handle, ids)


@pytest.mark.parametrize("examples", [EXAMPLES, pytest.param(LONG, marks=pytest.mark.long)])
def test_whatever_is_found_in_a_slot_was_computed_there_for_the_same_tokens(examples):
    number = SEED
    run_machine(SlotsMachine, number, examples)
    while steps < STEPS:
        number += 1
        run_machine(SlotsMachine, number, examples)
