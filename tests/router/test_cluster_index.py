"""The index of prefixes by replica: events, and events that say nothing or too much."""

import tracemalloc

import numpy as np
import pytest
from index_help import SIZE, removed, stored

from quire.errors import ConfigError, InvariantError
from quire.exchange.wire import ClearedEvent, UnknownEvent
from quire_router.index import ClusterIndex
from quire_router.numbers import NumberTable

TEXT = [5, 6, 7, 8, 9, 10]


def held(index, tokens=TEXT, **more):
    index.check()
    return index.lookup(np.array(tokens, np.int32), **more).held


def test_replicas_that_name_blocks_by_other_hashes_are_found_by_one_prompt():
    index = ClusterIndex(64)
    index.apply("a", [stored([1, 2, 3], TEXT)])
    index.apply("b", [stored([b"\x07" * 32], TEXT[:2])])
    index.apply("b", [stored([3], TEXT[2:4], b"\xff" * 24 + b"\x07" * 8)])  # the low 64 bits count
    assert held(index) == {"a": (6, 0, 0), "b": (4, 0, 0)}
    assert held(index, [*TEXT[:3], 99]) == {"a": (2, 0, 0), "b": (2, 0, 0)}
    assert held(index, [0, *TEXT]) == {}
    assert index.num_blocks == 3


def test_the_nearest_tier_counts_and_a_hole_ends_the_prefix():
    index = ClusterIndex(64)
    index.apply("a", [stored([1, 2, 3], TEXT, medium=None), stored([1, 2], TEXT[:4], medium="CPU")])
    index.apply("a", [removed([2]), stored([3], TEXT[4:], 2, medium="EXTERNAL"), removed([3])])
    assert held(index) == {"a": (2, 2, 2)}
    index.apply("a", [removed([2], "CPU")])
    assert held(index) == {"a": (2, 0, 0)}
    index.apply("a", [stored([2], TEXT[2:4], 1)])  # what is behind the hole was there all the time
    assert held(index) == {"a": (4, 0, 2)}


def test_a_block_with_two_copies_stays_until_both_are_removed():
    index = ClusterIndex(64)
    index.apply("a", [stored([1], TEXT[:2]), stored([1], TEXT[:2])])
    index.apply("a", [removed([1])])
    assert held(index) == {"a": (2, 0, 0)}
    index.apply("a", [removed([1, 1])])
    assert held(index) == {}


def test_blocks_of_one_batch_may_follow_each_other_in_any_number_of_events():
    index = ClusterIndex(64)
    index.apply("a", [stored([1], TEXT[:2]), stored([2], TEXT[2:4], 1), stored([3], TEXT[4:], 2)])
    assert held(index) == {"a": (6, 0, 0)}


def test_a_prompt_under_another_salt_or_adapter_is_another_prompt():
    index = ClusterIndex(64)
    index.apply("a", [stored([1, 2, 3], TEXT, extra_keys=[["salt"], None, None])])
    lora = stored([4, 5, 6], TEXT)
    lora.lora_name = "fine"
    index.apply("b", [lora])
    assert held(index) == {}
    assert held(index, extra_keys=[["salt"]]) == {"a": (6, 0, 0)}
    assert held(index, lora_name="fine") == {"b": (6, 0, 0)}


def test_layers_that_keep_a_window_and_blocks_of_another_size_are_passed_over():
    index = ClusterIndex(64)
    index.apply("a", [stored([1, 2, 3], TEXT, group_idx=0, kv_cache_spec_kind="full_attention")])
    window = {"group_idx": 1, "kv_cache_spec_kind": "sliding_window"}
    index.apply("a", [stored([3], TEXT, **window), removed([1, 2, 3], group_idx=1)])
    other = stored([9], TEXT[:3])
    other.block_size = 3
    index.apply("b", [other, UnknownEvent("BlockDreamt")])
    assert held(index) == {"a": (6, 0, 0)}
    assert index.num_ignored == 3


def test_a_gap_degrades_a_replica_until_a_snapshot_or_until_all_is_cleared():
    index = ClusterIndex(64)
    index.apply("a", [stored([1], TEXT[:2])], 0)
    index.apply("a", [stored([3], TEXT[4:], 2)], 2)  # 1 told of the block between
    assert index.replicas == {"a": True}
    assert index.num_orphans == 1
    assert held(index) == {"a": (2, 0, 0)}  # still the best that is known
    index.resync("a", [stored([1, 2, 3], TEXT)], 2)
    index.apply("a", [removed([3])], 3)
    assert index.replicas == {"a": False}
    assert held(index) == {"a": (4, 0, 0)}
    index.apply("a", [], 5)
    assert index.replicas == {"a": True}
    index.apply("a", [ClearedEvent()], 6)
    assert index.replicas == {"a": False}
    assert held(index) == {}
    index.degrade("a")
    assert index.replicas == {"a": True}


def test_repeated_and_late_batches_are_ignored_and_number_0_means_a_restart():
    index = ClusterIndex(64)
    index.apply("a", [], 0)
    index.apply("a", [stored([1], TEXT[:2])], 1)
    index.apply("a", [removed([1])], 1)
    assert (index.num_late, held(index)) == (1, {"a": (2, 0, 0)})
    index.apply("a", [stored([8], [1, 2])], 0)
    assert held(index) == {}
    assert held(index, [1, 2]) == {"a": (2, 0, 0)}
    index.apply("late", [], 7)
    assert index.replicas == {"a": False, "late": True}


