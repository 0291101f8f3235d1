"""An S3 server on loopback (moto, in its own process), and a front before it that fails on demand."""

from __future__ import annotations

import http.client
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from processes import end_with_parent, free_port, wait_for_port

CONFIG = {
    "region": "us-east-1",
    "access_key_id": "test",
    "secret_access_key": "test",
}


class S3Server:
    """moto's server with a bucket called `quire`."""

    def __init__(self, log: str) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        code = "from moto.server import main; import sys; main(sys.argv[1:])"
        words = [sys.executable, "-c", code, "-H", "127.0.0.1", "-p", str(self.port)]
        keys = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test"}
        with open(log, "wb") as output:  # noqa: PTH123 - a path of the test's own
            self._process = subprocess.Popen(
                [*end_with_parent(), *words], stdout=output, stderr=output, env=os.environ | keys
            )
        wait_for_port(self._process, self.port, log)
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        connection.request("PUT", "/quire")
        assert connection.getresponse().status == 200
        connection.close()

    def close(self) -> None:
        self._process.kill()
        self._process.wait(10)


Fault = Callable[["FrontHandler", int, list[tuple[str, str]], bytes], None]
"""Answers a request in place of the server: (handler, status, headers, body of the true answer)."""


class Front:
    """A server that passes requests on, until `fault` says otherwise for those that `concerns` picks."""

    def __init__(self, behind: int) -> None:
        self.behind = behind
        self.fault: Fault | None = None
        self.concerns: Callable[[FrontHandler], bool] = lambda _: True
        self.requests: list[str] = []
        self.released = threading.Event()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), FrontHandler)
        self._server.daemon_threads = True
        self._server.block_on_close = False
        self._server.front = self
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    @contextmanager
    def failing(
        self, fault: Fault, concerns: Callable[[FrontHandler], bool] = lambda _: True
    ) -> Iterator[None]:
        self.released.clear()
        self.concerns, self.fault = concerns, fault
        try:
            yield
        finally:
            self.fault = None
            self.released.set()

    def close(self) -> None:
        self.released.set()
        self._server.shutdown()
        self._server.server_close()


class FrontHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    @property
    def is_listing(self) -> bool:
        return self.command == "GET" and "list-type" in self.path

    @property
    def is_reading(self) -> bool:
        return self.command == "GET" and "list-type" not in self.path

    def _pass_on(self) -> None:
        front: Front = self.server.front
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        kind = "LIST" if self.is_listing else self.command
        front.requests.append(f"{kind} {self.path}")
        fault = front.fault if front.concerns(self) else None
        connection = http.client.HTTPConnection("127.0.0.1", front.behind, timeout=60)
        try:
            connection.request(self.command, self.path, body or None, dict(self.headers))
            answer = connection.getresponse()
            content = answer.read()
        finally:
            connection.close()
        headers = [
            (name, value)
            for name, value in answer.getheaders()
            if name.lower() not in ("transfer-encoding", "connection", "server", "date")
        ]
        (fault or FrontHandler.answer)(self, answer.status, headers, content)

    def answer(self, status: int, headers: list[tuple[str, str]], body: bytes) -> None:
        self.send_response(status)
        for name, value in headers:
            if self.command == "HEAD" or name.lower() != "content-length":
                self.send_header(name, value)
        if self.command != "HEAD":
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _pass_on  # noqa: N815

    def log_message(self, *_: object) -> None:
        pass

    def handle(self) -> None:
        with suppress(OSError):
            super().handle()


def overloaded(handler: FrontHandler, *_: object) -> None:
    """Answer 503."""
    handler.answer(
        503, [("Content-Type", "application/xml")], b"<Error><Code>SlowDown</Code></Error>"
    )


def hanging(handler: FrontHandler, *_: object) -> None:
    """Answer nothing until the test is over, then close."""
    handler.server.front.released.wait(30)
    handler.close_connection = True


def half(handler: FrontHandler, status: int, headers: list, body: bytes) -> None:
    """Promise all of the body and close after half of it."""
    handler.send_response(status)
    for name, value in headers:
        if name.lower() != "content-length":
            handler.send_header(name, value)
    handler.send_header("Content-Length", str(len(body)))
    handler.end_headers()
    handler.wfile.write(body[: len(body) // 2])
    handler.close_connection = True


def short(handler: FrontHandler, status: int, headers: list, body: bytes) -> None:
    """Answer half of the body, well-formed."""
    handler.answer(status, headers, body[: len(body) // 2])


def flipped_bit(handler: FrontHandler, status: int, headers: list, body: bytes) -> None:
    """Answer all of the body with one bit turned in its middle."""
    changed = bytearray(body)
    changed[len(changed) // 2] ^= 1
    handler.answer(status, headers, bytes(changed))


def late(handler: FrontHandler, *answer: object) -> None:
    """Answer rightly, but only after half a second."""
    time.sleep(0.5)
    handler.answer(*answer)


def denied(handler: FrontHandler, *_: object) -> None:
    """Answer 403, as for wrong credentials."""
    handler.answer(403, [], b"<Error><Code>InvalidAccessKeyId</Code></Error>")


def rubbish(handler: FrontHandler, *_: object) -> None:
    """Answer what no object store answers."""
    handler.answer(200, [("Content-Type", "text/html")], b"<html>please log in</html>" * 50)
