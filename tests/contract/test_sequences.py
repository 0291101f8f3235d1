"""The life of a sequence: open, reserve, commit, fork, truncate, suspend, resume, close."""

import numpy as np
import pytest
from core_help import found, generate, prefill, rejected, run, serve

from quire import errors, ops
from quire.core import CacheManager, MediaItem, Scope
from quire.foresight import Trail

BLOCK = 4


@pytest.fixture
def manager():
    return CacheManager(num_blocks=16, block_size=BLOCK, watchers=[Trail()])


def counts(manager):
    return manager.num_free, manager.num_active, manager.num_cached


# -- lengths -------------------------------------------------------------------------------


def test_a_new_sequence_computed_nothing(manager):
    seq = manager.open(run(0, 6))
    assert (seq.num_cached, seq.published, seq.computed, seq.capacity) == (0, 0, 0, 0)
    assert (seq.prompt_len, seq.state, seq.tokens.tolist()) == (6, "open", [])
    assert seq.block_ids().tolist() == []
    assert counts(manager) == (16, 0, 0)


def test_a_reservation_counts_from_computed_and_does_not_add_up(manager):
    seq = manager.open(run(0, 6))
    for num_tokens, capacity in ((6, 6), (6, 6), (3, 6), (7, 7)):
        manager.reserve(seq, num_tokens)
        assert seq.capacity == capacity
    assert len(seq.block_ids()) == 2
    manager.commit(seq, run(0, 2))
    manager.reserve(seq, 7)
    assert (seq.computed, seq.capacity) == (2, 9)


def test_lengths_follow_a_commit_in_chunks(manager):
    seq = manager.open(run(0, 10))
    manager.reserve(seq, 10)
    for chunk, published in ((3, 0), (1, 4), (5, 8), (1, 8)):
        manager.commit(seq, run(seq.computed, chunk))
        assert seq.published == published
    assert seq.tokens.tolist() == list(range(10))
    assert seq.tokens.dtype == np.int32


@pytest.mark.parametrize("length", range(1, 14))
def test_the_last_token_of_a_prompt_is_never_found(manager, length):
    serve(manager, run(0, 13))
    hit = manager.probe(run(0, length))
    assert hit.num_tokens == min(length - 1, 12)
    seq = manager.open(run(0, length))
    assert seq.num_cached == seq.computed == hit.num_tokens
    assert seq.capacity >= seq.computed


def test_a_hit_says_what_it_consists_of_and_why_it_ends(manager):
    serve(manager, run(0, 12))

    def hit(tokens, scope=None):
        hit = manager.probe(tokens, scope)
        return hit.num_tokens, hit.num_blocks, hit.partial_tokens, hit.reason

    assert hit(run(0, 12)) == (11, 2, 3, "last_token")
    assert hit([0, 1, 2, 3, 4, 5, 9, 9, 9]) == (6, 1, 2, "cold")
    assert hit([*range(12), *range(90, 98)]) == (12, 3, 0, "cold")
    assert hit([*range(12), 9, 9]) == (12, 3, 0, "partial_block")
    assert hit(run(500, 9)) == (0, 0, 0, "cold")
    ops.reclaim(manager, 1)
    assert hit(run(0, 14)) == (8, 2, 0, "evicted")


def test_that_another_scope_has_the_prompt_is_told_by_explain_alone(manager):
    serve(manager, run(0, 12))
    assert manager.probe(run(0, 12), Scope(salt="x")).reason == "cold"
    story = ops.explain(manager, run(0, 16), Scope(salt="x"))
    assert [(each.start, each.stop, each.why) for each in story.segments] == [
        (0, 12, "scope"),
        (12, 15, "cold"),
        (15, 16, "last_token"),
    ]
    assert story.found_in == [(Scope(), 12)]


