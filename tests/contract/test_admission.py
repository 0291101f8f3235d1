"""Admission: a request counts, and what it found counts as used, at the first reserve that succeeds."""

import sys
from pathlib import Path

import pytest
from core_help import generate, prefill, rejected, run, serve, use
from hybrid_help import FULL, make

import quire
from quire import ops
from quire.core import CacheManager, Hint, Watcher
from quire.errors import OutOfBlocks
from quire.foresight import LiveCurve, Trail
from quire.groups import Recurrent, SlidingWindow

POLICIES = ["fifo", "learned", "lfu", "lru"]
ROOT = Path(quire.__file__).parent


class Clock:
    """Time that a test owns."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


class Noting(Watcher):
    """Notes of which requests it is told."""

    def __init__(self):
        self.told = []

    def opened(self, seq, key, missed):
        self.told.append(("opened", seq.num_cached, bytes(key), missed.reason))

    def closed(self, seq):
        self.told.append(("closed", seq.computed))


def order(manager):
    """Return the tokens that end the cached runs, in the order in which they lose blocks, and the orders of sparse groups."""
    tree = manager.kernel.tree
    full = [(bytes(node.key[-4:]), node.priority) for node in tree.order.order()]
    return full, [group.eviction_order() for group in tree.sparse]


def refuse(manager, tokens, **terms):
    """Open a prompt, ask for more than there is, and close; what the request found."""
    seq = manager.open(tokens, **terms)
    with rejected(manager, OutOfBlocks):
        manager.reserve(seq, 10_000)
    manager.close(seq)
    return seq.num_cached


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


def test_a_refused_request_that_finds_a_part_of_a_run_cuts_it_and_leaves_its_place():
    manager = CacheManager(16, 4, sub_block=False)
    for start in (0, 1000, 2000):
        serve(manager, run(start, 16))
    assert refuse(manager, [*run(0, 8), 7, 7, 7, 7, 7]) == 8
    assert [node.end for node in manager.kernel.tree.order.order()] == [4, 2, 4, 4]
    assert ops.reclaim(manager, 4) == 4
    assert manager.probe(run(1000, 17)).num_tokens == 16
    assert manager.probe(run(0, 17)).num_tokens == 0


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


def test_a_request_that_is_opened_and_closed_without_room_counts_nothing():
    manager = CacheManager(16, 4, sub_block=False)
    serve(manager, run(0, 17))
    before = order(manager), manager.stats
    manager.close(manager.open(run(0, 17)))
    seq = manager.open(run(0, 17))
    manager.suspend(seq)
    manager.resume(seq)
    manager.close(seq)
    assert (order(manager), manager.stats) == before


def test_a_request_counts_once_at_the_first_reserve_that_succeeds():
    manager = CacheManager(8, 4, sub_block=False)
    serve(manager, run(0, 9))
    seq = manager.open(run(0, 9))
    assert manager.stats.num_requests == 1
    with rejected(manager, OutOfBlocks):
        manager.reserve(seq, 100)
    manager.reserve(seq, 1)
    assert (manager.stats.num_requests, manager.stats.hit_tokens) == (2, 8)
    manager.reserve(seq, 4)
    manager.suspend(seq)
    manager.resume(seq)
    manager.reserve(seq, 1)
    assert (manager.stats.num_requests, manager.stats.hit_tokens) == (2, 8)


def test_watchers_are_told_at_that_moment_of_the_whole_prompt_and_of_no_request_without_room():
    watcher = Noting()
    manager = CacheManager(16, 4, watchers=[watcher])
    serve(manager, run(0, 9))
    watcher.told.clear()
    refuse(manager, run(0, 11))
    assert watcher.told == []
    seq = manager.open(run(0, 11))
    assert watcher.told == []
    manager.reserve(seq, 3)
    manager.close(seq)
    assert watcher.told == [
        ("opened", 8, run(0, 11).tobytes(), "partial_block"),
        ("closed", 8),
    ]


def test_a_miss_has_the_reason_that_it_had_at_open():
    manager = CacheManager(16, 4, watchers=[Trail()], sub_block=False)
    first, second = manager.open(run(0, 9)), manager.open(run(0, 9))
    manager.reserve(first, 9)
    manager.commit(first, run(0, 9))
    manager.reserve(second, 9)
    assert manager.stats.missed["cold"] == 16
    assert manager.stats.missed["evicted"] == 0
    manager.kernel.watchers.of(Trail).check()


def test_a_trail_asked_about_others_meanwhile_tells_of_its_own_request():
    told = CacheManager(16, 4, watchers=[trail := Trail()], sub_block=False)
    plain = CacheManager(16, 4, watchers=[other := Trail()], sub_block=False)
    for manager in (told, plain):
        for start in (0, 1000):
            serve(manager, run(start, 9))
        ops.reclaim(manager, 16)
    seq = told.open(run(0, 9))
    told.probe(run(1000, 9))
    told.close(told.open(run(1000, 9)))
    told.reserve(seq, 9)
    alone = plain.open(run(0, 9))
    plain.reserve(alone, 9)
    known = [each._prompts[row][1] for each, row in ((trail, seq.row), (other, alone.row))]
    assert known[0].marks == known[1].marks
    assert told.stats.missed == plain.stats.missed
    trail.check()


def test_the_live_curve_numbers_requests_without_gaps():
    curve = LiveCurve()
    manager = CacheManager(16, 4, watchers=[curve], sub_block=False)
    for number in range(12):
        serve(manager, run(1000 * (number % 3), 17))
        refuse(manager, run(0, 17))
    what_if = curve.what_if()
    assert what_if.num_requests == what_if.noted_requests == 12
    assert what_if.measured == manager.stats.hit_rate


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
    assert [node.end for node in manager.kernel.tree.order.order()] == [4, 2]
    ops.check(manager)


def test_uses_by_others_while_a_request_waits_count():
    manager = CacheManager(16, 4, sub_block=False)
    for start in (0, 1000):
        serve(manager, run(start, 17))
    waiting = manager.open(run(0, 17))
    use(manager, run(0, 17))
    use(manager, run(1000, 17))
    manager.close(waiting)
    ops.reclaim(manager, 4)
    assert manager.probe(run(0, 17)).num_tokens == 0
    assert manager.probe(run(1000, 17)).num_tokens == 16


def test_a_resumed_request_that_is_refused_leaves_the_order_and_what_it_must_recompute():
    manager = CacheManager(12, 4, sub_block=False)
    seq = prefill(manager, run(0, 17))
    manager.suspend(seq)
    serve(manager, run(1000, 16))
    ops.reclaim(manager, 2)
    before = order(manager), manager.stats
    for _ in range(3):
        assert manager.resume(seq) == 9
        with rejected(manager, OutOfBlocks):
            manager.reserve(seq, 1000)
        manager.suspend(seq)
        assert (order(manager), manager.stats) == before
    manager.resume(seq)
    manager.reserve(seq, 9)
    assert manager.stats.recomputed_tokens == 9


def test_a_resumed_request_whose_blocks_are_all_there_counts_as_used_at_its_next_decode_step():
    manager = CacheManager(12, 4, sub_block=False)
    seq = prefill(manager, run(0, 16))
    manager.suspend(seq)
    serve(manager, run(1000, 16))
    manager.resume(seq)
    assert seq.pending is not None
    manager.reserve_step([seq])
    assert seq.pending is None
    manager.commit_step([seq], [5])
    manager.close(seq)
    assert manager.stats.num_requests == 2
    ops.check(manager)


def test_a_fork_counts_the_request():
    manager = CacheManager(12, 4, sub_block=False)
    serve(manager, run(0, 17))
    seq = manager.open(run(0, 17))
    twin = manager.fork(seq)
    assert manager.stats.num_requests == 2
    for each in (twin, seq):
        generate(manager, each, run(16, 1))
        manager.close(each)
    assert manager.stats.num_requests == 2
    ops.check(manager)


def test_a_request_that_needs_no_room_is_admitted_by_hand_once():
    manager = CacheManager(12, 4, sub_block=False)
    serve(manager, run(0, 17))
    seq = manager.open(run(0, 17))
    ops.admit(manager, seq)
    ops.admit(manager, seq)
    manager.reserve(seq, 1)
    assert (manager.stats.num_requests, manager.stats.hit_tokens) == (2, 16)


def test_opening_a_cached_prompt_takes_28_calls_at_most():
    manager = CacheManager(64, 16)
    serve(manager, run(0, 300))
    prompt, calls = [*range(300), *[9] * 50], []

    def count(frame, event, arg):
        del event, arg
        if frame.f_code.co_filename.startswith(str(ROOT)):
            calls.append(frame.f_code.co_qualname)

    had = sys.gettrace()
    sys.settrace(count)
    try:
        seq = manager.open(prompt)
    finally:
        sys.settrace(had)
    assert seq.num_cached == 288
    assert 0 < len(calls) <= 28, calls
