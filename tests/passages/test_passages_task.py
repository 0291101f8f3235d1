"""The task of `quire bench passages`: which facts hold behind passages in an order, and how they are told apart."""

import itertools

import numpy as np
import pytest

from quire_passages.bench import facts, quotes
from quire_passages.bench.facts import (
    BOS,
    FIRST_KEY,
    FIRST_NAME,
    FIRST_VALUE,
    SUBJECT,
    FactQuestion,
)

ANN, BOB = FIRST_NAME, FIRST_NAME + 1
AGE, CITY = FIRST_KEY, FIRST_KEY + 1
ONE, TWO, SIX = FIRST_VALUE, FIRST_VALUE + 1, FIRST_VALUE + 2


def held(*passages):
    return {
        (each.name, each.key): (each.value, each.category) for each in facts.questions(passages)
    }


def test_a_fact_of_one_passage_is_local():
    assert held((SUBJECT, ANN, AGE, ONE, CITY, TWO)) == {
        (ANN, AGE): (ONE, "local"),
        (ANN, CITY): (TWO, "local"),
    }


def test_the_later_of_two_passages_holds_and_the_order_decides():
    old, new = (SUBJECT, ANN, AGE, ONE), (SUBJECT, ANN, AGE, TWO)
    assert held(old, new) == {(ANN, AGE): (TWO, "update")}
    assert held(new, old) == {(ANN, AGE): (ONE, "update")}


def test_the_same_value_said_again_is_no_update():
    assert held((SUBJECT, ANN, AGE, ONE), (SUBJECT, ANN, AGE, ONE)) == {(ANN, AGE): (ONE, "local")}


def test_facts_at_a_head_are_of_the_subject_before_the_border_and_of_nobody_without_one():
    first, second = (SUBJECT, ANN, AGE, ONE), (CITY, TWO, SUBJECT, BOB, CITY, SIX)
    assert held(first, second)[ANN, CITY] == (TWO, "boundary")
    assert held(second, first) == {(BOB, CITY): (SIX, "local"), (ANN, AGE): (ONE, "local")}


def test_a_fact_said_with_its_subject_behind_one_at_a_head_is_an_update():
    first, second = (SUBJECT, ANN, CITY, ONE), (CITY, TWO, SUBJECT, BOB, CITY, SIX)
    assert held(first, second, first)[ANN, CITY] == (ONE, "update")


def test_made_passages_are_in_the_vocabulary_and_can_stand_in_any_order():
    passages = facts.make_passages(np.random.default_rng(0), 4)
    assert {token for passage in passages for token in passage} <= set(
        range(SUBJECT, len(facts.VOCABULARY))
    )
    answers = {tuple(facts.questions(order)) for order in itertools.permutations(passages)}
    assert len(answers) > 1
    categories = {each.category for order in answers for each in order}
    assert categories == set(facts.CATEGORIES)


def test_the_same_seed_makes_the_same_passages():
    made = [facts.make_passages(np.random.default_rng(7), 3) for _ in range(2)]
    assert made[0] == made[1]
    assert made[0] != facts.make_passages(np.random.default_rng(8), 3)


def test_some_questions_are_of_each_category_alike():
    asked = [FactQuestion(ANN, AGE, ONE, "local")] * 9 + [
        FactQuestion(BOB, AGE, ONE, "boundary")
    ] * 2
    chosen = facts.some(np.random.default_rng(0), asked, 4)
    assert sorted(each.category for each in chosen) == ["boundary", "boundary", "local", "local"]


def test_runs_are_cut_from_texts_one_passage_after_the_other():
    texts = [list(range(100)), list(range(1000, 1300))]
    rng = np.random.default_rng(0)
    for _ in range(50):
        runs = quotes.cut_runs(rng, texts, 5, 32)
        assert sum(map(len, runs)) == 5
        for run in runs:
            joined = [token for passage in run for token in passage]
            assert joined == list(range(joined[0], joined[0] + 32 * len(run)))


@pytest.mark.parametrize("category", quotes.CATEGORIES)
def test_a_quote_stands_in_its_run_and_the_next_token_follows(category):
    rng = np.random.default_rng(1)
    runs = [[tuple(range(32)), tuple(range(32, 64))], [tuple(range(100, 132))]]
    for _ in range(50):
        found = quotes.quote(rng, runs, category, 8)
        assert found.tokens == tuple(range(found.following - 8, found.following))
        assert (found.following == 32) == (category == "border")


def test_specials_stand_where_the_models_have_them():
    assert facts.VOCABULARY[BOS] == "<bos>"
    assert facts.VOCABULARY[FIRST_VALUE] == "v0"
