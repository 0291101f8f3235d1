"""A stack's reads: the fastest tier, the next one where that fails, and never longer than a deadline."""

import pytest
from stack_help import KEYS, RECORDS, SIZE, Stacked, load, put

from quire.errors import ConfigError

TEN = list(range(10))


def test_find_says_the_fastest_tier_that_has_a_key():
    def scenario(stack, host, disk, remote):
        put(host, [0, 1])
        put(disk, [1, 2])
        put(remote, [2, 3])
        assert stack.find(KEYS[:5]) == [0, 0, 1, 2, -1]

    Stacked("host", "disk", "remote").run(scenario)


def test_find_of_a_prefix_ends_at_the_first_hole():
    def scenario(stack, host, disk):
        put(host, [0, 3])
        put(disk, [4])
        assert stack.find(KEYS[:5]) == [0, -1, -1, -1, -1]
        assert stack.find(KEYS[:5], contiguous=False) == [0, -1, -1, 0, 1]

    Stacked("host", "disk").run(scenario)


def test_a_cold_prompt_asks_a_remote_tier_for_few_of_its_keys():
    def scenario(stack, host, remote):
        assert set(stack.find(KEYS)) == {-1}
        assert [len(keys) for keys in remote.asked("contains")] == [64]

    Stacked("host", "remote").run(scenario)


def test_a_warm_prompt_asks_a_remote_tier_in_a_few_growing_questions():
    def scenario(stack, host, remote):
        put(remote, range(1000))
        assert stack.find(KEYS) == [1] * 1000
        assert [len(keys) for keys in remote.asked("contains")] == [64, 936]

    Stacked("host", "remote").run(scenario)


def test_a_slower_tier_is_not_asked_for_what_a_faster_one_has():
    def scenario(stack, host, disk):
        put(host, TEN)
        stack.find(KEYS[:10])
        load(stack, TEN)
        assert disk.calls == []

    Stacked("host", "disk").run(scenario)


def test_a_lookup_of_a_tier_that_hangs_ends_in_time_and_finds_what_others_have():
    stacked = Stacked("host", "disk", "remote", lookup_timeout_s=0.1)

    def scenario(stack, host, disk, remote):
        disk.contains_s = 5.0
        put(remote, TEN)
        assert stacked.timed(lambda: stack.find(KEYS[:10])) == ([2] * 10, 0.05)
        assert stack.stats().tiers[1].loads == {"lookup_timeout": 1}

    stacked.run(scenario)


def test_a_record_from_a_slower_tier_is_stored_in_the_fastest():
    def scenario(stack, host, disk):
        put(disk, TEN)
        assert load(stack, TEN) == ["hit"] * 10
        assert load(stack, TEN) == ["hit"] * 10
        assert len(disk.asked("get")) == 1
        assert host.contains(KEYS[:10]) == [True] * 10

    Stacked("host", "disk").run(scenario)


def test_promote_false_stores_no_record_in_a_faster_tier():
    def scenario(stack, host, disk):
        put(disk, TEN)
        load(stack, TEN)
        assert not host.records

    Stacked("host", "disk", promote=False).run(scenario)


def test_keys_of_several_tiers_are_read_side_by_side():
    stacked = Stacked("disk", "remote")

    def scenario(stack, disk, remote):
        put(disk, [0, 1])
        put(remote, [2, 3])
        disk.get_s = remote.get_s = 1.0
        outcomes, took_s = stacked.timed(lambda: load(stack, range(4), found=[0, 0, 1, 1]))
        assert outcomes == ["hit"] * 4
        assert took_s == 1.0

    stacked.run(scenario)


@pytest.mark.parametrize("wrong", ["bits", "gone", "shorter"])
def test_a_record_that_one_tier_fails_to_give_comes_from_the_next(wrong):
    def scenario(stack, disk, remote):
        put(disk, TEN)
        put(remote, TEN)
        if wrong == "bits":
            disk.records[KEYS[3]] = bytes(SIZE)
        elif wrong == "gone":
            del disk.records[KEYS[3]]
        else:
            disk.records[KEYS[3]] = bytes(RECORDS[3])[:-64]
        assert load(stack, TEN, found=[0] * 10) == ["hit"] * 10
        assert remote.asked("get") == [[KEYS[3]]]

    Stacked("disk", "remote").run(scenario)


