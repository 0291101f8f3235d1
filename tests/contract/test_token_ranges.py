"""Token ranges of a request: what is stored, how well it is kept, and for how long."""

import pytest
from core_help import found, generate, prefill, rejected, run, serve
from hybrid_help import BLOCK, Ledger, conserved, counts, make, prefill_in_pieces

from quire import errors
from quire.core import (
    CacheManager,
    FullAttention,
    Recurrent,
    SlidingWindow,
    TokenRange,
)

KINDS = (FullAttention(), SlidingWindow(6))


class Clock:
    """Time that a test owns."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def manager():
    return CacheManager(num_blocks=32, block_size=BLOCK, sub_block=False)


@pytest.fixture
def hybrid():
    return make(("full", 64, KINDS[0]), ("sliding", 64, KINDS[1]), sub_block=False)


# -- what is stored ------------------------------------------------------------------------


@pytest.mark.parametrize(("start", "stored"), [(0, 0), (3, 0), (4, 4), (9, 8), (24, 24), (26, 24)])
def test_blocks_from_an_unstored_token_on_are_never_published(hybrid, start, stored):
    serve(hybrid, run(0, 26), ranges=[TokenRange(start, store=False)])
    assert found(hybrid, run(0, 26)) == stored
    assert counts(hybrid, 0) == (64 - stored // 4, 0, stored // 4)
    assert conserved(hybrid)


def test_what_follows_an_unstored_part_cannot_be_found_either(manager):
    serve(manager, run(0, 24), ranges=[TokenRange(8, 12, store=False)])
    assert found(manager, run(0, 24)) == 8


def test_an_unstored_part_beyond_the_prompt_holds_for_generated_tokens(manager):
    seq = prefill(manager, run(0, 8), ranges=[TokenRange(8, store=False)])
    generate(manager, seq, run(1000, 8))
    manager.close(seq)
    assert found(manager, [*run(0, 8), *run(1000, 8)]) == 8


def test_a_request_that_is_not_stored_may_still_hit(hybrid):
    ledger = Ledger(hybrid, *KINDS)
    hybrid.close(ledger.prefill(run(0, 16)))
    seq = ledger.prefill(run(0, 24), ranges=[TokenRange(0, store=False)])
    assert seq.num_cached == 16
    ledger.check(seq)
    hybrid.close(seq)
    assert found(hybrid, run(0, 24)) == 16
    assert conserved(hybrid)


def test_a_request_that_is_not_stored_computes_more_than_its_windowed_pool():
    manager = make(("full", 400, KINDS[0]), ("sliding", 6, KINDS[1]))
    ledger = Ledger(manager, *KINDS)
    seq = ledger.prefill(run(0, 6), ranges=[TokenRange(0, store=False)])
    for token in range(300):
        ledger.generate(seq, [token])
        assert conserved(manager)
    ledger.check(seq)
    manager.close(seq)
    assert counts(manager, 1) == (6, 0, 0)


def test_an_unstored_request_beside_a_stored_one_reads_its_own_blocks(hybrid):
    ledger = Ledger(hybrid, *KINDS)
    seqs = [
        hybrid.open(run(0, 20), ranges=[TokenRange(0, store=False)]),
        hybrid.open(run(0, 20)),
    ]
    for end in range(4, 21, 4):
        for seq in seqs:
            ledger.generate(seq, run(0, 20)[end - 4 : end])
            ledger.check(seq)
    for seq in seqs:
        hybrid.close(seq)
    assert found(hybrid, run(0, 20)) == 20
    assert conserved(hybrid)


def test_no_snapshot_is_kept_of_what_is_not_stored():
    manager = make(("full", 64, KINDS[0]), ("states", 8, Recurrent(interval=8)))
    seq = prefill_in_pieces(manager, run(0, 30), ranges=[TokenRange(18, store=False)])
    manager.close(seq)
    assert found(manager, run(0, 30)) == 16
    assert counts(manager, 1)[2] == 2


def test_from_stop_storing_on_nothing_is_published(hybrid):
    seq = prefill(hybrid, run(0, 10))
    hybrid.stop_storing(seq)
    generate(hybrid, seq, run(1000, 10))
    assert found(hybrid, [*run(0, 10), *run(1000, 10)]) == 8
    hybrid.close(seq)
    assert found(hybrid, [*run(0, 10), *run(1000, 10)]) == 8
    assert counts(hybrid, 0) == (62, 0, 2)


def test_stop_storing_twice_is_once(manager):
    seq = prefill(manager, run(0, 10))
    manager.stop_storing(seq)
    manager.stop_storing(seq)
    generate(manager, seq, run(1000, 10))
    assert manager.num_active == 5
    manager.close(seq)
    assert counts(manager, 0) == (30, 0, 2)


def test_a_fork_stores_as_little_as_its_origin(manager):
    seq = prefill(manager, run(0, 10), ranges=[TokenRange(8, store=False)])
    twin = manager.fork(seq)
    generate(manager, twin, run(1000, 6))
    manager.close(twin)
    manager.close(seq)
    assert counts(manager, 0) == (30, 0, 2)


def test_a_resumed_request_stores_as_little_as_before(manager):
    seq = prefill(manager, run(0, 14), ranges=[TokenRange(8, store=False)])
    manager.suspend(seq)
    assert manager.resume(seq) == 6
    generate(manager, seq, run(0, 14)[8:])
    manager.close(seq)
    assert counts(manager, 0) == (30, 0, 2)


def test_an_unstored_sequence_is_rolled_back_like_any_other(manager):
    seq = prefill(manager, run(0, 14), ranges=[TokenRange(0, store=False)])
    manager.truncate(seq, 6)
    generate(manager, seq, run(0, 14)[6:])
    assert seq.tokens.tolist() == list(range(14))
    manager.close(seq)
    assert counts(manager, 0) == (32, 0, 0)


# -- priorities ----------------------------------------------------------------------------


def test_a_range_of_a_higher_priority_outlives_the_rest_of_its_prompt(manager):
    serve(manager, run(0, 16), ranges=[TokenRange(0, 8, priority=1)])
    serve(manager, run(1000, 8))
    manager.reclaim(4)
    assert found(manager, run(0, 16)) == 8
    assert found(manager, run(1000, 8)) == 0


def test_what_stands_before_an_important_range_is_kept_as_well(manager):
    serve(manager, run(0, 24), ranges=[TokenRange(8, 16, priority=1)])
    serve(manager, run(1000, 8))
    manager.reclaim(4)
    assert found(manager, run(0, 24)) == 16


def test_a_range_to_the_end_covers_generated_tokens(manager):
    seq = prefill(manager, run(0, 8), ranges=[TokenRange(8, priority=1)])
    generate(manager, seq, run(1000, 8))
    manager.close(seq)
    serve(manager, run(2000, 16))
    manager.reclaim(4)
    assert found(manager, [*run(0, 8), *run(1000, 8)]) == 16


def test_a_range_that_starts_inside_a_block_covers_that_block(manager):
    serve(manager, run(0, 16), ranges=[TokenRange(0, 5, priority=1)])
    serve(manager, run(1000, 8))
    manager.reclaim(4)
    assert found(manager, run(0, 16)) == 8


def test_tokens_outside_of_all_ranges_have_the_priority_of_the_request(manager):
    serve(manager, run(0, 16), priority=1, ranges=[TokenRange(8, 12, store=True)])
    serve(manager, run(1000, 16))
    manager.reclaim(4)
    assert found(manager, run(0, 16)) == 16


def test_a_range_may_be_of_a_lower_priority_than_its_request(manager):
    serve(manager, run(0, 16), priority=1, ranges=[TokenRange(8, priority=-1)])
    serve(manager, run(1000, 16))
    manager.reclaim(2)
    assert found(manager, run(0, 16)) == 8
    assert found(manager, run(1000, 16)) == 16


def test_several_ranges_each_have_their_priority(manager):
    ranges = [TokenRange(0, 4, priority=3), TokenRange(4, 8, priority=2)]
    serve(manager, run(0, 16), ranges=ranges)
    serve(manager, run(1000, 8), priority=1)
    order = []
    for _ in range(6):
        manager.reclaim(1)
        order.append((found(manager, run(0, 16)), found(manager, run(1000, 8))))
    assert order == [(12, 8), (8, 8), (8, 4), (8, 0), (4, 0), (0, 0)]


def test_windows_of_an_important_range_go_last_in_their_group():
    manager = make(("full", 64, KINDS[0]), ("sliding", 12, SlidingWindow(8)), sub_block=False)
    serve(manager, run(0, 16), ranges=[TokenRange(0, 16, priority=1)])
    serve(manager, run(1000, 16))
    manager.close(manager.open(run(1000, 17)))
    serve(manager, run(2000, 40))
    assert found(manager, run(0, 16)) == 16
    assert found(manager, run(1000, 16)) == 0


def test_priorities_reach_what_is_computed_in_pieces(manager):
    seq = manager.open(run(0, 16), ranges=[TokenRange(0, 8, priority=1)])
    for end in range(3, 17, 3):
        generate(manager, seq, run(0, 16)[seq.computed : end])
    manager.close(seq)
    serve(manager, run(1000, 8))
    manager.reclaim(3)
    assert found(manager, run(0, 16)) == 8


# -- retention -----------------------------------------------------------------------------


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def timed(clock):
    return CacheManager(num_blocks=32, block_size=BLOCK, sub_block=False, clock=clock)


def test_a_retained_range_outlives_the_rest(timed, clock):
    serve(timed, run(0, 16), ranges=[TokenRange(0, 8, retain_s=10)])
    serve(timed, run(1000, 8))
    clock.now += 9
    timed.reclaim(4)
    assert found(timed, run(0, 16)) == 8
    assert found(timed, run(1000, 8)) == 0


def test_the_retention_of_a_range_ends(timed, clock):
    serve(timed, run(0, 16), ranges=[TokenRange(0, 8, retain_s=10)])
    serve(timed, run(1000, 8))
    clock.now += 11
    timed.reclaim(4)
    assert found(timed, run(0, 16)) == 0
    assert found(timed, run(1000, 8)) == 8


def test_what_stands_before_a_retained_range_is_kept_as_well(timed, clock):
    serve(timed, run(0, 24), ranges=[TokenRange(8, 16, retain_s=10)])
    serve(timed, run(1000, 8))
    timed.reclaim(4)
    assert found(timed, run(0, 24)) == 16


def test_a_range_may_be_kept_longer_than_its_request(timed, clock):
    serve(timed, run(0, 16), retain_s=5, ranges=[TokenRange(0, 8, retain_s=50)])
    serve(timed, run(1000, 8))
    clock.now += 20
    timed.reclaim(4)
    assert found(timed, run(0, 16)) == 8


# -- refusals ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "ranges",
    [
        [(-1,)],
        [(4, 4)],
        [(4, 3)],
        [(1.5,)],
        [("0",)],
        [(None,)],
        [(True,)],
        [(0, 2.5)],
        [(0, "4")],
        [(0, 8), (4, 12)],
        [(4, 12), (0, 8)],
        [(0,), (8, 12)],
        [(0,), (0,)],
    ],
)
def test_ranges_are_whole_numbers_that_rise_and_do_not_overlap(manager, ranges):
    with rejected(manager, errors.ConfigError):
        manager.open(run(0, 16), ranges=[TokenRange(*bounds) for bounds in ranges])


@pytest.mark.parametrize("priority", ["high", 1.5, True, 2**40])
def test_the_priority_of_a_range_is_an_integer(manager, priority):
    with rejected(manager, errors.ConfigError, priority):
        manager.open(run(0, 16), ranges=[TokenRange(0, 8, priority=priority)])


@pytest.mark.parametrize("seconds", [-1, float("nan"), "5"])
def test_the_retention_of_a_range_is_a_duration(timed, seconds):
    with rejected(timed, errors.ConfigError, seconds):
        timed.open(run(0, 16), ranges=[TokenRange(0, 8, retain_s=seconds)])


def test_the_retention_of_a_range_needs_a_clock(manager):
    with rejected(manager, errors.ConfigError, "clock"):
        manager.open(run(0, 16), ranges=[TokenRange(0, 8, retain_s=5)])


@pytest.mark.parametrize("ranges", [[(0, 8)], ["all"], [None], 7])
def test_a_range_is_a_token_range(manager, ranges):
    with rejected(manager, errors.ConfigError):
        manager.open(run(0, 16), ranges=ranges)


@pytest.mark.parametrize("store", ["no", None, 2])
def test_whether_a_range_is_stored_is_yes_or_no(manager, store):
    with rejected(manager, errors.ConfigError):
        manager.open(run(0, 16), ranges=[TokenRange(0, store=store)])
