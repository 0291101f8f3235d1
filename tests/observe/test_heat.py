"""The picture of a prefix tree: its hottest branches, bounded whatever the tree has."""

import json

import pytest

from quire.core import CacheManager, Scope
from quire.observe.heat import HALF_LIFE, Heat, TreePicture


def served(manager, prompt, scope=None):
    seq = manager.open(prompt, scope)
    manager.reserve(seq, len(prompt) - seq.num_cached)
    manager.take_copies()
    manager.commit(seq, prompt[seq.num_cached :])
    manager.close(seq)


def wide(num_ends, num_blocks=4096):
    """A manager with a head of two blocks that so many ends of one block follow."""
    manager = CacheManager(num_blocks, 4, watchers=[Heat()])
    for at in range(num_ends):
        served(manager, [*range(8), 100 + at, 0, 0, 0, 1])
    return manager


def flat(branches):
    for each in branches:
        yield each
        yield from flat(each["children"])


def test_branches_hang_where_their_prefix_is_and_count_who_found_them():
    manager = CacheManager(64, 4, watchers=[Heat()])
    for last in (1, 2, 3):
        served(manager, [*range(16), last, last, last, last, 9])
    running = manager.open([*range(17)])
    manager.reserve(running, 1)
    (scope,) = TreePicture(manager).data()
    assert (scope["uses"], scope["scope"]) == (4, {"tenant": None, "lora": None, "salt": None})
    (head,) = scope["children"]
    assert (head["start"], head["end"], head["uses"], head["running"]) == (0, 16, 3, 1)
    assert head["branches"] == 3 == len(head["children"])
    assert {(each["start"], each["end"], each["uses"]) for each in head["children"]} == {
        (16, 20, 0)
    }
    assert "[0, 1, 2" not in json.dumps(scope)


def test_a_branch_that_is_cut_keeps_its_uses_on_both_sides():
    manager = CacheManager(64, 4, watchers=[Heat()])
    prompt = [*range(100, 164)]
    for each in ([*prompt, 1], [*prompt, 1], [*prompt[:32], *range(50)]):
        served(manager, each)
    uses = {(b["start"], b["end"]): b["uses"] for b in flat(TreePicture(manager).data())}
    assert (uses[0, 32], uses[32, 64]) == (2, 1)


def test_the_hottest_of_many_branches_is_shown_wherever_it_stands():
    manager = wide(1000)
    for at in (0, 500, 999):
        served(manager, [*range(8), 100 + at, 0, 0, 0, 1])
    picture = TreePicture(manager, max_shown=5)
    (scope,) = picture.data()
    (head,) = scope["children"]
    assert head["branches"] == 1000
    assert len(head["children"]) == 3
    assert [each["uses"] for each in head["children"]] == [1, 1, 1]


@pytest.mark.parametrize("num_ends", [10, 400, 3000])
def test_a_picture_looks_at_a_bounded_number_of_branches(num_ends):
    picture = TreePicture(wide(num_ends), max_shown=20, max_visited=300)
    data = picture.data()
    assert picture.num_visited <= 300
    assert len([*flat(data)]) == min(num_ends + 2, 20)
    (head,) = data[0]["children"]
    assert head["branches"] == num_ends


def test_a_use_counts_half_after_its_half_life():
    manager = CacheManager(64, 4, watchers=[Heat()])
    for at in range(2):
        served(manager, [at] * 5)
    served(manager, [0] * 5)
    for _ in range(HALF_LIFE):
        served(manager, [1] * 5)
    old, new = sorted(TreePicture(manager).data()[0]["children"], key=lambda each: each["heat"])
    assert (old["uses"], new["uses"]) == (1, HALF_LIFE)
    assert old["heat"] == pytest.approx(0.5, rel=0.01)
    assert HALF_LIFE / 2 < new["heat"] < HALF_LIFE


def test_a_branch_keeps_its_number_in_later_pictures():
    manager = wide(3)
    numbers = {each["id"] for each in flat(TreePicture(manager).data())}
    served(manager, [7] * 9)
    later = {each["id"] for each in flat(TreePicture(manager).data())}
    assert len(later) == len(numbers) + 1
    assert numbers < later


def test_scopes_name_tenants_and_adapters_and_no_salt():
    manager = CacheManager(64, 4, watchers=[Heat()])
    served(manager, [*range(9)], Scope(tenant="a", salt="a secret"))
    served(manager, [*range(9)], Scope(lora="tuned"))
    scopes = [each["scope"] for each in TreePicture(manager).data()]
    assert sorted(str(each["tenant"]) for each in scopes) == ["None", "a"]
    assert {each["lora"] for each in scopes} == {None, "tuned"}
    assert len([each for each in scopes if each["salt"]]) == 1
    assert "secret" not in json.dumps(scopes)


def test_nothing_is_drawn_without_heat():
    assert TreePicture(CacheManager(8, 4)).data() == []