def test_a_miss_says_the_first_cause_that_is_more_than_absence():
    def scenario(stack, host, disk, remote):
        disk.records[KEYS[0]] = bytes(SIZE)
        assert load(stack, [0, 1]) == ["corrupt", "absent"]
        assert stack.stats().loads == {"absent": 1, "corrupt": 1}

    Stacked("host", "disk", "remote").run(scenario)


def test_keys_that_were_not_found_are_not_looked_for():
    def scenario(stack, disk):
        put(disk, TEN)
        assert load(stack, TEN, found=[0] * 5 + [-1] * 5) == ["hit"] * 5 + ["absent"] * 5

    Stacked("disk").run(scenario)


def test_a_read_ends_at_its_deadline():
    stacked = Stacked("disk")

    def scenario(stack, disk):
        put(disk, TEN)
        disk.get_s = 50.0
        assert stacked.timed(lambda: load(stack, TEN, 0.2)) == (["timeout"] * 10, 0.2)

    stacked.run(scenario)


def test_a_tier_that_hangs_leaves_half_the_time_to_the_next_one():
    stacked = Stacked("disk", "remote")

    def scenario(stack, disk, remote):
        put(disk, TEN)
        put(remote, TEN)
        disk.get_s = 50.0
        assert stacked.timed(lambda: load(stack, TEN, 1.0)) == (["hit"] * 10, 0.5)

    stacked.run(scenario)


def test_a_late_read_writes_to_no_record_that_anybody_was_given():
    stacked = Stacked("disk")

    def scenario(stack, disk):
        put(disk, TEN)
        disk.get_s = 1.0
        assert set(load(stack, TEN, 0.5)) == {"timeout"}
        disk.get_s = 0.0
        _, records = stack.load(KEYS[10:20], [SIZE] * 10)
        mine = stack.buffers([SIZE] * 10)
        for each in mine:
            each[:] = b"!" * SIZE
        stacked.lanes.sleep(5)
        assert records == [None] * 10
        assert [bytes(each) for each in mine] == [b"!" * SIZE] * 10
        assert stack.stats().tiers[0].late == 10

    stacked.run(scenario)


def test_a_queued_read_past_its_timeout_never_begins():
    stacked = Stacked("disk", threads=1)

    def scenario(stack, disk):
        put(disk, TEN)
        disk.get_s = 1.0
        first = stacked.beside(lambda: load(stack, [0]))
        stacked.lanes.sleep(0.1)
        assert load(stack, [1], 0.5) == ["timeout"]
        stacked.lanes.sleep(5)
        assert len(disk.asked("get")) == 1
        assert first == [(["hit"], 1.0)]

    stacked.run(scenario)


def test_two_requests_for_one_key_share_one_read():
    stacked = Stacked("disk")

    def scenario(stack, disk):
        put(disk, TEN)
        disk.get_s = 1.0
        first = stacked.beside(lambda: load(stack, TEN))
        stacked.lanes.sleep(0.5)
        assert stacked.timed(lambda: load(stack, [3, 4, 5])) == (["hit"] * 3, 0.5)
        stacked.lanes.sleep(0.01)
        assert first == [(["hit"] * 10, 1.0)]
        assert len(disk.asked("get")) == 1
        assert stack.stats().tiers[0].joined == 3

    stacked.run(scenario)


def test_a_request_does_not_wait_for_a_shared_read_beyond_its_own_deadline():
    stacked = Stacked("disk")

    def scenario(stack, disk):
        put(disk, TEN)
        disk.get_s = 3.0
        first = stacked.beside(lambda: load(stack, TEN))
        stacked.lanes.sleep(0.5)
        assert stacked.timed(lambda: load(stack, [3], 0.2)) == (["timeout"], 0.2)
        stacked.lanes.sleep(5)
        assert first == [(["hit"] * 10, 3.0)]

    stacked.run(scenario)


def test_a_shared_read_goes_on_for_the_second_request_when_the_first_has_left():
    stacked = Stacked("disk", threads=1)

    def scenario(stack, disk):
        put(disk, range(20))
        disk.get_s = 1.0
        stacked.beside(lambda: load(stack, [19]))
        stacked.lanes.sleep(0.5)
        first = stacked.beside(lambda: load(stack, TEN, 0.9))
        stacked.lanes.sleep(0.1)
        second = stacked.beside(lambda: load(stack, TEN, 1.5))
        stacked.lanes.sleep(5)
        assert set(first[0][0]) == {"timeout"}
        assert second == [(["hit"] * 10, 1.4)]
        assert len(disk.asked("get")) == 2

    stacked.run(scenario)


