"""Recurrent groups under checkpoint, truncate, fork and suspend."""

import pytest
from core_help import found, generate, prefill, rejected, run
from hybrid_help import (
    BLOCK,
    Ledger,
    conserved,
    counts,
    prefill_in_pieces,
    recurrent,
    serve_in_pieces,
)

from quire import errors, groups, ops

STATES = 1  # the index of the recurrent group


# -- checkpoints ---------------------------------------------------------------------------


def test_a_checkpoint_keeps_a_snapshot_now():
    manager = recurrent()
    ledger = Ledger(manager)
    seq = ledger.prefill(run(0, 30))
    ledger.generate(seq, [100, 101])
    assert groups.checkpoint(manager, seq) is True
    (copy,) = ledger.copy()
    assert copy.src == seq.block_ids(STATES)[0]
    manager.close(seq)
    again = ledger.prefill([*run(0, 30).tolist(), 100, 101, 777])
    assert again.num_cached == 32
    ledger.check(again)


def test_a_checkpoint_where_a_snapshot_stands_costs_nothing():
    manager = recurrent()
    seq = manager.open(run(0, 30))
    generate(manager, seq, run(0, 28))
    manager.take_copies()
    before = counts(manager, STATES)
    assert groups.checkpoint(manager, seq) is True
    assert manager.take_copies() == []
    assert counts(manager, STATES) == before


@pytest.mark.parametrize("computed", [1, 3, 5, 30])
def test_a_checkpoint_inside_a_block_is_refused(computed):
    manager = recurrent()
    seq = manager.open(run(0, 40))
    generate(manager, seq, run(0, computed))
    with rejected(manager, errors.CheckpointError, computed):
        groups.checkpoint(manager, seq)


def test_a_checkpoint_of_nothing_is_refused():
    manager = recurrent()
    seq = manager.open(run(0, 30))
    with rejected(manager, errors.CheckpointError):
        groups.checkpoint(manager, seq)
    manager.reserve(seq, 8)
    with rejected(manager, errors.CheckpointError):
        groups.checkpoint(manager, seq)


def test_a_checkpoint_without_a_working_state_is_refused():
    manager = recurrent()
    serve_in_pieces(manager, run(0, 30))
    seq = manager.open(run(0, 31))
    assert seq.computed == 28
    with rejected(manager, errors.CheckpointError):
        groups.checkpoint(manager, seq)


def test_a_checkpoint_that_gets_no_block_says_so():
    manager = recurrent(num_states=2)
    prefill(manager, run(1000, 3))
    seq = prefill(manager, run(0, 32))
    assert groups.checkpoint(manager, seq) is False
    assert manager.take_copies() == []
    assert conserved(manager)


def test_checkpoints_of_a_decode_leave_the_snapshots_at_the_interval():
    manager = recurrent(num_states=6, interval=64)
    seq = prefill_in_pieces(manager, run(0, 65))
    for token in range(62):
        generate(manager, seq, [token])
        if seq.computed % BLOCK == 0:
            assert groups.checkpoint(manager, seq) is True
    manager.close(seq)
    assert found(manager, run(0, 65)) == 64
    assert found(manager, [*run(0, 65).tolist(), *range(62)]) == 124


# -- rollback ------------------------------------------------------------------------------


def test_a_cut_to_a_snapshot_copies_it_back():
    manager = recurrent(interval=8)
    ledger = Ledger(manager)
    seq = ledger.prefill(run(0, 30))
    ops.truncate(manager, seq, 16)
    assert (seq.computed, seq.capacity) == (16, 16)
    ledger.generate(seq, run(0, 30)[16:])
    ledger.check(seq)
    assert conserved(manager)


@pytest.mark.parametrize(("length", "longest"), [(29, 28), (27, 16), (20, 16), (12, 0), (3, 0)])
def test_a_cut_to_where_no_snapshot_stands_is_refused_and_says_what_is_possible(length, longest):
    manager = recurrent(interval=16)
    seq = prefill_in_pieces(manager, run(0, 30))
    with rejected(manager, errors.TruncateError, length, f"is {longest} tokens"):
        ops.truncate(manager, seq, length)


# -- forks, preemption ---------------------------------------------------------------------


def test_a_fork_shares_the_working_state():
    manager = recurrent()
    seq = prefill(manager, run(0, 30))
    before = counts(manager, STATES)
    twin = manager.fork(seq)
    assert twin.block_ids(STATES).tolist() == seq.block_ids(STATES).tolist()
    assert counts(manager, STATES) == before
    assert manager.take_copies() == []


@pytest.mark.parametrize("first", [0, 1])
def test_the_first_reservation_of_either_copies_the_shared_state(first):
    manager = recurrent()
    ledger = Ledger(manager)
    seq = ledger.prefill(run(0, 30))
    both = [seq, manager.fork(seq)]
    shared = seq.block_ids(STATES).tolist()
    manager.reserve(both[first], 1)
    copies = [copy for copy in ledger.copy() if copy.group == STATES]
    assert [(copy.src, copy.num_tokens) for copy in copies] == [(shared[0], 1)]
    assert both[0].block_ids(STATES).tolist() != both[1].block_ids(STATES).tolist()
    for i in (first, 1 - first):
        ledger.generate(both[i], [100 + i, 200 + i])
    for one in both:
        ledger.check(one)
        manager.close(one)
    assert conserved(manager)


def test_a_fork_without_a_block_for_its_state_is_refused_at_its_reservation():
    manager = recurrent(num_states=2)
    prefill(manager, run(1000, 3))
    seq = prefill(manager, run(0, 30))
    twin = manager.fork(seq)
    with rejected(manager, errors.OutOfBlocks):
        manager.reserve(twin, 1)
    manager.close(seq)
    manager.reserve(twin, 1)
    assert [copy for copy in manager.take_copies() if copy.group == STATES] == []


def test_forks_in_a_batch_get_their_states():
    manager = recurrent()
    ledger = Ledger(manager)
    seq = ledger.prefill(run(0, 30))
    seqs = [seq, manager.fork(seq), manager.fork(seq)]
    batch = manager.batch(seqs)
    for step in range(9):
        manager.reserve_step(batch)
        for i, one in enumerate(seqs):
            ledger.forward(one, [step * 10 + i])
        manager.commit_step(batch, [step * 10 + i for i in range(3)])
    for one in seqs:
        ledger.check(one)
    assert conserved(manager)


def test_a_suspended_sequence_gives_its_state_back_and_resumes_from_a_snapshot():
    manager = recurrent()
    ledger = Ledger(manager)
    seq = ledger.prefill(run(0, 30))
    manager.suspend(seq)
    assert counts(manager, STATES) == (7, 0, 1)
    assert manager.resume(seq) == 2
    assert seq.block_ids(STATES).tolist() == []
    ledger.generate(seq, [28, 29])
    ledger.check(seq)


def test_a_resume_without_a_snapshot_computes_everything():
    manager = recurrent()
    ledger = Ledger(manager)
    seq = manager.open(run(0, 30))
    ledger.generate(seq, run(0, 30))
    manager.suspend(seq)
    assert manager.resume(seq) == 30
    assert groups.stops(manager, seq) == [28]
    ledger.generate(seq, run(0, 30))
    ledger.check(seq)
