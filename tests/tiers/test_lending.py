"""Records that are written into a host tier's own memory, and need no copy to be stored."""

import pytest

from quire.tiers import Host, StackSettings, TierStack
from quire.tiers.base import Outcome
from quire.tiers.contract.samples import name_of, names_of, record_of
from quire.tiers.format import new_buffer, record_bytes

SIZE = 4000
STORED = record_bytes(SIZE)
SLOTS = 40


@pytest.fixture
def host():
    with Host(SLOTS * STORED) as tier:
        assert tier.put([name_of(1000)], [record_of(name_of(1000), SIZE)]) == [Outcome.STORED]
        yield tier
        tier.check()


def lent_and_filled(host, numbers):
    lent = host.lend([STORED] * len(numbers))
    for number, memory in zip(numbers, lent, strict=False):
        memory[:] = record_of(name_of(number), SIZE)
    return lent


def fill(host, first, count):
    for number in range(first, first + count):
        host.put([name_of(number)], [record_of(name_of(number), SIZE)])


def test_a_record_written_into_lent_memory_is_found_where_it_lies(host):
    lent = lent_and_filled(host, [1, 2])
    assert host.contains(names_of([1, 2])) == [False, False]
    assert host.put(names_of([1, 2]), lent) == [Outcome.STORED] * 2
    host.take_back(lent)
    buffer = new_buffer(STORED)
    assert host.get([name_of(2)], [buffer]) == [Outcome.HIT]
    assert buffer == record_of(name_of(2), SIZE)


def test_lent_memory_stays_as_it_is_until_it_is_taken_back(host):
    (memory,) = lent_and_filled(host, [1])
    host.put([name_of(1)], [memory])
    fill(host, 2, 5 * SLOTS)
    assert memory == record_of(name_of(1), SIZE)
    host.take_back([memory])
    fill(host, 300, 5 * SLOTS)
    assert host.contains([name_of(1)]) == [False]


def test_memory_that_was_not_put_is_free_when_it_is_taken_back(host):
    lent = host.lend([STORED] * 5)
    host.take_back(lent)
    host.take_back(lent)
    assert host._arena.shelves[STORED].index.num_reserved == 0


def test_a_record_that_is_deleted_while_its_memory_is_lent_can_be_put_again(host):
    (memory,) = lent_and_filled(host, [1])
    host.put([name_of(1)], [memory])
    host.delete([name_of(1)])
    fill(host, 2, SLOTS)
    assert memory == record_of(name_of(1), SIZE)
    assert host.put([name_of(1)], [memory]) == [Outcome.STORED]
    host.take_back([memory])
    assert host.get([name_of(1)], [new_buffer(STORED)]) == [Outcome.HIT]


def test_leases_of_others_on_lent_memory_outlive_take_back(host):
    (memory,) = lent_and_filled(host, [1])
    host.put([name_of(1)], [memory])
    host.lease([name_of(1)], 60.0)
    host.take_back([memory])
    fill(host, 2, 3 * SLOTS)
    assert host.contains([name_of(1)]) == [True]


def test_a_deleted_record_in_lent_memory_leaves_no_lease(host):
    (memory,) = lent_and_filled(host, [1])
    host.put([name_of(1)], [memory])
    host.lease([name_of(1)], 60.0)
    host.delete([name_of(1)])
    host.put([name_of(1)], [memory])
    host.take_back([memory])
    fill(host, 2, 3 * SLOTS)
    assert host.contains([name_of(1)]) == [False]


def test_a_record_that_is_there_already_is_not_stored_twice(host):
    (memory,) = lent_and_filled(host, [1000])
    assert host.put([name_of(1000)], [memory]) == [Outcome.PRESENT]
    host.take_back([memory])
    assert host.stats().num_records == 1


def test_at_most_half_of_the_memory_is_lent(host):
    lent = host.lend([STORED] * SLOTS)
    assert len(lent) == SLOTS // 2
    assert not host.lend([STORED])
    host.take_back(lent)
    assert len(host.lend([STORED])) == 1


def test_sizes_that_share_the_memory_are_copied(host):
    host.put([name_of(1)], [record_of(name_of(1), 1000)])
    assert host.lend([STORED]) == []


def test_another_size_takes_no_room_while_memory_is_lent(host):
    fill(host, 1, SLOTS)
    lent = lent_and_filled(host, range(500, 510))
    host.put(names_of(range(500, 510)), lent)
    host.put([name_of(2000)], [record_of(name_of(2000), 1000)])
    host.check()
    assert [bytes(each) for each in lent] == [
        bytes(record_of(name_of(number), SIZE)) for number in range(500, 510)
    ]
    host.take_back(lent)
    assert host.put([name_of(2000)], [record_of(name_of(2000), 1000)]) != [Outcome.FULL]


def test_a_closed_tier_lends_nothing_and_takes_back_what_it_lent():
    host = Host(SLOTS * STORED)
    fill(host, 0, 1)
    lent = host.lend([STORED])
    host.close()
    host.take_back(lent)
    assert host.lend([STORED]) == []


@pytest.mark.parametrize("write", ["through", "back", "second_use"])
def test_a_stack_gives_memory_of_its_host_to_what_is_stored_at_once_only(host, write):
    stack = TierStack([host], StackSettings(write=write))
    records = stack.records([STORED] * 3)
    assert host._arena.shelves[STORED].index.num_reserved == (3 if write == "through" else 0)
    stack.give_back(records)
    assert host._arena.shelves[STORED].index.num_reserved == 0
    stack.close()
