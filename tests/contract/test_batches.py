"""A decode batch stays right whatever happens to its sequences, its tables and its manager."""

import numpy as np
import pytest
from core_help import rejected

from quire import CacheManager, MediaItem, errors, ops


def prefilled(manager, tokens, **options):
    seq = manager.open(tokens, **options)
    manager.take_copies()
    manager.reserve(seq, len(tokens) - seq.num_cached)
    manager.commit(seq, tokens[seq.num_cached :])
    return seq


def steps(manager, batch, count):
    for step in range(count):
        manager.reserve_step(batch)
        manager.commit_step(batch, [step] * len(batch))
        ops.check(manager)


def test_steps_use_up_a_reservation_made_before_and_then_go_on():
    manager = CacheManager(64, 4, debug=True)
    seq = manager.open([1, 2, 3])
    manager.reserve(seq, 8)
    manager.commit(seq, [1, 2, 3])
    steps(manager, manager.batch([seq]), 20)


def test_another_call_between_the_halves_of_a_step_changes_nothing():
    manager = CacheManager(64, 4, debug=True)
    seq, other = prefilled(manager, [1, 2, 3, 4]), prefilled(manager, [9, 9])
    batch = manager.batch([seq])
    manager.reserve_step(batch)
    manager.close(other)
    manager.commit_step(batch, [5])
    steps(manager, batch, 12)


@pytest.mark.parametrize("num_found", [63, 64, 65, 128])
def test_tables_that_another_request_widens_stay_right(num_found):
    manager = CacheManager(1024, 4, debug=True)
    long = list(range(1000, 1000 + 4 * num_found))
    manager.close(prefilled(manager, long))
    running = [prefilled(manager, [10 * n, 1, 2, n]) for n in range(1, 4)]
    batch = manager.batch(running)
    steps(manager, batch, 4)
    manager.open([*long, 7])
    steps(manager, batch, 9)


def test_tables_that_steps_widen_again_and_again_stay_right():
    manager = CacheManager(2048, 1, debug=True)
    running = [prefilled(manager, [n]) for n in range(3)]
    batch = manager.batch(running)
    for step in range(300):
        manager.reserve_step(batch)
        manager.commit_step(batch, [step] * 3)
    ops.check(manager)


def test_a_batch_of_another_manager_is_refused():
    one, two = CacheManager(64, 4), CacheManager(64, 4)
    prefilled(one, [1, 2, 3, 4])
    batch = two.batch([prefilled(two, [1, 2, 3, 4])])
    with rejected(one, errors.SequenceError, "another manager"):
        one.reserve_step(batch)
    with rejected(one, errors.SequenceError, "another manager"):
        one.commit_step(batch, [1])


def test_a_step_never_computes_tokens_of_the_prompt():
    manager = CacheManager(64, 4)
    seq = prefilled(manager, [1, 2, 7, 7, 7, 7, 7, 7, 3], media=[MediaItem(b"a" * 32, 2, 6)])
    batch = manager.batch([seq])
    manager.truncate(seq, 2)
    with rejected(manager, errors.SequenceError, "7 tokens of its prompt"):
        manager.reserve_step(batch)


def test_a_step_never_computes_what_a_resumed_sequence_had():
    manager = CacheManager(64, 4)
    seq = prefilled(manager, [1, 2, 3, 4])
    batch = manager.batch([seq])
    steps(manager, batch, 5)
    manager.suspend(seq)
    manager.clear()
    assert manager.resume(seq) == 9
    with rejected(manager, errors.SequenceError, "before a suspend"):
        manager.reserve_step(batch)


def test_an_idle_shared_block_leaves_the_steps_of_others_alone():
    manager = CacheManager(64, 4, debug=True)
    manager.fork(prefilled(manager, [5] * 5))
    batch = manager.batch([prefilled(manager, [1, 2, 3])])
    steps(manager, batch, 9)
    assert not batch.shares


def test_forks_in_a_batch_copy_their_shared_block_once():
    manager = CacheManager(64, 4, debug=True)
    seq = prefilled(manager, [1, 2, 3])
    twins = [seq, manager.fork(seq), manager.fork(seq)]
    batch = manager.batch(twins)
    manager.reserve_step(batch)
    copies = manager.take_copies()
    assert len(copies) == 2
    assert {copy.num_tokens for copy in copies} == {3}
    manager.commit_step(batch, np.array([7, 8, 9], np.int32))
    steps(manager, batch, 9)
    assert [twin.tokens[3] for twin in twins] == [7, 8, 9]
