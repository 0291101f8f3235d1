"""Following a stream: gaps, doubles, late comers, publishers that begin anew, messages that nobody can read."""

import pytest

from quire.errors import RecordError
from quire.exchange.wire import ClearedEvent, EventBatch, StoredEvent, encode_batch
from quire.observe import Follower, Mirror


def message(number, *, at=None, events=None):
    """A message that stores one block, named by its number."""
    stored = [StoredEvent([number + 1], None, [number], 1, None, "GPU", None)]
    return number, encode_batch(
        EventBatch(number if at is None else at, stored if events is None else events, 0)
    )


def followed(*numbers):
    following = Follower(Mirror())
    for number in numbers:
        following.receive(message(number))
    return following


def held(following):
    return sorted(name - 1 for name in following.consumer.held())


def test_batches_in_order_are_followed():
    following = followed(0, 1, 2)
    assert (held(following), following.is_degraded, following.wish) == ([0, 1, 2], False, None)


def test_a_doubled_batch_is_taken_once():
    following = followed(0, 1, 1, 0)
    assert following.num_doubled == 2
    assert following.consumer.num_copies[0, "GPU"] == {1: 1, 2: 1}


def test_a_gap_is_noticed_and_filled_by_a_replay():
    following = followed(0, 1, 3, 4)
    assert (following.is_degraded, following.wish, following.replay_from) == (True, "replay", 2)
    assert (held(following), following.num_gaps) == ([0, 1], 1)
    following.refill([message(2), message(3)])
    assert (held(following), following.is_degraded) == ([0, 1, 2, 3, 4], False)


def test_a_batch_that_was_only_late_fills_its_gap():
    following = followed(0, 2, 1)
    assert (held(following), following.is_degraded, following.wish) == ([0, 1, 2], False, None)


def test_a_gap_that_no_replay_fills_is_mended_by_a_snapshot():
    following = followed(0, 3)
    following.refill([message(2)])
    assert (following.is_degraded, following.wish) == (True, "replay")
    following.restore(3, [message(7, at=2)[1]])
    assert (held(following), following.is_degraded) == ([3, 7], False)


def test_a_follower_without_a_snapshot_stays_degraded_until_a_clear():
    following = followed(0, 3)
    following.skip()
    following.receive(message(4))
    assert (held(following), following.is_degraded, following.wish) == ([0, 3, 4], True, None)
    following.receive(message(5, events=[ClearedEvent()]))
    assert (held(following), following.is_degraded) == ([], False)


def test_a_late_follower_wishes_for_a_snapshot():
    following = followed(5)
    assert (held(following), following.is_degraded, following.wish) == ([], True, "snapshot")
    following.restore(5, [message(2)[1]])
    assert (held(following), following.is_degraded, following.wish) == ([2, 5], False, None)


def test_a_late_follower_is_complete_after_a_whole_replay():
    following = followed(2)
    following.refill([message(0), message(1)])
    assert (held(following), following.is_degraded) == ([0, 1, 2], False)


def test_a_replay_that_begins_late_is_taken_as_far_as_it_goes():
    following = followed(5)
    following.refill([message(3), message(4)])
    assert following.is_degraded
    following.skip()
    assert (held(following), following.is_degraded, following.wish) == ([3, 4, 5], True, None)


def test_an_empty_replay_completes_a_follower_that_heard_nothing():
    following = followed()
    following.refill([])
    assert (following.is_degraded, following.next_number) == (False, 0)


def test_a_publisher_that_begins_anew_has_an_empty_cache():
    following = followed(0, 1, 2)
    following.receive(message(0, at=50))
    assert (held(following), following.is_degraded, following.num_restarts) == ([0], False, 1)
    following.receive(message(1, at=51))
    assert held(following) == [0, 1]


def test_a_publisher_that_began_anew_unseen_is_recognised_by_its_times():
    following = followed(0, 1, 2)
    following.receive(message(1, at=50))
    assert (held(following), following.is_degraded, following.wish) == ([], True, "snapshot")
    following.restore(1, [message(9, at=49)[1]])
    assert (held(following), following.is_degraded) == ([1, 9], False)


def test_after_a_break_the_same_publisher_is_known_by_its_last_batch():
    following = followed(0, 1)
    following.doubt()
    assert (following.is_degraded, following.wish, following.replay_from) == (True, "replay", 1)
    following.receive(message(2))
    assert held(following) == [0, 1]
    following.refill([message(1)])
    assert (held(following), following.is_degraded) == ([0, 1, 2], False)


@pytest.mark.parametrize("replayed", [[], [message(1, at=50), message(2, at=51)], [message(2)]])
def test_a_new_publisher_behind_a_gap_is_recognised_by_its_replay(replayed):
    following = followed(0, 1)
    following.doubt()
    following.refill(replayed)
    assert following.num_restarts == 1
    assert 0 not in held(following)


def test_an_unreadable_batch_counts_as_lost():
    following = followed(0)
    following.receive((1, b"rubbish"))
    following.receive(message(2))
    assert (following.num_unreadable, following.is_degraded, following.replay_from) == (1, True, 1)
    with pytest.raises(RecordError):
        following.restore(3, [message(1)[1], b"rubbish"])
    assert (held(following), following.is_degraded) == ([0], True)


def test_batches_ahead_of_a_gap_are_kept_up_to_a_limit(monkeypatch):
    monkeypatch.setattr("quire.observe.follower.MAX_AHEAD", 3)
    following = followed(0, 2, 3, 4)
    assert not following.lost
    following.receive(message(5))
    assert (following.lost, held(following)) == (True, [0, 2, 3, 4, 5])
