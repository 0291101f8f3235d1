"""A TCP proxy that delays: a server of this machine as if it were some milliseconds away."""

from __future__ import annotations

import queue
import socket
import threading
import time
from contextlib import suppress
from typing import Self

CHUNK_BYTES = 1 << 20


class DelayingProxy:
    """Forwards connections to `address`; what is sent arrives half of `rtt_s` later, in order and not slower.

    `port`  where it listens, on 127.0.0.1
    """

    def __init__(self, address: tuple[str, int], rtt_s: float) -> None:
        self.rtt_s = rtt_s
        self._address = address
        self._sockets: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._start(self._accept)

    def close(self) -> None:
        """End all connections."""
        for each in (self._listener, *self._sockets):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(self._address)
                self._sockets += client, server
                for source, sink in ((client, server), (server, client)):
                    sink.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    self._start(self._receive, source, sink)

    def _receive(self, source: socket.socket, sink: socket.socket) -> None:
        due: queue.SimpleQueue[tuple[float, bytes]] = queue.SimpleQueue()
        self._start(self._send, sink, due)
        data = b"-"
        while data:
            try:
                data = source.recv(CHUNK_BYTES)
            except OSError:
                data = b""
            due.put((time.perf_counter() + self.rtt_s / 2, data))

    def _send(self, sink: socket.socket, due: queue.SimpleQueue[tuple[float, bytes]]) -> None:
        with suppress(OSError):
            while True:
                when, data = due.get()
                time.sleep(max(0.0, when - time.perf_counter()))
                if not data:
                    sink.shutdown(socket.SHUT_WR)
                    return
                sink.sendall(data)

    @staticmethod
    def _start(work: object, *arguments: object) -> None:
        threading.Thread(target=work, args=arguments, daemon=True).start()  # pyright: ignore[reportArgumentType]
