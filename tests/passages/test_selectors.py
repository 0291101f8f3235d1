"""The rows that each selector chooses, and Cache-Craft's corrections."""

import math

import numpy as np
import pytest
from passages_made import HEAD, A, B, C, D, ids, variant

from quire.errors import ConfigError
from quire_passages import (
    CacheCraft,
    Epic,
    EpicShare,
    KVDeviation,
    Masses,
    Moved,
    RandomRows,
    named_selector,
)
from quire_passages.bench.published import PublishedCacheCraft

a, b, c, d = (ids(*each) for each in (A, B, C, D))


def moved(*starts, passage=A, **given):
    return [Moved(variant(passage, HEAD, **given), start, ()) for start in starts]


def masses(inter, tokens, intra=1.0):
    given = np.array(inter, np.float32), intra, np.array(tokens, np.float32)
    return Masses((20,) * len(inter), *given)


def test_epic_takes_the_first_rows_of_each_passage():
    assert Epic(3).rows(moved(10, 50)).tolist() == [10, 11, 12, 50, 51, 52]
    assert Epic(99).rows(moved(10)).size == 20
    assert EpicShare(0.2).rows(moved(10, 50)).tolist() == [10, 11, 12, 13, 50, 51, 52, 53]
    assert EpicShare(0.01).rows(moved(10)).tolist() == [10]
    assert EpicShare(0).rows(moved(10)).size == Epic(0).rows(moved(10)).size == 0


@pytest.mark.parametrize(
    "line", ["epic:0", "epic:3", "epic:99", "epic-share:0.07", "epic-share:1", "random:0.3", "all"]
)
@pytest.mark.parametrize("starts", [(), (10,), (10, 50, 90)])
def test_the_work_of_a_selector_without_a_check_is_the_rows_that_it_chooses(line, starts):
    selector = named_selector(line)
    assert selector.work(moved(*starts), 0.25) == selector.rows(moved(*starts)).size


def test_deviation_keeps_the_rows_that_are_furthest_off_over_all_passages():
    selector = KVDeviation(0.1)
    rows = selector.rows(moved(10, 50))
    assert rows.tolist() == [*range(10, 30), *range(50, 70)]
    off = np.zeros(40, np.float32)
    off[[3, 21, 30, 39]] = [1, 4, 2, 3]
    assert selector.kept(rows, off).tolist() == [13, 51, 60, 69]
    assert selector.work(moved(10, 50), 0.25) == pytest.approx(40 * (0.25 + 0.75 * 0.1))


def test_random_rows_are_the_same_from_the_same_seed():
    one, two = RandomRows(0.3, seed=4), RandomRows(0.3, seed=5)
    rows = one.rows(moved(10, 50))
    assert rows.size == 12
    assert np.array_equal(rows, one.rows(moved(10, 50)))
    assert not np.array_equal(rows, two.rows(moved(10, 50)))
    assert np.all(np.diff(rows) > 0)


def test_the_context_that_is_there_again_as_published_and_corrected():
    def kept(selector, known, before, tokens=(1.0,) * 20):
        weighed = masses([3.0, 1.0][: len(known)], tokens)
        held = variant(C, HEAD, "contextual", predecessors=known, masses=weighed)
        return selector.kept_context(held, tuple(before))

    published, corrected = PublishedCacheCraft(), CacheCraft()
    assert kept(published, [a, b], [a, b]) == kept(corrected, [a, b], [a, b]) == 1
    assert kept(published, [a, b], [a]) == kept(corrected, [a, b], [a]) == 0.75
    assert kept(published, [a, b], [b, a]) == 0  # both are there, the other way round
    assert kept(corrected, [a, b], []) == 0
    assert kept(published, [a, b], [a, c, b, d]) == 1  # new predecessors go unseen
    assert kept(corrected, [a, b], [a, c, b, d]) == 0.5
    assert kept(published, [], [a]) == 1  # 0 of 0 is taken for all
    assert kept(corrected, [], [a]) == 0
    assert kept(corrected, [], []) == 1


def test_a_variant_without_masses_is_kept_where_nothing_stands_before_it():
    alone, among = variant(A, HEAD), variant(A, HEAD, "contextual", predecessors=[b])
    for selector, stale in ((CacheCraft(), 0), (PublishedCacheCraft(), 1)):
        assert selector.kept_context(alone, ()) == 1
        assert selector.kept_context(alone, (b,)) == stale
        assert selector.kept_context(among, (b,)) == 1 - stale  # by its company
        assert selector.kept_context(among, (c,)) == 0


