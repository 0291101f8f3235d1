"""A publisher and subscribers over real sockets."""

import time

import pytest

zmq = pytest.importorskip("zmq", reason="install it with: pip install '.[observe]'")

from quire import CacheManager, ops  # noqa: E402
from quire.errors import ConfigError  # noqa: E402
from quire.exchange import EventLog  # noqa: E402
from quire.exchange.wire import decode_batch  # noqa: E402
from quire.observe import Mirror  # noqa: E402
from quire.observe.zmq import Publisher, Subscriber  # noqa: E402

ANY = "tcp://127.0.0.1:0"


def compute(manager, tokens):
    seq = manager.open(tokens)
    manager.reserve(seq, len(tokens) - seq.computed)
    manager.commit(seq, tokens[seq.computed :])
    manager.close(seq)


def prompt(number, length=32):
    return [number * 1000 + at for at in range(length)]


def until(done, subscriber):
    """Poll until something holds; the deadline only ends a test that failed."""
    deadline = time.monotonic() + 60
    while not done():
        subscriber.poll(0.05)
        assert time.monotonic() < deadline


@pytest.fixture
def manager():
    return CacheManager(100, 4, watchers=[EventLog()])


@pytest.fixture
def publisher(manager):
    with Publisher(manager, ANY, replay=ANY) as made:
        yield made


def subscriber_to(publisher, **options):
    return Subscriber(
        publisher.endpoint, Mirror(), replay=publisher.replay, check_s=0.05, **options
    )


def test_a_subscriber_knows_what_is_cached(manager, publisher):
    with subscriber_to(publisher) as subscriber:
        mirror = subscriber.following.consumer
        until(lambda: not subscriber.is_degraded, subscriber)
        compute(manager, prompt(1))
        until(lambda: mirror.lookup(prompt(1)) == 32, subscriber)
        ops.invalidate(manager, prompt(1)[:16])
        until(lambda: mirror.lookup(prompt(1)) == 0, subscriber)


def test_a_late_subscriber_gets_a_snapshot(manager):
    with Publisher(manager, ANY, replay=ANY, max_batches=1) as publisher:
        for number in range(5):
            compute(manager, prompt(number))
            while len(manager.kernel.watchers.find(EventLog)):
                time.sleep(0.001)
        with subscriber_to(publisher) as subscriber:
            until(lambda: not subscriber.is_degraded, subscriber)
            assert [subscriber.following.consumer.lookup(prompt(n)) for n in range(5)] == [32] * 5


def test_a_subscriber_that_missed_the_last_batches_asks_for_a_replay(manager, publisher):
    with subscriber_to(publisher, topic="none of this name") as deaf:
        until(lambda: not deaf.is_degraded, deaf)
        compute(manager, prompt(1))
        until(lambda: deaf.following.consumer.lookup(prompt(1)) == 32, deaf)


def test_a_publisher_that_is_started_again_is_followed_anew(manager):
    with Publisher(manager, ANY, replay=ANY) as first:
        endpoint, replay = first.endpoint, first.replay
        subscriber = subscriber_to(first)
        until(lambda: not subscriber.is_degraded, subscriber)
        compute(manager, prompt(1))
        until(lambda: len(subscriber.following.consumer) == 8, subscriber)
    other = CacheManager(100, 4, watchers=[EventLog()])
    with subscriber, Publisher(other, endpoint, replay=replay):
        compute(other, prompt(2))
        mirror = subscriber.following.consumer
        until(lambda: mirror.lookup(prompt(2)) == 32, subscriber)
        until(lambda: not subscriber.is_degraded, subscriber)
        assert mirror.lookup(prompt(1)) == 0


def test_without_a_replay_a_gap_stays(manager):
    with Publisher(manager, ANY) as publisher:
        compute(manager, prompt(1))
        while not publisher.num_batches:
            time.sleep(0.001)
        with subscriber_to(publisher) as subscriber:
            mirror = subscriber.following.consumer
            for number in range(2, 50):  # the first go to nobody: a subscription takes a while
                compute(manager, prompt(number, 8))
                subscriber.poll(0.1)
                if len(mirror):
                    break
            assert subscriber.following.lost
            until(lambda: mirror.lookup(prompt(number, 8)) == 8, subscriber)


@pytest.mark.parametrize("request_", [b"", b"what is cached?", b"12345678" * 9])
def test_a_malformed_replay_request_gets_an_empty_answer(manager, publisher, request_):
    compute(manager, prompt(1))
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.linger = 0
        dealer.connect(publisher.replay)
        dealer.send_multipart([b"", request_])
        assert dealer.poll(60_000)
        assert dealer.recv_multipart() == [b"", b"", b"\xff" * 8, b""]


def test_messages_are_topic_number_and_batch(manager):
    with (
        Publisher(manager, ANY, replay=ANY, topic="kv@pod@model") as publisher,
        zmq.Context() as context,
        context.socket(zmq.DEALER) as dealer,
    ):
        compute(manager, prompt(1))
        while not publisher.num_batches:
            time.sleep(0.001)
        dealer.linger = 0
        dealer.connect(publisher.replay)
        dealer.send_multipart([b"", bytes(8)])
        assert dealer.poll(60_000)
        empty, topic, number, payload = dealer.recv_multipart()
        assert (empty, topic, number[4:]) == (b"", b"kv@pod@model", bytes(4))
        assert any(number[:4]), "the life of the publisher"
        (event,) = decode_batch(payload).events
        assert event.token_ids == prompt(1)
        assert (event.kv_cache_spec_kind, event.group_idx) == ("full_attention", 0)


def test_a_publisher_refuses_impossible_settings(manager, publisher):
    with pytest.raises(ConfigError, match="watchers"):
        Publisher(CacheManager(4), ANY)
    with pytest.raises(ConfigError, match="tcp://HOST:PORT"):
        Publisher(manager, "nowhere")
    with pytest.raises(ConfigError, match="cannot be published"):
        Publisher(manager, ANY, replay=publisher.replay)
    with pytest.raises(ConfigError, match="tcp://HOST:PORT"):
        Subscriber("nowhere", Mirror())
    with pytest.raises(ConfigError, match="tcp://HOST:PORT"):
        Subscriber(ANY.replace("0", "1"), Mirror(), replay="nowhere")
