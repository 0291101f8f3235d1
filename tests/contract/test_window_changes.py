"""Windowed groups under truncate, fork, suspend, evict and reclaim."""

import pytest
from core_help import found, prefill, rejected, run, serve
from hybrid_help import (
    FULL,
    Ledger,
    conserved,
    counts,
    held,
    make,
    prefill_in_pieces,
    squeeze,
    windowed,
)

from quire import errors, ops
from quire.groups import ChunkedAttention, SlidingWindow


def test_a_cut_is_allowed_while_the_window_there_is_cached():
    manager = windowed(64)
    ledger = Ledger(manager)
    seq = ledger.prefill(run(0, 40))
    ops.truncate(manager, seq, 20)
    assert (seq.computed, held(seq, 1)) == (20, [3, 4])
    ledger.check(seq)
    ledger.generate(seq, run(0, 40)[20:])
    ledger.check(seq)
    assert conserved(manager)


def test_a_cut_reads_the_window_that_another_request_healed():
    manager = windowed(14)
    ledger = Ledger(manager)
    seq = ledger.prefill(run(0, 40))
    manager.close(ledger.prefill(run(1000, 32)))
    with rejected(manager, errors.TruncateError, 24):
        ops.truncate(manager, seq, 24)
    manager.close(ledger.prefill([*run(0, 24).tolist(), 777]))
    ops.truncate(manager, seq, 24)
    ledger.check(seq)
    ledger.generate(seq, run(0, 40)[24:])
    ledger.check(seq)
    assert conserved(manager)


def test_a_cut_to_where_the_window_is_gone_is_refused():
    manager = windowed(10)
    seq = prefill_in_pieces(manager, run(0, 80), 8)
    with rejected(manager, errors.TruncateError, 20):
        ops.truncate(manager, seq, 20)
    assert held(seq, 1) == [18, 19]


def test_a_fork_shares_the_window():
    manager = windowed(64)
    ledger = Ledger(manager)
    seq = ledger.prefill(run(0, 30))
    before = counts(manager, 1)
    twin = manager.fork(seq)
    assert counts(manager, 1) == before
    assert twin.block_ids(1).tolist() == seq.block_ids(1).tolist()
    for i in range(20):
        ledger.generate(seq, [100 + i])
        ledger.generate(twin, [200 + i])
    for both in (seq, twin):
        ledger.check(both)
    manager.close(seq)
    ledger.check(twin)
    assert conserved(manager)


def test_a_suspended_sequence_holds_no_window_and_finds_it_again():
    manager = windowed(64)
    ledger = Ledger(manager)
    seq = ledger.prefill(run(0, 38))
    manager.suspend(seq)
    assert [counts(manager, group)[1] for group in (0, 1)] == [0, 0]
    assert manager.resume(seq) == 2
    ledger.copy()
    ledger.check(seq)
    ledger.generate(seq, [36, 37])
    ledger.check(seq)


def test_a_resume_after_the_window_went_computes_more():
    manager = windowed(10)
    ledger = Ledger(manager)
    seq = ledger.prefill(run(0, 22))
    manager.suspend(seq)
    squeeze(manager, 1000, 7)
    missing = manager.resume(seq)
    assert missing == 22 - seq.computed
    ledger.copy()
    ledger.generate(seq, run(0, 22)[seq.computed :])
    ledger.check(seq)
    assert conserved(manager)


def test_eviction_of_a_prefix_empties_every_group():
    manager = windowed(64)
    serve(manager, run(0, 32))
    ops.invalidate(manager, run(0, 8))
    assert [counts(manager, group)[2] for group in (0, 1)] == [0, 0]
    serve(manager, run(0, 32))
    ops.clear(manager)
    assert [counts(manager, group)[2] for group in (0, 1)] == [0, 0]


def test_reclaim_frees_every_cached_block_of_a_windowed_group():
    manager = windowed(20)
    for start in range(0, 5000, 1000):
        serve(manager, run(start, 30))
    while any(counts(manager, group)[2] for group in (0, 1)):
        ops.reclaim(manager, 1)
        assert conserved(manager)
    assert [counts(manager, group)[0] for group in (0, 1)] == [512, 20]


@pytest.mark.parametrize("priority", [0, 1])
def test_a_hit_in_the_middle_of_what_another_generated_protects_two_windows(priority):
    manager = windowed(64)
    seq = prefill(manager, run(0, 6), priority=priority)
    batch = manager.batch([seq])
    for token in range(94):
        manager.reserve_step(batch)
        manager.commit_step(batch, [token])
    assert counts(manager, 1)[1] <= 4
    reader = manager.open(seq.tokens[:53])
    assert reader.num_cached == 52
    assert counts(manager, 1)[1] <= 8
    manager.close(reader)
    assert counts(manager, 1)[1] <= 4
    assert conserved(manager)


def test_a_chunk_boundary_needs_nothing_of_its_group():
    kind = ChunkedAttention(16)
    manager = make(("full", 64, FULL), ("chunked", 8, kind), sub_block=False)
    ledger = Ledger(manager)
    manager.close(ledger.prefill(run(0, 28)))
    squeeze(manager, 1000, 8)
    seq = manager.open([*run(0, 20).tolist(), 777])
    assert seq.num_cached == 16
    assert held(seq, 1) == []
    assert counts(manager, 1)[1] == 0
    ledger.generate(seq, [16, 17, 18, 19, 777])
    ledger.check(seq)


def test_prefixes_around_a_lost_window_block_are_still_found():
    manager = windowed(64, SlidingWindow(8, interval=32))
    serve(manager, run(0, 240))
    squeeze(manager, 1000, 5)
    assert found(manager, run(0, 240)) == 240
    refused = [n for n in range(4, 241, 4) if found(manager, run(0, n)) < n - 32 - 4]
    assert refused == []
