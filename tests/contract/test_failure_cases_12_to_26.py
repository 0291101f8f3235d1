"""How caches like this one have failed elsewhere, for models of several layer kinds; by number.

What a single full-attention group must hold stands in test_failure_cases.py.
"""

import pytest
from core_help import found, prefill, run, serve
from hybrid_help import BLOCK, Ledger, conserved, counts, make, serve_in_pieces, squeeze

from quire.core import (
    ChunkedAttention,
    FullAttention,
    MediaItem,
    Recurrent,
    Scope,
    SlidingWindow,
)

FULL = FullAttention()
POLICIES = ("lru", "fifo", "lfu")
KINDS = (FULL, SlidingWindow(7, sinks=2, interval=8), ChunkedAttention(10), Recurrent(interval=8))


def every_kind(num_blocks=40, **options):
    manager = make(*[(f"g{i}", num_blocks, kind) for i, kind in enumerate(KINDS)], **options)
    return manager, Ledger(manager, *KINDS)


def sliding_pair(num_sliding, window=8, interval=16, **options):
    return make(
        ("full", 512, FULL),
        ("sliding", num_sliding, SlidingWindow(window, interval=interval)),
        sub_block=False,
        **options,
    )


def test_case_12_a_hole_in_a_window_is_no_hit():
    manager = sliding_pair(10)
    serve(manager, run(0, 32))
    squeeze(manager, 1000, 6)
    for length in (20, 24, 28):
        assert found(manager, run(0, length)) == 16
        seq = manager.open([*run(0, length).tolist(), 777])
        assert min(seq.block_ids(1).tolist()[2:4]) >= 0
        manager.close(seq)


@pytest.mark.parametrize("policy", POLICIES)
def test_case_12_a_hit_is_whole_in_every_kind_of_group_at_any_pressure(policy):
    manager, ledger = every_kind(14, policy=policy)
    for i in range(60):
        start, length = 1000 * (i * i % 5), 9 + 7 * (i % 4)
        manager.close(ledger.prefill(run(start, length)))
        assert conserved(manager)
    assert manager.stats.evicted_blocks > 0
    assert manager.stats.hit_tokens > 0


@pytest.mark.parametrize("policy", ["lru", "lfu"])
def test_case_13_recency_and_frequency_move_in_every_group_on_every_open(policy):
    manager = make(
        ("full", 512, FULL), ("states", 3, Recurrent()), ("sliding", 512, SlidingWindow(8)),
        policy=policy,
    )  # fmt: skip
    serve_in_pieces(manager, run(0, 17))
    serve_in_pieces(manager, run(1000, 17))
    for _ in range(100):
        manager.close(manager.open(run(0, 17)))
    serve_in_pieces(manager, run(2000, 17))
    assert found(manager, run(0, 16)) == 16
    assert found(manager, run(1000, 16)) == 0


def test_case_13_a_window_used_again_and_again_stays():
    manager = sliding_pair(10, interval=32)
    serve(manager, run(0, 16))
    for start in range(1000, 20_000, 1000):
        serve(manager, run(start, 16))
        manager.close(manager.open(run(0, 17)))
    assert found(manager, run(0, 16)) == 16


def test_case_14_after_splits_every_window_holds_its_own_context():
    manager, ledger = every_kind(24)
    trunk = run(0, 21).tolist()
    prompts = [[*trunk[:cut], *run(1000 * cut, 11)] for cut in (21, 13, 8, 17, 4, 21, 9)]
    for prompt in [*prompts, *prompts[::-1], *prompts]:
        seq = ledger.prefill(prompt)
        ledger.check(seq)
        ledger.generate(seq, [5, 6, 7])
        ledger.check(seq)
        manager.close(seq)
        assert conserved(manager)


def test_case_14_a_commit_that_takes_over_other_blocks_keeps_its_own_context():
    kinds = (FULL, SlidingWindow(6))
    manager = make(("full", 64, FULL), ("sliding", 64, kinds[1]))
    ledger = Ledger(manager, *kinds)
    seqs = [manager.open([*run(0, 18).tolist(), 700 + i]) for i in range(3)]
    for end in (5, 11, 18, 19):
        for i, seq in enumerate(seqs):
            tokens = [*run(0, 18).tolist(), 700 + i]
            ledger.generate(seq, tokens[seq.computed : end])
            for other in seqs:
                ledger.check(other)
    assert conserved(manager)


