"""A request that waits for room holds what it found, and changes nothing."""

import pytest
from core_help import order, prefill, refuse, rejected, run, serve, state, use
from hybrid_help import FULL, make

from clocks import Clock
from quire import ops
from quire.core import CacheManager, Hint
from quire.errors import OutOfBlocks
from quire.groups import ChunkedAttention, Recurrent, SlidingWindow

POLICIES = ["fifo", "learned", "lfu", "lru"]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("prompt", [0, 1000, 2000])
def test_a_refused_request_leaves_order_and_counts_as_they_were(policy, prompt):
    manager = CacheManager(16, 4, policy=policy, sub_block=False)
    for start in (0, 1000, 2000, 1000):
        serve(manager, run(start, 17))
    before = order(manager), manager.stats
    assert refuse(manager, run(prompt, 17)) == 16
    assert (order(manager), manager.stats) == before
    ops.check(manager)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_refused_request_leaves_a_run_that_grew_since_it_was_found_as_it_was(policy):
    manager = CacheManager(16, 4, policy=policy)
    serve(manager, run(0, 8))
    serve(manager, run(0, 12))
    before = state(manager)
    assert refuse(manager, run(0, 13)) == 12
    assert state(manager) == before


def test_a_refused_request_that_finds_a_part_of_a_run_leaves_it_whole_and_in_its_place():
    manager = CacheManager(16, 4, sub_block=False)
    for start in (0, 1000, 2000):
        serve(manager, run(start, 16))
    assert refuse(manager, [*run(0, 8), 7, 7, 7, 7, 7]) == 8
    assert [node.end for node in manager.kernel.tree.order.order()] == [4, 4, 4]
    assert ops.reclaim(manager, 4) == 4
    assert manager.probe(run(1000, 17)).num_tokens == 16
    assert manager.probe(run(0, 17)).num_tokens == 0


def test_a_refused_request_that_finds_the_head_of_a_block_in_a_full_pool_evicts_nothing():
    manager = CacheManager(4, 4)
    for prompt in ([1, 2, 3, 4, 5], [5, 6, 7, 8, 9], [9, 9, 9, 9]):
        serve(manager, prompt)
    held = manager.open([7, 7, 7])
    manager.reserve(held, 3)
    before = state(manager)
    assert refuse(manager, [5, 6, 1, 1] * 4) == 2
    assert state(manager) == before
    assert manager.probe([1, 2, 3, 4, 5]).num_tokens == 4


def test_a_request_that_waits_holds_what_it_found_and_one_block_of_which_it_found_the_head():
    manager = CacheManager(16, 4)
    serve(manager, run(0, 40))
    seq = manager.open([*run(0, 10), 99, 99])
    assert (seq.num_cached, manager.num_free, manager.num_active, manager.num_cached) == (
        10,
        6,
        3,
        7,
    )
    assert ops.reclaim(manager, 10) == 7
    assert manager.probe([*run(0, 12), 5]).num_tokens == 12
    manager.reserve(seq, 2)
    (copy,) = manager.take_copies()
    assert (copy.num_tokens, copy.dst) == (2, seq.block_ids()[2])
    ops.check(manager)


def test_the_block_of_which_a_request_found_the_head_may_make_room_for_its_own_copy():
    manager = CacheManager(4, 4)
    serve(manager, run(0, 12))
    seq = manager.open([*run(0, 10), *[9] * 6])
    assert ops.fits(manager, seq)
    manager.reserve(seq, 6)
    assert manager.num_active == 4
    ops.check(manager)


def test_a_batch_of_one_resumed_request_may_use_the_block_of_which_it_found_the_head():
    manager = CacheManager(3, 4)
    seq = prefill(manager, run(0, 10))
    manager.suspend(seq)
    serve(manager, [*run(0, 10), 5, 5])
    assert manager.resume(seq) == 0
    manager.reserve_step([seq])
    assert manager.num_active == 3
    ops.check(manager)


def test_a_request_that_waits_gets_its_copy_when_copies_are_taken_if_there_is_a_block_for_it():
    manager = CacheManager(4, 4)
    serve(manager, run(0, 12))
    held, seq = manager.open(run(1000, 4)), manager.open([*run(0, 10), 9])
    other = manager.open([*run(0, 10), 8])
    manager.reserve(held, 4)
    assert manager.take_copies() == []
    before = manager.stats.num_requests
    manager.close(other)
    manager.close(held)
    (copy,) = manager.take_copies()
    assert (copy.num_tokens, copy.dst) == (2, seq.block_ids()[2])
    assert manager.stats.num_requests == before
    ops.check(manager)
    manager.reserve(seq, 1)
    assert manager.take_copies() == []
    manager.commit(seq, [9])
    manager.close(seq)
    ops.check(manager)


