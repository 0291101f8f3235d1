"""A tier whose lookups take longer than a caller has patience for is not asked, until it is fast again."""

from stack_help import KEYS, Stacked, put


def test_a_tier_is_not_asked_when_its_last_two_lookups_took_longer_than_patience():
    def scenario(stack, host, disk):
        put(disk, [0, 1])
        disk.contains_s = 0.02
        assert stack.find(KEYS[:2], patience_s=0.005) == [1, 1]
        assert stack.find(KEYS[:2], patience_s=0.005) == [1, 1]
        asked = len(disk.asked("contains"))
        _, seconds = world.timed(lambda: stack.find(KEYS[:2], patience_s=0.005))
        assert seconds == 0
        assert len(disk.asked("contains")) == asked
        assert stack.find(KEYS[:2], patience_s=0.1) == [1, 1]
        assert stack.find(KEYS[:2]) == [1, 1], "without a limit all are asked"

    world = Stacked("host", "disk")
    world.run(scenario)


def test_one_slow_lookup_is_forgiven():
    def scenario(stack, host, disk):
        put(disk, [0])
        stack.find(KEYS[:1])
        disk.contains_s = 0.02
        stack.find(KEYS[:1])
        disk.contains_s = 0.0
        assert stack.find(KEYS[:1], patience_s=0.005) == [1]

    Stacked("host", "disk").run(scenario)


def test_a_tier_that_is_fast_again_is_found_out_in_the_background():
    def scenario(stack, host, disk):
        put(disk, [0])
        disk.contains_s = 0.02
        stack.find(KEYS[:1])
        stack.find(KEYS[:1])
        disk.contains_s = 0.0
        assert stack.find(KEYS[:1], patience_s=0.005) == [-1]
        world.lanes.sleep(11)
        answer, seconds = world.timed(lambda: stack.find(KEYS[:1], patience_s=0.005))
        assert (answer, seconds) == ([-1], 0)
        world.lanes.sleep(0.1)
        assert stack.find(KEYS[:1], patience_s=0.005) == [1]

    world = Stacked("host", "disk")
    world.run(scenario)


def test_a_tier_in_memory_whose_lookups_are_slow_is_left_out_as_well():
    def scenario(stack, host):
        put(host, [0])
        host.contains_s = 0.02
        stack.find(KEYS[:1])
        stack.find(KEYS[:1])
        assert stack.find(KEYS[:1], patience_s=0.005) == [-1]

    Stacked("host").run(scenario)


def test_who_cannot_gain_what_asking_takes_is_asked_now_and_then_only():
    def scenario(stack, host, remote):
        put(remote, [0, 1])
        remote.contains_s = 0.002
        gains = {"gains_s": [1.0, 0.001]}
        assert stack.find(KEYS[:2], **gains) == [1, 1]  # nothing is known of it yet
        assert stack.find(KEYS[:2], **gains) == [1, 1]
        num_asked = len(remote.asked("contains"))
        answer, seconds = world.timed(lambda: stack.find(KEYS[:2], **gains))
        assert (answer, seconds) == ([-1, -1], 0.0)
        assert stack.find(KEYS[:2], gains_s=[1.0, 0.003]) == [1, 1]
        world.lanes.sleep(10.0)
        assert stack.find(KEYS[:2], **gains) == [1, 1]
        assert stack.find(KEYS[:2], **gains) == [-1, -1]
        assert len(remote.asked("contains")) == num_asked + 2

    world = Stacked("host", "remote")
    world.run(scenario)


def test_a_tier_that_answers_at_once_is_asked_whatever_it_gains():
    def scenario(stack, host):
        put(host, [0])
        assert stack.find(KEYS[:2], gains_s=[-1.0]) == [0, -1]

    Stacked("host").run(scenario)
