"""PlaceIndex against a dict."""

from hashlib import sha256

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from quire.errors import ConfigError, InvariantError, OutOfSlots, SlotError
from quire.tiers.places.index import NOWHERE, PlaceIndex
from quire.tiers.places.recency import Recency, oldest


def key_of(number):
    return sha256(str(number).encode()).digest()


def crowded(number):
    """Keys that all want the last few places of a small table, so that probing wraps around."""
    place = (0xFFFF_FFFF_FFFF_FFFF - number % 3).to_bytes(8, "little")
    return place + number.to_bytes(24, "little")


def insert(index, key, generation=0):
    place = index.reserve()
    try:
        index.publish(place, key, generation)
    except SlotError:
        index.release(place)
        raise
    return place


def filled(count, num_places=None):
    index = PlaceIndex(num_places or count)
    for number in range(count):
        insert(index, key_of(number), generation=number)
    return index


def test_a_key_is_found_in_its_place_until_it_is_removed():
    index = PlaceIndex(4)
    place = insert(index, key_of(1), generation=7)
    assert index.find(key_of(1)) == place
    assert index.generation_of(place) == 7
    assert index.key_of(place) == key_of(1)
    index.remove(place)
    assert index.find(key_of(1)) == NOWHERE
    index.check()


def test_a_full_index_refuses_another_key_and_keeps_all():
    index = filled(3)
    with pytest.raises(OutOfSlots, match="none of 3 places"):
        insert(index, key_of(9))
    assert [index.find(key_of(n)) for n in range(3)] == [0, 1, 2]
    index.check()


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
        index.publish(0, key_of(5))
    with pytest.raises(ConfigError, match="32 bytes, got 3"):
        index.publish(index.reserve(), b"abc")
    with pytest.raises(ConfigError, match="0 to"):
        PlaceIndex(-1)
    assert index.stamps.tolist() == before
    index.check()


def test_a_reserved_place_is_found_only_after_it_is_published():
    index = PlaceIndex(2)
    place = index.reserve()
    assert index.find(key_of(1)) == NOWHERE
    assert (index.num_reserved, index.num_free, len(index)) == (1, 1, 0)
    index.publish(place, key_of(1))
    assert index.find(key_of(1)) == place
    index.unpublish(place)
    assert (index.num_reserved, index.num_free, len(index)) == (1, 1, 0)
    index.release(place)
    assert index.num_free == 2


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


def test_the_first_of_many_that_does_not_fit_stops_them_and_those_before_stay():
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


def test_the_tail_of_a_touched_prompt_goes_before_its_head():
    index = filled(6)
    index.touch([0, 1, 2, 3])
    assert index.victims(6).tolist() == [4, 5, 3, 2, 1, 0]
    index.touch([4, 5])
    assert index.victims(3).tolist() == [3, 2, 1]


def test_a_block_that_a_prompt_repeats_counts_where_it_comes_first():
    index = filled(3)
    index.touch([0, 1, 0, 2])
    assert index.victims(3).tolist() == [2, 1, 0]
    index.check()


def test_touching_a_place_that_holds_nothing_does_nothing():
    index = filled(2, num_places=4)
    index.touch([3, 0, 2])
    assert index.victims(4).tolist() == [1, 0]
    index.check()


def test_a_leased_place_is_no_victim_until_its_lease_ends():
    index = filled(3)
    index.lease([0, 1], until=10.0)
    index.lease([0], until=5.0)
    assert index.victims(3, now=9.0).tolist() == [2]
    assert index.victims(3, now=10.0).tolist() == [0, 1, 2]


def test_a_lease_can_be_ended():
    index = filled(2)
    index.lease([0], until=10.0)
    index.end_leases([0, 1])
    assert index.victims(1).tolist() == [0]


def test_a_record_moves_with_all_that_is_known_of_it():
    index = filled(3, num_places=5)
    index.lease([1], until=10.0)
    to = index.reserve()
    index.move(1, to)
    index.check()
    assert index.find(key_of(1)) == to
    assert (index.generation_of(to), index.stamps[to], index.reserved().tolist()) == (1, 2, [1])
    assert index.victims(5, now=1.0).tolist() == [0, 2]
    assert index.victims(5, now=11.0).tolist() == [0, to, 2]


def test_a_prompt_over_two_indexes_falls_in_one_line_of_stamps():
    recency = Recency()
    first, second = PlaceIndex(2, recency), PlaceIndex(2, recency)
    for number in range(2):
        insert(first, key_of(number))
        insert(second, key_of(number + 2))
    stamps = recency.falling(4)
    first.touch([1, 0], stamps[[0, 3]])
    second.touch([0, 1], stamps[[1, 2]])
    assert (first.stamps.tolist(), second.stamps.tolist()) == ([5, 8], [7, 6])


