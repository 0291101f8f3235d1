"""Calls at the wrong time: the right error, a message that names the value, and a state that did not change."""

import pytest
from core_help import prefill, rejected, run, serve, state

from quire import errors
from quire.core import CacheManager


@pytest.fixture
def manager():
    """16 blocks of 4, with an open, a cached and a closed sequence in it."""
    manager = CacheManager(num_blocks=16, block_size=4)
    serve(manager, run(1000, 8))
    manager.open(run(1000, 8))
    return manager


# -- sequences -----------------------------------------------------------------------------

OPERATIONS = {
    "reserve": lambda m, seq: m.reserve(seq, 1),
    "commit": lambda m, seq: m.commit(seq, [1]),
    "truncate": lambda m, seq: m.truncate(seq, 0),
    "fork": lambda m, seq: m.fork(seq),
    "suspend": lambda m, seq: m.suspend(seq),
    "batch": lambda m, seq: m.batch([seq]),
    "reserve_step": lambda m, seq: m.reserve_step([seq]),
    "commit_step": lambda m, seq: m.commit_step([seq], [1]),
    "tables": lambda m, seq: m.tables([seq]),
}
ALWAYS_BAD = {**OPERATIONS, "resume": lambda m, s: m.resume(s), "close": lambda m, s: m.close(s)}


@pytest.mark.parametrize("name", ALWAYS_BAD)
def test_a_closed_sequence_is_refused(manager, name):
    seq = prefill(manager, run(5000, 6))
    manager.close(seq)
    with rejected(manager, errors.SequenceError, "closed"):
        ALWAYS_BAD[name](manager, seq)


@pytest.mark.parametrize("name", ALWAYS_BAD)
def test_a_sequence_of_another_manager_is_refused(manager, name):
    other = CacheManager(num_blocks=16, block_size=4)
    foreign = prefill(other, run(5000, 6))
    before = state(other)
    with rejected(manager, errors.SequenceError):
        ALWAYS_BAD[name](manager, foreign)
    assert state(other) == before


@pytest.mark.parametrize("name", ALWAYS_BAD)
@pytest.mark.parametrize("thing", [None, 3, "seq"])
def test_what_is_no_sequence_is_refused(manager, name, thing):
    with rejected(manager, errors.SequenceError):
        ALWAYS_BAD[name](manager, thing)


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_suspended_sequence_can_only_be_resumed_or_closed(manager, name):
    seq = prefill(manager, run(5000, 6))
    manager.suspend(seq)
    with rejected(manager, errors.SequenceError, "suspended"):
        OPERATIONS[name](manager, seq)


def test_an_open_sequence_cannot_be_resumed(manager):
    seq = prefill(manager, run(5000, 6))
    with rejected(manager, errors.SequenceError):
        manager.resume(seq)


def test_a_batch_cannot_name_a_sequence_twice(manager):
    seq = prefill(manager, run(5000, 6))
    with rejected(manager, errors.SequenceError):
        manager.batch([seq, seq])


def test_a_batch_with_a_sequence_closed_meanwhile_is_refused(manager):
    left, right = prefill(manager, run(5000, 6)), prefill(manager, run(6000, 6))
    batch = manager.batch([left, right])
    manager.close(right)
    with rejected(manager, errors.SequenceError, "closed"):
        manager.reserve_step(batch)


# -- reserve and commit --------------------------------------------------------------------


@pytest.mark.parametrize("num_tokens", [-1, 1.5, "3", None])
def test_a_reservation_must_be_a_number_of_tokens(manager, num_tokens):
    seq = prefill(manager, run(5000, 6))
    with rejected(manager, errors.QuireError, num_tokens):
        manager.reserve(seq, num_tokens)


def test_a_reservation_beyond_the_pool_says_what_there_is(manager):
    seq = prefill(manager, run(5000, 6))
    free, cached, active = manager.num_free, manager.num_cached, manager.num_active
    with rejected(manager, errors.OutOfBlocks, "free", free, "cached", cached, active) as caught:
        manager.reserve(seq, 4 * 16)
    error = caught.value
    assert (error.free, error.cached, error.active) == (free, cached, active)
    assert error.needed > free + cached


