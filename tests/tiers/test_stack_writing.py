"""A stack's writes: policies, order, back-pressure, and nothing twice."""

import pytest
from dict_tier import DictTier
from stack_help import KEYS, RECORDS, SIZE, Stacked, load, put, store, wanted

from quire.errors import RecordError
from quire.tiers.base import Outcome
from quire.tiers.stack.settings import TierSettings

TEN = list(range(10))


def use(stack, numbers):
    stack.count_use([KEYS[i] for i in numbers])


def held(tier):
    return sorted(KEYS.index(key) for key in tier.records)


def test_write_through_stores_in_all_tiers_at_once():
    def scenario(stack, host, disk, remote):
        assert wanted(stack, KEYS[:10]) == [True] * 10
        assert store(stack, TEN) == ["stored"] * 10
        assert held(host) == TEN
        assert stack.drain(1)
        assert held(disk) == held(remote) == TEN
        assert wanted(stack, KEYS[:10]) == [False] * 10

    Stacked("host", "disk", "remote").run(scenario)


def test_a_record_that_does_not_carry_its_key_is_refused_and_nothing_is_stored():
    def scenario(stack, host, disk):
        for give in (stack.store, stack.store_evicted):
            with pytest.raises(RecordError, match="put as"):
                give(KEYS[:3], [RECORDS[0], RECORDS[1], RECORDS[1]])
        assert not host.records

    Stacked("host", "disk").run(scenario)


def test_store_never_waits():
    stacked = Stacked("host", "disk")

    def scenario(stack, host, disk):
        disk.put_s = disk.contains_s = 50.0
        assert stacked.timed(lambda: store(stack, TEN)) == (["stored"] * 10, 0.0)
        assert stacked.timed(lambda: wanted(stack, KEYS[10:20])) == ([True] * 10, 0.0)
        assert stacked.timed(lambda: use(stack, TEN))[1] == 0.0
        assert not stack.drain(1)

    stacked.run(scenario)


def test_drain_of_keys_waits_only_where_one_of_them_is_queued():
    stacked = Stacked("disk")

    def scenario(stack, disk):
        disk.put_s = 5.0
        store(stack, TEN)
        store(stack, range(10, 20))
        assert stacked.timed(lambda: stack.drain(60, KEYS[20:30])) == (True, 0.0)
        assert stacked.timed(lambda: stack.drain(1, KEYS[19:30])) == (False, 1.0)
        assert stacked.timed(lambda: stack.drain(60, KEYS[:1])) == (True, 9.0)
        assert held(disk) == [*range(20)]

    stacked.run(scenario)


def test_back_writes_what_the_device_and_then_each_tier_lets_go():
    def scenario(stack, host, disk):
        assert wanted(stack, KEYS[:10]) == [False] * 10
        assert store(stack, TEN) == ["skipped"] * 10
        stack.store_evicted(KEYS[:10], RECORDS[:10])
        stack.drain(1)
        assert held(host) == [6, 7, 8, 9]
        assert held(disk) == [0, 1, 2, 3, 4, 5]

    Stacked("host", "disk", write="back", capacity=4).run(scenario)


def test_second_use_writes_what_is_asked_for_again():
    def scenario(stack, host):
        use(stack, TEN)
        assert wanted(stack, KEYS[:10]) == [False] * 10
        assert store(stack, TEN) == ["skipped"] * 10
        use(stack, [0, 1, 2])
        assert wanted(stack, KEYS[:10]) == [True] * 3 + [False] * 7
        assert store(stack, TEN) == ["stored"] * 3 + ["skipped"] * 7

    Stacked("host", write="second_use").run(scenario)


def test_each_tier_may_have_its_own_write_policy():
    def scenario(stack, host, disk, remote):
        use(stack, TEN)
        use(stack, [0])
        store(stack, TEN)
        stack.drain(1)
        assert (held(host), held(disk), held(remote)) == (TEN, [], [0])

    tiers = {
        "disk": TierSettings(read_only=True),
        "remote": TierSettings(write="second_use"),
    }
    Stacked("host", "disk", "remote", tiers=tiers).run(scenario)


def test_a_stack_that_is_read_only_writes_nothing():
    def scenario(stack, host, disk):
        put(disk, [1])
        assert wanted(stack, KEYS[:2]) == [False, False]
        assert store(stack, [0]) == ["skipped"]
        stack.store_evicted(KEYS[:1], RECORDS[:1])
        stack.load(KEYS[1:2], [SIZE])
        assert (held(host), held(disk)) == ([], [1])

    Stacked("host", "disk", read_only=True).run(scenario)


def test_a_victim_of_one_tier_is_stored_in_the_next():
    def scenario(stack, host, disk):
        put(disk, [0, 1])
        stack.find(KEYS[:2], contiguous=False)
        store(stack, TEN)
        stack.drain(1)
        assert held(host) == [6, 7, 8, 9]
        assert held(disk) == TEN

    Stacked("host", "disk", capacity=4).run(scenario)


