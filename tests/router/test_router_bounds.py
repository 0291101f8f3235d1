"""The router under clients that break HTTP, stall, or send without end: its memory, its connections, its answers."""

import contextlib
import json
import socket
import time
from contextlib import ExitStack, closing

import pytest
from upstream_help import FakeUpstream, routed, served, wait_for

import quire.web.protocol
from quire.web.protocol import MOST_HEAD, MOST_WAITING

POST = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n"
BODY = b'{"prompt": "Once"}'
WHOLE = POST + b"content-length: %d\r\n\r\n" % len(BODY) + BODY


@pytest.fixture
def one():
    """A server, and a router before it that takes bodies of 1 MiB."""
    fake = FakeUpstream("one")
    with served(fake.app()) as url, routed([url], max_body=1 << 20) as router:
        router.well(True)
        yield router, fake
        router.idle()
        assert router.ask().status_code == 200


def connected(router):
    host, port = router.url.removeprefix("http://").split(":")
    return closing(socket.create_connection((host, int(port)), timeout=20))


def everything(connection):
    """Return what comes until the other side closes the connection."""
    said = b""
    with contextlib.suppress(ConnectionError):
        while piece := connection.recv(1 << 16):
            said += piece
    return said


def asked(router, *pieces):
    """Send pieces on a connection of their own; return all that comes back."""
    with connected(router) as connection:
        with contextlib.suppress(ConnectionError):
            for piece in pieces:
                connection.sendall(piece)
        return everything(connection)


CLOSE = b"connection: close\r\n"
WRONG = {
    "two lengths": POST + b"content-length: 5\r\ncontent-length: 6\r\n\r\nhello!",
    "a negative length": POST + b"content-length: -5\r\n\r\n",
    "a length that is none": POST + b"content-length: 5x\r\n\r\nhello",
    "a length and chunks": POST
    + b"content-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    "a chunk's size that is none": POST + b"transfer-encoding: chunked\r\n\r\nzz\r\n",
    "a chunk's size without end": POST + b"transfer-encoding: chunked\r\n\r\n" + b"f" * 40,
    "a name with a space": POST + b"a b: c\r\n\r\n",
    "a folded header": POST + b"a: b\r\n c\r\n\r\n",
    "a line break in a header": POST + b"a: b\rc: d\r\n\r\n",
    "a zero in a header": POST + b"a: \x00\r\n\r\n",
    "a connection to elsewhere": b"CONNECT example.com:443 HTTP/1.1\r\nhost: example.com\r\n\r\n",
    "no method": b"BREW /v1/completions HTTP/1.1\r\nhost: localhost\r\n\r\n",
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "no HTTP": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 40 + b"\r\n\r\n",
    "a path of other bytes": b"GET /\xff\xfe HTTP/1.1\r\nhost: localhost\r\n\r\n",
}


@pytest.mark.parametrize("kind", WRONG)
def test_what_is_no_request_is_refused_and_no_server_sees_it(one, kind):
    router, fake = one
    said = asked(router, WRONG[kind])
    assert said == b"" or said.startswith((b"HTTP/1.1 400 ", b"HTTP/1.1 403 ")), said[:80]
    assert (fake.asked, fake.seen) == ([], [])


def test_a_head_without_end_is_refused(one):
    router, fake = one
    assert asked(router, POST, b"a: " + b"b" * (MOST_HEAD + 9)).startswith(b"HTTP/1.1 400 ")
    many = b"".join(b"a%d: b\r\n" % at for at in range(9000))
    assert asked(router, POST, many).startswith(b"HTTP/1.1 400 ")
    assert fake.asked == []


@pytest.mark.parametrize("is_chunked", [False, True])
def test_a_body_beyond_the_limit_is_refused_whether_its_size_is_said_or_not(one, is_chunked):
    router, fake = one
    if is_chunked:
        piece = b"10000\r\n" + b"x" * (1 << 16) + b"\r\n"
        said = asked(router, POST + CLOSE + b"transfer-encoding: chunked\r\n\r\n", *([piece] * 40))
    else:
        said = asked(router, POST + CLOSE + b"content-length: 99999999999\r\n\r\n")
    assert said.startswith(b"HTTP/1.1 413 "), said[:80]
    assert fake.asked == []


def test_chunks_with_long_extensions_and_trailers_are_bounded(one):
    router, fake = one
    head = POST + CLOSE + b"transfer-encoding: chunked\r\n\r\n"
    said = asked(router, head, b"5;" + b"e" * (4 * MOST_HEAD))
    assert said.startswith(b"HTTP/1.1 400 ")
    said = asked(router, head, b"2\r\n{}\r\n0\r\nx: " + b"t" * (4 * MOST_HEAD))
    assert said == b"" or said.startswith(b"HTTP/1.1 400 ")
    tiny = b"".join(b"1\r\n%c\r\n" % byte for byte in BODY) + b"0\r\n\r\n"
    assert asked(router, head, tiny).startswith(b"HTTP/1.1 200 ")
    assert fake.asked[-1][1] == json.loads(BODY)