def test_taking_copies_evicts_nothing_for_a_request_that_waits():
    manager = CacheManager(5, 4)
    serve(manager, run(1000, 8))
    serve(manager, run(0, 12))
    seq = manager.open([*run(0, 10), 9])
    with rejected(manager, OutOfBlocks):
        manager.reserve(seq, 20)
    before = state(manager)
    assert (manager.take_copies(), manager.num_free) == ([], 0)
    assert state(manager) == before
    manager.reserve(seq, 1)
    (copy,) = manager.take_copies()
    assert (copy.num_tokens, copy.dst) == (2, seq.block_ids()[2])


def test_a_copy_that_was_not_taken_goes_with_the_request_that_waited():
    manager = CacheManager(8, 4)
    serve(manager, run(0, 12))
    seq = manager.open([*run(0, 10), 9])
    manager.take_copies()
    ops.truncate(manager, seq, 9)
    ops.check(manager)
    assert len(manager.take_copies()) == 1
    manager.suspend(seq)
    assert manager.take_copies() == []
    ops.check(manager)
    manager.resume(seq)
    manager.close(seq)
    assert (manager.num_active, manager.num_free) == (0, 5)


@pytest.mark.parametrize("refused", [1, 2])
def test_a_node_split_for_waiting_requests_is_joined_when_the_last_leaves(refused):
    manager = CacheManager(16, 4)
    serve(manager, run(0, 32))
    before = state(manager)
    waiting = [manager.open([*run(0, 10), each, each]) for each in (97, 98, 99)[:refused]]
    for seq in waiting:
        assert state(manager) != before
        manager.close(seq)
    assert state(manager) == before


def test_a_fork_of_a_request_that_waits_takes_its_copy():
    manager = CacheManager(4, 4)
    serve(manager, run(0, 12))
    seq, other = manager.open([*run(0, 10), 9]), manager.open(run(0, 13))
    with rejected(manager, OutOfBlocks):
        manager.reserve(other, 5)
    blocker = manager.open(run(1000, 4))
    manager.reserve(blocker, 4)
    with rejected(manager, OutOfBlocks):
        manager.fork(seq)
    manager.close(blocker)
    twin = manager.fork(seq)
    assert len(manager.take_copies()) == 1
    assert twin.computed == 10
    ops.check(manager)


def test_a_request_that_waits_can_be_cut_back_to_less_of_what_it_found():
    manager = CacheManager(16, 4)
    serve(manager, run(0, 32))
    before = state(manager)
    seq = manager.open([*run(0, 10), 9])
    for num_tokens in (9, 8, 7, 4, 1, 0):
        ops.truncate(manager, seq, num_tokens)
        assert (seq.computed, seq.capacity) == (num_tokens, num_tokens)
        ops.check(manager)
    manager.close(seq)
    assert state(manager) == before


@pytest.mark.parametrize("kind", [SlidingWindow(8), ChunkedAttention(8), SlidingWindow(8, 4)])
@pytest.mark.parametrize("length", [6, 9, 11, 14, 17])
def test_a_refused_request_leaves_the_runs_of_sparse_groups_whole(kind, length):
    made = [("full", 40, FULL), ("sparse", 20, kind)]
    untouched, manager = make(*made), make(*made)
    for each in (untouched, manager):
        serve(each, run(0, 24))
        serve(each, [*run(0, 12), *run(1000, 12)])
    assert refuse(manager, [*run(0, length), 99]) >= length // 4 * 4
    assert state(manager) == state(untouched)
    for _ in range(20):
        assert ops.reclaim(manager, 1, group=1) == ops.reclaim(untouched, 1, group=1)
        assert state(manager) == state(untouched)


def test_the_block_at_a_chunks_end_of_which_a_request_found_the_head_stays():
    manager = make(("full", 16, FULL), ("chunks", 16, ChunkedAttention(8)))
    serve(manager, run(0, 16))
    seq = manager.open([*run(0, 14), 99])
    assert seq.num_cached == 14
    ops.reclaim(manager, 16, group=1)
    ops.check(manager)
    assert seq.block_ids(1)[3] >= 0
    manager.reserve(seq, 1)
    assert {copy.group for copy in manager.take_copies()} == {0, 1}


