"""What is fed to a stack: when it begins, in which order, and who waits for it. In virtual time."""

import pytest
from stack_help import KEYS, SIZE, Stacked, store, wanted

from quire.tiers import StackSettings
from quire.tiers.stack.feeding import LATEST_S, LONGEST_LOOK_S, LOOK_S, MOST_CREDIT_S

MUCH = 1000
"""Bytes that may wait."""

PACE = 1 / StackSettings().busy_share
"""Beside a model, work is followed by a pause of so many times as long."""

SOON = {
    "find": lambda stack: stack.find(KEYS[:1]),
    "stats": lambda stack: stack.stats(),
    "delete": lambda stack: stack.delete(KEYS[:1]),
    "drain": lambda stack: stack.drain(5.0),
}


class Fed:
    """Work that notes when it ran, and takes so long."""

    def __init__(self, world, stack):
        self.world, self.stack = world, stack
        self.took_s = 0.0
        self.ran = []

    def feed(self, *numbers, num_bytes=100):
        def work():
            self.ran.append((numbers, round(self.world.lanes.time_s, 6)))
            self.world.lanes.sleep(self.took_s)
            store(self.stack, numbers)

        return self.stack.feeding.begin([KEYS[i] for i in numbers], work, num_bytes, MUCH)

    @property
    def order(self):
        return [numbers for numbers, _ in self.ran]


def fed_in(scenario, busy_cores=0.0, **settings):
    world = Stacked("host", "disk", **settings)
    world.lanes.busy_cores = busy_cores
    return world.run(lambda stack, host, disk: scenario(Fed(world, stack), stack, world.lanes))


def test_it_begins_when_the_process_is_seen_to_be_idle():
    def scenario(fed, stack, lanes):
        fed.feed(0)
        lanes.sleep(LOOK_S / 2)
        fed.feed(1, 2)
        assert fed.ran == []
        lanes.sleep(LOOK_S)
        assert fed.ran == [((0,), LOOK_S), ((1, 2), LOOK_S)]
        assert wanted(stack, KEYS[:3]) == [False] * 3

    fed_in(scenario)


def test_beside_a_model_it_takes_a_small_share_of_the_time():
    def scenario(fed, stack, lanes):
        fed.took_s = 0.004
        for number in range(5):
            fed.feed(number)
        lanes.sleep(5 * (PACE * fed.took_s + LONGEST_LOOK_S))
        assert fed.order == [(0,), (1,), (2,), (3,), (4,)]
        begun = [when for _, when in fed.ran]
        took_s = begun[-1] - begun[0]
        assert abs(took_s - 4 * PACE * fed.took_s) <= LONGEST_LOOK_S

    fed_in(scenario, busy_cores=1.0)


def test_beside_a_model_as_much_is_done_at_a_time_as_its_share_allows():
    def scenario(fed, stack, lanes):
        fed.took_s = 0.02
        fed.feed(31)
        lanes.sleep(LOOK_S + fed.took_s)
        fed.took_s = 0.0001
        for number in range(300):
            assert stack.feeding.has_room(8 * MUCH)
            fed.feed(number % 30)
            lanes.sleep(0.1)
        lanes.sleep(LONGEST_LOOK_S)
        assert len(fed.ran) == 301

    fed_in(scenario, busy_cores=1.0)


def test_when_the_model_has_stopped_the_rest_is_done_without_pauses():
    def scenario(fed, stack, lanes):
        fed.took_s = 0.001
        for number in range(6):
            fed.feed(number)
        lanes.sleep(2 * LOOK_S)
        assert fed.order == [(0,)]
        lanes.busy_cores = 0.0
        lanes.sleep(2 * LONGEST_LOOK_S)
        assert fed.order == [(number,) for number in range(6)]

    fed_in(scenario, busy_cores=2.0)


def test_what_is_old_is_done_even_beside_a_model_if_hits_have_paid():
    def scenario(fed, stack, lanes):
        fed.took_s = 0.3
        stack.feeding.earn(10.0)
        for number in range(3):
            fed.feed(number)
        lanes.sleep(LATEST_S - 0.01)
        assert len(fed.ran) == 1
        lanes.sleep(1.0)
        assert len(fed.ran) == 3

    fed_in(scenario, busy_cores=1.0)


def test_what_is_old_waits_for_its_turn_where_nothing_was_saved():
    def scenario(fed, stack, lanes):
        fed.took_s = 0.3
        for number in range(3):
            fed.feed(number)
        lanes.sleep(LATEST_S + 1.0)
        assert len(fed.ran) == 2
        lanes.sleep(PACE * fed.took_s)
        assert len(fed.ran) == 3

    fed_in(scenario, busy_cores=1.0)


