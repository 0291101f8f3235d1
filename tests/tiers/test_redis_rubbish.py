"""Answers that are none: whatever comes over the wire, no exception, no wrong byte, no wait, no memory."""

import os
import random
import socket
import threading
import time
import tracemalloc

import pytest
from processes import SOON_S
from redis_help import the_server
from rubbish_server import RubbishServer, Then, bulk, hang_up, honest, rubbish

from quire.errors import TierError
from quire.tiers.base import Outcome
from quire.tiers.contract.samples import buffers_like, name_of, names_of, record_of, records_of
from quire.tiers.redis import Redis
from quire.tiers.redis import servers as redis_servers
from quire.tiers.redis import tier as redis_tier
from quire.tiers.redis.link import WINDOW_BYTES, Failure, Link, RedisRequest, Rubbish, Value
from turns import few

HIT, ABSENT, CORRUPT = Outcome.HIT, Outcome.ABSENT, Outcome.CORRUPT
TIMEOUT, ERROR = Outcome.TIMEOUT, Outcome.ERROR
SECONDS = 0.04
CASES = int(os.environ.get("QUIRE_REDIS_FUZZ", "200"))


@pytest.fixture
def server():
    server = RubbishServer()
    yield server
    server.close()


@pytest.fixture
def tier(server):
    with Redis(f"redis://127.0.0.1:{server.port}", connections=2) as tier:
        yield tier
        tier.check()


# the parser alone


def some_replies(numbers, count):
    """Replies as bytes, and as what they mean to a reader with a buffer of 9,000 bytes."""
    for _ in range(count):
        value = numbers.randbytes(numbers.choice([0, 1, 299, 300, 301, 9000]))
        number = numbers.randrange(-(1 << 40), 1 << 40)
        yield numbers.choice(
            [
                (bulk(value), Value(len(value))),
                (b"$-1\r\n", None),
                (b":%d\r\n" % number, number),
                (b"+OK\r\n", "OK"),
                (b"-OOM no\r\n", Failure("OOM no")),
            ]
        )


def link_to(data: bytes, numbers) -> Link:
    """A link over which these bytes come, in pieces of any size, and then the end."""
    near, far = socket.socketpair()

    def write():
        rest = memoryview(data)
        try:
            while rest:
                size = numbers.choice([1, 2, 7, 300, 5000, 100_000])
                far.sendall(rest[:size])
                rest = rest[size:]
        except OSError:
            pass
        far.close()

    thread = threading.Thread(target=write)
    thread.start()
    link = Link(near)
    if len(data) < 50_000:
        thread.join()
    return link


@pytest.mark.parametrize("seed", range(40))
def test_good_replies_are_read_whatever_pieces_they_come_in(seed):
    numbers = random.Random(seed)
    replies = list(some_replies(numbers, 40))
    link = link_to(b"".join(data for data, _ in replies), numbers)
    for data, expected in replies:
        buffer = bytearray(9000)
        assert link.read(memoryview(buffer), time.monotonic() + 5) == expected
        if isinstance(expected, Value):
            assert buffer.startswith(data.split(b"\r\n", 1)[1][: expected.num_bytes])
    with pytest.raises(ConnectionResetError):
        link.read(None, time.monotonic() + 5)
    link.close()


def test_a_value_longer_than_its_buffer_ends_the_link():
    value = random.Random(1).randbytes(301)
    link = link_to(bulk(value) + b"+OK\r\n", random.Random(1))
    buffer = bytearray(300)
    assert link.read(memoryview(buffer), time.monotonic() + 5) == Value(301)
    assert buffer == value[:300]
    assert link.is_spent
    assert link.has_unread
    link.close()


@pytest.mark.cases(56)
@pytest.mark.parametrize("seed", few(range(2 * CASES), *range(CASES)))
def test_changed_replies_end_in_an_error_and_stay_within_the_buffer(seed):
    numbers = random.Random(seed)
    data = bytearray(b"".join(data for data, _ in some_replies(numbers, 12)))
    for _ in range(numbers.choice([0, 1, 3, 30])):
        place = numbers.randrange(len(data) + 1)
        match numbers.randrange(4):
            case 0:
                data[place : place + 1] = numbers.randbytes(1)
            case 1:
                del data[place : place + numbers.choice([1, 2, 100])]
            case 2:
                data[place:place] = numbers.choice(
                    [b"\r\n", b"*3\r\n", b"$5\r\n", b"$-1\r\n", b"*-1\r\n", numbers.randbytes(9)]
                )
            case _:
                data[place : place + 20] = b"$%d\r\n" % numbers.randrange(
                    1 << numbers.randrange(36)
                )
    link = link_to(bytes(data), numbers)
    room = bytearray(b"\xa5" * 500)
    try:
        for _ in range(10_000):
            link.read(numbers.choice([memoryview(room)[100:400], None]), time.monotonic() + 0.2)
            if link.is_spent:
                break
        else:
            pytest.fail("more replies than bytes")
    except (TierError, OSError):
        pass
    assert room[:100] == room[400:] == b"\xa5" * 100
    link.close()