def test_nothing_is_written_to_a_tier_that_has_it():
    def scenario(stack, host, disk, remote):
        store(stack, TEN)
        stack.drain(1)
        for _ in range(3):
            store(stack, TEN)
            stack.store_evicted(KEYS[:10], RECORDS[:10])
            stack.drain(1)
        assert len(disk.asked("put")) == len(remote.asked("put")) == 1

    Stacked("host", "disk", "remote", capacity=4).run(scenario)


def test_a_tier_that_others_write_to_is_asked_before_it_is_sent_anything():
    def scenario(stack, remote):
        put(remote, range(5))
        store(stack, TEN)
        stack.drain(1)
        assert remote.asked("put") == [KEYS[5:10]]
        assert stack.stats().tiers[0].stores == {"present": 5, "stored": 5}

    Stacked("remote").run(scenario)


def test_a_key_waits_once():
    def scenario(stack, disk):
        disk.put_s = 1.0
        store(stack, TEN)
        assert store(stack, TEN) == ["present"] * 10
        assert stack.stats().tiers[0].queued_bytes == 10 * SIZE
        stack.drain(10)
        assert len(disk.asked("put")) == 1

    Stacked("disk").run(scenario)


def test_records_beyond_the_queues_room_are_dropped_from_the_tail():
    def scenario(stack, host, disk):
        disk.put_s = 1.0
        store(stack, TEN)
        report = stack.stats().tiers[1]
        assert (report.queued_bytes, report.dropped) == (4 * SIZE, 6)
        assert wanted(stack, KEYS[:20]) == [False] * 10 + [True] * 10
        stack.drain(10)
        assert (held(host), held(disk)) == (TEN, [0, 1, 2, 3])

    Stacked("host", "disk", queue_bytes=4 * SIZE).run(scenario)


def test_a_full_queue_wants_as_much_as_it_has_room_for():
    def scenario(stack, disk):
        disk.put_s = 1.0
        store(stack, [0])
        assert wanted(stack, KEYS[1:10]) == [True] * 3 + [False] * 6
        stack.drain(10)
        assert wanted(stack, KEYS[1:10]) == [True] * 4 + [False] * 5

    Stacked("disk", queue_bytes=4 * SIZE).run(scenario)


@pytest.mark.parametrize("refused_by", ["one answer", "one call"])
def test_no_tail_is_stored_behind_a_refused_head(refused_by):
    def scenario(stack, disk):
        keep = disk._put

        def refuse_third(keys, records, timeout_s, done):
            keep(keys, records, timeout_s, done)
            if KEYS[3] in keys:
                done[keys.index(KEYS[3])] = Outcome.FULL
                del disk.records[KEYS[3]]

        disk._put = refuse_third
        store(stack, TEN)
        stack.drain(10)
        assert held(disk) == [0, 1, 2]

    batch_bytes = SIZE if refused_by == "one call" else 1 << 20
    Stacked("disk", batch_bytes=batch_bytes).run(scenario)


def test_a_tier_that_is_not_written_for_failures_still_gives_what_it_has():
    def scenario(stack, disk):
        put(disk, [0])

        def fails(*_):
            raise OSError(28, "disk full")

        disk._put = fails
        for number in range(1, 5):
            store(stack, [number])
            stack.drain(1)
        report = stack.stats().tiers[0]
        assert (report.reading, report.writing) == ("closed", "open")
        assert store(stack, [8]) == ["skipped"]
        assert wanted(stack, KEYS[8:9]) == [False]
        assert stack.find(KEYS[:1]) == [0]

    Stacked("disk", failures=3, cool_down_s=10.0).run(scenario)


def test_a_hung_tier_keeps_its_own_queue_only():
    stacked = Stacked("host", "disk", "remote", queue_bytes=20 * SIZE)

    def scenario(stack, host, disk, remote):
        disk.put_s = 1000.0
        for first in range(0, 100, 10):
            store(stack, range(first, first + 10))
            stacked.lanes.sleep(0.1)
        assert held(host) == held(remote) == list(range(100))
        assert stack.stats().tiers[1].queued_bytes <= 20 * SIZE

    stacked.run(scenario)


def test_records_from_the_stack_come_back_when_all_tiers_have_read_them():
    def scenario(stack, disk, remote):
        disk.put_s = 1.0
        buffers = stack.buffers([SIZE] * 3)
        for buffer, record in zip(buffers, RECORDS[:3], strict=True):
            buffer[:] = record
        stack.store(KEYS[:3], buffers)
        assert not {id(each.obj) for each in stack.buffers([SIZE] * 3)} & {
            id(each.obj) for each in buffers
        }
        stack.drain(10)
        again = stack.buffers([SIZE] * 3)
        assert {id(each.obj) for each in again} == {id(each.obj) for each in buffers}

    Stacked("disk", "remote").run(scenario)


def test_a_buffer_that_comes_back_twice_is_lent_once():
    def scenario(stack, disk):
        buffers = stack.buffers([SIZE])
        stack.give_back(buffers)
        stack.give_back(buffers)
        one, two = stack.buffers([SIZE, SIZE])
        assert one.obj is not two.obj

    Stacked("disk").run(scenario)


