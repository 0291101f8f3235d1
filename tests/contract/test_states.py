"""Recurrent groups: working states, snapshots at stops, and what they allow."""

import pytest
from core_help import found, generate, prefill, rejected, run, serve
from hybrid_help import (
    BLOCK,
    FULL,
    Ledger,
    conserved,
    counts,
    make,
    recurrent,
    serve_in_pieces,
)

from quire import errors, groups
from quire.core import CacheManager
from quire.groups import Recurrent, SlidingWindow

STATES = 1  # the index of the recurrent group


# -- stops ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("interval", "length", "stops"),
    [
        (None, 30, [28]),
        (None, 32, [28]),
        (None, 33, [32]),
        (None, 5, [4]),
        (None, 4, []),
        (8, 30, [8, 16, 24, 28]),
        (8, 33, [8, 16, 24, 32]),
        (16, 16, [12]),
        (16, 17, [16]),
        (64, 30, [28]),
    ],
)
def test_a_prefill_stops_at_the_interval_and_at_the_last_block_boundary(interval, length, stops):
    manager = recurrent(interval=interval)
    assert groups.stops(manager, manager.open(run(0, length))) == stops


def test_stops_lie_beyond_what_is_computed():
    manager = recurrent(interval=8)
    seq = manager.open(run(0, 30))
    generate(manager, seq, run(0, 9))
    assert groups.stops(manager, seq) == [16, 24, 28]
    generate(manager, seq, run(0, 30)[9:])
    assert [stop for stop in groups.stops(manager, seq) if stop <= 30] == []


def test_stops_after_a_hit_lie_beyond_the_hit():
    manager = recurrent(interval=8)
    serve_in_pieces(manager, run(0, 20))
    seq = manager.open(run(0, 30))
    assert seq.num_cached == 16
    assert min(groups.stops(manager, seq)) > 16
    assert {24, 28} <= set(groups.stops(manager, seq))


def test_groups_of_other_kinds_need_no_stops():
    manager = make(("full", 64, FULL), ("sliding", 64, SlidingWindow(8)))
    assert groups.stops(manager, manager.open(run(0, 30))) == []
    plain = CacheManager(num_blocks=64, block_size=BLOCK)
    assert groups.stops(plain, plain.open(run(0, 30))) == []


def test_several_recurrent_groups_stop_at_the_intervals_of_each():
    manager = make(("a", 16, Recurrent(interval=8)), ("b", 16, Recurrent(interval=12)))
    stops = groups.stops(manager, manager.open(run(0, 31)))
    assert stops == sorted(set(stops))
    assert {8, 12, 16, 24, 28} <= set(stops)
    serve_in_pieces(manager, run(0, 31))
    assert found(manager, run(0, 28)) == 28
    assert found(manager, run(0, 27)) >= 24


def test_a_prompt_that_branches_off_a_cached_one_stops_at_the_branch():
    manager = recurrent()
    serve_in_pieces(manager, run(0, 30))
    seq = manager.open([*run(0, 18).tolist(), *run(5000, 12)])
    assert seq.num_cached == 0
    assert groups.stops(manager, seq) == [16, 28]


def test_a_third_prompt_finds_the_state_at_the_branch():
    manager = recurrent()
    ledger = Ledger(manager)
    system = run(0, 16).tolist()
    for start in (1000, 2000):
        manager.close(ledger.prefill([*system, *run(start, 12)]))
    seq = ledger.prefill([*system, *run(3000, 12)])
    assert seq.num_cached == 16
    ledger.check(seq)


# -- the working state ---------------------------------------------------------------------


def test_the_first_reservation_allocates_the_working_state():
    manager = recurrent()
    seq = manager.open(run(0, 30))
    assert seq.block_ids(STATES).tolist() == []
    assert counts(manager, STATES) == (8, 0, 0)
    manager.reserve(seq, 5)
    (working,) = seq.block_ids(STATES).tolist()
    assert counts(manager, STATES) == (7, 1, 0)
    manager.reserve(seq, 30)
    manager.commit(seq, run(0, 30))
    assert seq.block_ids(STATES).tolist() == [working]
    manager.close(seq)
    assert conserved(manager)


def test_a_hit_copies_the_snapshot_into_the_working_state():
    manager = recurrent()
    serve_in_pieces(manager, run(0, 30))
    seq = manager.open(run(0, 31))
    assert seq.num_cached == 28
    assert manager.take_copies() == []
    assert seq.block_ids(STATES).tolist() == []
    manager.reserve(seq, 3)
    (copy,) = manager.take_copies()
    (working,) = seq.block_ids(STATES).tolist()
    assert (copy.group, copy.dst, copy.num_tokens) == (STATES, working, 1)
    assert copy.src != working


def test_a_sequence_without_a_hit_starts_without_a_copy():
    manager = recurrent()
    seq = manager.open(run(0, 30))
    manager.reserve(seq, 30)
    assert manager.take_copies() == []