def test_case_15_a_commit_of_what_is_cached_frees_only_its_own_blocks_in_every_group():
    manager, ledger = every_kind()
    seqs = [manager.open(run(0, 26)) for _ in range(3)]
    for seq in seqs:
        for end in (8, 16, 24, 26):
            ledger.generate(seq, run(0, 26)[seq.computed : end])
            assert conserved(manager)
    ledger.copy()
    for seq in seqs:
        ledger.check(seq)
        manager.close(seq)
        assert conserved(manager)
    assert [counts(manager, group)[2] for group in range(4)] == [6, 6, 6, 3]
    assert found(manager, run(0, 24)) == 24


def test_case_18_pictures_with_equal_placeholders_share_nothing_in_any_group():
    manager, _ = every_kind()
    prompt = [1, 1, 5, 5, 5, 5, 2, 2, 3, 3, 3, 3, 4]
    cat, dog = ([MediaItem(name * 32, 2, 4)] for name in (b"c", b"d"))
    serve_in_pieces(manager, prompt, media=cat)
    assert manager.probe(prompt, media=cat).num_tokens == 12
    assert manager.probe(prompt, media=dog).num_tokens == 0
    assert manager.probe(prompt).num_tokens == 0
    serve_in_pieces(manager, prompt, media=dog)
    for picture in (cat, dog):
        assert manager.probe(prompt, media=picture).num_tokens == 12
    assert conserved(manager)


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (Scope(lora="a", salt="b"), Scope(lora="ab")),
        (Scope(salt="a"), Scope(lora="a")),
        (Scope(salt="a"), None),
    ],
)
def test_case_19_scopes_meet_in_no_group(left, right):
    manager, ledger = every_kind()
    manager.close(ledger.prefill(run(0, 21), left))
    assert found(manager, run(0, 20), right) == 0
    seq = ledger.prefill(run(0, 21), right)
    assert seq.num_cached == 0
    ledger.check(seq)
    again = ledger.prefill(run(0, 21), left)
    assert again.num_cached == 20
    ledger.check(again)


def test_case_25_one_lost_block_leaves_the_branch_matchable():
    manager = sliding_pair(64, window=8, interval=32)
    serve(manager, run(0, 240))
    squeeze(manager, 1000, 5)
    assert found(manager, run(0, 240)) == 240
    refused = [n for n in range(4, 241, 4) if found(manager, run(0, n)) < n - 32 - BLOCK]
    assert refused == []


def test_case_25_one_lost_state_leaves_shorter_and_longer_prefixes():
    manager = make(("full", 512, FULL), ("states", 9, Recurrent(interval=16)))
    serve_in_pieces(manager, run(0, 120))
    assert counts(manager, 1)[2] == 8
    serve_in_pieces(manager, run(1000, 5))
    lost = [n for n in (16, 32, 48, 64, 80, 96, 112, 116) if found(manager, run(0, n)) < n]
    assert len(lost) == 1
    assert found(manager, run(0, 120)) == 116


@pytest.mark.parametrize("cut", range(4, 28, 4))
def test_case_26_a_state_is_given_to_no_shorter_prefix_after_a_split(cut):
    kinds = (FULL, Recurrent())
    manager = make(("full", 64, FULL), ("states", 8, kinds[1]))
    ledger = Ledger(manager, *kinds)
    manager.close(ledger.prefill(run(0, 30)))
    branch = prefill(manager, [*run(0, cut).tolist(), *run(5000, 6)])
    assert branch.num_cached == 0
    manager.close(branch)
    assert found(manager, run(0, cut)) == 0
    seq = ledger.prefill(run(0, 30))
    assert seq.num_cached == 28
    ledger.check(seq)


def test_case_26_states_are_bounded_by_their_pool():
    kinds = (FULL, Recurrent(interval=4))
    manager = make(("full", 400, FULL), ("states", 5, kinds[1]))
    ledger = Ledger(manager, *kinds)
    for start in range(0, 20_000, 1000):
        seq = ledger.prefill(run(start, 50))
        ledger.check(seq)
        manager.close(seq)
        assert counts(manager, 1)[2] <= 5
        assert conserved(manager)
