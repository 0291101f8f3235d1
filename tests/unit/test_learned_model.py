"""What `learned` stands on: the model of returns, its ranks, the shadow of LRU, the guard."""

from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.foresight.lru_shadow import MIN_SLOTS, LruShadow
from quire.foresight.mind import APPRENTICE, LOSS, LOST_PROMPTS, TRUST, Mind
from quire.foresight.reentry import (
    EDGES,
    NUM_BINS,
    NUM_CLASSES,
    PRIOR,
    WIDTHS,
    Record,
    Reentry,
    bucket,
    class_of,
    ranks,
)


def test_ranks_fall_with_age_and_rise_with_weight():
    hazard = np.array(PRIOR)
    so_far = np.concatenate(([0.0], np.cumsum(hazard * WIDTHS)[:-1]))
    table = ranks(hazard, so_far)
    assert table.shape == (NUM_CLASSES, NUM_BINS)
    assert np.all(np.diff(table, axis=1) < 0)
    assert np.all(np.diff(table[:, 0]) > 0)


def test_a_rank_is_the_best_ratio_of_returns_to_time_held():
    hazard = np.where(np.arange(NUM_BINS) == 12, 1.0, 1e-6)  # everybody returns after a while
    table = ranks(hazard, np.concatenate(([0.0], np.cumsum(hazard * WIDTHS)[:-1])))
    middle = NUM_CLASSES // 2
    assert np.argmax(table[middle]) == 12
    assert table[middle, 0] > 1000 * hazard[0]
    assert np.all(np.diff(table[middle, :13]) > 0)


@pytest.mark.parametrize("half_octaves", range(-16, 17))
def test_classes_are_half_octaves_of_weight_rounded(half_octaves):
    middle, quarter = half_octaves + 16, 2.0**0.25
    exact = 2.0 ** (half_octaves // 2) * (1.0, 2.0**0.5)[half_octaves % 2]
    assert class_of(exact) == middle
    assert class_of(exact * quarter * 0.999) == middle
    assert class_of(exact / quarter * 1.001) == middle
    assert class_of(exact * quarter * 1.001) == min(middle + 1, NUM_CLASSES - 1)
    assert class_of(exact / quarter * 0.999) == max(middle - 1, 0)


def test_buckets_are_floors_of_the_logarithm():
    assert [bucket(value, 15) for value in (0, 1, 2, 3, 6, 7, 8)] == [0, 1, 1, 2, 2, 3, 3]
    for power in range(1, 50):
        assert bucket(2**power - 2, 99) == power - 1
        assert bucket(2**power - 1, 99) == power
    assert bucket(10**9, 15) == 15


def test_a_class_that_returns_more_than_expected_weighs_more():
    model = Reentry()
    for number in range(200):
        now = 10.0 * number
        model.advance(now)
        loyal, fickle = Record(time=now), Record(time=now)
        model.watch(loyal, (0,))
        model.watch(fickle, (1,))
        model.advance(now + 5)
        model.returned(loyal, now + 5)
    assert loyal.kind > fickle.kind + 4
    assert model.rank[loyal.kind][0] > model.rank[fickle.kind][0]


def test_records_stand_in_the_bin_of_their_age():
    model = Reentry()
    records = []
    for number in range(120):
        now = 0.7 * 1.1**number
        model.advance(now)
        for record in records:
            age = now - record.time
            assert EDGES[record.bin] <= age
            assert record.bin == NUM_BINS - 1 or age < EDGES[record.bin + 1]
        records.append(Record(time=now))
        model.watch(records[-1], (0,))


@settings(max_examples=5, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_the_shadow_counts_what_lies_above_a_record(seed):
    random, shadow, stack = Random(seed), LruShadow(), []
    for number in range(3 * MIN_SLOTS // 2):
        stack.append([Record(), random.randint(1, 5)])
        shadow.push(*stack[-1], 60)
        for _ in range(2):
            each = random.choice(stack[-12:])
            taken = random.randint(0, 3)
            shadow.take(each[0], taken)
            each[1] -= min(taken, each[1])
        if number % 50 == 0:
            for at in range(max(len(stack) - 12, 0), len(stack)):
                above = sum(count for _, count in stack[at + 1 :])
                assert min(shadow.above(stack[at][0], 60), 60) == min(above, 60)


def compared(num_requests, *, asked=100):
    """Return a mind that acts, and has compared so many requests of so many blocks with LRU."""
    mind = Mind(apprentice=0)
    for number in range(num_requests):
        mind.num_requests = number + 1
        mind.judge(0, 0, asked)
    return mind


@pytest.mark.parametrize("num_requests", [TRUST + 1, 10 * TRUST])
def test_it_is_lru_until_half_of_what_it_may_lose_is_made_good(num_requests):
    mind = compared(num_requests)
    most = int(LOSS * mind.asked) + LOST_PROMPTS * 100
    mind.judge(0, most - 1, 0)
    assert not mind.is_lru
    mind.judge(0, 2, 0)
    assert mind.is_lru
    mind.judge(most // 2 - 1, 0, 0)
    assert mind.is_lru
    mind.judge(4, 0, 0)
    assert not mind.is_lru


def test_what_it_lost_becomes_little_as_more_is_asked_for():
    mind = compared(TRUST + 1)
    mind.judge(0, LOST_PROMPTS * 100 + 100, 0)
    assert mind.is_lru
    mind.judge(0, 0, 4 * 10**6)
    assert not mind.is_lru


def test_it_is_lru_as_long_as_it_has_learned_little():
    mind = Mind()
    for number in range(APPRENTICE - 1):
        mind.num_requests = number + 1
        mind.judge(1, 0, 1)
        assert mind.is_lru
    mind.num_requests = APPRENTICE
    mind.judge(1, 0, 1)
    assert not mind.is_lru


def test_nothing_is_decided_before_enough_is_compared():
    mind = Mind(apprentice=0)
    mind.num_requests = TRUST
    mind.judge(0, 1000, 100)
    assert not mind.is_lru