def test_a_body_that_stops_is_given_up_and_its_connection_closed():
    fake = FakeUpstream("one")
    with served(fake.app()) as url, routed([url], slow_s=0.3) as router:
        router.well(True)
        said = asked(router, POST + CLOSE + b"content-length: 10\r\n\r\n{")
        assert said.startswith(b"HTTP/1.1 408 ")
        assert fake.asked == []


def test_a_connection_without_a_whole_head_is_closed(one, monkeypatch):
    monkeypatch.setattr(quire.web.protocol, "HEAD_S", 0.2)
    router, fake = one
    for begun in (b"", b"POST /v1/comp", POST, WHOLE + POST):
        with connected(router) as connection:
            connection.sendall(begun)
            said = everything(connection)  # ends
            assert said.count(b"HTTP/1.1 200 ") == begun.count(BODY)
    fake.mood = "late"  # longer than a head may take
    assert asked(router, WHOLE.replace(b"host:", CLOSE + b"host:")).startswith(b"HTTP/1.1 200 ")


def test_a_client_that_takes_nothing_of_a_stream_is_cut():
    fake = FakeUpstream("one")
    fake.more = {"text": "x" * (1 << 24)}
    with served(fake.app()) as url, routed([url], slow_s=0.5) as router:
        router.well(True)
        body = b'{"stream": true}'
        fake.mood = "slow"
        with connected(router) as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.sendall(POST + b"content-length: %d\r\n\r\n" % len(body) + body)
            wait_for(lambda: fake.gone == 1)
        router.idle()


def test_a_client_that_closes_its_half_ends_its_request(one):
    """As a whole close, which cannot be told from it before the answer."""
    router, fake = one
    fake.mood = "slow"
    body = b'{"stream": true}'
    with connected(router) as connection:
        connection.sendall(POST + b"content-length: %d\r\n\r\n" % len(body) + body)
        connection.recv(10)
        connection.shutdown(socket.SHUT_WR)
        everything(connection)
    wait_for(lambda: fake.gone == 1)
    fake.mood = "well"


def test_requests_one_behind_the_other_are_answered_in_order_and_bounded(one):
    router, fake = one
    said = asked(router, WHOLE * 5 + WHOLE.replace(b"host:", CLOSE + b"host:"))
    assert said.count(b"HTTP/1.1 200 ") == 6
    fake.mood = "late"
    more = POST + b'content-length: 60000\r\n\r\n{"prompt": "%s"}' % (b"x" * 59_986)
    assert asked(router, *([more] * (MOST_WAITING // 60_000 + 3))) == b""
    fake.mood = "well"


def test_a_client_of_http_1_0_gets_whole_answers_by_their_length(one):
    router, _ = one
    said = asked(router, WHOLE.replace(b"HTTP/1.1", b"HTTP/1.0"))
    head, _, body = said.partition(b"\r\n\r\n")
    assert b"content-length: %d" % len(body) in head.lower()
    assert b"transfer-encoding" not in head.lower()


def test_a_request_to_continue_and_an_upgrade_to_http_2_are_answered(one):
    router, _ = one
    with connected(router) as connection:
        connection.sendall(POST + b"expect: 100-continue\r\ncontent-length: %d\r\n\r\n" % len(BODY))
        assert connection.recv(100).startswith(b"HTTP/1.1 100 ")
        connection.sendall(BODY)
        assert b"HTTP/1.1 200 " in connection.recv(1000)
    upgrade = b"connection: upgrade, close\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABk\r\n"
    said = asked(router, WHOLE.replace(b"host:", upgrade + b"host:"))
    assert said.startswith(b"HTTP/1.1 ")


@pytest.mark.parametrize(
    "body",
    [
        b"[" * 500_000,
        b'{"prompt": ' + b"[" * 500_000,
        b'{"prompt": [' + b"[]," * 100_000 + b"[]]}",
        b'{"messages": ' + b'{"a":' * 100_000,
        b'{"model": "\xff\xfe"}',
        b'{"prompt": "a", "user": 7}',
        b'{"prompt": 1e999}',
        b'{"prompt": "a", "prompt": "b"}',
    ],
)
def test_bodies_that_are_odd_pass_as_they_are(one, body):
    router, _ = one
    since = time.process_time()
    said = asked(router, POST + CLOSE + b"content-length: %d\r\n\r\n" % len(body) + body)
    assert said.startswith((b"HTTP/1.1 200 ", b"HTTP/1.1 500 ")), said[
        :300
    ]  # as this server says it
    assert time.process_time() - since < 5


def test_many_connections_that_say_nothing_leave_room_for_others(one):
    router, _ = one
    with ExitStack() as stack:
        for _ in range(300):
            stack.enter_context(connected(router)).sendall(POST)
        assert router.ask().status_code == 200


def test_a_head_alone_is_sent_at_once_and_the_connection_goes_on(one):
    router, _ = one
    with connected(router) as connection:
        for _ in range(2):
            connection.sendall(b"HEAD /v1/models HTTP/1.1\r\nhost: localhost\r\n\r\n")
            said = b""
            while b"\r\n\r\n" not in said:
                said += connection.recv(1000)
            assert said.startswith(b"HTTP/1.1 200 ")
            assert said.endswith(b"\r\n\r\n")
