"""A relay that runs before a server, and a server that answers with given bytes."""

import socket
import threading
import time
from contextlib import contextmanager

import uvicorn

from quire.web.clients import UVICORN
from quire_sim.tap.app import Tap

OK = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"


def wait_for(seen, within_s=60):
    until = time.monotonic() + within_s
    while not seen():
        assert time.monotonic() < until
        time.sleep(0.01)


@contextmanager
def tapped(upstream, **options):
    """Run a relay before a server; yield its URL and the relay."""
    made = Tap(upstream, **{"most": 1 << 20} | options)
    listening = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(made.app(), **UVICORN | {"date_header": False, "log_level": "critical"})
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    try:
        wait_for(lambda: server.started)
        yield f"http://127.0.0.1:{listening.getsockname()[1]}", made
    finally:
        server.should_exit = True
        thread.join(10)
        listening.close()
    assert not thread.is_alive()


class RawServer:
    """A server of raw bytes: takes one request for each of its answers, a list of pieces, and keeps what came.

    A piece that is an event is waited for; after an answer the connection is closed. `gone` is set once the client has
    closed a connection before its answer was through.
    """

    def __init__(self, *answers):
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listening.getsockname()[1]}"
        self.came, self.gone = [], threading.Event()
        self._thread = threading.Thread(target=self._run, args=[answers], daemon=True)
        self._thread.start()

    def _run(self, answers):
        for answer in answers:
            connection, _ = self._listening.accept()
            with connection:
                self.came.append(_request(connection))
                try:
                    for piece in answer:
                        if isinstance(piece, bytes):
                            connection.sendall(piece)
                        else:
                            self._wait(piece, connection)
                except OSError:
                    self.gone.set()
        self._listening.close()

    def _wait(self, event, connection):
        connection.settimeout(0.02)
        while not event.is_set():
            try:
                if not connection.recv(1):
                    raise ConnectionError
            except TimeoutError:
                continue

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._listening.close()


def _request(connection):
    """Read a request with its body, of a length or in chunks."""
    data = b""
    while b"\r\n\r\n" not in data:
        data += connection.recv(1 << 16)
    head, _, body = data.partition(b"\r\n\r\n")
    lower = head.lower()
    if b"content-length:" in lower:
        length = int(lower.partition(b"content-length:")[2].split(b"\r\n")[0])
        while len(body) < length:
            body += connection.recv(1 << 16)
    elif b"transfer-encoding: chunked" in lower:
        while not body.endswith(b"0\r\n\r\n"):
            body += connection.recv(1 << 16)
    return head, body


def sent(url, request):
    """Return a connection on which a request was sent."""
    host, port = url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)), timeout=60)
    connection.sendall(request)
    return connection


def asked(url, request):
    """Send raw bytes; yield what comes, read after read, until the other side closes."""
    with sent(url, request) as connection:
        while piece := connection.recv(1 << 16):
            yield piece


def post(path, body, *headers):
    """A request as bytes, whose connection is closed behind its answer."""
    lines = [f"POST {path} HTTP/1.1", "Host: tap.example", f"Content-Length: {len(body)}"]
    lines += ["Connection: close", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body
