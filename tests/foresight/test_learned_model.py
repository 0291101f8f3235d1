"""The base of `learned`: the model of returns, its ranks, the shadow of LRU, the guard."""

from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.foresight.learned_state import (
    APPRENTICE,
    LEAST_PROMPTS,
    LOSS,
    MOST_PROMPTS,
    PAYS_WITHIN,
    STAKE,
    TRUST,
    LearnedState,
)
from quire.foresight.lru_shadow import MIN_SLOTS, LruShadow
from quire.foresight.reentry import (
    EDGES,
    MIN_AGING,
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
    assert model.rank_of(loyal, loyal.time) > model.rank_of(fickle, fickle.time)


def exposures(waits):
    """Return how long records that waited for so long were watched in each bin, all of weight 1, before anything is learned."""
    so_far = np.concatenate(([0.0], np.cumsum(np.array(PRIOR) * WIDTHS)[:-1]))
    spent = np.clip(np.array(waits)[:, None] - EDGES, 0, WIDTHS)
    return (spent / (1 + so_far + np.array(PRIOR) * spent / 2)).sum(axis=0)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_a_records_exposure_is_the_time_that_it_was_watched(seed):
    random, model, now = Random(seed), Reentry(), 0.0
    waiting, waits = [], []
    for _ in range(random.randint(1, 3 * MIN_AGING)):
        now += random.choice((0.0, 0.1, 1.0, 30.0))
        waiting.append(Record(time=now))
        model.watch(waiting[-1], ())
        if random.random() < 0.8:
            record = waiting.pop(random.randrange(len(waiting)))
            model.forget(record, now + 1)
            waits.append(now + 1 - record.time)
        if random.random() < 0.1:
            model._look(now + 1)
    for record in waiting:
        model.forget(record, now + 5)
        waits.append(now + 5 - record.time)
    model._look(now + 5)
    assert np.allclose(model._exposure, exposures(waits), rtol=1e-9)
    assert len(model._aging) <= 2 * MIN_AGING


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


CAPACITY = 10_000


def compared(num_requests, *, asked=100):
    """Return a mind that acts, and has compared so many requests of so many blocks with LRU."""
    mind = LearnedState(apprentice=0)
    mind.evicted = CAPACITY
    for number in range(num_requests):
        mind.num_requests = number + 1
        mind.judge(0, 0, asked, CAPACITY)
    return mind


def judge(mind, *, gain):
    """Compare a request of no blocks that found so many more than LRU, or fewer."""
    mind.judge(max(gain, 0), max(-gain, 0), 0, CAPACITY)


def leaves_lru(mind):
    """Let an apprentice see all that it has to."""
    mind.num_requests, mind.evicted = APPRENTICE, CAPACITY
    mind.judge(0, 0, 10_000, CAPACITY)
    assert not mind.is_lru


@pytest.mark.parametrize(
    ("num_requests", "asked", "stake"),
    [
        (TRUST + 1, 100, STAKE * CAPACITY),
        (10 * TRUST, 100, STAKE * CAPACITY),
        (500, 1000, LEAST_PROMPTS * 1000),
        (500, 1, MOST_PROMPTS),
    ],
)
def test_learned_stays_lru_until_half_of_its_allowed_loss_is_regained(num_requests, asked, stake):
    mind = compared(num_requests, asked=asked)
    most = int(LOSS * mind.asked + stake * (1 - 1 / PAYS_WITHIN))
    judge(mind, gain=-most)
    assert not mind.is_lru
    judge(mind, gain=-1)
    assert mind.is_lru
    judge(mind, gain=most // 2)
    assert mind.is_lru
    judge(mind, gain=2)
    assert not mind.is_lru


def test_learned_falls_back_to_lru_beyond_the_allowed_loss_once_its_stake_is_due():
    mind = compared(TRUST + 1)
    mind.evicted = PAYS_WITHIN * CAPACITY
    judge(mind, gain=-int(LOSS * mind.asked))
    assert not mind.is_lru
    judge(mind, gain=-1)
    assert mind.is_lru


def test_the_stake_is_whole_when_it_leaves_lru_however_long_that_was():
    mind = LearnedState()
    mind.evicted = 5 * CAPACITY
    mind.judge(0, 0, 10_000, CAPACITY)
    assert mind.is_lru
    mind.num_requests = APPRENTICE
    most = int(LOSS * mind.asked + MOST_PROMPTS * mind.asked / APPRENTICE)
    judge(mind, gain=0)
    judge(mind, gain=-most)
    assert not mind.is_lru
    judge(mind, gain=-1)
    assert mind.is_lru


def test_the_allowed_loss_grows_with_the_tokens_asked_for():
    mind = compared(TRUST + 1)
    judge(mind, gain=-int(STAKE * CAPACITY) - 100)
    assert mind.is_lru
    mind.evicted = PAYS_WITHIN * CAPACITY
    mind.judge(0, 0, 4 * 10**6, CAPACITY)
    assert mind.is_lru
    mind.judge(0, 0, 4 * 10**6, CAPACITY)
    assert not mind.is_lru


@pytest.mark.parametrize("lacks", ["requests", "evictions"])
def test_learned_is_lru_during_its_apprenticeship(lacks):
    mind = LearnedState()
    mind.num_requests = APPRENTICE - (lacks == "requests")
    mind.evicted = CAPACITY - (lacks == "evictions")
    judge(mind, gain=1)
    assert mind.is_lru
    leaves_lru(mind)


def test_nothing_is_decided_before_enough_is_compared():
    mind = LearnedState(apprentice=0)
    mind.num_requests = TRUST
    mind.judge(0, 1000, 100, CAPACITY)
    assert not mind.is_lru
