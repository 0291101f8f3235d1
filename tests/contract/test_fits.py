"""`fits`: whether a request would get its blocks, and calls that are refused without a trace.

That it says what `open`, `reserve` and `resume` then do is a rule of both state machines.
"""

import numpy as np
import pytest
from core_help import prefill, rejected, run, serve, state
from hybrid_help import BLOCK

from quire import errors, ops
from quire.core import CacheManager, Hint, MediaItem, Scope, Watcher
from quire.foresight import LiveCurve
from watching import watcher, watchers


class Calls(Watcher):
    """An observer that notes that it was told of something."""

    def __init__(self):
        self.told = []

    def opened(self, seq, key, missed):
        self.told.append((seq.number, bytes(key)))

    def closed(self, seq):
        self.told.append(seq.number)


@pytest.fixture
def manager():
    return CacheManager(num_blocks=8, block_size=BLOCK, sub_block=False)


def test_fits_counts_cached_blocks_as_there(manager):
    serve(manager, run(0, 20))
    held = prefill(manager, run(1000, 12))
    assert (manager.num_free, manager.num_cached, manager.num_active) == (0, 5, 3)
    fit = ops.fits(manager, run(0, 21))
    assert (bool(fit), fit.num_cached, fit.needed, fit.room) == (False, 20, (1,), (0,))
    assert ops.fits(manager, run(0, 20), 4)
    assert not ops.fits(manager, run(0, 20), 5)
    manager.close(held)
    assert ops.fits(manager, run(0, 21))


def test_fits_counts_evictable_blocks_as_room_and_pinned_ones_not(manager):
    serve(manager, run(0, 16))
    assert ops.fits(manager, run(1000, 32))
    with ops.pin(manager, run(0, 16)):
        assert ops.fits(manager, run(1000, 16))
        assert not ops.fits(manager, run(1000, 17))
        assert ops.fits(manager, run(0, 32))
    assert ops.fits(manager, run(1000, 32))


def test_a_pin_counts_until_its_time_has_run_out():
    now = [0.0]
    manager = CacheManager(num_blocks=8, block_size=BLOCK, clock=lambda: now[0])
    serve(manager, run(0, 16))
    ops.pin(manager, run(0, 16), ttl_s=5)
    assert not ops.fits(manager, run(1000, 32))
    now[0] = 6.0
    before = state(manager)
    assert ops.fits(manager, run(1000, 32))
    assert state(manager) == before
    assert prefill(manager, run(1000, 32)).computed == 32


def test_a_prompt_that_never_fits_is_told_from_one_that_waits(manager):
    never = ops.fits(manager, run(0, 33))
    assert (bool(never), never.needed, never.room) == (False, (9,), (8,))
    held = prefill(manager, run(1000, 4))
    later = ops.fits(manager, run(0, 32))
    assert (bool(later), later.needed, later.room) == (False, (8,), (7,))
    manager.close(held)
    assert ops.fits(manager, run(0, 32))


def test_media_and_scopes_are_read_as_open_reads_them(manager):
    image = MediaItem(b"i" * 32, 1, 6)
    serve(manager, run(0, 16), Scope(salt="x"), media=[image])
    prompt = run(0, 17)
    assert ops.fits(manager, prompt, scope=Scope(salt="x"), media=[image]).num_cached == 16
    assert ops.fits(manager, prompt, scope=Scope(salt="x")).num_cached == 0
    assert ops.fits(manager, prompt, media=[image]).num_cached == 0


@pytest.mark.parametrize("num_new", [0, -1, 1.5, "3", True])
def test_the_room_asked_for_is_a_number_of_tokens(manager, num_new):
    with rejected(manager, errors.ConfigError, num_new):
        ops.fits(manager, run(0, 8), num_new)


def test_the_room_asked_for_may_be_a_number_of_numpys(manager):
    assert ops.fits(manager, run(0, 8), np.int32(3)) == ops.fits(manager, run(0, 8), 3)


def test_a_sequence_that_is_closed_or_foreign_fits_nowhere(manager):
    closed = prefill(manager, run(0, 6))
    manager.close(closed)
    foreign = prefill(CacheManager(num_blocks=8, block_size=BLOCK), run(0, 6))
    for seq in (closed, foreign):
        with rejected(manager, errors.SequenceError):
            ops.fits(manager, seq, 1)


def test_an_open_that_is_refused_leaves_no_trace():
    observer = Calls()
    manager = CacheManager(
        8, BLOCK, watchers=watchers(observer=observer, curve=True, events=True), policy="learned"
    )
    serve(manager, run(0, 16), hint=Hint("session", session_id="a"))
    serve(manager, run(1000, 12))
    image = MediaItem(b"i" * 32, 1, 6)

    def noted():
        order = [id(node) for node in manager.kernel.tree.order.order()]
        return (
            list(observer.told),
            list(watcher(manager, LiveCurve)._notes),
            order,
            len(manager.kernel.owners.sessions),
        )

    before = noted()
    for options in ({}, {"media": [image]}, {"scope": Scope(salt="new")}):
        prompt = [*run(0, 16), *run(5000, 20)]
        hint = Hint("session", session_id="b")
        with rejected(manager, errors.OutOfBlocks):
            manager.open(prompt, **options, hint=hint, priority=3)
        assert noted() == before
        assert not ops.fits(manager, prompt, **options)
        assert noted() == before
    assert len(manager.kernel.tree.media) == 0