@pytest.mark.parametrize("kind", [SlidingWindow(8), Recurrent(), SlidingWindow(8, 4)])
def test_a_refused_request_leaves_the_order_of_sparse_groups(kind):
    manager = make(("full", 40, FULL), ("sparse", 20, kind), sub_block=False)
    for start in (0, 1000, 2000):
        serve(manager, run(start, 16))
    before = order(manager), manager.stats
    refuse(manager, run(0, 17))
    refuse(manager, run(1000, 17))
    assert (order(manager), manager.stats) == before
    ops.check(manager)


def test_a_refused_request_changes_no_terms():
    clock = Clock()
    manager = CacheManager(16, 4, sub_block=False, clock=clock)
    serve(manager, run(0, 17), hint=Hint("session", session_id="a"))
    serve(manager, run(1000, 17), hint=Hint("session", 5, "b"))
    clock.now += 6  # what `b` left is spent
    before = order(manager)
    refuse(manager, run(1000, 17), priority=7, retain_s=50, hint=Hint("session", 5, "b"))
    refuse(manager, run(0, 17), priority=7, retain_s=50)
    assert order(manager) == before
    assert manager.end_session("a") == 4


def test_a_run_whose_retention_ends_while_a_request_waits_goes_before_no_child():
    clock = Clock()
    manager = CacheManager(16, 4, sub_block=False, clock=clock)
    serve(manager, run(0, 16), retain_s=10)
    seq = manager.open([*run(0, 8), 5])
    clock.now += 20
    manager.close(seq)
    assert [node.end for node in manager.kernel.tree.order.order()] == [4]
    ops.check(manager)


def test_retention_that_ends_while_a_request_waits_ends_for_the_head_of_a_run_as_well():
    clock = Clock()
    manager = CacheManager(16, 4, sub_block=False, clock=clock)
    serve(manager, run(0, 16), retain_s=10)
    serve(manager, [*run(0, 8), *run(1000, 8)], retain_s=10)
    seq = manager.open([*run(0, 8), 5])
    clock.now += 20
    manager.close(seq)
    assert sorted(node.end for node in manager.kernel.tree.order.order()) == [2, 4, 4]
    ops.check(manager)


@pytest.mark.parametrize("last", [0, 1000])
def test_a_use_by_another_while_a_request_waits_moves_what_both_found_in_the_order(last):
    manager = CacheManager(16, 4, sub_block=False)
    for start in (0, 1000):
        serve(manager, run(start, 17))
    waiting = [manager.open(run(start, 17)) for start in (0, 1000)]
    for start in (1000 - last, last):
        use(manager, run(start, 17))
    for seq in waiting:
        manager.close(seq)
    ops.check(manager)
    ops.reclaim(manager, 4)
    assert manager.probe(run(last, 17)).num_tokens == 16
    assert manager.probe(run(1000 - last, 17)).num_tokens == 0


@pytest.mark.parametrize("admitted_leaves_first", [True, False])
def test_a_cut_stays_where_one_of_two_waiting_requests_is_admitted(admitted_leaves_first):
    manager = CacheManager(16, 4)
    serve(manager, run(0, 32))
    first, second = manager.open([*run(0, 8), 97]), manager.open([*run(0, 8), 98])
    manager.reserve(first, 1)
    for seq in (first, second) if admitted_leaves_first else (second, first):
        manager.close(seq)
    assert sorted(node.end for node in manager.kernel.tree.order.order()) == [2, 8]
    assert ops.reclaim(manager, 6) == 6
    assert manager.probe(run(0, 9)).num_tokens == 8
    ops.check(manager)


@pytest.mark.parametrize("first", [0, 1])
def test_a_run_awaited_at_its_end_is_cut_by_a_request_that_waits_inside(first):
    manager = CacheManager(16, 4)
    serve(manager, run(0, 32))
    before = state(manager)
    waiting = [manager.open(run(0, 33)), manager.open([*run(0, 8), 97])]
    ops.check(manager)
    manager.close(waiting.pop(first))
    ops.check(manager)
    manager.close(waiting.pop())
    ops.check(manager)
    assert state(manager) == before


def test_runs_that_are_joined_while_a_request_waits_at_their_end_are_its_own_still():
    manager = CacheManager(16, 4)
    serve(manager, [*run(0, 8), *run(1000, 8)])
    serve(manager, run(0, 32))
    assert ops.reclaim(manager, 2) == 2  # the branch, which goes first
    waiting, seq = manager.open(run(0, 33)), manager.open(run(0, 33))
    assert len(waiting.node.path()) == 2
    manager.reserve(seq, 1)
    assert len(waiting.node.path()) == 1
    ops.check(manager)
    manager.close(waiting)
    manager.close(seq)
    ops.check(manager)
    assert [node.end for node in manager.kernel.tree.order.order()] == [8]
