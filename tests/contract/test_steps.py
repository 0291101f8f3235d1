"""Decode steps over a batch, and the tables an attention kernel reads."""

import numpy as np
import pytest
from core_help import found, generate, prefill, rejected, run

from quire import errors, ops
from quire.core import CacheManager, LayerGroup, MediaItem

BLOCK = 4


@pytest.fixture
def manager():
    return CacheManager(num_blocks=16, block_size=BLOCK)


def counts(manager):
    return manager.num_free, manager.num_active, manager.num_cached


# -- the decode step -----------------------------------------------------------------------


@pytest.mark.parametrize("as_list", [False, True])
def test_a_step_adds_one_token_to_each_sequence(manager, as_list):
    seqs = [prefill(manager, run(1000 * i, 3 + i)) for i in range(3)]
    batch = seqs if as_list else manager.batch(seqs)
    for step in range(6):
        manager.reserve_step(batch)
        assert manager.take_copies() == []
        manager.commit_step(batch, np.array([7, 8, 9]) + step)
        assert [seq.computed for seq in seqs] == [4 + step, 5 + step, 6 + step]
        ops.check(manager)
    assert seqs[1].tokens.tolist() == [1000, 1001, 1002, 1003, 8, 9, 10, 11, 12, 13]
    assert [seq.published for seq in seqs] == [8, 8, 8]
    assert found(manager, seqs[2].tokens) == 8


def test_a_step_copies_blocks_that_forks_share(manager):
    seq = prefill(manager, run(0, 6))
    seqs = [seq, *(manager.fork(seq) for _ in range(3))]
    batch = manager.batch(seqs)
    manager.reserve_step(batch)
    assert len(manager.take_copies()) == 3
    assert len({int(seq.block_ids()[1]) for seq in seqs}) == 4
    manager.commit_step(batch, [1, 2, 3, 4])


def test_equal_continuations_in_one_step_end_as_one_block(manager):
    seq = prefill(manager, run(0, 7))
    batch = manager.batch([seq, manager.fork(seq), manager.fork(seq)])
    manager.reserve_step(batch)
    manager.take_copies()
    manager.commit_step(batch, [5, 5, 5])
    assert counts(manager) == (14, 2, 0)
    ops.check(manager)


def test_a_batch_lives_on_while_its_sequences_change(manager):
    left, right = prefill(manager, run(0, 6)), prefill(manager, run(1000, 7))
    batch = manager.batch([left, right])
    for turn in range(3):
        manager.reserve_step(batch)
        manager.take_copies()
        manager.commit_step(batch, [70 + turn, 80 + turn])
        ops.truncate(manager, right, 7)
        generate(manager, left, [60])
    assert left.tokens.tolist() == [*range(6), 70, 60, 71, 60, 72, 60]
    assert right.tokens.tolist() == list(range(1000, 1007))
    ops.check(manager)


# -- tables --------------------------------------------------------------------------------


@pytest.mark.parametrize("pad", [0, -1])
def test_tables_hold_the_same_blocks_padded_and_in_a_row(manager, pad):
    seqs = [prefill(manager, run(1000 * i, length)) for i, length in enumerate((9, 4, 1, 6))]
    manager.reserve(seqs[2], 7)
    tables = manager.tables(seqs, pad=pad)
    assert tables.padded.shape == (4, 3)
    assert (tables.padded.dtype, tables.indptr.dtype) == (np.int32, np.int32)
    assert tables.indices.dtype == np.int32
    assert tables.num_blocks.tolist() == [3, 1, 2, 2]
    assert tables.indptr.tolist() == [0, 3, 4, 6, 8]
    assert tables.lengths.tolist() == [9, 4, 8, 6]
    assert tables.last_block_len.tolist() == [1, 4, 4, 2]
    for row, seq in enumerate(seqs):
        ids = seq.block_ids().tolist()
        assert tables.padded[row].tolist() == ids + [pad] * (3 - len(ids))
        assert tables.indices[tables.indptr[row] : tables.indptr[row + 1]].tolist() == ids


