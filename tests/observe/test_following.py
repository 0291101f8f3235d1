"""Following a stream: gaps, doubles, late comers, publishers that begin anew, messages that nobody can read."""

import pytest

from quire import CacheManager
from quire.errors import RecordError
from quire.exchange import EventLog
from quire.exchange.wire import ClearedEvent, EventBatch, StoredEvent, encode_batch
from quire.observe import BatchStream, Follower, Mirror
from quire.observe.follower import LIFE_BITS, life_of
from quire.observe.stream import LAST_COUNT


def message(number, *, at=None, events=None, life=0):
    """A message that stores one block, named by its number; by default of an engine that tells no life."""
    stored = [StoredEvent([number + 1], None, [number], 1, None, "GPU", None)]
    return (life << LIFE_BITS) + number, encode_batch(
        EventBatch(number if at is None else at, stored if events is None else events, 0)
    )


def followed(*numbers, life=0):
    following = Follower(Mirror())
    for number in numbers:
        following.receive(message(number, life=life))
    return following


def held(following):
    return sorted(name - 1 for name in following.consumer.held())


def test_batches_in_order_are_followed():
    following = followed(0, 1, 2)
    assert (held(following), following.is_degraded, following.wish) == ([0, 1, 2], False, None)


def test_a_first_batch_behind_a_broken_connection_may_be_another_publishers_than_the_second():
    following = Follower(Mirror())
    following.doubt()  # seen before what was on its way
    for number in (0, 1):
        following.receive(message(number))
    assert following.is_degraded
    following.refill(map(message, (0, 1)))
    assert (held(following), following.is_degraded) == ([0, 1], False)


def test_a_doubled_batch_is_taken_once():
    following = followed(0, 1, 1, 0)
    assert following.num_doubled == 2
    assert following.consumer.num_copies[0, "GPU"] == {1: 1, 2: 1}


def test_a_gap_is_noticed_and_filled_by_a_replay():
    following = followed(0, 1, 3, 4)
    assert (following.is_degraded, following.wish, following.replay_from) == (True, "replay", 1)
    assert (held(following), following.num_gaps) == ([0, 1], 1)
    following.refill(map(message, (1, 2, 3, 4)))
    assert (held(following), following.is_degraded) == ([0, 1, 2, 3, 4], False)


def test_a_gap_of_a_publisher_that_tells_its_life_is_filled_by_what_is_missing():
    following = followed(0, 1, 3, 4, life=7)
    following.refill([message(2, life=7)])
    assert (held(following), following.is_degraded) == ([0, 1, 2, 3, 4], False)


def test_a_batch_that_was_only_late_fills_its_gap_where_it_tells_its_life():
    following = followed(0, 2, 1, life=7)
    assert (held(following), following.is_degraded, following.wish) == ([0, 1, 2], False, None)
    following = followed(0, 2, 1)
    assert (held(following), following.is_degraded) == ([0], True)
    following.refill(map(message, (0, 1, 2)))
    assert (held(following), following.is_degraded) == ([0, 1, 2], False)


def test_a_gap_that_no_replay_fills_is_mended_by_a_snapshot():
    following = followed(0, 3, life=7)
    following.refill([message(2, life=7)])
    assert (following.is_degraded, following.wish) == (True, "replay")
    following.restore((7 << LIFE_BITS) + 3, [message(7, at=2)[1]])
    assert (held(following), following.is_degraded) == ([3, 7], False)


def test_a_follower_without_a_snapshot_stays_degraded_until_a_clear():
    following = followed(0, 3)
    following.skip()
    following.receive(message(4))
    assert (held(following), following.is_degraded, following.wish) == ([0, 3, 4], True, None)
    following.receive(message(5, events=[ClearedEvent()]))
    assert (held(following), following.is_degraded) == ([], False)


def test_a_late_follower_wishes_for_a_snapshot():
    following = followed(5, life=7)
    assert (held(following), following.is_degraded, following.wish) == ([], True, "snapshot")
    following.restore((7 << LIFE_BITS) + 5, [message(2)[1]])
    assert (held(following), following.is_degraded, following.wish) == ([2, 5], False, None)


def test_a_late_follower_is_complete_after_a_whole_replay():
    following = followed(2)
    following.refill(map(message, range(3)))
    assert (held(following), following.is_degraded) == ([0, 1, 2], False)


def test_a_replay_that_begins_late_is_taken_as_far_as_it_goes():
    following = followed(5)
    following.refill(map(message, (3, 4, 5)))
    assert following.is_degraded
    following.skip()
    assert (held(following), following.is_degraded, following.wish) == ([3, 4, 5], True, None)


def test_an_empty_replay_completes_a_follower_that_heard_nothing():
    following = followed()
    following.refill([])
    assert (following.is_degraded, following.next_number) == (False, 0)


