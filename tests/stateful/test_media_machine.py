"""Requests and restores with media, of which fewer are remembered than are in use.

The pool is so large that nothing is evicted but by name: whatever was committed is found.
"""

import sys
from unittest import mock

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from running import run_machine

from quire.core import CacheManager, MediaItem
from quire.exchange import residency, restore

SEED, EXAMPLES = 20260101, 40

index = st.integers(0, 9)
pieces = st.lists(st.integers(0, 5) | st.tuples(st.integers(0, 7), st.integers(1, 5)), max_size=6)


def read(recipe):
    """Return tokens and media of a recipe: runs of three tokens, and pictures."""
    tokens, media = [0], []
    for piece in recipe:
        if isinstance(piece, tuple):
            number, length = piece
            media.append(MediaItem(bytes([number]) * 32, len(tokens), length))
            tokens += [9] * length
        else:
            tokens += [piece] * 3
    return tokens, tuple(media)


class MediaMachine(RuleBasedStateMachine):
    """Every rule ends with a recount, and with a look for all that was committed."""

    @initialize(block_size=st.sampled_from([1, 2, 4]), events=st.booleans())
    def start(self, block_size, events):
        self.patch = mock.patch("quire.core.media.MAX_MEDIA", 2)
        self.patch.start()
        self.manager = CacheManager(4096, block_size, events=events, sub_block=False)
        self.size = block_size
        self.live, self.suspended, self.restores, self.stored = [], [], [], []

    def teardown(self):
        try:
            if hasattr(self, "manager") and sys.exc_info()[0] is None:
                for seq, *_ in self.live + self.suspended:
                    self.manager.close(seq)
                for restored, *_ in self.restores:
                    restored.__exit__(None, None, None)
                self.manager.clear()
                assert not self.manager.kernel.tree.media.uses
                self.manager.check()
        finally:
            if hasattr(self, "patch"):
                self.patch.stop()

    def after(self):
        self.manager.check()
        for tokens, media in self.stored:
            wanted = len(tokens) // self.size
            hit = self.manager.probe([*tokens, 8], media=media)
            assert hit.num_blocks == wanted, "what was committed is not found"

    def compute(self, recipe):
        tokens, media = read(recipe)
        seq = self.manager.open([*tokens, 7], media=media)
        rest = len(tokens) + 1 - seq.num_cached
        self.manager.reserve(seq, rest)
        self.manager.take_copies()
        self.manager.commit(seq, [*tokens, 7][-rest:])
        self.stored.append((tokens, media))
        return seq, tokens, media

    @rule(recipe=pieces, stays=st.booleans(), uncomputed=st.booleans())
    def request(self, recipe, stays, uncomputed):
        if uncomputed:
            tokens, media = read(recipe)
            self.live.append((self.manager.open(tokens, media=media), tokens, media))
        else:
            self.live.append(self.compute(recipe))
        if not stays:
            self.manager.close(self.live.pop()[0])
        self.after()

    @precondition(lambda self: self.live)
    @rule(choice=index, what=st.sampled_from(["close", "fork", "suspend", "decode"]))
    def change(self, choice, what):
        entry = self.live[choice % len(self.live)]
        seq = entry[0]
        if what == "fork":
            self.live.append((self.manager.fork(seq), *entry[1:]))
        elif what == "decode" and not seq.known:
            for token in range(5):
                self.manager.reserve_step([seq])
                self.manager.take_copies()
                self.manager.commit_step([seq], [token])
        elif what in ("close", "suspend"):
            self.live.remove(entry)
            if what == "suspend":
                self.manager.suspend(seq)
                self.suspended.append(entry)
            else:
                self.manager.close(seq)
        self.after()

    @precondition(lambda self: self.suspended)
    @rule(choice=index)
    def resume(self, choice):
        entry = self.suspended.pop(choice % len(self.suspended))
        self.manager.resume(entry[0])
        self.live.append(entry)
        self.after()

    @rule(recipe=pieces)
    def begin_restore(self, recipe):
        tokens, media = read(recipe)
        here = residency(self.manager, [*tokens, 8], media=media).accepted
        end = len(tokens) // self.size
        if end > here:
            brought = {0: list(range(here, end))}
            restored = restore(self.manager, tokens, end, brought, media=media)
            self.restores.append((restored.__enter__(), tokens, media))
        self.after()

    @precondition(lambda self: self.restores)
    @rule(choice=index, commit=st.booleans())
    def end_restore(self, choice, commit):
        restored, tokens, media = self.restores.pop(choice % len(self.restores))
        if commit:
            restored.commit()
            self.stored.append((tokens, media))
        restored.__exit__(None, None, None)
        self.after()

    @rule(whole=st.booleans())
    def evict(self, whole):
        if whole and not (self.live or self.restores):
            self.manager.clear()
            self.stored.clear()
        self.after()


@pytest.mark.slow
def test_media_that_anything_needs_are_never_forgotten():
    run_machine(MediaMachine, SEED, EXAMPLES, steps_per_example=30)
