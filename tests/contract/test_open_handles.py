"""Handles that give block ids out: no call moves the blocks while one is open."""

from functools import partial

import pytest
from core_help import prefill, rejected, run, serve
from hybrid_help import conserved, make

from quire import ops
from quire.core import FullAttention
from quire.errors import CopyError
from quire.exchange import hold, restore
from quire.groups import Recurrent, SlidingWindow

FULL, SLIDING, STATE = FullAttention(), SlidingWindow(8), Recurrent()


def hybrid():
    manager = make(("full", 24, FULL), ("sliding", 24, SLIDING), ("state", 6, STATE))
    first = prefill(manager, run(5000, 16))
    serve(manager, run(6000, 12))
    manager.close(first)
    manager.take_copies()
    ops.invalidate(manager, run(5000, 16))
    return manager


MOVES = [
    ("resize", {"full": 20}),
    ("resize", {"sliding": 20}),
    ("resize", {"state": 5, "sliding": 30}),
]


@pytest.mark.parametrize(("name", "argument"), MOVES)
@pytest.mark.parametrize("commit", [True, False])
def test_nothing_is_moved_while_a_restore_is_open(name, argument, commit):
    manager = hybrid()
    move = partial(getattr(ops, name), manager)
    with restore(manager, run(0, 16), 4, {0: [0, 1, 2, 3], 1: [2, 3], 2: [3]}) as restored:
        with rejected(manager, CopyError, "1 restores or holds are open"):
            move(argument)
        if commit:
            restored.commit()
            with rejected(manager, CopyError, "open"):
                move(argument)
    move(argument)
    manager.take_copies()
    if commit:
        seq = manager.open([*run(0, 16), 1])
        assert seq.num_cached == 16
        assert conserved(manager)


@pytest.mark.parametrize(("name", "argument"), MOVES)
def test_nothing_is_moved_while_a_hold_is_open_whatever_becomes_of_its_sequence(name, argument):
    manager = hybrid()
    move = partial(getattr(ops, name), manager)
    seq = prefill(manager, run(0, 16))
    manager.take_copies()
    releases = [hold(manager, seq), hold(manager, seq)]
    manager.close(seq)
    for left in (2, 1):
        with rejected(manager, CopyError, f"{left} restores or holds are open"):
            move(argument)
        releases.pop()()
    move(argument)
    assert conserved(manager)


def test_a_pool_may_grow_while_a_restore_is_open():
    manager = hybrid()
    with restore(manager, run(0, 16), 4, {0: [0, 1, 2, 3], 1: [2, 3], 2: [3]}) as restored:
        given = {group: list(ids) for group, ids in restored.blocks.items()}
        ops.resize(manager, {"full": 40, "state": 9})
        assert restored.blocks == given
        restored.commit()
    assert manager.probe([*run(0, 16), 1]).num_blocks == 4
    assert conserved(manager)
