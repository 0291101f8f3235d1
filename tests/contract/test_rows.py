"""The arrays behind block tables: what they take follows the sequences that are open now."""

import numpy as np
import pytest
from core_help import prefill, run
from hybrid_help import conserved, make

from quire import ops
from quire.core import CacheManager, FullAttention
from quire.core.rows import MIN_ARENA, MIN_EXTENT
from quire.groups import Recurrent, SlidingWindow
from quire.ops.checks import check_rows

FULL, SLIDING, STATE = FullAttention(), SlidingWindow(8), Recurrent()


def num_entries(manager):
    """Entries of all arrays that hold block tables."""
    return sum(len(flat) for flat in manager.kernel.rows.flat)


def opened(manager, num_tokens, start=0):
    """Return an open sequence with room for so many tokens, and the table that it must keep."""
    seq = manager.open(run(start, num_tokens))
    manager.reserve(seq, num_tokens)
    return seq, seq.block_ids().tolist()


def test_rows_of_short_prompts_stay_small_after_a_long_prompt():
    manager = CacheManager(num_blocks=70_000, block_size=16)
    manager.close(opened(manager, 1_000_000)[0])
    short = [opened(manager, 20, 2_000_000 + 100 * n)[0] for n in range(1_100)]
    assert num_entries(manager) <= 4 * 1_100 * MIN_EXTENT
    for seq in short:
        manager.close(seq)
    assert num_entries(manager) == MIN_ARENA
    ops.check(manager)


def test_a_long_prompt_beside_many_short_ones_takes_one_long_row():
    manager = CacheManager(num_blocks=140_000, block_size=1)
    short = [opened(manager, 20, 2_000_000 + 100 * n) for n in range(300)]
    long, table = opened(manager, 100_000)
    assert num_entries(manager) <= 4 * (2**17 + 300 * MIN_EXTENT)
    assert long.block_ids().tolist() == table
    assert all(seq.block_ids().tolist() == ids for seq, ids in short)
    manager.close(long)
    assert num_entries(manager) == MIN_ARENA
    assert all(seq.block_ids().tolist() == ids for seq, ids in short)
    ops.check(manager)


@pytest.mark.ci
def test_forks_of_a_long_sequence_take_no_long_rows_before_their_tables_are_asked_for():
    manager = CacheManager(num_blocks=140_000, block_size=1)
    trunk = prefill(manager, run(0, 100_000))
    before = num_entries(manager)
    twins = [manager.fork(trunk) for _ in range(64)]
    for n, twin in enumerate(twins):
        manager.reserve(twin, 3)
        manager.commit(twin, [n, 1, 2])
    assert num_entries(manager) == before
    table = trunk.block_ids().tolist()
    assert all(twin.block_ids().tolist()[:100_000] == table for twin in twins[:3])
    assert len({tuple(twin.block_ids()[100_000:].tolist()) for twin in twins}) == 64
    ops.check(manager)


@pytest.mark.cases(2)
@pytest.mark.parametrize("sizes", [(63, 64, 65), (127, 128, 129), (64, 4_096, 64), (1, 65_537, 1)])
def test_tables_stay_right_while_rows_move_and_the_arena_grows_and_shrinks(sizes):
    manager = make(("full", 270_000, FULL), ("sliding", 270_000, SLIDING), ("state", 99, STATE))
    running = []
    for turn, num_blocks in enumerate(3 * sizes):
        seq = manager.open(run(10_000_000 * turn, 3))
        manager.reserve(seq, 2)
        expected = seq.block_ids().tolist()
        for total in (num_blocks // 2, num_blocks):
            manager.reserve(seq, max(4 * total, 1))
            assert seq.block_ids().tolist()[: len(expected)] == expected
            expected = seq.block_ids().tolist()
        running.append((seq, expected, seq.block_ids(1).tolist(), seq.block_ids(2).tolist()))
        if turn % 3 == 2:
            manager.close(running.pop(turn % len(running))[0])
        for one, full, sliding, state in running:
            tables = [one.block_ids(group).tolist() for group in range(3)]
            assert tables == [full, sliding, state]
        check_rows(manager.kernel.rows)
    assert conserved(manager)


def test_a_batch_goes_on_while_rows_move_under_it():
    manager = CacheManager(num_blocks=300_000, block_size=1)
    running = [prefill(manager, run(1000 * n, 20 + n)) for n in range(5)]
    batch = manager.batch(running)
    tokens = [seq.tokens.tolist() for seq in running]
    for step in range(200):
        manager.reserve_step(batch)
        manager.commit_step(batch, [step] * 5)
        if step % 40 == 7:
            other = opened(manager, 70_000, 1_000_000 * (step + 1))[0]
        if step % 40 == 23:
            manager.close(other)
    for seq, before in zip(running, tokens, strict=True):
        assert seq.tokens.tolist() == before + list(range(200))
        assert len(np.unique(seq.block_ids())) == len(before) + 200
    ops.check(manager)
