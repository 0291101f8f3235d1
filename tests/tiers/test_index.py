"""PlaceIndex against a dict."""

from hashlib import sha256

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from quire.errors import ConfigError, InvariantError, OutOfSlots, SlotError
from quire.tiers.places.columns import Recency, as_words, find_all, oldest
from quire.tiers.places.index import NOWHERE, PlaceIndex
from turns import lived


def key_of(number):
    return sha256(str(number).encode()).digest()


def crowded(number):
    """Keys that all want the last few places of a small table, so that probing wraps around."""
    place = (0xFFFF_FFFF_FFFF_FFFF - number % 3).to_bytes(8, "little")
    return place + number.to_bytes(24, "little")


def insert(index, key, generation=0):
    place = index.reserve()
    try:
        index.publish_all([place], [key], [generation], [index.recency.take(1)])
    except SlotError:
        index.recency.now -= 1
        index.release(place)
        raise
    return place


def filled(count, num_places=None):
    index = PlaceIndex(num_places or count)
    for number in range(count):
        insert(index, key_of(number), generation=number)
    return index


def test_misuse_raises_and_changes_nothing():
    index = filled(2, num_places=4)
    before = index.stamps.tolist()
    with pytest.raises(SlotError, match="has place 0 already"):
        insert(index, key_of(0))
    with pytest.raises(SlotError, match="place 3 of 4 holds no record"):
        index.remove(3)
    with pytest.raises(SlotError, match="holds no record"):
        index.lease([3], until=1.0)
    with pytest.raises(SlotError, match="is not reserved"):
        index.release(2)
    with pytest.raises(SlotError, match="is not there to be filled"):
        index.publish_all([0], [key_of(5)], [0], [9])
    with pytest.raises(ConfigError, match="32 bytes, got 3"):
        index.publish_all([index.reserve()], [b"abc"], [0], [9])
    with pytest.raises(ConfigError, match="0 to"):
        PlaceIndex(-1)
    assert index.stamps.tolist() == before
    index.check()


def test_many_places_are_reserved_published_and_freed_as_one_by_one():
    index = PlaceIndex(5)
    places = index.reserve_some(3)
    assert places == [0, 1, 2]
    keys = [key_of(number) for number in range(3)]
    index.publish_all(places, keys, [7, 8, 9], [3, 2, 1])
    assert [index.find(key) for key in keys] == places
    assert [index.generation_of(place) for place in places] == [7, 8, 9]
    assert [index.stamp_of(place) for place in places] == [3, 2, 1]
    assert index.reserve_some(9) == [3, 4]
    index.remove(2, 0)
    assert [index.find(key) for key in keys] == [NOWHERE, 1, NOWHERE]
    assert index.reserve_some(9) == [0, 2]
    assert index.reserve_some(9) == []


def test_places_before_the_first_that_is_refused_stay_committed():
    index = PlaceIndex(3)
    places = index.reserve_some(3)
    with pytest.raises(SlotError, match="already"):
        index.publish_all(places, [key_of(1), key_of(1), key_of(2)], [0] * 3, [3, 2, 1])
    assert (len(index), index.num_reserved, index.find(key_of(1))) == (1, 2, places[0])
    index.recency.take(3)
    index.check()
    with pytest.raises(SlotError, match="holds no record"):
        index.unpublish(places[0], places[1])
    assert (len(index), index.num_reserved) == (0, 3)
    index.check()


def test_victims_of_a_large_index_are_about_as_many_as_asked_and_the_oldest():
    stamps = np.random.default_rng(3).permutation(300_000) + 1
    stamps[:100_000] = 0
    victims = oldest(stamps, 10_000, before=400_000)
    assert 9_000 <= len(victims) <= 10_000
    used = np.sort(stamps[stamps > 0])
    assert stamps[victims].tolist() == used[: len(victims)].tolist()
    assert len(oldest(stamps, 10_000, before=int(used[50]))) == 50
    assert len(oldest(stamps, 1, before=400_000)) == 1
    assert len(oldest(stamps, 200_000, before=400_000)) >= 190_000
    assert len(oldest(np.zeros(300_000, np.int64), 5, before=9)) == 0


def test_indexes_that_share_a_recency_have_comparable_stamps():
    recency = Recency()
    first, second = PlaceIndex(2, recency), PlaceIndex(2, recency)
    insert(first, key_of(1))
    insert(second, key_of(2))
    insert(first, key_of(3))
    assert (first.stamps.tolist(), second.stamps.tolist()) == ([1, 3], [2, 0])


