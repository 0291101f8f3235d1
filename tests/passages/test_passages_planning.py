"""The plan of a prompt: exact prefix first, then variants, then computing; and the fallback."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from passages_made import HEAD, QUESTION, A, B, C, D, asked, ids, variant

from quire.core import Scope
from quire.errors import ConfigError
from quire_passages import (
    AllRows,
    Epic,
    KVDeviation,
    NoRows,
    Passages,
    PassageStore,
    Reach,
    Segments,
    make_plan,
    report_of,
)

SCOPE = Scope(model="m")
FREE = Passages(selector=Epic(2), min_tokens=1, worth=10)
LIMITS = Reach(100_000, 0.0)


def store_of(*variants):
    store = PassageStore("1MiB")
    for each in variants:
        store.put(SCOPE, each)
    return store


def planned(segments, store, cached=0, settings=FREE, limits=LIMITS):
    return make_plan(segments, store, SCOPE, cached, settings=settings, limits=limits)


def test_passages_are_placed_wherever_they_stand():
    store = store_of(*(variant(each, HEAD) for each in (A, B, C)))
    plan = planned(asked(C, A, B), store)
    assert plan.fallback is None
    assert [each.variant.ids for each in plan.placements] == [ids(*each) for each in (C, A, B)]
    assert [each.shift for each in plan.placements] == [0, 20, 40]
    assert [each.is_exact for each in plan.placements] == [True, False, False]
    assert plan.exact_until == len(HEAD)


def test_the_first_passage_behind_what_is_exact_is_exact():
    plan = planned(asked(A, B), store_of(variant(B, HEAD)))
    assert plan.placements[0].variant is None
    assert plan.placements[0].is_exact
    assert plan.exact_until == len(HEAD) + len(A)
    assert plan.placements[1].variant is not None


def test_rows_that_were_computed_up_to_the_check_layer_are_told():
    store = store_of(*(variant(each, HEAD) for each in (A, B, C)))
    settings = Passages(selector=KVDeviation(0.5), min_tokens=1, worth=10)
    plan = planned(asked(C, A, B), store, settings=settings, limits=Reach(1000, 0.75))
    told = report_of(plan, np.arange(30, 50))
    assert told.recomputed_rows == 20
    assert told.moved_tokens == told.checked_rows == 20
    assert told.work_rows == told.computed_tokens + 20 + 20 * 0.75
    chosen = report_of(planned(asked(C, A, B), store), np.arange(30, 32))
    assert chosen.checked_rows == 0
    assert chosen.work_rows == chosen.computed_tokens + 2
    nothing = report_of(planned(asked(D), store), np.arange(0))
    assert nothing.work_rows == nothing.computed_tokens


@pytest.mark.parametrize("other", [[], HEAD[:-1], [*HEAD, 7]], ids=["none", "shorter", "longer"])
def test_a_variant_of_another_head_is_not_placed(other):
    behind_others = variant(C, [*other, *A], "contextual", predecessors=[ids(*A)])
    store = store_of(*(variant(each, other) for each in (A, B)), behind_others)
    plan = planned(asked(B, A, C), store)
    assert [each.variant for each in plan.placements] == [None] * 3
    assert "no passage" in plan.fallback
    assert len(planned(asked(B, A, C, head=other), store).placed) == 3


def test_a_rounded_variant_is_exact_nowhere():
    held = [variant(each, HEAD) for each in (A, B)]
    for each in held:
        each.rounded = True
    plan = planned(asked(A, B), store_of(*held))
    assert plan.placements[0].variant is None
    assert not plan.placements[1].is_exact
    assert planned(asked(A, B), store_of(variant(A, HEAD))).placements[0].variant is not None


def test_a_passage_that_a_tier_could_not_give_says_why():
    lost = {ids(*B): "its record is damaged"}
    plan = planned(asked(C, A, B), store_of(variant(A, HEAD))).explained(lost)
    assert plan.placements[2].reason == "its record is damaged"
    assert plan.placements[1].reason is None
    assert "its record is damaged" in planned(asked(A, B), store_of()).explained(lost).fallback


def test_an_exact_prefix_wins_over_variants():
    store = store_of(*(variant(each, HEAD) for each in (A, B, C)))
    plan = planned(asked(A, B, C), store, cached=len(HEAD) + 25)
    assert [each.reason for each in plan.placements[:1]] == ["cached prefix"]
    assert plan.placements[1].variant is None  # the first behind it: exact, so computed
    assert plan.exact_until == len(HEAD) + 40
    assert plan.placements[2].variant.ids == ids(*C)


def test_a_variant_captured_behind_this_very_text_is_exact():
    there = variant(B, [*HEAD, *A], "contextual", predecessors=[ids(*A)])
    store = store_of(variant(A, HEAD), there, variant(B, HEAD))
    plan = planned(asked(A, B), store)
    assert plan.placements[1].variant is there
    assert plan.is_exact
    assert plan.moved == []
    assert not planned(asked(C, B), store).placements[1].is_exact


def test_the_same_passage_twice_is_placed_twice():
    store = store_of(variant(A, HEAD))
    plan = planned(asked(A, A, A), store)
    assert [each.shift for each in plan.placements] == [0, 20, 40]


def test_unknown_and_short_passages_are_computed_and_it_says_so():
    store = store_of(variant(A, HEAD), variant(B[:5], HEAD))
    settings = Passages(selector=Epic(2), min_tokens=6, worth=10)
    plan = planned(asked(A, C, B[:5], A), store, settings=settings)
    assert [each.reason for each in plan.placements] == [
        None,
        "not in the store",
        "shorter than 6 tokens",
        None,
    ]
    rows = plan.rows(plan.selector.rows(plan.moved))
    start, stop = 30, 30 + 20 + 5
    assert set(range(start, stop)) <= set(rows.tolist())


def test_the_last_token_is_always_computed_and_the_exact_head_never_again():
    store = store_of(*(variant(each, HEAD) for each in (A, B)))
    segments = asked(A, B)
    plan = planned(segments, store, settings=Passages(selector=NoRows(), min_tokens=1, worth=10))
    rows = plan.rows(plan.selector.rows(plan.moved))
    assert rows.tolist() == list(range(segments.tokens.size - len(QUESTION), segments.tokens.size))


def test_passages_are_left_alone_where_plain_prefill_is_hardly_dearer():
    store = store_of(*(variant(each, HEAD) for each in (A, B)))
    dear = planned(asked(A, B), store, settings=Passages(selector=AllRows(), min_tokens=1))
    assert "of 55 that a plain prefill takes" in dear.fallback
    assert dear.is_exact
    long = [range(1000, 1500), range(2000, 2500), range(3000, 3500)]
    store = store_of(*(variant(each, HEAD) for each in long))
    assert planned(asked(*long), store, settings=Passages()).fallback is None
    deep = Reach(100_000, 0.9)
    checked = Passages(selector=KVDeviation(0.1), worth=0.5)
    assert planned(asked(*long), store, settings=checked).fallback is None
    assert planned(asked(*long), store, settings=checked, limits=deep).fallback


def test_a_refused_model_and_far_positions_fall_back_with_the_reason():
    store = store_of(variant(A, HEAD))
    refused = planned(asked(A), store, limits=Reach(100, 0.0, "keys cannot be moved"))
    assert refused.fallback == "keys cannot be moved"
    far = planned(asked(A, B, C, D), store, limits=Reach(60, 0.0))
    assert "positions below 60" in far.fallback
    assert "no passage" in planned(asked(B), store).fallback
    assert "no passage" in planned(Segments.of([HEAD, QUESTION]), store).fallback


def test_a_variant_that_goes_between_plan_and_assembly_is_computed():
    store = store_of(*(variant(each, HEAD) for each in (A, B, C)))
    plan = planned(asked(A, B, C), store)
    gone = plan.placements[1].variant
    store.drop(gone)
    left = plan.without([gone])
    assert left.placements[1].reason == "its variant has gone since it was planned"
    assert set(range(30, 50)) <= set(left.rows(left.selector.rows(left.moved)).tolist())
    report = report_of(left, left.selector.rows(left.moved))
    assert report.details[1].variant is None


def test_other_scopes_find_nothing():
    store = store_of(variant(A, HEAD), variant(B, HEAD))
    other = Scope(salt="x", model="m")
    plan = make_plan(asked(A, B), store, other, 0, settings=FREE, limits=LIMITS)
    assert "no passage" in plan.fallback


@given(
    drawn=st.tuples(st.sampled_from([HEAD, []]), st.integers(0, 60), st.integers(0, 30)),
    passages=st.lists(st.sampled_from([A, B, C, D, A[:1], B[:3]]), max_size=6),
    known=st.lists(st.sampled_from([A, B, C, D, B[:3]]), max_size=5),
    before=st.sampled_from([HEAD, [], [*HEAD, *A], [*HEAD, *B, *A]]),
)
def test_a_report_accounts_for_every_token(drawn, passages, known, before):
    head, cached, epic = drawn
    segments = asked(*passages, head=head)
    store = store_of(*(variant(each, before, "contextual") for each in known))
    settings = Passages(selector=Epic(epic), min_tokens=2, worth=3)
    cached = min(cached, segments.tokens.size - 1)
    plan = planned(segments, store, cached, settings)
    again = plan.selector.rows(plan.moved) if plan.fallback is None else np.empty(0, np.int64)
    report = report_of(plan, again)
    parts = report.exact_tokens, report.moved_tokens, report.recomputed_rows, report.computed_tokens
    assert sum(parts) == segments.tokens.size
    assert min(parts) >= 0
    assert report.computed_tokens >= 1
    assert (report.exactness == "exact") is (not plan.moved or plan.fallback is not None)
    if plan.fallback is None:
        rows = plan.rows(again)
        placed = sum(each.stop - max(each.start, plan.exact_until) for each in plan.placed)
        assert rows.size == segments.tokens.size - plan.exact_until - placed + again.size
        assert rows[-1] == segments.tokens.size - 1
        for each in plan.placed:
            assert each.start >= plan.exact_until or each.is_exact


def test_a_passage_that_is_cached_in_part_is_placed_from_there_on():
    store = store_of(*(variant(each, HEAD) for each in (A, B)))
    plan = planned(asked(A, B), store, cached=len(HEAD) + 3)
    assert plan.exact_until == len(HEAD) + 3
    assert plan.placements[0].is_exact
    assert plan.placements[0].variant is not None
    assert report_of(plan, plan.selector.rows(plan.moved)).exact_tokens == len(HEAD) + 20


@pytest.mark.parametrize(
    "given",
    [
        {"capacity": "none"},
        {"capture": "all"},
        {"selector": "epic"},
        {"worth": 0},
        {"min_tokens": 0},
    ],
)
def test_settings_that_cannot_work_are_refused(given):
    with pytest.raises(ConfigError):
        Passages(**given)


def test_a_plan_that_loses_variants_keeps_its_reason_and_without_any_has_one():
    store = store_of(*(variant(each, HEAD) for each in (A, B, C)))
    plan = planned(asked(A, B, C), store)
    every = [each.variant for each in plan.placed]
    assert plan.fallback is None
    assert plan.without([]).fallback is plan.without(every[:1]).fallback is None
    assert plan.without(every).fallback == "all variants have gone since they were planned"
    refused = planned(asked(A, B, C), store, limits=Reach(100_000, 0.0, "no keys to move"))
    for gone in ([], every[:1], every):
        assert refused.without(gone).fallback == "no keys to move"
