"""Pools that change size: blocks move, and tables, hits and contents stay right."""

import pytest
from core_help import found, rejected, run, serve
from hybrid_help import BLOCK, Ledger, conserved, counts, make

from quire import errors, ops
from quire.core import CacheManager, FullAttention
from quire.groups import Recurrent, SlidingWindow

FULL = FullAttention()
KINDS = (FULL, SlidingWindow(6, interval=8), Recurrent(interval=8))


@pytest.fixture
def manager():
    return CacheManager(num_blocks=32, block_size=BLOCK)


def hybrid(num_full=32, num_sliding=32, num_states=24):
    """One group of each kind, and its memory."""
    manager = make(
        ("full", num_full, KINDS[0]),
        ("sliding", num_sliding, KINDS[1]),
        ("states", num_states, KINDS[2]),
    )
    return manager, Ledger(manager)


def ids_of(seqs, group=0):
    return {block for seq in seqs for block in seq.block_ids(group).tolist() if block >= 0}


def scattered(ledger):
    """Four running sequences of six; the two closed ones between them are evicted."""
    manager = ledger.manager
    seqs = [ledger.prefill(run(1000 * i, 14)) for i in range(6)]
    for seq in seqs[::3]:
        manager.close(seq)
    for start in (0, 3000):
        ops.invalidate(manager, run(start, 4))
    ops.check(manager)
    return [seq for i, seq in enumerate(seqs) if i % 3]


def test_a_running_request_gets_room_after_its_pool_grew():
    manager, ledger = hybrid(num_full=4)
    seq = ledger.prefill(run(0, 14))
    with rejected(manager, errors.OutOfBlocks):
        manager.reserve(seq, 10)
    ops.resize(manager, {"full": 8})
    assert manager.pools[0].num_blocks == 8
    assert counts(manager, 0)[0] == 4
    ledger.generate(seq, list(range(10)))
    ledger.check(seq)
    assert conserved(manager)


def test_a_prompt_that_only_the_grown_pool_holds_is_accepted():
    manager = CacheManager(num_blocks=4, block_size=BLOCK)
    with rejected(manager, errors.OutOfBlocks):
        manager.open(run(0, 30))
    ops.resize(manager, {"full": 8})
    serve(manager, run(0, 30))
    ops.resize(manager, {"full": 4})
    with rejected(manager, errors.OutOfBlocks):
        manager.open(run(0, 30))


def test_a_pool_shrinks_to_what_is_active(manager):
    ledger = Ledger(manager)
    seqs = scattered(ledger)
    ops.resize(manager, {"full": 16})
    ledger.copy()
    assert ids_of(seqs) == set(range(16))
    assert counts(manager, 0) == (0, 16, 0)
    for seq in seqs:
        ledger.check(seq)
    assert conserved(manager)


@pytest.mark.parametrize("group", [0, 1, 2])
def test_a_pool_that_shrinks_to_what_is_held_moves_its_own_blocks_alone(group):
    manager, ledger = hybrid()
    seqs = scattered(ledger)
    before = [[seq.block_ids(g).tolist() for seq in seqs] for g in range(3)]
    pool = manager.pools[group]
    num_held = pool.num_active + pool.num_cached
    ops.resize(manager, {manager.settings.groups[group].name: num_held})
    copies = ledger.copy()
    assert copies
    assert {copy.group for copy in copies} == {group}
    assert max(ids_of(seqs, group)) < num_held
    for other in {0, 1, 2} - {group}:
        assert [seq.block_ids(other).tolist() for seq in seqs] == before[other]
    for seq in seqs:
        ledger.check(seq)
    ops.resize(manager, {spec.name: 40 for spec in manager.settings.groups})
    for seq in seqs:
        ledger.generate(seq, [1, 2, 3])
        ledger.check(seq)
    assert conserved(manager)


def test_blocks_move_only_when_no_copy_waits(manager):
    ledger = Ledger(manager)
    seqs = scattered(ledger)
    twin = manager.fork(seqs[0])
    manager.reserve(twin, 1)
    reader = manager.open([*run(1000, 10).tolist(), 777])
    assert reader.num_cached == 10
    with rejected(manager, errors.CopyError, "take_copies"):
        ops.resize(manager, {"full": 20})
    ledger.copy()
    ops.resize(manager, {"full": 20})
    assert ledger.copy()
    for seq in (*seqs, reader, twin):
        ledger.check(seq)
    ledger.forward(twin, [5])
    manager.commit(twin, [5])
    ledger.check(twin)
    assert conserved(manager)


def test_a_shrink_evicts_cached_blocks_and_no_more_than_it_must(manager):
    for start in (0, 1000, 2000):
        serve(manager, run(start, 16))
    ops.resize(manager, {"full": 10})
    manager.take_copies()
    assert counts(manager, 0) == (0, 0, 10)
    assert [found(manager, run(start, 16)) for start in (0, 1000, 2000)] == [8, 16, 16]


def test_a_shrink_below_what_is_active_is_refused(manager):
    seqs = scattered(Ledger(manager))
    with rejected(manager, errors.OutOfBlocks):
        ops.resize(manager, {"full": 15})
    assert len(ids_of(seqs)) == 16


def test_resize_changes_every_named_group_or_none():
    manager, ledger = hybrid()
    seqs = scattered(ledger)
    with rejected(manager, errors.OutOfBlocks):
        ops.resize(manager, {"full": 64, "sliding": 2})
    with rejected(manager, errors.OutOfBlocks):
        ops.resize(manager, {"sliding": 30, "full": 15})
    ops.resize(manager, {"full": 20, "sliding": 40, "states": 12})
    ledger.copy()
    assert [pool.num_blocks for pool in manager.pools] == [20, 40, 12]
    for seq in seqs:
        ledger.check(seq)
        assert max(seq.block_ids(0)) < 20
        assert max(seq.block_ids(2)) < 12
    assert conserved(manager)


@pytest.mark.parametrize("size", [0, -1, 1.5, "8", None, True])
def test_a_size_is_a_positive_integer(manager, size):
    with rejected(manager, errors.ConfigError, size):
        ops.resize(manager, {"full": size})


@pytest.mark.parametrize("sizes", [{"fulll": 8}, {0: 8}, {"full": 40, "other": 8}])
def test_only_groups_that_are_there_are_resized(manager, sizes):
    with rejected(manager, errors.ConfigError):
        ops.resize(manager, sizes)


@pytest.mark.parametrize("sizes", [None, 8, "full", [8]])
def test_resize_refuses_sizes_that_are_no_mapping(manager, sizes):
    with rejected(manager, errors.ConfigError):
        ops.resize(manager, sizes)


def test_a_pinned_prefix_stays_when_the_pool_shrinks():
    manager = CacheManager(num_blocks=32, block_size=BLOCK, pin_budget=1.0)
    for start in (0, 1000, 2000):
        serve(manager, run(start, 16))
    with ops.pin(manager, run(0, 16)):
        ops.resize(manager, {"full": 5})
        manager.take_copies()
        assert found(manager, run(0, 16)) == 16
        with rejected(manager, errors.OutOfBlocks):
            ops.resize(manager, {"full": 3})


def test_a_shrink_leaves_pins_within_their_budget(manager):
    serve(manager, run(0, 16))
    with ops.pin(manager, run(0, 16)):
        with rejected(manager, errors.PinBudgetExceeded, 4, 2):
            ops.resize(manager, {"full": 5})
        ops.resize(manager, {"full": 8})