def test_buffers_of_small_records_do_not_use_up_the_maps_of_a_process():
    stack = Stacked("disk").stack
    buffers = stack.buffers([64] * 100_000)
    stack.give_back(buffers)
    assert len({id(each.obj) for each in stack.buffers([64] * 1000)}) == 1000


def test_uses_keep_records_in_memory_from_ageing():
    def scenario(stack, host):
        store(stack, range(4))
        use(stack, [0, 1])
        store(stack, [4, 5])
        assert held(host) == [0, 1, 4, 5]

    Stacked("host", capacity=4).run(scenario)


def test_deleted_keys_are_gone_everywhere_and_may_be_written_again():
    def scenario(stack, host, disk):
        store(stack, TEN)
        stack.drain(1)
        stack.delete(KEYS[:5])
        assert held(host) == held(disk) == [5, 6, 7, 8, 9]
        assert wanted(stack, KEYS[:10]) == [True] * 5 + [False] * 5

    Stacked("host", "disk").run(scenario)


def test_queued_records_are_written_before_a_delete_or_flush():
    def scenario(stack, host, disk):
        store(stack, range(800))
        flushed = []
        disk.flush = lambda: flushed.append(len(disk.records))
        stack._lookup.in_all_lanes(lambda tier: tier.flush(), 1.0)
        assert flushed == [800]
        store(stack, range(800, 1000))
        stack.delete(KEYS)
        assert stack.drain(1)
        assert held(disk) == []

    Stacked("host", "disk", batch_bytes=10 * SIZE).run(scenario)


def test_a_record_deleted_during_its_read_is_neither_kept_nor_shared():
    stacked = Stacked("host", "disk")

    def slow_get(*args):
        DictTier._get(stacked.tiers[1], *args)
        stacked.lanes.sleep(0.5)

    def scenario(stack, host, disk):
        put(disk, TEN)
        disk._get = slow_get
        before = stacked.beside(lambda: load(stack, TEN))
        stacked.lanes.sleep(0.1)
        stack.delete(KEYS[:5])
        later = stacked.beside(lambda: load(stack, TEN))
        stacked.lanes.sleep(2.0)
        assert before[0][0] == ["hit"] * 10
        assert later[0][0] == ["absent"] * 5 + ["hit"] * 5
        assert held(host) == held(disk) == [5, 6, 7, 8, 9]

    stacked.run(scenario)


def test_a_tier_gets_what_it_wanted_of_a_prompt_and_no_more():
    def scenario(stack, host, disk):
        put(disk, TEN[:5])
        stack.find(KEYS[:10])
        tiers = stack.wanted(KEYS[:10])
        assert tiers.tolist() == [0] * 5 + [3] * 5
        outcomes = stack.store(KEYS[:10], RECORDS[:10], tiers)
        assert [outcome.value for outcome in outcomes] == ["skipped"] * 5 + ["stored"] * 5
        assert stack.drain(1)
        assert (held(host), held(disk)) == (TEN[5:], TEN)
        assert disk.asked("put") == [KEYS[5:10]]

    Stacked("host", "disk").run(scenario)


@pytest.mark.parametrize("why", ["out of service", "nothing is promoted"])
def test_a_tier_wants_what_one_below_has_and_does_not_give(why):
    def scenario(stack, host, disk):
        put(disk, TEN)
        stack.find(KEYS[:10])
        assert not any(wanted(stack, KEYS[:10])) or why == "nothing is promoted"
        if why == "out of service":
            stack._levels[1].reading.open()
        assert stack.wanted(KEYS[:10]).tolist() == [1] * 10

    Stacked("host", "disk", promote=why != "nothing is promoted").run(scenario)


def test_memory_wants_what_is_not_read_from_below_as_computing_is_faster():
    def scenario(stack, host, disk):
        put(disk, TEN)
        found = stack.find(KEYS[:10])
        assert not any(wanted(stack, KEYS[:10]))
        assert stack.choose(KEYS[:10], found, [SIZE] * 10, lambda n: (10 - n) * 1e-9) == 0
        assert wanted(stack, KEYS[:10]) == [1] * 10
        assert stack.choose(KEYS[:10], found, [SIZE] * 10, lambda n: 10.0 - n) == 10
        assert not any(wanted(stack, KEYS[:10]))
        stack._lookup._is_asked = lambda *_: False
        assert stack.find(KEYS[:10]) == [-1] * 10
        assert wanted(stack, KEYS[:10]) == [1] * 10

    Stacked("host", "disk").run(scenario)


def test_a_tier_that_lacks_the_head_of_a_prompt_wants_its_tail_too():
    def scenario(stack, host):
        put(host, TEN[8:])
        assert wanted(stack, KEYS[:10]) == [True] * 10
        outcomes = stack.store(KEYS[:10], RECORDS[:10], stack.wanted(KEYS[:10]))
        assert outcomes == [Outcome.STORED] * 8 + [Outcome.PRESENT] * 2

    Stacked("host").run(scenario)
