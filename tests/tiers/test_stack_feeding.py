"""What is fed to a stack: when it begins, in which order, and who waits for it. In virtual time."""

import pytest
from stack_help import KEYS, Stacked, store, wanted

from quire.tiers.stack.feeding import LATER_S, MUCH_BYTES

SOON = {
    "find": lambda stack: stack.find(KEYS[:1]),
    "stats": lambda stack: stack.stats(),
    "delete": lambda stack: stack.delete(KEYS[:1]),
    "drain": lambda stack: stack.drain(5.0),
}


class Fed:
    """Work that notes when it ran."""

    def __init__(self, world, stack):
        self.world, self.stack = world, stack
        self.ran = []

    def feed(self, *numbers, num_bytes=100):
        def work():
            self.ran.append((numbers, round(self.world.lanes.time_s, 6)))
            store(self.stack, numbers)

        return self.stack.feed([KEYS[i] for i in numbers], work, num_bytes)


def fed_in(scenario):
    world = Stacked("host", "disk")
    return world.run(lambda stack, host, disk: scenario(Fed(world, stack), stack, world.lanes))


def test_what_nobody_waits_for_begins_later_with_what_came_meanwhile():
    def scenario(fed, stack, lanes):
        fed.feed(0)
        lanes.sleep(LATER_S / 2)
        fed.feed(1, 2)
        assert fed.ran == []
        lanes.sleep(LATER_S)
        assert fed.ran == [((0,), LATER_S), ((1, 2), LATER_S)]
        assert wanted(stack, KEYS[:3]) == [False] * 3

    fed_in(scenario)


@pytest.mark.parametrize("asking", SOON.values(), ids=SOON)
def test_who_waits_for_it_has_it_begin_at_once(asking):
    def scenario(fed, stack, lanes):
        fed.feed(0)
        fed.feed(1)
        asking(stack)
        assert fed.ran[0] == ((0,), 0.0)

    fed_in(scenario)


def test_who_looks_for_something_else_does_not_wait():
    def scenario(fed, stack, lanes):
        fed.feed(0)
        assert stack.find(KEYS[5:6]) == [-1]
        assert fed.ran == []

    fed_in(scenario)


def test_much_of_it_begins_at_once():
    def scenario(fed, stack, lanes):
        fed.feed(0, num_bytes=MUCH_BYTES // 2)
        fed.feed(1, num_bytes=MUCH_BYTES // 2)
        lanes.sleep(LATER_S / 2)
        assert fed.ran == [((0,), 0.0), ((1,), 0.0)]

    fed_in(scenario)


def test_haste_is_over_with_what_was_in_a_hurry():
    def scenario(fed, stack, lanes):
        fed.feed(0)
        assert stack.drain(5.0)
        begun_s = lanes.time_s
        fed.feed(1)
        lanes.sleep(2 * LATER_S)
        assert fed.ran[1] == ((1,), round(begun_s + LATER_S, 6))

    fed_in(scenario)


def test_what_fails_is_told_to_who_waits_and_the_next_is_done_all_the_same():
    def scenario(fed, stack, lanes):
        broken = stack.feed(KEYS[:1], lambda: 1 / 0, 100)
        fed.feed(1)
        assert broken.wait(1.0)
        assert isinstance(broken.error, ZeroDivisionError)
        assert stack.drain(5.0)
        assert [numbers for numbers, _ in fed.ran] == [(1,)]

    fed_in(scenario)