@pytest.mark.parametrize(
    "data",
    [
        b"*2\r\n:1\r\n:1\r\n",
        b"$3\r\nabc\r\n",
        b"+" + b"x" * 1_000_000,
        b"x" * 1_000_000,
    ],
)
def test_a_reply_that_no_command_asks_for_is_refused_without_memory(data):
    link = link_to(data, random.Random(1))
    tracemalloc.start()
    with pytest.raises(Rubbish):
        link.read(None, time.monotonic() + 5)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 100_000
    link.close()


def test_a_value_that_does_not_end_where_it_said_is_rubbish():
    link = link_to(b"$3\r\nabcd\r\n", random.Random(1))
    with pytest.raises(Rubbish, match="does not end"):
        link.read(memoryview(bytearray(3)), time.monotonic() + 5)
    link.close()


def test_bytes_that_are_there_are_not_read_behind_the_deadline():
    link = link_to(b"+OK\r\n", random.Random(1))
    with pytest.raises(TimeoutError):
        link.read(None, time.monotonic())
    link.close()


# the tier


@pytest.mark.cases(8)
@pytest.mark.parametrize("seed", few(range(CASES), *range(CASES // 4)))
def test_rubbish_is_a_miss_in_time_and_the_next_call_finds_what_is_there(server, tier, seed):
    numbers = random.Random(seed)
    sizes = [numbers.choice([0, 1000, 1000, 70_000, 200_000]) for _ in range(6)]
    keys = names_of(range(6))
    records = [record_of(key, size) for key, size in zip(keys, sizes, strict=True)]
    there = numbers.sample(range(6), 4)
    for i in there:
        server.values[tier._names([keys[i]])[0]] = bytes(records[i])
    server.mischief = rubbish(seed, pause_s=2 * SECONDS)
    buffers = buffers_like(records)
    began = time.monotonic()
    got = tier.get(keys, buffers, timeout_s=SECONDS)
    put = tier.put(keys, records, timeout_s=SECONDS)
    found = tier.contains(keys, timeout_s=SECONDS)
    tier.delete(keys[:1], timeout_s=SECONDS)
    # Dropping what is corrupt has its own time: at most one for each of the six.
    assert time.monotonic() - began < 11 * SECONDS + SOON_S

    assert set(got) <= {HIT, ABSENT, CORRUPT, Outcome.FOREIGN, TIMEOUT, ERROR}
    for i, outcome in enumerate(got):
        assert outcome is not HIT or buffers[i] == records[i]
    assert set(put) <= {
        Outcome.STORED,
        Outcome.PRESENT,
        Outcome.FULL,
        Outcome.SKIPPED,
        TIMEOUT,
        ERROR,
    }
    assert all(isinstance(each, bool) for each in found)

    server.mischief = honest
    # Commands of connections that were given up may still be carried out, one after the other.
    for _ in range(100):
        held = [HIT if name in server.values else ABSENT for name in tier._names(keys)]
        again = tier.get(keys, buffers, timeout_s=5)
        assert all(buffers[i] == records[i] for i in range(6) if again[i] is HIT)
        if again == held:
            break
        time.sleep(0.01)
    assert again == held


@pytest.mark.cases(29)
@pytest.mark.parametrize("scheme", ["redis", "redis+cluster"])
@pytest.mark.parametrize("seed", range(60))
def test_a_server_that_answers_rubbish_opens_or_is_refused(server, scheme, seed, monkeypatch):
    monkeypatch.setattr(redis_tier, "OPEN_TIMEOUT_S", SECONDS)
    server.mischief = rubbish(seed, pause_s=2 * SECONDS)
    try:
        with Redis(f"{scheme}://:word@127.0.0.1:{server.port}/0") as tier:
            list(tier.scan())
    except TierError:
        pass


def test_a_server_that_reads_nothing_costs_the_timeout(server, tier):
    server.mischief = lambda answer, command: Then(answer, after=lambda _: time.sleep(0.6))
    began = time.monotonic()
    record = record_of(name_of(1), 60_000)
    outcomes = tier.put(names_of(range(200)), records_of(names_of(range(200)), 60_000), 0.3)
    assert set(outcomes) <= {Outcome.STORED, TIMEOUT}
    assert outcomes[-1] is TIMEOUT
    assert len(record) * 200 > 8 << 20
    assert time.monotonic() - began < SOON_S


def test_an_answer_too_many_ends_the_connection_so_that_none_is_taken_for_another(server, tier):
    keys = names_of(range(4))
    tier.put(keys, records_of(keys))
    server.mischief = lambda answer, command: answer + bulk(bytes(record_of(keys[3])))
    assert tier.get(keys[:1], buffers_like(records_of(keys[:1]))) == [HIT]
    time.sleep(0.02)
    server.mischief = honest
    buffers = buffers_like(records_of(keys))
    assert tier.get(keys, buffers) == [HIT] * 4
    assert buffers == records_of(keys)


@pytest.mark.parametrize("answer", [b":1\r\n", b"+OK\r\n", b"*0\r\n"])
def test_an_answer_of_another_kind_than_the_commands_ends_the_connection(server, tier, answer):
    server.mischief = lambda _, command: answer
    assert tier.get([name_of(1)], buffers_like([record_of(name_of(1))])) == [ERROR]
    assert "another kind" in tier.last_failure
    assert len(the_server(tier)._idle) == 0


def test_the_answer_to_another_key_is_corrupt(server, tier):
    keys = names_of(range(2))
    server.mischief = lambda answer, command: bulk(bytes(record_of(keys[1])))
    assert tier.get(keys[:1], buffers_like(records_of(keys[:1]))) == [CORRUPT]


def test_outcomes_from_before_a_broken_connection_stand(server, tier):
    keys = names_of(range(6))
    records = records_of(keys)
    tier.put(keys, records)
    (broken,) = tier._names(keys[3:4])

    def cut(answer, command):
        return Then(answer[:700], after=hang_up) if command[1] == broken else answer

    server.mischief = cut
    buffers = buffers_like(records)
    assert tier.get(keys, buffers) == [HIT] * 3 + [ERROR] * 3
    assert buffers[:3] == records[:3]


@pytest.mark.cases(9)
@pytest.mark.parametrize(
    "where",
    [
        "127.0.0.1:{port}",
        ":{port}",
        "?:{port}",
        "127.0.0.1:1",
        "127.0.0.1:0",
        "127.0.0.1:99999",
        "127.0.0.1:x",
        "a" * 300 + ":7",
        "..:7",
        "é\0:7",
        "nowhere.invalid:7",
        "",
    ],
)
@pytest.mark.parametrize("kind", ["MOVED", "ASK"])
def test_being_sent_in_circles_or_nowhere_is_an_error(server, kind, where, monkeypatch):
    monkeypatch.setattr(redis_servers, "REFRESH_S", 0.05)
    slots = b"*1\r\n*3\r\n:0\r\n:16383\r\n*2\r\n$0\r\n\r\n:%d\r\n" % server.port
    target = where.format(port=server.port).encode()
    is_open = False

    def send_away(answer, command):
        if command[0] == b"CLUSTER":
            return slots
        return b"-%b 5 %b\r\n" % (kind.encode(), target) if is_open else answer

    server.mischief = send_away
    with Redis(f"redis+cluster://127.0.0.1:{server.port}") as tier:
        is_open = True
        keys = names_of(range(3))
        assert tier.get(keys, buffers_like(records_of(keys))) == [ERROR] * 3
        assert tier.contains(keys) == [False] * 3
        is_open = False
        deadline = time.monotonic() + 60
        while tier.get(keys, buffers_like(records_of(keys))) != [ABSENT] * 3:
            assert time.monotonic() < deadline, "a right map makes it whole again"
            time.sleep(0.01)


def test_the_next_value_is_asked_for_before_the_one_that_came_is_looked_at():
    class NotingLink(Link):
        done = ()

        def send(self, requests, deadline):
            self.done += ("asked",) * len(requests)
            super().send(requests, deadline)

    near, far = socket.socketpair()
    link = NotingLink(near)
    writing = threading.Thread(target=far.sendall, args=(bulk(bytes(WINDOW_BYTES)) * 3,))
    writing.start()

    def arrived(_):
        link.done += ("looked at",)

    into = memoryview(bytearray(WINDOW_BYTES))
    requests = [RedisRequest((b"GET",), (Value,), into, arrived) for _ in range(3)]
    link.exchange(requests, time.monotonic() + 10, [])
    assert link.done == ("asked", "asked", "looked at", "asked", "looked at", "looked at")
    writing.join()
    link.close()
    far.close()