def test_tables_of_each_layer_group():
    groups = [LayerGroup("a", 8), LayerGroup("b", 16)]
    manager = CacheManager(block_size=BLOCK, groups=groups)
    seq = prefill(manager, run(0, 9))
    for group in (0, 1):
        padded = manager.tables([seq], group=group).padded
        assert padded.tolist() == [seq.block_ids(group).tolist()]


TABLES_OF_A_TWIN = {
    "tables": lambda manager, twin, ids: manager.tables([twin]).indices.tolist(),
    "blocks_at": lambda manager, twin, ids: ops.blocks_at(manager, [twin], ids).ravel().tolist(),
    "block_ids": lambda manager, twin, ids: twin.block_ids().tolist(),
}


@pytest.mark.parametrize("name", TABLES_OF_A_TWIN)
def test_a_forks_table_is_whole_whichever_side_reads_it_first(manager, name):
    seq = prefill(manager, run(0, 14))
    ids = seq.block_ids().tolist()
    assert len(ids) == 4
    twin = manager.fork(seq)
    assert TABLES_OF_A_TWIN[name](manager, twin, np.arange(4)[None]) == ids
    ops.check(manager)


def test_single_blocks_follow_the_steps_of_a_batch(manager):
    """A block that fills up gives way to an equal one: the table has that one, and the new one behind it."""
    first = prefill(manager, run(0, 3))
    second = prefill(manager, run(0, 3))
    table = manager.tables([first, second]).padded
    assert table[0] != table[1]
    batch = manager.batch([first, second])
    manager.reserve_step(batch)
    manager.commit_step(batch, [3, 3])
    manager.reserve_step(batch)
    both = ops.blocks_at(manager, [first, second], np.array([[0, 1], [0, 1]], np.int32))
    assert both[0, 0] == both[1, 0] == table[0, 0]
    assert len({*both.ravel().tolist()}) == 3
    assert both.tolist() == manager.tables([first, second]).padded.tolist()
    assert ops.blocks_at(manager, [], np.zeros((0, 2), np.int64)).shape == (0, 2)


def test_tables_are_the_callers_own(manager):
    seq = prefill(manager, run(0, 9))
    ids = seq.block_ids().tolist()
    tables = manager.tables([seq])
    tables.padded[:] = 99
    tables.indices[:] = 99
    seq.block_ids()[:] = 99
    assert seq.block_ids().tolist() == ids
    assert manager.tables([seq]).indices.tolist() == ids
    ops.check(manager)


def test_tables_of_no_sequence_are_empty(manager):
    tables = manager.tables([])
    assert (tables.padded.shape[0], tables.indptr.tolist(), tables.indices.size) == (0, [0], 0)


def test_blocks_filled_by_steps_are_counted_as_published(manager):
    seqs = [prefill(manager, run(1000 * i, 3)) for i in range(3)]
    for token in range(5):
        manager.reserve_step(seqs)
        manager.commit_step(seqs, [token, token, token])
    stats = manager.stats
    assert (stats.published_blocks, stats.computed_tokens) == (6, 24)


# -- a batch that lives on ------------------------------------------------------------------


def decode(manager, batch, count):
    for step in range(count):
        manager.reserve_step(batch)
        manager.commit_step(batch, [step] * len(batch))
        ops.check(manager)


def test_steps_use_up_a_reservation_made_before_and_then_go_on():
    manager = CacheManager(64, 4, pool=ops.CheckedPool)
    seq = manager.open([1, 2, 3])
    manager.reserve(seq, 8)
    manager.commit(seq, [1, 2, 3])
    decode(manager, manager.batch([seq]), 20)


def test_another_call_between_the_halves_of_a_step_changes_nothing():
    manager = CacheManager(64, 4, pool=ops.CheckedPool)
    seq, other = prefill(manager, [1, 2, 3, 4]), prefill(manager, [9, 9])
    batch = manager.batch([seq])
    manager.reserve_step(batch)
    manager.close(other)
    manager.commit_step(batch, [5])
    decode(manager, batch, 12)


@pytest.mark.parametrize("num_found", [63, 64, 65, 128])
def test_tables_that_another_request_widens_stay_right(num_found):
    manager = CacheManager(1024, 4, pool=ops.CheckedPool)
    long = list(range(1000, 1000 + 4 * num_found))
    manager.close(prefill(manager, long))
    running = [prefill(manager, [10 * n, 1, 2, n]) for n in range(1, 4)]
    batch = manager.batch(running)
    decode(manager, batch, 4)
    manager.open([*long, 7])
    decode(manager, batch, 9)


