"""The stored part of a request: `store_until`."""

import pytest
from core_help import found, generate, prefill, rejected, run, serve
from hybrid_help import BLOCK, Ledger, conserved, counts, make, prefill_in_pieces

from quire import errors, ops
from quire.core import CacheManager, FullAttention
from quire.groups import Recurrent, SlidingWindow

KINDS = (FullAttention(), SlidingWindow(6))


@pytest.fixture
def manager():
    return CacheManager(num_blocks=32, block_size=BLOCK, sub_block=False)


@pytest.fixture
def hybrid():
    return make(("full", 64, KINDS[0]), ("sliding", 64, KINDS[1]), sub_block=False)


@pytest.mark.parametrize(("limit", "stored"), [(0, 0), (3, 0), (4, 4), (9, 8), (24, 24), (26, 24)])
def test_blocks_from_the_first_unstored_token_on_are_never_published(hybrid, limit, stored):
    serve(hybrid, run(0, 26), store_until=limit)
    assert found(hybrid, run(0, 26)) == stored
    assert counts(hybrid, 0) == (64 - stored // 4, 0, stored // 4)
    assert conserved(hybrid)


def test_an_unstored_part_beyond_the_prompt_holds_for_generated_tokens(manager):
    seq = prefill(manager, run(0, 8), store_until=8)
    generate(manager, seq, run(1000, 8))
    manager.close(seq)
    assert found(manager, [*run(0, 8), *run(1000, 8)]) == 8


def test_a_request_that_is_not_stored_may_still_hit(hybrid):
    ledger = Ledger(hybrid)
    hybrid.close(ledger.prefill(run(0, 16)))
    seq = ledger.prefill(run(0, 24), store_until=0)
    assert seq.num_cached == 16
    ledger.check(seq)
    hybrid.close(seq)
    assert found(hybrid, run(0, 24)) == 16
    assert conserved(hybrid)


def test_a_request_that_is_not_stored_computes_more_than_its_windowed_pool():
    manager = make(("full", 400, KINDS[0]), ("sliding", 6, KINDS[1]))
    ledger = Ledger(manager)
    seq = ledger.prefill(run(0, 6), store_until=0)
    for token in range(300):
        ledger.generate(seq, [token])
        assert conserved(manager)
    ledger.check(seq)
    manager.close(seq)
    assert counts(manager, 1) == (6, 0, 0)


def test_an_unstored_request_beside_a_stored_one_reads_its_own_blocks(hybrid):
    ledger = Ledger(hybrid)
    seqs = [
        hybrid.open(run(0, 20), store_until=0),
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
    seq = prefill_in_pieces(manager, run(0, 30), store_until=18)
    manager.close(seq)
    assert found(manager, run(0, 30)) == 16
    assert counts(manager, 1)[2] == 2


def test_an_answer_is_not_published_beyond_store_until(hybrid):
    seq = prefill(hybrid, run(0, 10), store_until=10)
    generate(hybrid, seq, run(1000, 10))
    assert found(hybrid, [*run(0, 10), *run(1000, 10)]) == 8
    hybrid.close(seq)
    assert found(hybrid, [*run(0, 10), *run(1000, 10)]) == 8
    assert counts(hybrid, 0) == (62, 0, 2)


def test_a_fork_stores_as_little_as_its_origin(manager):
    seq = prefill(manager, run(0, 10), store_until=8)
    twin = manager.fork(seq)
    generate(manager, twin, run(1000, 6))
    manager.close(twin)
    manager.close(seq)
    assert counts(manager, 0) == (30, 0, 2)


def test_a_resumed_request_stores_as_little_as_before(manager):
    seq = prefill(manager, run(0, 14), store_until=8)
    manager.suspend(seq)
    assert manager.resume(seq) == 6
    generate(manager, seq, run(0, 14)[8:])
    manager.close(seq)
    assert counts(manager, 0) == (30, 0, 2)


def test_an_unstored_sequence_is_rolled_back_like_any_other(manager):
    seq = prefill(manager, run(0, 14), store_until=0)
    ops.truncate(manager, seq, 6)
    generate(manager, seq, run(0, 14)[6:])
    assert seq.tokens.tolist() == list(range(14))
    manager.close(seq)
    assert counts(manager, 0) == (32, 0, 0)


def test_a_cached_path_beyond_store_until_is_used(manager):
    serve(manager, run(0, 24))
    seq = prefill(manager, run(0, 28), store_until=8)
    assert seq.num_cached == 24
    manager.close(seq)
    assert counts(manager, 0) == (26, 0, 6)


def test_the_stored_part_of_a_prompt_keeps_its_priority(manager):
    serve(manager, run(0, 16), store_until=8, priority=1)
    serve(manager, run(1000, 8))
    ops.reclaim(manager, 2)
    assert (found(manager, run(0, 16)), found(manager, run(1000, 8))) == (8, 0)


@pytest.mark.parametrize("num_tokens", [-1, 1.5, "0", True, [4]])
def test_the_tokens_to_store_are_a_whole_number(manager, num_tokens):
    with rejected(manager, errors.ConfigError, "store_until"):
        manager.open(run(0, 16), store_until=num_tokens)
