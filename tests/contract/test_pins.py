"""Pins: what they keep, what they do not, and the blocks that they alone keep."""

import pytest
from core_help import prefill, run, serve
from hybrid_help import FULL, make

from clocks import Clock
from quire import ops
from quire.core import CacheManager
from quire.groups import Recurrent, SlidingWindow


def test_a_pin_says_how_much_of_its_prompt_it_keeps_and_how_much_not():
    manager = CacheManager(16, 4)
    serve(manager, run(0, 9))
    pin = ops.pin(manager, run(0, 14))
    assert (pin.num_tokens, pin.num_missing) == (8, 6)
    assert pin.counts == {"num_tokens": 8, "missing_tokens": 6}
    assert repr(pin) == "<Pin 8 of 14 tokens, open>"
    nothing = ops.pin(manager, run(1000, 14))
    assert (nothing.num_tokens, nothing.num_missing) == (0, 14)


def test_blocks_that_pins_alone_keep_are_counted_apart_from_those_that_requests_use():
    clock = Clock()
    manager = CacheManager(32, 4, clock=clock)
    for start in (0, 1000, 2000):
        serve(manager, run(start, 16))
    ops.pin(manager, run(0, 16))
    ops.pin(manager, run(0, 8))
    ops.pin(manager, run(1000, 16), ttl_s=5)
    seq = prefill(manager, [*run(0, 8), 7])
    assert ops.block_states(manager) == [{"free": 19, "active": 3, "pinned": 6, "cached": 4}]
    clock.now += 6
    assert ops.block_states(manager) == [{"free": 19, "active": 3, "pinned": 2, "cached": 8}]
    manager.close(seq)
    assert ops.block_states(manager) == [{"free": 20, "active": 0, "pinned": 4, "cached": 8}]


@pytest.mark.parametrize("kind", [SlidingWindow(8), Recurrent()])
def test_pinned_blocks_are_counted_in_groups_of_every_kind(kind):
    manager = make(("full", 40, FULL), ("sparse", 20, kind), sub_block=False)
    for start in (0, 1000):
        serve(manager, run(start, 16))
    before = ops.block_states(manager)
    pin = ops.pin(manager, run(0, 16))
    for pool, states in zip(manager.pools, ops.block_states(manager), strict=True):
        assert sum(states.values()) == pool.num_blocks
        assert states["active"] == 0
        assert states["pinned"] == pool.num_active
    assert states["pinned"] or isinstance(kind, Recurrent)  # which has kept no snapshot here
    pin.close()
    assert ops.block_states(manager) == before


@pytest.mark.parametrize("is_counted", [False, True])
def test_admission_by_hand_lets_a_pin_go_whose_time_is_over(is_counted):
    clock = Clock()
    manager = CacheManager(16, 4, clock=clock, sub_block=False)
    serve(manager, run(0, 16))
    serve(manager, run(1000, 8))
    ops.pin(manager, run(1000, 8), ttl_s=5)
    seq = manager.open(run(0, 17))
    if is_counted:
        ops.admit(manager, seq)
    assert manager.num_active == 6
    clock.now += 6
    ops.admit(manager, seq)
    assert manager.num_active == 4