def test_a_joined_load_reads_what_the_first_request_gave_up():
    stacked = Stacked("disk", threads=1)

    def scenario(stack, disk):
        put(disk, range(20))
        disk.get_s = 1.0
        stacked.beside(lambda: load(stack, [19]))
        stacked.lanes.sleep(0.1)
        disk.get_s = 0.1
        first = stacked.beside(lambda: load(stack, TEN, 0.8))
        stacked.lanes.sleep(0.1)
        second = stacked.beside(lambda: load(stack, TEN, 1.3))  # half of that is left: it joins
        stacked.lanes.sleep(5)
        assert set(first[0][0]) == {"timeout"}
        assert second[0][0] == ["hit"] * 10
        assert stack.stats().tiers[0].joined == 10

    stacked.run(scenario)


def test_requests_that_share_a_read_have_records_of_their_own():
    stacked = Stacked("disk")

    def scenario(stack, disk):
        put(disk, TEN)
        disk.get_s = 1.0
        both = [stacked.beside(lambda: stack.load(KEYS[:10], [SIZE] * 10)) for _ in range(2)]
        stacked.lanes.sleep(2)
        (((_, one), _),), (((_, two), _),) = both
        assert one == two == RECORDS[:10]
        assert len({id(each.obj) for each in one + two}) == 20
        assert len(disk.asked("get")) == 1

    stacked.run(scenario)


def test_a_slow_read_delays_no_read_from_another_tier():
    stacked = Stacked("disk", "remote")

    def scenario(stack, disk, remote):
        put(remote, range(20))
        put(disk, range(20, 30))
        remote.get_s = 3.0
        slow = [stacked.beside(lambda i=i: load(stack, [i], found=[1])) for i in range(20)]
        stacked.lanes.sleep(0.5)
        fast = stacked.timed(lambda: load(stack, range(20, 30), found=[0] * 10))
        assert fast == (["hit"] * 10, 0.0)
        assert slow == [[]] * 20

    stacked.run(scenario)


def test_a_small_read_takes_its_turn_between_the_chunks_of_a_large_one():
    stacked = Stacked("disk", threads=1, batch_bytes=SIZE, load_timeout_s=1000.0)

    def scenario(stack, disk):
        put(disk, range(110))
        disk.get_s = 1.0
        large = stacked.beside(lambda: load(stack, range(100)))
        stacked.lanes.sleep(10.5)
        assert stacked.timed(lambda: load(stack, [105])) == (["hit"], 2.5)
        stacked.lanes.sleep(100)
        assert large == [(["hit"] * 100, 101.0)]

    stacked.run(scenario)


def test_a_tier_that_fails_again_and_again_is_left_alone():
    stacked = Stacked("disk", failures=3, cool_down_s=10.0)

    def scenario(stack, disk):
        put(disk, TEN)
        disk.get_s = 1e6
        for _ in range(3):
            assert load(stack, [0], 0.2) == ["timeout"]
        assert stacked.timed(lambda: load(stack, [0], 0.2)) == (["skipped"], 0.0)
        assert stacked.timed(lambda: stack.find(KEYS[:1])) == ([-1], 0.0)
        report = stack.stats().tiers[0]
        assert (report.reading, report.num_opened) == ("open", 1)
        assert report.loads == {"skipped": 1, "timeout": 3}

    stacked.run(scenario)


def test_no_request_waits_for_the_trial_of_a_tier_that_was_left_alone():
    stacked = Stacked("disk", failures=1, cool_down_s=1.0)

    def scenario(stack, disk):
        put(disk, TEN)
        disk.get_s = disk.contains_s = 0.5
        assert load(stack, [0], 0.2) == ["timeout"]
        stacked.lanes.sleep(2)
        disk.get_s = 0.0
        disk.contains_s = 0.05
        assert stacked.timed(lambda: stack.find(KEYS[:1])) == ([-1], 0.0)
        stacked.lanes.sleep(0.1)
        assert stack.find(KEYS[:1]) == [0]
        assert load(stack, [0]) == ["hit"]

    stacked.run(scenario)


