"""`quire watch`: what it shows of an engine that publishes events, and the trace that it records."""

import time
from threading import Thread

import pytest

pytest.importorskip("zmq", reason="install it with: pip install '.[observe]'")

from cli_help import refusal, run, shown, told
from quire import CacheManager
from quire.exchange import EventLog
from quire.exchange.wire import ClearedEvent, EventBatch, RemovedEvent, StoredEvent
from quire.observe.activity import Activity
from quire.observe.zmq import Publisher

ANY = "tcp://127.0.0.1:0"


def compute(manager, tokens):
    seq = manager.open(tokens)
    manager.reserve(seq, len(tokens) - seq.computed)
    manager.commit(seq, tokens[seq.computed :])
    manager.close(seq)


SYSTEM = list(range(1000, 1064))


def work(manager):
    """Ten requests that share a beginning of 64 tokens and have 16 of their own."""
    for number in range(10):
        compute(manager, [*SYSTEM, *range(number * 16, number * 16 + 16), 7])


@pytest.fixture
def publisher():
    manager = CacheManager(64, 4, watchers=[EventLog()])
    with Publisher(manager, ANY, replay=ANY) as made:
        made.manager = manager
        yield made


def working(publisher):
    """Have requests come, as long as somebody may look."""
    thread = Thread(target=_go_on, args=(publisher,), daemon=True)
    thread.start()
    return thread


def _go_on(publisher):
    for number in range(100_000):
        compute(publisher.manager, [*SYSTEM, *range(number * 16, number * 16 + 16), 7])
        time.sleep(0.005)
        if not publisher._thread.is_alive():
            return


def test_watch_reports_cached_stored_and_removed_blocks(publisher):
    work(publisher.manager)
    while publisher.num_batches == 0 or len(publisher._stream._log):
        time.sleep(0.001)
    working(publisher)
    known = told("watch", publisher.endpoint, "--replay", publisher.replay, "--batches", "5")
    assert known["degraded"] is False
    assert 0 < known["cached_blocks"][0]["blocks"] <= 64
    assert known["groups"]["0"] == {"block_size": 4, "kind": "full_attention", "window": None}
    assert known["requests_seen"] >= 5
    assert known["hit_rate_seen"] == pytest.approx(0.8, abs=0.05)
    assert known["hottest"][0]["tokens"] == 64
    assert known["hottest"][0]["last_tokens"] == SYSTEM[-8:]
    assert known["what_if"]["1"] > 0.5


def test_for_people_it_says_the_same_in_words(publisher):
    working(publisher)
    words = shown("watch", publisher.endpoint, "--replay", publisher.replay, "--batches", "3")
    for word in ("followed", "cached", "churn", "hit rate", "what if", "hot"):
        assert word in words


def test_a_recording_of_watch_is_a_trace_without_tokens(publisher, tmp_path):
    path = tmp_path / "events.jsonl"
    working(publisher)
    words = ("--replay", publisher.replay, "--batches", "30", "--record", path)
    assert run("watch", publisher.endpoint, *words).exit_code == 0
    assert "token_ids" not in path.read_text()
    facts = told("trace", "info", path)
    assert facts["block_size"] == 4
    done = told("replay", path, "--capacity", "50%", "--policies", "lru", "--jobs", "1")
    assert done
    assert "exists" in refusal("watch", publisher.endpoint, "--record", path)


def test_watch_without_a_publisher_ends_in_time_as_degraded():
    known = told("watch", "tcp://127.0.0.1:1", "--replay", "none", "--for", "0.2")
    assert (known["degraded"], known["cached_blocks"], known["what_if"]) == (True, [], None)


def test_an_endpoint_that_is_none_is_refused():
    assert "tcp://HOST:PORT" in refusal("watch", "nowhere")


def stored(names, tokens, parent=None):
    return StoredEvent(names, parent, tokens, 2, None, "GPU", None)


def seen(*batches):
    activity = Activity()
    for at, events in batches:
        activity.receive(EventBatch(at, events))
    return activity


def test_a_run_that_continues_one_soon_is_the_same_request_and_later_is_another():
    first = stored([1, 2], [1, 2, 3, 4])
    chunk, answer = stored([3, 4], [5, 6, 7, 8], 2), stored([5], [9, 9], 4)
    soon = seen((0.0, [first]), (1.0, [chunk]), (2.0, [answer]))
    assert (soon.num_requests, soon.found_tokens, soon.new_tokens) == (1, 0, 8)
    late = seen((0.0, [first]), (9.0, [chunk]), (10.0, [answer]))
    assert (late.num_requests, late.found_tokens, late.new_tokens) == (2, 4, 8)
    assert late.hit_rate == 4 / 12
    assert [(hot.num_tokens, hot.num_uses) for hot in late.hottest(3)] == [(4, 1)]


def test_looking_while_requests_run_changes_nothing_of_what_is_seen():
    looked, prompt = Activity(), stored([1, 2], [1, 2, 3, 4])
    for at, event in enumerate((prompt, stored([3], [5, 5], 2), stored([4], [6, 6], 3))):
        looked.receive(EventBatch(float(at), [event]))
        assert looked.what_if() is None
    assert (looked.num_requests, looked.found_tokens, looked.new_tokens) == (1, 0, 4)
    looked.receive(EventBatch(9.0, [ClearedEvent()]))
    assert looked.what_if().num_requests == 1


def test_the_curve_finds_whole_blocks_as_the_engines_do():
    activity = seen(
        (0.0, [stored([1, 2], [1, 2, 3, 4])]),
        (1.0, [stored([3], [3, 9], 1)]),  # the head of its second block is that of block 2
    )
    activity.end()
    curve = activity.what_if()
    assert activity.hit_rate == 2 / 8
    assert curve.at(curve.capacity_blocks) == 2 / 10  # each with the token that is to be computed


def test_a_block_stored_after_its_removal_counts_as_stored_again():
    activity = seen(
        (0.0, [stored([1], [1, 2])]),
        (1.0, [RemovedEvent([1], "GPU")]),
        (2.0, [stored([1], [1, 2]), ClearedEvent()]),
    )
    counts = (activity.num_stored, activity.num_removed, activity.num_again, activity.num_cleared)
    assert counts == (2, 1, 1, 1)
    assert activity.peak_blocks == 1