def test_the_share_to_compute_again_follows_its_equations():
    weighed = masses([30.0, 10.0], [2.0] * 20, intra=20.0)
    held = variant(C, [*HEAD, *A, *B], "contextual", predecessors=[a, b], masses=weighed)
    outside, inside = 40 / (20 * 20), 20 / 400
    impact = 1 / (1 + math.exp(-outside / inside))
    assert CacheCraft(0.5).share(held, (a, b)) == 0
    assert CacheCraft(0.5).share(held, (a,)) == pytest.approx(0.5 * impact * 0.25)
    assert CacheCraft(9.0).share(held, (d,)) == 1


@pytest.mark.parametrize("selector", [CacheCraft(0.5), PublishedCacheCraft(0.5)])
def test_rows_are_those_that_looked_most_at_other_passages(selector):
    weighed = masses([10.0], list(range(20)))
    held = variant(C, [*HEAD, *A], "contextual", predecessors=[a], masses=weighed)
    count = math.ceil(20 * selector.share(held, (b,)))
    rows = selector.rows([Moved(held, 100, (b,))])
    assert rows.tolist() == list(range(120 - count, 120))


def test_ties_go_to_the_head_of_a_passage():
    place = [Moved(variant(A, HEAD), 100, (b,))]
    rows = CacheCraft(0.5).rows(place)
    assert rows.tolist() == list(range(100, 100 + rows.size))
    assert rows.size == 5
    looked_at_none = masses([10.0], [0.0] * 20)
    held = variant(C, [*HEAD, *A], "contextual", predecessors=[a], masses=looked_at_none)
    assert CacheCraft().order(held).tolist() == list(range(20))
    by_chance = PublishedCacheCraft().order(held).tolist()
    assert sorted(by_chance) == list(range(20)) != by_chance


def test_the_variant_with_the_least_to_compute_is_placed():
    weighed = masses([10.0], [1.0] * 20)
    near = variant(C, [*HEAD, *A], "contextual", predecessors=[a], masses=weighed)
    other = variant(C, [*HEAD, *D], "contextual", predecessors=[d], masses=weighed)
    assert CacheCraft().preferred([near, other], (b, a)) is near
    assert CacheCraft().preferred([near, other], (b, d)) is other


def test_the_variant_of_the_nearest_company_is_placed_and_of_none_one_that_had_any():
    near = variant(C, [*HEAD, *A], "contextual", predecessors=[a])
    far = variant(C, [*HEAD, *A, *D], "contextual", predecessors=[a, d])
    alone = variant(C, HEAD)
    for selector in (Epic(), KVDeviation()):
        assert selector.preferred([far, alone, near], (b, a)) is near
        assert selector.preferred([near, alone, far], (b, d)) is far
        assert selector.preferred([near, far, alone], (b,)) is far  # the later one
        assert selector.preferred([far, near, alone], ()) is alone
        assert selector.preferred([alone], (b,)) is alone


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("kv-deviation", "kv-deviation 0.15"),
        ("kv-deviation:0.3", "kv-deviation 0.3"),
        ("epic:8", "epic 8"),
        ("epic-share:0.25", "epic-share 0.25"),
        ("cache-craft:1", "cache-craft 1"),
        ("random:0.2", "random 0.2"),
        ("all", "all"),
        ("none", "none"),
    ],
)
def test_a_selector_is_made_from_a_line(line, name):
    assert named_selector(line).name == name


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("epik:8", "no selector is named 'epik'.*epic"),
        ("epic:many", "'many' is no number"),
        ("random:1.5", "ratio=1.5; a share of rows is from 0 to 1"),
        ("kv-deviation:-1", "ratio=-1"),
        ("epic:-1", "tokens=-1"),
        ("cache-craft:-0.5", "alpha=-0.5"),
        ("all:3", "no selector is named 'all'|all"),
        ("random:nan", "ratio=nan"),
    ],
)
def test_a_line_that_is_no_selector_is_refused(line, words):
    with pytest.raises(ConfigError, match=words):
        named_selector(line)


def test_a_check_layer_before_the_second_is_refused():
    with pytest.raises(ConfigError, match="check=0"):
        KVDeviation(0.1, check=0)