def test_decode_steps_keep_one_working_state_for_each_sequence():
    manager = recurrent(num_states=3)
    seqs = [prefill(manager, run(1000 * i, 3)) for i in range(3)]
    working = [seq.block_ids(STATES).tolist() for seq in seqs]
    batch = manager.batch(seqs)
    for step in range(50):
        manager.reserve_step(batch)
        manager.take_copies()
        manager.commit_step(batch, [step] * 3)
    assert [seq.block_ids(STATES).tolist() for seq in seqs] == working
    tables = manager.tables(seqs, group=STATES)
    assert tables.padded.tolist() == working
    assert tables.last_block_len.tolist() == [53 % 4] * 3
    assert conserved(manager)


# -- snapshots -----------------------------------------------------------------------------


def test_a_commit_that_ends_at_a_stop_keeps_a_snapshot():
    manager = recurrent()
    seq = manager.open(run(0, 30))
    generate(manager, seq, run(0, 28))
    (working,) = seq.block_ids(STATES).tolist()
    (copy,) = manager.take_copies()
    assert (copy.group, copy.src, copy.num_tokens) == (STATES, working, 1)
    assert copy.dst != working
    assert found(manager, run(0, 28)) == 28


def test_a_state_is_not_written_again_before_its_snapshot_was_copied():
    manager = recurrent()
    seq = manager.open(run(0, 30))
    manager.reserve(seq, 30)
    manager.commit(seq, run(0, 28))
    with rejected(manager, errors.CopyError, "take_copies"):
        manager.commit(seq, [28, 29])
    assert len(manager.take_copies()) == 1
    manager.commit(seq, [28, 29])


def test_a_commit_that_passes_a_stop_keeps_none():
    manager = recurrent()
    serve(manager, run(0, 30))
    assert manager.take_copies() == []
    assert counts(manager, STATES) == (8, 0, 0)
    assert found(manager, run(0, 30)) == 0


def test_a_snapshot_that_is_there_is_not_taken_twice():
    manager = recurrent()
    first, second = manager.open(run(0, 30)), manager.open(run(0, 30))
    for seq in (first, second):
        generate(manager, seq, run(0, 28))
        manager.take_copies()
    assert counts(manager, STATES)[0] == 8 - 2 - 1
    for seq in (first, second):
        manager.close(seq)
    assert counts(manager, STATES) == (7, 0, 1)


def test_a_snapshot_without_a_free_block_is_silently_left_out():
    manager = recurrent(num_states=2)
    prefill(manager, run(1000, 3))
    seq = manager.open(run(0, 30))
    generate(manager, seq, run(0, 28))
    assert manager.take_copies() == []
    generate(manager, seq, run(0, 30)[28:])
    assert found(manager, run(0, 30)) == 0
    manager.close(seq)
    assert conserved(manager)


def test_a_snapshot_takes_the_place_of_one_used_longer_ago():
    manager = recurrent(num_states=2)
    serve_in_pieces(manager, run(0, 30))
    serve_in_pieces(manager, run(1000, 30))
    assert found(manager, run(0, 30)) == 0
    assert found(manager, run(1000, 30)) == 28
    assert conserved(manager)


@pytest.mark.parametrize("length", range(4, 33, 4))
def test_a_snapshot_is_valid_at_its_own_boundary_only(length):
    manager = recurrent(interval=16)
    serve_in_pieces(manager, run(0, 30))
    assert found(manager, run(0, length)) == {16: 16, 20: 16, 24: 16, 28: 28, 32: 28}.get(length, 0)


def test_a_split_gives_the_state_to_no_shorter_prefix():
    manager = recurrent()
    serve_in_pieces(manager, run(0, 30))
    serve(manager, [*run(0, 14).tolist(), *run(5000, 12)])
    for length in (4, 8, 12, 16, 20, 24):
        assert found(manager, run(0, length)) == 0
    assert found(manager, run(0, 28)) == 28


def test_the_head_of_a_block_is_never_taken_from_a_recurrent_model():
    manager = recurrent()
    serve_in_pieces(manager, run(0, 30))
    hit = manager.probe([*run(0, 28).tolist(), 777])
    assert (hit.num_tokens, hit.partial_tokens) == (28, 0)
    hit = manager.probe(run(0, 28))
    assert (hit.num_tokens, hit.partial_tokens) == (0, 0)


def test_a_hit_protects_its_snapshot_alone():
    manager = recurrent(num_states=5, interval=8)
    ledger = Ledger(manager)
    manager.close(ledger.prefill(run(0, 30)))
    assert counts(manager, STATES)[2] == 4
    seq = manager.open(run(0, 31))
    assert seq.num_cached == 28
    assert counts(manager, STATES)[1] in (1, 2)
    for start in range(1000, 9000, 1000):
        manager.close(ledger.prefill(run(start, 13)))
    ledger.generate(seq, run(0, 31)[28:])
    ledger.check(seq)
    assert conserved(manager)


def test_prefixes_around_a_lost_state_are_still_found():
    manager = recurrent(9, interval=16)
    serve_in_pieces(manager, run(0, 120))
    assert counts(manager, STATES)[2] == 8
    serve_in_pieces(manager, run(1000, 5))
    lost = [n for n in (16, 32, 48, 64, 80, 96, 112, 116) if found(manager, run(0, n)) < n]
    assert len(lost) == 1
    assert found(manager, run(0, 120)) == 116
