"""A publisher of a manager's events, with a replay of those before and a snapshot for who joins late."""

from __future__ import annotations

import time
from threading import Event, Thread
from typing import Any, Self

import zmq

from quire.core import CacheManager
from quire.errors import ConfigError
from quire.observe.follower import Message
from quire.observe.stream import BatchStream

WAKE_MS = 10
"""So often it looks for events, in milliseconds: no event waits longer."""

SNAPSHOT = b"snapshot"
"""The request for a snapshot. As a number it is larger than any of a batch, so that other publishers answer with nothing."""

END = (-1).to_bytes(8, "big", signed=True)
"""The number that ends an answer."""


class Publisher:
    """Publishes the events of a manager's `EventLog`, from a thread of its own, until it is closed.

        manager = CacheManager(1000, watchers=[EventLog()])
        with Publisher(manager, "tcp://127.0.0.1:5557", replay="tcp://127.0.0.1:5558"):
            ...

    endpoint     where it publishes; a port of 0 is any
    replay       where it answers: batches since a number, or a snapshot; None: nowhere
    topic        what messages begin with
    max_batches  that are kept for replay

    Messages are `(topic, number, batch)`, numbers of 8 bytes. A request for a replay is a number, for a snapshot the word
    `snapshot`; the answer is messages, and an empty one of number -1. In those of a snapshot the number is that of the
    batch which comes next. Raises `ConfigError` for a manager without a log, and for an endpoint that cannot be had.
    """

    def __init__(
        self,
        manager: CacheManager,
        endpoint: str,
        *,
        replay: str | None = None,
        topic: str = "",
        max_batches: int = 10_000,
    ) -> None:
        self._stream = BatchStream(manager, max_batches)
        self._topic = topic.encode()
        self._context: zmq.Context[Any] = zmq.Context()
        try:
            self._pub = self._bound(zmq.PUB, endpoint)
            self._router = None if replay is None else self._bound(zmq.ROUTER, replay)
        except ConfigError:
            self._context.destroy(linger=0)
            raise
        self.endpoint = _name(self._pub)
        self.replay = None if self._router is None else _name(self._router)
        self._num_sent = 0
        self._ending = Event()
        self._thread = Thread(target=self._run, name="quire-events", daemon=True)
        self._thread.start()

    @property
    def num_batches(self) -> int:
        """Batches that were published."""
        return self._num_sent

    def close(self) -> None:
        """Publish the remaining events and end."""
        self._ending.set()
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _bound(self, kind: int, endpoint: str) -> zmq.Socket[bytes]:
        """Return a socket with room for a whole replay."""
        made = self._context.socket(kind)
        made.set(zmq.SNDHWM, 100_000 if kind == zmq.PUB else 0)
        try:
            made.bind(endpoint)
        except zmq.ZMQError as error:
            msg = f"events cannot be published at {endpoint!r}: {error.strerror}"
            raise ConfigError(f"{msg}; an endpoint is tcp://HOST:PORT or ipc://PATH") from error
        return made

    def _run(self) -> None:
        while not self._ending.is_set():
            if self._router is None:
                time.sleep(WAKE_MS / 1000)
            elif self._router.poll(WAKE_MS):
                self._answer(self._router)
            self._publish()
        self._publish()
        self._context.destroy(linger=1000)

    def _publish(self) -> None:
        for message in self._stream.take():
            self._pub.send_multipart(self._frames(message))
            self._num_sent += 1

    def _answer(self, router: zmq.Socket[bytes]) -> None:
        """Answer a request; an unknown request gets an empty answer."""
        client, *_, asked = router.recv_multipart()
        answer: list[Message] = []
        if asked == SNAPSHOT:
            self._publish()  # what is in the snapshot has its number
            answer = self._stream.snapshot()
        elif len(asked) == 8:
            answer = self._stream.replay(int.from_bytes(asked, "big"))
        for message in answer:
            router.send_multipart([client, b"", *self._frames(message)])
        router.send_multipart([client, b"", b"", END, b""])

    def _frames(self, message: Message) -> list[bytes]:
        number, payload = message
        return [self._topic, number.to_bytes(8, "big"), payload]


def beside(endpoint: str) -> str | None:
    """Return the endpoint where replays are offered unless another is named: the next port, None without a port."""
    host, colon, port = endpoint.rpartition(":")
    if not endpoint.startswith("tcp://") or not port.isdecimal():
        return None
    return f"{host}{colon}{int(port) + 1 if int(port) else 0}"


def _name(socket: zmq.Socket[bytes]) -> str:
    """Return the endpoint at which a socket is found."""
    return socket.getsockopt_string(zmq.LAST_ENDPOINT)