@pytest.mark.parametrize(
    ("tokens", "scope"),
    [
        (range(12), None),
        (range(5), None),
        ([0, 1, 2, 3, 4, 5, 9, 9, 9], None),
        ([0, 1, 2, 3, 4, 5, 9, 9, 9], Scope(salt="x")),
        (range(500, 509), None),
        (range(20), None),
    ],
)
def test_an_explanation_covers_the_prompt_and_agrees_with_the_lookup(manager, tokens, scope):
    serve(manager, run(0, 12))
    tokens = list(tokens)
    explanation, hit = ops.explain(manager, tokens, scope), manager.probe(tokens, scope)
    assert explanation.hit == hit
    starts = [segment.start for segment in explanation.segments]
    stops = [segment.stop for segment in explanation.segments]
    assert [*starts, len(tokens)] == [0, *stops]
    cached = [s.stop - s.start for s in explanation.segments if s.cached]
    assert sum(cached) == hit.num_tokens
    missed = [segment.why for segment in explanation.segments if not segment.cached]
    assert missed[0] == ("scope" if explanation.found_in else hit.reason)
    assert str(explanation).startswith(f"{hit.num_tokens} of {len(tokens)} tokens cached")


def test_every_way_to_write_the_tokens_is_the_same_prompt(manager):
    from array import array

    serve(manager, run(0, 9))
    same = [list(range(9)), tuple(range(9)), array("i", range(9)), array("q", range(9))]
    same += [np.arange(9, dtype=kind) for kind in ("i4", "i8", "u2", "u8", ">i4")]
    same += [np.arange(18, dtype=np.int32)[::2] // 2, memoryview(run(0, 9))]
    assert [manager.probe(tokens).num_tokens for tokens in same] == [8] * len(same)


# -- rollback and preemption ---------------------------------------------------------------


def test_a_cut_at_a_block_boundary_takes_back_what_nobody_else_used(manager):
    seq = prefill(manager, run(0, 12))
    ops.truncate(manager, seq, 4)
    assert counts(manager) == (15, 1, 0)
    assert found(manager, run(0, 12)) == 4


def test_a_cut_at_a_block_boundary_leaves_cached_blocks_of_others(manager):
    serve(manager, run(0, 12))
    seq = manager.open(run(0, 13))
    ops.truncate(manager, seq, 4)
    assert counts(manager) == (13, 1, 2)
    assert found(manager, run(0, 12)) == 12


def test_a_cut_into_an_unshared_published_block_takes_it_back(manager):
    seq = prefill(manager, run(0, 8))
    ops.truncate(manager, seq, 6)
    assert (seq.published, seq.computed, seq.capacity) == (4, 6, 6)
    assert manager.probe(run(0, 9)).num_tokens == 4
    assert counts(manager) == (14, 2, 0)


def test_a_cut_into_the_prompt_must_go_on_with_the_prompt(manager):
    seq = prefill(manager, run(0, 7))
    ops.truncate(manager, seq, 5)
    manager.reserve(seq, 2)
    with rejected(manager, errors.CommitError):
        manager.commit(seq, [5, 9])
    manager.commit(seq, [5, 6])


def test_a_cut_into_a_picture_goes_on_with_the_picture(manager):
    cat = [MediaItem(b"c" * 32, 2, 4)]
    seq = prefill(manager, [5] * 8, media=cat)
    ops.truncate(manager, seq, 4)
    generate(manager, seq, [5, 5, 5, 5])
    assert manager.probe([5] * 9).num_tokens == 2
    assert manager.probe([5] * 9, media=cat).num_tokens == 8


def test_a_resumed_sequence_must_go_on_with_what_it_had(manager):
    seq = prefill(manager, run(0, 4))
    generate(manager, seq, [70, 71, 72])
    manager.suspend(seq)
    assert manager.resume(seq) == 3
    manager.reserve(seq, 3)
    with rejected(manager, errors.CommitError):
        manager.commit(seq, [70, 99])
    manager.commit(seq, [70, 71, 72])
    ops.truncate(manager, seq, 5)
    generate(manager, seq, [80])


def test_a_suspended_sequence_holds_nothing(manager):
    seq = prefill(manager, run(0, 10))
    manager.suspend(seq)
    assert seq.state == "suspended"
    assert counts(manager) == (14, 0, 2)


def test_a_resumed_sequence_finds_what_is_left(manager):
    seq = prefill(manager, run(0, 10))
    generate(manager, seq, [70, 71, 72])
    manager.suspend(seq)
    ops.reclaim(manager, 1)
    assert manager.resume(seq) == 13 - 8
    assert (seq.state, seq.computed, seq.tokens.tolist()) == ("open", 8, list(range(8)))
    generate(manager, seq, [8, 9, 70, 71, 72])
    assert seq.computed == 13


def test_a_resume_after_everything_was_evicted_starts_anew(manager):
    seq = prefill(manager, run(0, 10))
    manager.suspend(seq)
    ops.clear(manager)
    assert manager.resume(seq) == 10
    assert seq.block_ids().tolist() == []


def test_a_closed_sequence_leaves_published_blocks_cached_and_frees_the_rest(manager):
    seq = prefill(manager, run(0, 10))
    manager.reserve(seq, 20)
    manager.close(seq)
    assert seq.state == "closed"
    assert counts(manager) == (14, 0, 2)


def test_eviction_below_a_prefix_leaves_what_is_active(manager):
    seq = prefill(manager, run(0, 8))
    serve(manager, [*range(8), 1, 1, 1, 1])
    serve(manager, run(1000, 8))
    assert ops.invalidate(manager, run(0, 8)) == 1
    assert found(manager, run(0, 8)) == 8
    assert found(manager, run(1000, 8)) == 8
    manager.close(seq)


def test_eviction_of_a_scope_leaves_other_scopes(manager):
    serve(manager, run(0, 8))
    serve(manager, run(0, 8), Scope(salt="x"))
    assert ops.invalidate(manager, scope=Scope(salt="x")) == 2
    assert manager.probe(run(0, 9)).num_tokens == 8
    assert manager.probe(run(0, 9), Scope(salt="x")).num_tokens == 0


def test_reclaim_of_one_block_frees_one():
    manager = CacheManager(num_blocks=512, block_size=BLOCK, sub_block=False)
    serve(manager, run(0, 500 * BLOCK))
    assert ops.reclaim(manager, 1) == 1
    assert found(manager, run(0, 500 * BLOCK)) == 499 * BLOCK
    seq = manager.open(run(5000, 14 * BLOCK))
    manager.reserve(seq, 14 * BLOCK)
    assert found(manager, run(0, 500 * BLOCK)) == 498 * BLOCK


def test_invalidating_a_block_drops_the_blocks_behind_it(manager):
    serve(manager, run(0, 8 * BLOCK))
    ops.invalidate(manager, run(0, BLOCK))
    assert found(manager, run(0, 8 * BLOCK)) == 0
    assert counts(manager) == (16, 0, 0)


# -- counting ------------------------------------------------------------------------------


def test_the_hit_rate_is_counted_in_tokens_once_at_open(manager):
    serve(manager, run(0, 8))
    manager.probe(run(0, 8))
    serve(manager, run(0, 12))
    stats = manager.stats
    assert (stats.num_requests, stats.prompt_tokens, stats.hit_tokens) == (2, 20, 8)
    assert stats.hit_rate == pytest.approx(8 / 20)
    assert sum(stats.missed.values()) == 12


def test_every_missed_token_is_counted_under_its_reason(manager):
    def missed(tokens, scope=None):
        before = manager.stats.missed
        serve(manager, tokens, scope)
        after = manager.stats.missed
        return {why: after[why] - before[why] for why in after if after[why] != before[why]}

    assert missed(run(0, 8)) == {"last_token": 1, "cold": 7}
    assert missed(run(0, 14)) == {"last_token": 1, "cold": 5}
    assert missed(run(0, 14)) == {"last_token": 1, "partial_block": 1}
    ops.reclaim(manager, 1)
    assert missed(run(0, 18)) == {"last_token": 1, "evicted": 4, "cold": 5}
    assert missed(run(0, 14), Scope(salt="x")) == {"last_token": 1, "cold": 13}
    assert missed(run(0, 17)) == {"last_token": 1}


def test_stats_are_a_snapshot(manager):
    stats = manager.stats
    serve(manager, run(0, 8))
    assert (stats.num_requests, manager.stats.num_requests) == (0, 1)
    with pytest.raises((AttributeError, TypeError)):
        stats.num_requests = 5