@pytest.mark.parametrize("name", [key_of, crowded])
def test_a_bulk_load_equals_single_inserts(name):
    count = 300
    rng = np.random.default_rng(1)
    places = rng.permutation(400)[:count]
    index = PlaceIndex(400)
    keys = np.frombuffer(b"".join(map(name, range(count))), np.uint8).reshape(count, 32)
    stamps = rng.permutation(count) + 1
    index.load(places, keys, np.arange(count, dtype=np.uint64), stamps)
    index.check()
    assert [index.find(name(n)) for n in range(count)] == places.tolist()
    assert index.generations_of(places).tolist() == list(range(count))
    assert index.victims(5).tolist() == places[np.argsort(stamps)[:5]].tolist()
    assert insert(index, name(count)) == min(set(range(400)) - set(places.tolist()))


def test_a_bulk_load_refuses_a_place_that_comes_twice():
    keys = np.frombuffer(key_of(1) + key_of(2) + key_of(3), np.uint8).reshape(3, 32)
    ones = np.ones(3, np.int64)
    index = PlaceIndex(4)
    with pytest.raises(SlotError, match="comes twice"):
        index.load(np.array([0, 0]), keys[:2], ones[:2].astype(np.uint64), ones[:2])
    with pytest.raises(SlotError, match="below 4"):
        index.load(np.array([0, 4]), keys[:2], ones[:2].astype(np.uint64), ones[:2])
    assert len(index) == 0
    index.check()


def test_shrinking_needs_free_places_at_the_end():
    index = filled(8, num_places=10)
    with pytest.raises(SlotError, match="only 2 of the last 4 places are free"):
        index.shrink(6)
    index.remove(6)
    index.remove(7)
    index.shrink(6)
    index.check()
    assert (index.num_places, index.num_free, len(index)) == (6, 0, 6)


def test_check_notices_a_lost_table_entry():
    index = filled(3)
    index._table[np.flatnonzero(index._table)[0]] = 0
    with pytest.raises(InvariantError, match="one table entry per published place"):
        index.check()


def test_ten_million_places_take_less_than_70_bytes_each():
    index = PlaceIndex(10_000_000)
    arrays = (index._words, index._stamps, index._generations, index._free, index._table)
    assert sum(array.nbytes for array in arrays) / 10_000_000 < 70


