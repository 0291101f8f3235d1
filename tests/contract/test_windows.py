"""Windowed groups: what stays and what goes first, tombstones and their healing, and locks."""

import pytest
from core_help import found, prefill, run, serve, use
from hybrid_help import (
    BLOCK,
    FULL,
    SLIDING,
    Ledger,
    conserved,
    counts,
    held,
    make,
    squeeze,
    windowed,
)

from quire.groups import ChunkedAttention, SlidingWindow


def lengths_found(manager, start=0, stop=32):
    """Return the block boundaries of a prompt that a request ending there would find."""
    return [
        length
        for length in range(BLOCK, stop + 1, BLOCK)
        if found(manager, run(start, length)) == length
    ]


# -- behind the window ---------------------------------------------------------------------


def test_blocks_behind_the_window_are_cached_while_the_sequence_runs():
    manager = windowed(64)
    seq = prefill(manager, run(0, 40))
    free, active, cached = counts(manager, 1)
    assert free == 54
    assert 2 <= active <= 6
    assert cached == 10 - active
    assert counts(manager, 0) == (502, 10, 0)
    assert held(seq, 1) == [8, 9]


def test_blocks_behind_the_window_are_found_while_nobody_needs_the_memory():
    manager = windowed(64)
    prefill(manager, run(0, 40))
    assert lengths_found(manager, stop=40) == list(range(4, 41, 4))


@pytest.mark.parametrize("kind", [SlidingWindow(64), ChunkedAttention(64)])
def test_the_windowed_pool_may_be_far_smaller_than_the_sequence(kind):
    manager = make(("full", 700, FULL), ("window", 16, kind), block_size=16)
    ledger = Ledger(manager)
    seq = ledger.prefill(run(0, 20))
    batch = manager.batch([seq])
    for step in range(2000):
        manager.reserve_step(batch)
        manager.commit_step(batch, [step % 1000])
        if step % 200 == 0:
            assert conserved(manager)
            assert held(seq, 1)[0] >= (seq.computed - 64) // 16
    manager.close(seq)
    assert conserved(manager)


def test_sinks_of_a_running_sequence_are_protected_beside_its_window():
    manager = windowed(12, SlidingWindow(8, sinks=6))
    seq = prefill(manager, run(0, 40))
    assert counts(manager, 1) == (2, 4, 6)
    manager.close(seq)
    assert counts(manager, 1) == (2, 0, 10)
    assert conserved(manager)


# -- the order of eviction -----------------------------------------------------------------


def test_blocks_that_no_kept_boundary_needs_go_first():
    manager = windowed(10)
    serve(manager, run(0, 32))
    squeeze(manager, 1000, 6)
    assert lengths_found(manager) == [16, 32]
    assert [counts(manager, group)[2] for group in (0, 1)] == [14, 10]
    assert conserved(manager)


def test_an_interval_is_four_windows_unless_it_is_given():
    manager = windowed(18, SlidingWindow(4))
    serve(manager, run(0, 64))
    squeeze(manager, 1000, 14)
    assert lengths_found(manager, stop=64) == [16, 32, 48, 64]


def test_the_plain_blocks_of_the_run_used_longest_ago_go_first():
    manager = windowed(16)
    serve(manager, run(0, 32))
    serve(manager, run(1000, 32))
    use(manager, run(0, 33))
    squeeze(manager, 2000, 4)
    assert lengths_found(manager, 1000) == [16, 32]
    assert lengths_found(manager, 0) == list(range(4, 33, 4))


def test_kept_windows_go_by_recency():
    manager = windowed(10, SlidingWindow(8))
    serve(manager, run(0, 16))
    serve(manager, run(1000, 16))
    use(manager, run(0, 17))
    squeeze(manager, 2000, 8)
    assert lengths_found(manager, 1000, 16) == []
    assert lengths_found(manager, 0, 16) == [16]


def test_the_use_of_a_branch_moves_the_window_of_its_trunk():
    manager = windowed(18, SlidingWindow(8))
    trunks = [run(0, 16).tolist(), run(1000, 16).tolist()]
    for trunk in trunks:
        for branch in (5000, 6000):
            serve(manager, [*trunk, *run(branch, 8)])
    use(manager, [*trunks[0], *run(5000, 9)])
    squeeze(manager, 2000, 14)
    assert [found(manager, trunk) for trunk in trunks] == [16, 0]
    assert conserved(manager)


def test_kept_windows_of_a_lower_priority_go_first():
    manager = windowed(10, SlidingWindow(8))
    serve(manager, run(0, 16), priority=1)
    serve(manager, run(1000, 16))
    use(manager, run(1000, 17))
    squeeze(manager, 2000, 8)
    assert lengths_found(manager, 0, 16) == [16]
    assert lengths_found(manager, 1000, 16) == []