def test_a_full_index_drops_the_least_recent_blocks_and_children_before_parents():
    index = ClusterIndex(4, SIZE)
    index.apply("a", [stored([1, 2], TEXT[:4])])
    index.apply("b", [stored([1], [1, 1]), stored([2], [2, 2])])
    index.touch(index.lookup(np.array(TEXT)))
    index.apply("c", [stored([1, 2], [3, 3, 4, 4])])
    assert held(index) == {"a": (4, 0, 0)}
    assert held(index, [1, 1]) == held(index, [2, 2]) == {}
    index.apply("c", [stored([1], [5, 5])])
    assert held(index) == {"a": (2, 0, 0)}
    index.apply("c", [stored(range(7), [*range(100, 114)])])
    assert sum(held(index, range(100, 114))["c"]) == 4 * SIZE
    assert index.num_blocks == 4


@pytest.mark.parametrize("text", [range(at, at + 6) for at in range(8)])
def test_the_end_of_a_prefix_goes_before_its_beginning(text):
    index = ClusterIndex(3, SIZE)
    index.apply("a", [stored([1, 2, 3], text)])
    index.apply("a", [stored([4], [90, 90])])
    assert held(index, text) == {"a": (4, 0, 0)}


def test_a_prompt_that_fills_the_index_keeps_its_own_beginning():
    index = ClusterIndex(4, SIZE)
    index.apply("a", [stored([1, 2], TEXT[:4]), stored([3], [1, 1]), stored([4], [2, 2])])
    index.apply("b", [stored([1, 2, 3, 4, 5], [*TEXT, 1, 1, 2, 2])])
    assert held(index, [*TEXT, 1, 1, 2, 2]) == {"a": (4, 0, 0), "b": (8, 0, 0)}


def test_a_replica_that_is_forgotten_leaves_its_place_to_another():
    index = ClusterIndex(64)
    for number in range(20):
        index.apply(f"r{number}", [stored([number + 1], TEXT[:2])])
    assert len(held(index)) == 20
    index.forget("r3")
    index.forget("never heard of")
    assert "r3" not in held(index)
    index.apply("new", [stored([1], [7, 7])])
    assert held(index, [7, 7]) == {"new": (2, 0, 0)}
    for name in list(index.replicas):
        index.forget(name)
    assert index.num_blocks == 0
    index.check()


def test_tokens_that_are_no_integers_are_refused():
    index = ClusterIndex(64, SIZE)
    with pytest.raises(ConfigError, match="tokens are integers"):
        index.lookup(np.array([1.5, 2.5]))


def test_events_that_contradict_each_other_break_no_law():
    random = np.random.default_rng(0)
    index = ClusterIndex(12)
    for _ in range(600):
        count = int(random.integers(1, 4))
        names = random.integers(1, 9, count).tolist()
        tokens = random.integers(0, 2, count * SIZE).tolist()
        parent = None if random.random() < 0.5 else int(random.integers(1, 9))
        some = stored(names, tokens, parent), removed(names)
        picked = [some[int(random.random() < 0.3)] for _ in range(int(random.integers(1, 4)))]
        index.apply("ab"[int(random.integers(2))], picked)
        index.check()


def test_a_million_blocks_on_sixteen_replicas_have_room_in_340_megabytes():
    tracemalloc.start()
    try:
        index = ClusterIndex(1_000_000)
        for replica in range(16):
            index.apply(f"r{replica}", [stored([1], TEXT[:2])])
        assert tracemalloc.get_traced_memory()[0] < 340e6  # beside 50 MB of a process
    finally:
        tracemalloc.stop()


def test_a_broken_index_is_noticed():
    index = ClusterIndex(64)
    index.apply("a", [stored([1, 2, 3], TEXT)])
    index._copies[0] = 0
    with pytest.raises(InvariantError, match="holders are counted"):
        index.check()


def test_a_table_of_names_finds_all_it_was_told_through_thousands_of_removals():
    random, table, model = np.random.default_rng(1), NumberTable(256, 2), {}
    for turn in range(400):
        free = [number for number in range(256) if number not in model]
        count = min(len(free), int(random.integers(0, 60)))
        numbers = random.permutation(free)[:count]
        names = np.arange(turn * 100, turn * 100 + count, dtype=np.uint64)
        table.add(numbers.astype(np.int64), names)
        model |= dict(zip(numbers.tolist(), names.tolist(), strict=True))
        gone = random.permutation(list(model))[: int(random.integers(0, 60))]
        table.remove(gone.astype(np.int64))
        for number in gone.tolist():
            del model[number]
        assert sorted(table.named().tolist()) == sorted(model)
        asked = np.array([*model.values(), 1 << 60], np.uint64)
        assert table.find(asked).tolist() == [*model, -1]
    with pytest.raises(InvariantError, match="have no name"):
        table.remove(np.array([next(n for n in range(256) if n not in model)]))