def test_a_new_life_begins_with_an_empty_cache():
    following = followed(0, 1, 2, life=7)
    following.receive(message(0, life=5))
    assert (held(following), following.is_degraded, following.num_restarts) == ([0], False, 1)
    following.receive(message(2, life=7))
    following.receive(message(1, life=5))
    assert (held(following), following.is_degraded, following.num_doubled) == ([0, 1], False, 1)


@pytest.mark.parametrize("number", [1, 3, 9])
def test_a_new_life_is_seen_at_any_number_and_any_time(number):
    following = followed(0, 1, 2, life=7)
    following.receive(message(number, at=-50, life=8))
    assert (held(following), following.is_degraded, following.wish) == ([], True, "snapshot")
    following.refill([message(at, at=-50, life=8) for at in range(number + 1)])
    assert (held(following), following.is_degraded) == ([*range(number + 1)], False)


def test_another_batch_of_an_old_number_is_of_a_publisher_that_began_anew():
    following = followed(0, 1, 2)
    following.receive(message(1, at=-50))
    assert (held(following), following.is_degraded, following.wish) == ([], True, "snapshot")
    following.restore(1, [message(9, at=49)[1]])
    assert (held(following), following.is_degraded) == ([9], False)


def test_a_time_that_steps_back_is_a_doubt_that_a_replay_dispels():
    following = followed(0, 1)
    following.receive(message(2, at=-50))
    assert (held(following), following.is_degraded, following.wish) == ([0, 1], True, "replay")
    following.refill([message(1), message(2, at=-50)])
    assert (held(following), following.is_degraded) == ([0, 1, 2], False)


def test_a_restart_that_was_slept_through_is_found_at_the_gap():
    following = followed(0, 1)
    following.receive(message(3, at=60))
    following.refill([message(at, at=57 + at) for at in (1, 2, 3)])
    assert (held(following), following.is_degraded, following.num_restarts) == ([], True, 1)
    following.refill([message(at, at=57 + at) for at in range(4)])
    assert (held(following), following.is_degraded) == ([0, 1, 2, 3], False)


def test_a_follower_that_sees_no_connections_is_degraded_unless_batches_tell_a_life():
    following = Follower(Mirror(), sees_breaks=False)
    following.receive(message(0))
    assert (following.is_blind, following.is_degraded) == (True, True)
    following.receive(message(0, life=7))
    assert (following.is_blind, following.is_degraded) == (False, False)


@pytest.mark.parametrize(("life", "lost"), [(0, True), (7, False)])
def test_after_a_break_that_nobody_can_be_asked_about_a_life_tells_and_else_something_is_lost(
    life, lost
):
    following = followed(0, 1, life=life)
    following.doubt()
    following.skip()
    assert following.is_degraded
    following.receive(message(2, life=life))
    assert (held(following), following.is_degraded) == ([0, 1, 2], lost)


def test_after_a_break_the_same_publisher_is_known_by_its_last_batch():
    following = followed(0, 1)
    following.doubt()
    assert (following.is_degraded, following.wish, following.replay_from) == (True, "replay", 1)
    following.receive(message(2))
    assert held(following) == [0, 1]
    following.refill([message(1), message(2)])
    assert (held(following), following.is_degraded) == ([0, 1, 2], False)


@pytest.mark.parametrize("replayed", [[], [message(1, at=50), message(2, at=51)], [message(2)]])
def test_a_new_publisher_behind_a_gap_is_recognised_by_its_replay(replayed):
    following = followed(0, 1)
    following.doubt()
    following.refill(replayed)
    assert following.num_restarts == 1
    assert 0 not in held(following)


def test_before_its_numbers_run_over_a_publisher_begins_another_life():
    manager = CacheManager(8, 2, watchers=[EventLog()])
    stream, following = BatchStream(manager, life=7), Follower(Mirror())

    def publish(*tokens):
        seq = manager.open(tokens)
        manager.reserve(seq, len(tokens))
        manager.commit(seq, tokens)
        manager.close(seq)
        for each in stream.take():
            following.receive(each)

    publish(1, 2)
    assert not following.is_degraded
    following.next_number = stream.next_number = stream.next_number + LAST_COUNT
    publish(3, 4)
    assert life_of(stream.next_number) != 7
    assert following.is_degraded
    following.restore(stream.next_number, [payload for _, payload in stream.snapshot()])
    assert (len(following.consumer), following.is_degraded) == (2, False)


def test_an_unreadable_batch_counts_as_lost():
    following = followed(0)
    following.receive((1, b"rubbish"))
    following.receive(message(2))
    assert (following.num_unreadable, following.is_degraded, following.replay_from) == (1, True, 0)
    with pytest.raises(RecordError):
        following.restore(3, [message(1)[1], b"rubbish"])
    assert (held(following), following.is_degraded) == ([0], True)


def test_batches_ahead_of_a_gap_are_kept_up_to_a_limit(monkeypatch):
    monkeypatch.setattr("quire.observe.follower.MAX_AHEAD", 3)
    following = followed(0, 2, 3, 4)
    assert not following.lost
    following.receive(message(5))
    assert (following.lost, held(following)) == (True, [0, 2, 3, 4, 5])