def test_beside_a_model_that_never_rests_there_is_no_room_for_more_than_may_wait():
    def scenario(fed, stack, lanes):
        fed.took_s = 0.01
        asked, found = 0, 0
        for number in range(400):
            asked += 1
            if stack.feeding.has_room(MUCH):
                fed.feed(number % 32, num_bytes=MUCH // 4)
                found += 1
            lanes.sleep(0.1)
        assert stack.stats().passed_over == asked - found > asked // 2
        assert f"{asked - found} times a prompt was not handed down" in str(stack)
        busy_s = fed.took_s * len(fed.ran)
        # What stats waited for is on top: four prompts, that much may wait.
        assert busy_s <= 40 / PACE + 5 * fed.took_s

    fed_in(scenario, busy_cores=1.0)


def test_what_is_late_leaves_no_room_either():
    def scenario(fed, stack, lanes):
        fed.took_s = 1.0
        fed.feed(0)
        fed.feed(1)
        lanes.sleep(LATEST_S - 0.1)
        assert stack.feeding.has_room(MUCH)
        lanes.sleep(0.2)
        assert not stack.feeding.has_room(MUCH)
        lanes.busy_cores = 0.0
        lanes.sleep(1.0 + LONGEST_LOOK_S)
        assert stack.feeding.has_room(MUCH)

    fed_in(scenario, busy_cores=1.0)


def test_before_the_process_was_seen_to_be_busy_there_is_room():
    def scenario(fed, stack, lanes):
        for number in range(8):
            assert stack.feeding.has_room(MUCH)
            fed.feed(number, num_bytes=MUCH)

    fed_in(scenario, busy_cores=1.0)


def test_what_hits_have_saved_is_spent_and_no_more():
    def scenario(fed, stack, lanes):
        fed.took_s = 0.1
        stack.feeding.earn(0.25)
        for number in range(8):
            fed.feed(number, num_bytes=MUCH)
        lanes.sleep(8 * LOOK_S + 6 * fed.took_s)
        # One in its turn, three with what was saved: the last one takes what is left.
        assert len(fed.ran) == 4
        assert not stack.feeding.has_room(MUCH)
        lanes.sleep(0.8 * PACE * fed.took_s)
        assert len(fed.ran) == 4

    fed_in(scenario, busy_cores=1.0)


def test_what_is_kept_in_mind_of_what_was_saved_is_bounded():
    def scenario(fed, stack, lanes):
        stack.feeding.earn(10 * MOST_CREDIT_S)
        stack.feeding.earn(-MOST_CREDIT_S)
        fed.took_s = 0.01
        for number in range(3):
            fed.feed(number, num_bytes=MUCH)
        lanes.sleep(4 * LOOK_S)
        assert fed.order == [(0,)]
        assert not stack.feeding.has_room(MUCH)

    fed_in(scenario, busy_cores=1.0)


def test_who_needs_its_blocks_does_not_wait_where_nothing_was_saved():
    def scenario(fed, stack, lanes):
        fed.took_s = 0.01
        first, second, third = (fed.feed(number) for number in range(3))
        lanes.sleep(LOOK_S + 2 * fed.took_s)
        assert fed.order == [(0,)]
        for each in (first, second):
            begun_s = lanes.now()
            stack.feeding.finish(each)
            assert each.is_over
            assert lanes.now() == begun_s
        assert stack.find(KEYS[1:2]) == [-1]
        stack.feeding.earn(1.0)
        stack.feeding.finish(third)
        assert fed.order == [(0,), (2,)]
        assert stack.stats().passed_over == 1

    fed_in(scenario, busy_cores=1.0)


def test_who_needs_its_blocks_pays_with_what_was_saved():
    def scenario(fed, stack, lanes):
        fed.took_s = 0.5
        stack.feeding.earn(0.6)
        lanes.sleep(LOOK_S)
        for number in range(20):
            each = fed.feed(number)
            lanes.sleep(2 * LOOK_S)
            stack.feeding.finish(each)
            assert each.is_over
        # One in its share, then with what was saved until nothing is left.
        assert len(fed.ran) == 3
        assert stack.stats().passed_over == 17

    fed_in(scenario, busy_cores=1.0)


@pytest.mark.parametrize("busy_cores", [0.0, 2.0])
def test_before_that_is_seen_who_needs_its_blocks_waits(busy_cores):
    def scenario(fed, stack, lanes):
        fed.took_s = 0.01
        stack.feeding.finish(fed.feed(0))
        assert fed.order == [(0,)]
        assert stack.stats().passed_over == 0

    fed_in(scenario, busy_cores)


def test_with_all_of_the_time_nothing_is_passed_over():
    def scenario(fed, stack, lanes):
        fed.took_s = 0.2
        for number in range(20):
            assert stack.feeding.has_room(MUCH)
            last = fed.feed(number, num_bytes=MUCH)
            lanes.sleep(0.05)
        stack.feeding.finish(last)
        assert (19,) in fed.order
        assert stack.drain(10.0)
        assert len(fed.ran) == 20

    fed_in(scenario, busy_cores=1.0, busy_share=1.0)


@pytest.mark.parametrize("busy_cores", [0.0, 2.0])
@pytest.mark.parametrize("asking", SOON.values(), ids=SOON)
def test_who_waits_for_it_has_it_begin_at_once(asking, busy_cores):
    def scenario(fed, stack, lanes):
        fed.feed(0)
        fed.feed(1)
        asking(stack)
        assert fed.ran[0] == ((0,), 0.0)

    fed_in(scenario, busy_cores)


def test_what_somebody_waits_for_does_not_wait_for_what_came_before():
    def scenario(fed, stack, lanes):
        fed.took_s = 0.002
        for number in range(5):
            fed.feed(number)
        assert stack.find(KEYS[3:4]) == [0]
        assert fed.order == [(3,)]
        assert fed.feed(5).wait(1.0)
        assert fed.order == [(3,), (5,)]

    fed_in(scenario, busy_cores=1.0)


def test_who_looks_for_something_else_does_not_wait():
    def scenario(fed, stack, lanes):
        fed.feed(0)
        assert stack.find(KEYS[5:6]) == [-1]
        assert fed.ran == []

    fed_in(scenario)


def test_what_is_under_way_is_known_until_it_is_stored():
    def scenario(fed, stack, lanes):
        fed.feed(0, 1)
        assert stack.feeding.has(KEYS[:3]).tolist() == [True, True, False]
        assert stack.drain(5.0)
        assert not stack.feeding.has(KEYS[:3]).any()
        assert wanted(stack, KEYS[:3]) == [False, False, True]

    fed_in(scenario)


def test_of_more_than_may_wait_the_oldest_is_done_at_each_look_if_hits_have_paid():
    def scenario(fed, stack, lanes):
        fed.took_s = 0.002
        stack.feeding.earn(1.0)
        for number in range(5):
            fed.feed(number, num_bytes=MUCH // 2)
        lanes.sleep(LOOK_S / 2)
        assert fed.ran == []
        lanes.sleep(5 * LOOK_S)
        assert fed.order == [(0,), (1,), (2,), (3,)]

    fed_in(scenario, busy_cores=1.0)


@pytest.mark.parametrize("asking", [SOON["drain"], SOON["stats"], lambda _: None])
def test_it_is_not_faster_than_a_tier_writes(asking):
    def scenario(fed, stack, lanes):
        disk = stack.tiers[1]
        disk.put_s = 0.05
        for number in range(20):
            fed.feed(number)
        asking(stack)
        lanes.sleep(20 * disk.put_s + 1.0)
        assert sorted(disk.records) == sorted(KEYS[:20])
        assert stack.stats().tiers[1].dropped == 0
        assert fed.order == [(number,) for number in range(20)]

    fed_in(scenario, queue_bytes=4 * SIZE)


def test_a_tier_that_hangs_does_not_keep_the_others_from_being_fed():
    def scenario(fed, stack, lanes):
        host, disk = stack.tiers
        disk.put_s = 1000.0
        for number in range(10):
            fed.feed(number)
        lanes.sleep(LATEST_S + 1.0)
        assert sorted(host.records) == sorted(KEYS[:10])

    fed_in(scenario, queue_bytes=4 * SIZE)


def test_what_fails_is_told_to_who_waits_and_the_next_is_done_all_the_same():
    def scenario(fed, stack, lanes):
        broken = stack.feeding.begin(KEYS[:1], lambda: 1 / 0, 100, MUCH)
        fed.feed(1)
        assert broken.wait(1.0)
        assert isinstance(broken.error, ZeroDivisionError)
        assert stack.drain(5.0)
        assert fed.order == [(1,)]

    fed_in(scenario)


def test_who_feeds_a_closed_stack_does_not_wait_for_ever():
    def scenario(fed, stack, lanes):
        before = fed.feed(0)
        stack.close()
        assert before.is_over
        assert fed.order == [(0,)]
        for _ in range(2):
            assert stack.feeding.begin(KEYS[:1], lambda: None, 100, MUCH).wait(1.0)

    fed_in(scenario)
