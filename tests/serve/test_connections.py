"""Connections: what is sent on one, how they end, and that nothing of those that ended is kept."""

import gc
import json
import re
import socket
import struct
import time
from contextlib import suppress

import pytest
from serve_help import LONG, fixtures, short, wait_for

from quire.serve.server import IDLE_S
from quire.serve.service import Bounds
from quire.web.protocol import MOST_WAITING, HttpProtocol

RESET = struct.pack("ii", 1, 0)
"""Of a socket's lingering: it is reset, and not closed."""


server, nothing_stays = fixtures(bounds=Bounds(max_inflight=4, max_body=1 << 16, slow_s=1.0))


@pytest.mark.ci
def test_connections_that_are_opened_and_dropped_harm_nobody(server):
    host, port = server.url.removeprefix("http://").split(":")
    for at in range(1000):
        connection = socket.create_connection((host, int(port)))
        if at % 2:
            connection.sendall(b"POST /v1/completions HTTP/1.1\r\nContent-Le")
        connection.close()
    assert short(server).status_code == 200
    server.quiet()


def sent(document, path=b"/v1/completions"):
    """A request as it is sent."""
    body = json.dumps(document).encode()
    head = b"POST %s HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: %d\r\n\r\n"
    return head % (path, len(body)) + body


HEALTH = b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
BEHIND = {
    "nothing": b"",
    "one": HEALTH,
    "some": HEALTH * 3,
    "like it": sent(LONG),
    "large": sent({"prompt": "a" * (1 << 18)}),
    "part": HEALTH[:20],
    "too many": HEALTH * (MOST_WAITING // 512),
    "too much": sent({"prompt": "a" * (MOST_WAITING * 2)}),
}


@pytest.mark.cases(4)
@pytest.mark.parametrize("behind", BEHIND)
@pytest.mark.parametrize("pause_s", [0, 0.05])
@pytest.mark.parametrize("streams", [True, False])
def test_a_disconnect_aborts_all_pipelined_requests(server, streams, behind, pause_s):
    host, port = server.url.removeprefix("http://").split(":")
    stats = server.service.running.engine.stats
    before = stats().generated_tokens
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(sent(LONG | {"stream": streams}))
        time.sleep(pause_s)
        if behind.startswith("too"):  # it is cut
            with suppress(ConnectionError):
                connection.sendall(BEHIND[behind])
                while connection.recv(1 << 16):
                    pass
        else:
            connection.sendall(BEHIND[behind])
            wait_for(lambda: stats().generated_tokens > before)
            time.sleep(pause_s)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
    server.quiet()
    assert stats().generated_tokens < before + LONG["max_tokens"] / 2
    assert short(server).status_code == 200


@pytest.mark.cases(1)
@pytest.mark.parametrize("behind", ["one", "some", "large"])
def test_pipelined_requests_are_answered_in_order(server, behind):
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        connection.sendall(sent({"prompt": "A list", "max_tokens": 200, "ignore_eos": True}))
        time.sleep(0.02)
        connection.sendall(
            BEHIND[behind] + HEALTH.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")
        )
        with connection.makefile("rb") as file:
            answer = file.read()
    statuses = re.findall(rb"HTTP/1.1 (\d+)", answer)
    first = {"one": [b"200"], "some": [b"200"] * 3, "large": [b"413"]}[behind]
    assert statuses == [b"200", *first, b"200"]
    assert answer.index(b"text_completion") < answer.rindex(b"HTTP/1.1 200")


def test_connections_that_are_reset_after_an_answer_are_forgotten_at_once(server):
    host, port = server.url.removeprefix("http://").split(":")

    def num_known():
        return sum(isinstance(each, HttpProtocol) for each in gc.get_objects())

    before = num_known()
    for _ in range(10):
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
            assert connection.recv(99).startswith(b"HTTP/1.1 200")
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
    wait_for(lambda: num_known() <= before, IDLE_S / 3)