def test_a_step_beyond_the_pool_reserves_for_nobody():
    manager = CacheManager(num_blocks=4, block_size=4)
    seqs = [prefill(manager, run(1000 * i, 4)) for i in range(3)]
    with rejected(manager, errors.OutOfBlocks):
        manager.reserve_step(manager.batch(seqs))
    with rejected(manager, errors.OutOfBlocks):
        manager.reserve_step(seqs)
    assert [seq.capacity for seq in seqs] == [4, 4, 4]


def test_a_pool_smaller_than_the_prompt_is_refused_at_open():
    manager = CacheManager(num_blocks=2, block_size=4)
    with rejected(manager, errors.OutOfBlocks) as caught:
        manager.open(run(0, 9))
    assert caught.value.needed == 3
    manager.close(prefill(manager, run(0, 8)))


@pytest.mark.parametrize("reserved", [0, 1, 2])
def test_more_cannot_be_committed_than_reserved(manager, reserved):
    seq = prefill(manager, run(5000, 6))
    if reserved:
        manager.reserve(seq, reserved)
    with rejected(manager, errors.CommitError, reserved + 1):
        manager.commit(seq, [7] * (reserved + 1))


def test_a_step_without_a_reservation_is_refused(manager):
    batch = manager.batch([prefill(manager, run(5000, 6)), prefill(manager, run(6000, 6))])
    with rejected(manager, errors.CommitError):
        manager.commit_step(batch, [1, 2])


def test_tokens_that_contradict_the_prompt_are_refused(manager):
    seq = manager.open(run(5000, 6))
    manager.reserve(seq, 6)
    with rejected(manager, errors.CommitError, 77):
        manager.commit(seq, [5000, 5001, 77, 5003, 5004, 5005])
    manager.commit(seq, run(5000, 6))


def test_a_step_of_a_sequence_within_its_prompt_is_refused_for_all(manager):
    seqs = [prefill(manager, run(5000, 6)), manager.open(run(6000, 6))]
    with rejected(manager, errors.SequenceError, 6):
        manager.reserve_step(seqs)


def test_a_commit_before_its_copy_was_taken_is_refused():
    manager = CacheManager(num_blocks=8, block_size=4)
    seq = prefill(manager, run(0, 6))
    twin = manager.fork(seq)
    manager.reserve(twin, 1)
    with rejected(manager, errors.CopyError):
        manager.commit(twin, [9])
    assert len(manager.take_copies()) == 1
    manager.commit(twin, [9])


# -- truncate ------------------------------------------------------------------------------


@pytest.mark.parametrize("num_tokens", [7, 100, -1, -4])
def test_truncation_stays_within_what_is_computed(manager, num_tokens):
    seq = prefill(manager, run(5000, 6))
    manager.reserve(seq, 10)
    with rejected(manager, errors.TruncateError, num_tokens, 6):
        manager.truncate(seq, num_tokens)


def test_a_published_block_that_another_reads_cannot_be_cut(manager):
    seq = prefill(manager, run(5000, 8))
    reader = manager.open(run(5000, 9))
    assert reader.num_cached == 8
    with rejected(manager, errors.TruncateError, 6):
        manager.truncate(seq, 6)


def test_a_published_block_with_a_branch_below_cannot_be_cut(manager):
    seq = prefill(manager, run(5000, 8))
    serve(manager, [*range(5000, 5008), 1, 2, 3, 4])
    manager.truncate(seq, 8)
    with rejected(manager, errors.TruncateError, 6):
        manager.truncate(seq, 6)


def test_a_pinned_block_cannot_be_cut(manager):
    seq = prefill(manager, run(5000, 8))
    with manager.pin(run(5000, 8)) as pin:
        assert pin.num_tokens == 8
        with rejected(manager, errors.TruncateError, 6):
            manager.truncate(seq, 6)