def test_tables_that_steps_widen_again_and_again_stay_right():
    manager = CacheManager(2048, 1, pool=ops.CheckedPool)
    running = [prefill(manager, [n]) for n in range(3)]
    batch = manager.batch(running)
    for step in range(300):
        manager.reserve_step(batch)
        manager.commit_step(batch, [step] * 3)
    ops.check(manager)


def test_a_batch_of_another_manager_is_refused():
    one, two = CacheManager(64, 4), CacheManager(64, 4)
    prefill(one, [1, 2, 3, 4])
    batch = two.batch([prefill(two, [1, 2, 3, 4])])
    with rejected(one, errors.SequenceError, "another manager"):
        one.reserve_step(batch)
    with rejected(one, errors.SequenceError, "another manager"):
        one.commit_step(batch, [1])


def test_a_step_never_computes_tokens_of_the_prompt():
    manager = CacheManager(64, 4)
    seq = prefill(manager, [1, 2, 7, 7, 7, 7, 7, 7, 3], media=[MediaItem(b"a" * 32, 2, 6)])
    batch = manager.batch([seq])
    ops.truncate(manager, seq, 2)
    with rejected(manager, errors.SequenceError, "7 tokens of its prompt"):
        manager.reserve_step(batch)


def test_a_step_never_computes_what_a_resumed_sequence_had():
    manager = CacheManager(64, 4)
    seq = prefill(manager, [1, 2, 3, 4])
    batch = manager.batch([seq])
    decode(manager, batch, 5)
    manager.suspend(seq)
    ops.clear(manager)
    assert manager.resume(seq) == 9
    with rejected(manager, errors.SequenceError, "before a suspend"):
        manager.reserve_step(batch)


def test_an_idle_shared_block_leaves_the_steps_of_others_alone():
    manager = CacheManager(64, 4, pool=ops.CheckedPool)
    manager.fork(prefill(manager, [5] * 5))
    batch = manager.batch([prefill(manager, [1, 2, 3])])
    decode(manager, batch, 9)
    assert not batch.uneven


def test_forks_in_a_batch_copy_their_shared_block_once():
    manager = CacheManager(64, 4, pool=ops.CheckedPool)
    seq = prefill(manager, [1, 2, 3])
    twins = [seq, manager.fork(seq), manager.fork(seq)]
    batch = manager.batch(twins)
    manager.reserve_step(batch)
    copies = manager.take_copies()
    assert len(copies) == 2
    assert {copy.num_tokens for copy in copies} == {3}
    manager.commit_step(batch, np.array([7, 8, 9], np.int32))
    decode(manager, batch, 9)
    assert [twin.tokens[3] for twin in twins] == [7, 8, 9]


def test_a_sequence_that_is_truncated_to_what_it_has_computed_again_decodes():
    manager = CacheManager(8, 2)
    seq = prefill(manager, run(0, 5))
    generate(manager, seq, [6, 7])
    manager.suspend(seq)
    ops.invalidate(manager)
    manager.resume(seq)
    manager.reserve(seq, 5)
    manager.commit(seq, run(0, 5))
    ops.truncate(manager, seq, 5)
    manager.reserve_step([seq])
    manager.commit_step([seq], [9])
    assert seq.tokens.tolist() == [*run(0, 5), 9]


@pytest.mark.parametrize(
    "step", [lambda m, x: m.reserve_step(x), lambda m, x: m.commit_step(x, [1])]
)
def test_a_refused_batch_changes_and_bars_nothing(step):
    def interrupted():
        raise KeyboardInterrupt
        yield

    manager = CacheManager(8, 2)
    prefill(manager, run(0, 3))
    with rejected(manager, errors.SequenceError, "a batch is made of sequences"):
        step(manager, memoryview(np.zeros((2, 2), np.int32)))
    with pytest.raises(KeyboardInterrupt):
        step(manager, interrupted())
    assert found(manager, run(0, 3)) == 2