def test_a_lease_ends_with_the_record():
    index = filled(1)
    index.lease([0], until=10.0)
    index.remove(0)
    insert(index, key_of(5))
    assert index.victims(1, now=1.0).tolist() == [0]


def test_victims_can_be_limited_to_those_used_before_a_stamp():
    index = filled(4)
    assert index.victims(4, before=3).tolist() == [0, 1]


def test_of_very_many_places_the_victims_are_about_as_many_as_asked_and_the_oldest():
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


def test_a_bulk_load_refuses_a_key_or_a_place_that_comes_twice():
    keys = np.frombuffer(key_of(1) + key_of(2) + key_of(1), np.uint8).reshape(3, 32)
    ones = np.ones(3, np.int64)
    index = PlaceIndex(4)
    with pytest.raises(SlotError, match="comes twice"):
        index.load(np.arange(3), keys, ones.astype(np.uint64), ones)
    with pytest.raises(SlotError, match="comes twice"):
        index.load(np.array([0, 0]), keys[:2], ones[:2].astype(np.uint64), ones[:2])
    with pytest.raises(SlotError, match="below 4"):
        index.load(np.array([0, 4]), keys[:2], ones[:2].astype(np.uint64), ones[:2])
    assert len(index) == 0
    index.check()


def test_find_many_finds_what_find_finds():
    index = filled(50)
    wanted = [key_of(n) for n in range(-20, 60)]
    assert index.find_many(wanted).tolist() == [index.find(key) for key in wanted]
    assert index.find_many([]).tolist() == []


def test_growing_keeps_every_key_and_adds_free_places():
    index = filled(10)
    index.lease([3], until=5.0)
    index.grow(500)
    index.check()
    assert index.num_free == 490
    assert [index.find(key_of(n)) for n in range(10)] == list(range(10))
    assert 3 not in index.victims(10, now=1.0).tolist()


def test_shrinking_needs_free_places_at_the_end():
    index = filled(8, num_places=10)
    with pytest.raises(SlotError, match="only 2 of the last 4 places are free"):
        index.shrink(6)
    index.remove(6)
    index.remove(7)
    index.shrink(6)
    index.check()
    assert (index.num_places, index.num_free, len(index)) == (6, 0, 6)


def test_free_places_of_a_range_can_be_asked_for():
    index = filled(8)
    for place in (2, 4, 6):
        index.remove(place)
    assert index.reserve_within(3, 6, 5).tolist() == [4]
    assert index.reserve_within(0, 8, 1).tolist() in ([2], [6])
    assert (index.num_free, index.num_reserved) == (1, 2)
    index.check()


def test_check_notices_a_lost_table_entry():
    index = filled(3)
    index._table[np.flatnonzero(index._table)[0]] = 0
    with pytest.raises(InvariantError, match="one table entry per published place"):
        index.check()


def test_ten_million_places_take_less_than_70_bytes_each():
    index = PlaceIndex(10_000_000)
    arrays = (index._words, index._stamps, index._generations, index._free, index._table)
    assert sum(array.nbytes for array in arrays) / 10_000_000 < 70


class Machine(RuleBasedStateMachine):
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
            with pytest.raises(OutOfSlots):
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
        keys = data.draw(st.lists(st.sampled_from(sorted(self.records)), unique=True))
        self.index.touch([self.records[key][0] for key in keys])
        self.stamp += len(keys)
        for at, key in enumerate(keys):
            self.records[key][2] = self.stamp - at

    @rule(data=st.data(), until=st.integers(1, 9))
    @precondition(lambda self: self.records)
    def lease(self, data, until):
        place = self.records[data.draw(st.sampled_from(sorted(self.records)))][0]
        self.index.lease([place], until)
        self.leases[place] = max(until, self.leases.get(place, 0))

    @rule(count=st.integers(0, 8), now=st.integers(0, 9))
    def evict(self, count, now):
        self.leases = {place: until for place, until in self.leases.items() if until > now}
        order = sorted(self.records, key=lambda key: self.records[key][2])
        oldest = [key for key in order if self.records[key][0] not in self.leases][:count]
        victims = self.index.victims(count, now).tolist()
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
            self.index.publish(place, key, 5)
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
        for number in range(60):
            assert (self.index.find(self.names(number)) != NOWHERE) == (
                self.names(number) in self.records
            )


class CrowdedMachine(Machine):
    names = staticmethod(crowded)


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestCrowdedMachine = CrowdedMachine.TestCase
TestCrowdedMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