class PlaceIndexMachine(RuleBasedStateMachine):
    """Every operation on an index and on a dict: key -> [place, generation, stamp]."""

    names = staticmethod(key_of)

    def __init__(self):
        super().__init__()
        self.index = PlaceIndex(6)
        self.records = {}
        self.stamp = 0
        self.reserved = []
        self.leases = {}

    @rule(number=st.integers(0, 40), generation=st.integers(0, 2**64 - 1))
    def insert(self, number, generation):
        key = self.names(number)
        if len(self.records) + len(self.reserved) == self.index.num_places:
            with pytest.raises(OutOfSlots, match=f"none of {self.index.num_places} places"):
                insert(self.index, key, generation)
        elif key in self.records:
            with pytest.raises(SlotError):
                insert(self.index, key, generation)
        else:
            self.stamp += 1
            self.records[key] = [insert(self.index, key, generation), generation, self.stamp]

    @rule(data=st.data())
    @precondition(lambda self: self.records)
    def remove(self, data):
        key = data.draw(st.sampled_from(sorted(self.records)))
        place = self.records.pop(key)[0]
        self.leases.pop(place, None)
        self.index.remove(place)

    @rule(data=st.data())
    @precondition(lambda self: self.records)
    def touch(self, data):
        """A prompt may repeat a block, which counts where it comes first, and name keys that are not there."""
        absent = key_of("absent")
        keys = data.draw(st.lists(st.sampled_from([*sorted(self.records), absent])))
        there = self.index.touch(keys, self.index.recency.falling(len(keys)))
        assert there.tolist() == [key != absent for key in keys]
        self.stamp += len(keys)
        for at, key in reversed(list(enumerate(keys))):
            if key != absent:
                self.records[key][2] = self.stamp - at

    @rule(data=st.data())
    @precondition(lambda self: self.records and self.index.num_free)
    def move(self, data):
        key = data.draw(st.sampled_from(sorted(self.records)))
        place, to = self.records[key][0], self.index.reserve()
        self.index.move(place, to)
        self.records[key][0] = to
        self.reserved.append(place)
        if place in self.leases:
            self.leases[to] = self.leases.pop(place)

    @rule(data=st.data())
    @precondition(lambda self: self.records)
    def end_lease(self, data):
        place = self.records[data.draw(st.sampled_from(sorted(self.records)))][0]
        self.index.end_leases([place])
        self.leases.pop(place, None)

    @rule(first=st.integers(0, 30), stop=st.integers(0, 60), count=st.integers(0, 3))
    def reserve_within(self, first, stop, count):
        taken = {place for place, *_ in self.records.values()} | set(self.reserved)
        free = [
            place for place in range(first, min(stop, self.index.num_places)) if place not in taken
        ]
        places = self.index.reserve_within(first, stop, count).tolist()
        assert set(places) <= set(free)
        assert len(set(places)) == len(places) == min(count, len(free))
        self.reserved += places

    @rule(data=st.data(), until=st.integers(1, 9))
    @precondition(lambda self: self.records)
    def lease(self, data, until):
        place = self.records[data.draw(st.sampled_from(sorted(self.records)))][0]
        self.index.lease([place], until)
        self.leases[place] = max(until, self.leases.get(place, 0))

    @rule(count=st.integers(0, 8), now=st.integers(0, 9), left=st.integers(0, 3))
    def evict(self, count, now, left):
        """The last `left` stamps make no room."""
        self.leases = {place: until for place, until in self.leases.items() if until > now}
        order = sorted(self.records, key=lambda key: self.records[key][2])
        before = self.stamp + 1 - left
        order = [key for key in order if self.records[key][2] < before]
        oldest = [key for key in order if self.records[key][0] not in self.leases][:count]
        victims = self.index.victims(count, now, before).tolist()
        assert victims == [self.records[key][0] for key in oldest]
        for key in oldest:
            self.index.remove(self.records.pop(key)[0])

    @rule()
    @precondition(lambda self: self.index.num_free)
    def reserve(self):
        self.reserved.append(self.index.reserve())

    @rule(number=st.integers(41, 60))
    @precondition(lambda self: self.reserved)
    def publish(self, number):
        key = self.names(number)
        if key not in self.records:
            self.stamp += 1
            place = self.reserved.pop()
            self.index.publish_all([place], [key], [5], [self.index.recency.take(1)])
            self.records[key] = [place, 5, self.stamp]

    @rule()
    @precondition(lambda self: self.reserved)
    def release(self):
        self.index.release(self.reserved.pop())

    @rule(more=st.integers(0, 20))
    @precondition(lambda self: self.index.num_places < 60)
    def grow(self, more):
        self.index.grow(self.index.num_places + more)

    @rule(to=st.integers(0, 60))
    def shrink(self, to):
        taken = [place for place, *_ in self.records.values()] + self.reserved
        if to > self.index.num_places:
            with pytest.raises(ConfigError):
                self.index.shrink(to)
        elif any(place >= to for place in taken):
            with pytest.raises(SlotError):
                self.index.shrink(to)
        else:
            self.index.shrink(to)

    @rule()
    @precondition(lambda self: not self.reserved)
    def save_and_load(self):
        places = self.index.published()
        again = PlaceIndex(self.index.num_places)
        arrays = self.index.keys_of(places), self.index.generations_of(places)
        again.load(places, *arrays, self.index.stamps[places])
        again.recency.now = self.stamp
        self.index, self.leases = again, {}

    @invariant()
    def agrees(self):
        self.index.check()
        assert len(self.index) == len(self.records)
        for key, (place, generation, stamp) in self.records.items():
            assert self.index.find(key) == place
            assert self.index.generation_of(place) == generation
            assert self.index.stamps[place] == stamp
        assert self.index.num_reserved == len(self.reserved)
        for name in (every := [self.names(number) for number in range(60)]):
            assert (self.index.find(name) != NOWHERE) == (name in self.records)
        places = [self.index.find(name) for name in every]
        assert self.index.find_many(every).tolist() == places
        at_once = find_all(self.index._table, self.index._words, as_words(every))
        assert at_once.tolist() == places


class CrowdedMachine(PlaceIndexMachine):
    names = staticmethod(crowded)


TestMachine, TestMachineLong = lived(PlaceIndexMachine, 30, 600, stateful_step_count=40)
TestCrowdedMachine, TestCrowdedMachineLong = lived(CrowdedMachine, 30, 600, stateful_step_count=40)