def test_a_caller_in_a_hurry_does_not_discredit_a_tier():
    def scenario(stack, disk):
        put(disk, TEN)
        disk.get_s = 0.03
        for _ in range(20):
            load(stack, [0], 0.01)
        assert stack.stats().tiers[0].reading == "closed"

    Stacked("disk", failures=3).run(scenario)


def test_a_tier_that_raises_what_it_should_not_is_a_miss():
    def scenario(stack, disk, remote):
        put(remote, TEN)
        disk._get = disk._contains = disk._put = lambda *_: 1 // 0
        assert stack.find(KEYS[:10]) == [1] * 10
        assert load(stack, TEN) == ["hit"] * 10
        assert stack.stats().tiers[0].loads == {"error": 10, "lookup_error": 1}

    Stacked("disk", "remote").run(scenario)


def test_a_refused_tier_is_measured_in_the_background():
    stacked = Stacked("disk")

    def scenario(stack, disk):
        put(disk, TEN)
        sizes, found = [SIZE] * 10, [0] * 10

        def choose():
            return stack.choose(KEYS[:10], found, sizes, lambda n: (10 - n) * 1e-6)

        disk.get_s = 0.1
        assert stacked.timed(choose) == (0, 0.0)
        assert choose() == 0
        stacked.lanes.sleep(1)
        assert len(disk.asked("get")) == 1
        disk.get_s = 0.0
        for _ in range(8):
            stacked.lanes.sleep(11)
            choose()
        stacked.lanes.sleep(1)
        assert choose() == 10
        assert stack.stats().refused_keys >= 20

    stacked.run(scenario)


def test_without_a_gate_all_that_was_found_is_loaded():
    def scenario(stack, disk):
        assert stack.choose(KEYS[:5], [0, 0, 0, 0, -1], [1] * 5, lambda _: 0.0) == 4
        assert stack.choose(KEYS[:5], [0, 0, 0, 0, -1], [1] * 5, lambda _: 0.0, step=3) == 3

    Stacked("disk", gate=False).run(scenario)


@pytest.mark.parametrize(
    "call",
    [
        lambda stack: stack.load(KEYS[:2], [SIZE]),
        lambda stack: stack.load(KEYS[:2], [SIZE, SIZE], found=[0]),
        lambda stack: stack.find([b"short"]),
        lambda stack: stack.choose(KEYS[:2], [0], [1, 1], float),
        lambda stack: stack.prefetch(KEYS[:2], [1]),
        lambda stack: stack.store(KEYS[:2], RECORDS[:1]),
    ],
)
def test_arguments_that_do_not_fit_together_are_refused(call):
    def scenario(stack, disk):
        with pytest.raises(ConfigError):
            call(stack)
        assert disk.calls == []

    Stacked("disk").run(scenario)


@pytest.mark.cases(1)
@pytest.mark.parametrize("blocks_per_s", [300.0, 900.0, 1100.0, 3000.0])
def test_tiers_slow_down_no_prefix_length_by_more_than_a_tenth(blocks_per_s):
    """The device computes 1,000 blocks a second; a read takes 5 ms and what its blocks take."""
    stacked = Stacked("disk")

    def recompute_s(num_blocks):
        return num_blocks / 1000

    def scenario(stack, disk):
        put(disk, range(200))
        read = disk._get

        def slowly(keys, *others):
            stacked.lanes.sleep(0.005 + len(keys) / blocks_per_s)
            read(keys, *others)

        disk._get = slowly
        slower, loaded = [], 0
        for turn in range(400):
            length = 1 + 7 * turn % 200
            keys = KEYS[:length]

            def request(keys=keys, length=length):
                found = stack.find(keys)
                cost_s = lambda n: recompute_s(length - n)  # noqa: E731
                chosen = stack.choose(keys, found, [SIZE] * length, cost_s)
                load(stack, range(chosen), found=found[:chosen])
                stacked.lanes.sleep(cost_s(chosen))
                return chosen

            chosen, took_s = stacked.timed(request)
            if turn >= 200:
                loaded += chosen > 0
                slower.append(took_s / recompute_s(length))
            stacked.lanes.sleep(2.0)
        assert max(slower) <= 1.1
        assert (loaded > 50) == (blocks_per_s > 1000)

    stacked.run(scenario)