def test_the_last_window_of_a_run_is_evicted_last():
    manager = windowed(8)
    serve(manager, run(0, 32))
    squeeze(manager, 1000, 6)
    assert lengths_found(manager) == [32]


def test_a_shorter_prefix_stays_matchable_at_its_last_kept_boundary():
    manager = make(
        ("full", 8000, FULL),
        ("sliding", 2100, SlidingWindow(1024, interval=4096)),
        block_size=16,
        sub_block=False,
    )
    serve(manager, run(0, 32_768))
    squeeze(manager, 100_000, 52 + 1536, block_size=16)
    for length in (4097, 8192, 9000, 20_000, 32_768):
        hit = manager.probe(run(0, length)).num_tokens
        assert hit == (length - 1) // 4096 * 4096, length
    assert manager.probe(run(0, 32_769)).num_tokens == 32_768
    assert conserved(manager)


def test_the_end_of_a_shared_prefix_is_a_kept_boundary():
    manager = windowed(18, SlidingWindow(8))
    system = run(0, 20).tolist()
    serve(manager, [*system, *run(1000, 16)])
    serve(manager, [*system, *run(2000, 16)])
    squeeze(manager, 3000, 9)
    assert found(manager, system) == 20
    assert found(manager, [*system, *run(1000, 16)]) == 36
    assert found(manager, [*system, *run(2000, 16)]) == 36


# -- tombstones ----------------------------------------------------------------------------


def test_a_request_that_computes_the_tokens_again_heals_the_tombstones():
    manager = windowed(13)
    ledger = Ledger(manager)
    manager.close(ledger.prefill(run(0, 32)))
    manager.close(ledger.prefill(run(1000, 36)))
    assert lengths_found(manager) == [16, 32]
    cached = counts(manager, 0)[2]
    again = ledger.prefill([*run(0, 24).tolist(), 777])
    assert again.num_cached == 16
    manager.close(again)
    assert found(manager, run(0, 24)) == 24
    assert counts(manager, 0)[2] == cached, "the full group holds one copy only"
    reader = ledger.prefill([*run(0, 24).tolist(), 888])
    assert reader.num_cached == 24
    assert conserved(manager)


def test_a_commit_over_several_nodes_gives_back_its_own_blocks_of_each():
    manager = windowed(64)
    late = manager.open(run(0, 16))
    manager.reserve(late, 16)
    serve(manager, run(0, 16))
    serve(manager, [*run(0, 8).tolist(), *run(5000, 8)])
    manager.commit(late, run(0, 16))
    assert counts(manager, 1)[1] <= 4
    manager.close(late)
    assert counts(manager, 1) == (58, 0, 6)


def test_two_requests_that_heal_the_same_tombstones_leave_one_copy():
    manager = windowed(14)
    serve(manager, run(0, 32))
    squeeze(manager, 1000, 10)
    seqs = [manager.open([*run(0, 24).tolist(), 700 + i]) for i in range(2)]
    for i, seq in enumerate(seqs):
        rest = [*run(0, 24).tolist(), 700 + i][seq.num_cached :]
        manager.reserve(seq, len(rest))
        manager.commit(seq, rest)
        assert conserved(manager)
    shared = [seq.block_ids(1).tolist()[4:6] for seq in seqs]
    assert shared[0] == shared[1]
    for seq in seqs:
        manager.close(seq)
    assert conserved(manager)


def test_a_cached_leaf_that_no_group_can_hit_again_is_dropped():
    manager = make(("sliding", 8, SLIDING), sub_block=False)
    serve(manager, run(0, 32))
    squeeze(manager, 1000, 8)
    assert found(manager, run(0, 32)) == 0
    assert manager.probe(run(0, 32)).reason == "evicted"
    assert counts(manager, 0) == (0, 0, 8)


# -- locks ---------------------------------------------------------------------------------


def test_the_window_of_a_running_sequence_is_never_evicted():
    manager = windowed(14)
    ledger = Ledger(manager)
    seq = ledger.prefill(run(0, 38))
    tables = [seq.block_ids(group).tolist() for group in (0, 1)]
    for start in range(1000, 30_000, 1000):
        manager.close(ledger.prefill(run(start, 16)))
        assert [seq.block_ids(group).tolist() for group in (0, 1)] == tables
        ledger.check(seq)
    assert conserved(manager)
    ledger.generate(seq, [7, 8, 9])
    ledger.check(seq)


def test_a_running_sequence_holds_its_whole_path_in_full_groups_alone():
    manager = windowed(64)
    serve(manager, run(0, 32))
    manager.open(run(0, 33))
    assert counts(manager, 0) == (504, 8, 0)
    assert counts(manager, 1)[1] in range(2, 5)
