"""Nearness of companies of a passage, and the variants that cover most of them."""

import numpy as np
import pytest
from passages_made import HEAD, A, B, C, D, ids, run, variant

from quire.core import Scope
from quire.errors import ConfigError
from quire_passages import Passages, PassageStore
from quire_passages.company import goes_for, nearness, related

a, b, c, d, e = (ids(*run(start)) for start in (100, 200, 300, 400, 500))
ONE, TWO = Scope(salt="one", model="m"), Scope(salt="two", model="m")


def among(*before, passage=A, head=HEAD):
    """Return a capture of a passage behind others."""
    text = [*head, *(each for part in before for each in part)]
    known = [ids(*part) for part in before]
    return variant(passage, text, "contextual", predecessors=known)


def test_the_same_company_is_nearest_and_one_without_common_passages_is_not_near():
    assert nearness([a, b], [a, b]) == nearness([], []) == 1
    assert nearness([a, b], [c]) == nearness([a], []) == nearness([], [a]) == 0
    assert nearness([a, a], [a, a]) == 1


def test_what_stands_right_before_a_passage_counts_most():
    assert nearness([a, b], [c, b]) > nearness([a, b], [a, c]) > 0
    assert nearness([a, b], [b, a]) < 1  # both are there, the other way round
    assert nearness([a, b], [b]) > nearness([a, b], [c, a])


@pytest.mark.parametrize(("old", "new"), [([a, b, c], [b]), ([a], [d, a]), ([a, b], [b, a, c])])
def test_nearness_does_not_depend_on_who_is_asked(old, new):
    assert nearness(old, new) == nearness(new, old)


def test_a_new_company_takes_the_place_of_one_that_another_covers():
    assert goes_for([d], [[a, b], [a, b, c], [c, b]]) == 0  # the first of two that are alike
    assert goes_for([a, b], [[a, b, c], [d]]) is None  # it is like one that is held
    assert goes_for([e], [[a], [b], [c]]) == 0  # nobody covers it: the oldest goes
    assert goes_for([e], [[a]]) == 0
    assert goes_for([a, b], [[b]]) is None


def test_a_store_keeps_so_many_captures_of_a_passage_among_others_and_those_alone():
    store = PassageStore("1MiB", most=2)
    alone, first, second, third = variant(A, HEAD), among(B), among(C, B), among(D)
    for each in (alone, first, second, third):
        assert store.lacks(ONE, each)
        assert store.put(ONE, each)
        store.check()
    there = list(store.variants(ONE, a, ids(*HEAD)))
    assert there == [alone, second, third]
    assert first.kv is None
    assert store.stats.replaced == 1
    again = among(B, D)  # as near to the last one as anything is
    assert not store.lacks(ONE, again)
    assert not store.put(ONE, again)
    assert store.stats.refused == 1


def test_captures_behind_other_heads_and_of_other_scopes_do_not_count():
    store = PassageStore("1MiB", most=1)
    kept = [among(B), among(B, head=HEAD[:-1]), among(B, passage=C)]
    for each in kept:
        assert store.put(ONE, each)
    other = among(B)
    assert store.lacks(TWO, other)
    assert store.put(TWO, other)
    assert all(each.kv is not None for each in [*kept, other])
    assert not store.lacks(ONE, among(B))


def test_a_pinned_capture_does_not_go_for_a_new_one():
    store = PassageStore("1MiB", most=1)
    first = among(B)
    store.put(ONE, first)
    with store.pin([first]):
        assert not store.put(ONE, among(C))
    assert store.put(ONE, among(C))
    store.check()


def test_a_passage_has_one_capture_at_least():
    with pytest.raises(ConfigError, match="variants=0"):
        Passages(variants=0)


def test_related_passages_are_those_of_similar_vectors():
    common = np.full(4, 5.0)
    near, far = np.array([1.0, 0.1, 0, 0]), np.array([0, 0, 1.0, 0.2])
    vectors = np.stack([near, far, near * 2, far * 3, near + 0.3 * far]).astype(np.float32) + common
    found = related(vectors, 2)
    assert set(found[0]) == {2, 4}
    assert found[1][-1] == 3
    assert all(at not in each and len(each) == 2 for at, each in enumerate(found))
    assert related(vectors[:1], 3) == [[]]
    assert [sorted(each) for each in related(vectors[:2], 3)] == [[1], [0]]
