"""Counts of uses by key in bounded memory."""

from collections import Counter
from random import Random

from quire.tiers.contract.samples import names_of
from quire.tiers.stack.key_table import KeyTable

KEYS = names_of(range(20_000))


def test_uses_are_counted_up_to_255():
    table, random, counts = KeyTable(1 << 14), Random(1), Counter()
    for _ in range(400):
        prompt = KEYS[: random.randrange(1, 300)]
        table.count(prompt)
        counts.update(prompt)
    assert table.get(KEYS[:300]).tolist() == [min(counts[key], 255) for key in KEYS[:300]]


def test_a_prompt_of_an_eighth_of_the_table_is_remembered_whole_at_its_second_use():
    table = KeyTable(1 << 14)
    for _ in range(2):
        table.count(KEYS[:2000])
    assert (table.get(KEYS[:2000]) >= 2).all()


def test_a_short_prompt_is_counted_whole_in_the_smallest_table():
    table = KeyTable(256)
    for _ in range(2):
        table.count(KEYS[:30])
    assert table.get(KEYS[:30]).tolist() == [2] * 30


def test_traffic_that_comes_once_does_not_make_what_comes_often_forgotten():
    table = KeyTable(1 << 10)
    for _ in range(50):
        table.count(KEYS[:100])
    for first in range(1000, 5000, 100):
        table.count(KEYS[first : first + 100])
        table.count(KEYS[:100])
    assert (table.get(KEYS[:100]) >= 2).all()


def test_new_traffic_replaces_old_traffic_that_came_once():
    table = KeyTable(1 << 10)
    for first in range(0, 20_000, 500):
        table.count(KEYS[first : first + 500])
    assert (table.get(KEYS[-100:]) >= 1).mean() > 0.9


def test_bits_are_set_and_cleared_one_by_one():
    table = KeyTable(1 << 12)
    table.mark(KEYS[:100], 0)
    table.mark(KEYS[50:150], 7)
    table.clear(KEYS[:75], 0)
    table.clear(KEYS[1000:1100], 7)
    bits = table.get(KEYS[:200]).tolist()
    assert bits == [0] * 50 + [128] * 25 + [129] * 25 + [128] * 50 + [0] * 50


def test_a_key_that_comes_twice_in_a_call_is_one_key():
    table = KeyTable(1 << 10)
    table.count([KEYS[0]] * 5)
    table.mark([KEYS[1]] * 5, 1)
    assert table.get(KEYS[:2]).tolist() == [1, 2]


def test_calls_without_keys_do_nothing():
    table = KeyTable(1 << 10)
    table.count([])
    table.mark([], 1)
    table.clear([], 1)
    assert table.get([]).tolist() == []
