"""Admission: a request counts, and what it found counts as used, at the first reserve that succeeds."""

import sys
from pathlib import Path

from core_help import generate, order, prefill, refuse, rejected, run, serve

import quire
from quire import ops
from quire.core import CacheManager, Watcher
from quire.errors import OutOfBlocks
from quire.foresight import LiveCurve, Trail

ROOT = Path(quire.__file__).parent


class NotingHits(Watcher):
    """Notes of which requests it is told."""

    def __init__(self):
        self.told = []

    def opened(self, seq, key, missed):
        self.told.append(("opened", seq.num_cached, bytes(key), missed.reason))

    def closed(self, seq):
        self.told.append(("closed", seq.computed))


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
    watcher = NotingHits()
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
