"""A subscriber to the events of an engine, which requests missed batches."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any, Self

import zmq
from zmq.utils.monitor import recv_monitor_message

from quire.errors import ConfigError, RecordError
from quire.observe.follower import Consumer, Follower, Message, Wish
from quire.observe.zmq.publisher import END, SNAPSHOT

ANSWER_S = 5.0
"""Seconds in which an answer has to be there."""

RETRY_S = 5.0
"""Seconds from a request that did not help to the next."""


class Subscriber:
    """Follows the events of an engine and hands them to a consumer, in order; it belongs to one thread.

        mirror = Mirror()
        with Subscriber("tcp://127.0.0.1:5557", mirror, replay="tcp://127.0.0.1:5558") as events:
            while True:
                events.poll(1.0)

    endpoint  where events are published
    replay    where it asks for what is missing, and, after `check_s` seconds without an event, for what came last
    topic     what the messages begin with that it takes

    It is degraded until it has what is missing. Of an engine that offers no snapshot, and has
    published more than it keeps for replay, what was cached before is not known until the engine clears its cache.
    Raises `ConfigError` for an endpoint that is none.
    """

    def __init__(
        self,
        endpoint: str,
        consumer: Consumer,
        *,
        replay: str | None = None,
        topic: str = "",
        check_s: float = 2.0,
    ) -> None:
        self.following = Follower(consumer)
        self._replay = replay
        self._retry_at = 0.0
        self._check_s, self._check_at = check_s, time.monotonic() + check_s
        self._context: zmq.Context[Any] = zmq.Context()
        try:
            self._socket = self._context.socket(zmq.SUB)
            self._socket.set(zmq.RCVHWM, 100_000)
            self._socket.set(zmq.SUBSCRIBE, topic.encode())
            seen = zmq.EVENT_DISCONNECTED | zmq.EVENT_CONNECTED
            self._monitor = self._socket.get_monitor_socket(seen)
            self._socket.connect(endpoint)
            if replay is not None:
                self._context.socket(zmq.DEALER).connect(replay)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            msg = f"{endpoint!r} with replay {replay!r} is not where events come from: {error.strerror}"
            raise ConfigError(f"{msg}; an endpoint is tcp://HOST:PORT or ipc://PATH") from error

    @property
    def is_degraded(self) -> bool:
        """Whether the consumer's contents may differ from the cache's."""
        return self.following.is_degraded

    def poll(self, timeout_s: float) -> int:
        """Take what has come, waiting for the first message for so many seconds at most; return how many came."""
        num_taken = 0
        while self._socket.poll(0 if num_taken else round(timeout_s * 1000)):
            self._see_breaks()  # before what the next publisher sent
            message = _message(self._socket.recv_multipart())
            if message is not None:
                self.following.receive(message)
            num_taken += 1
        if num_taken:
            self._check_at = time.monotonic() + self._check_s
        elif time.monotonic() > self._check_at:
            self.catch_up()
        self._see_breaks()
        self._mend()
        return num_taken

    def catch_up(self) -> None:
        """Ask for what was published last, which may have been lost; without `replay` nobody can be asked."""
        if self._replay is not None and self.following.next_number is not None:
            answer = self._ask(self._request("replay"))
            if answer is not None:
                self.following.refill(answer)
        self._check_at = time.monotonic() + self._check_s

    def close(self) -> None:
        """End."""
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._context.destroy(linger=0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _see_breaks(self) -> None:
        """Doubt that the publisher is the same where the connection broke; one that is back can be asked at once."""
        while self._monitor.poll(0):
            if recv_monitor_message(self._monitor)["event"] == zmq.EVENT_CONNECTED:
                self._retry_at = 0.0
            else:
                self.following.doubt()

    def _mend(self) -> None:
        """Ask for what is missing, if anything is, in both ways."""
        wish = self.following.wish
        if time.monotonic() < self._retry_at:
            return
        if wish is None and self.following.lost and self._replay is not None:
            wish = self.following.wish = "snapshot"
        if wish is None:
            return
        if self._replay is None:
            self.following.skip()
            return
        other: Wish = "replay" if wish == "snapshot" else "snapshot"
        for each in (
            wish,
            other,
            wish,
            other,
        ):  # the first may show that the publisher is another one
            answer = self._ask(self._request(each))
            if answer is None:
                break
            if self._has_mended(each, answer) and not self.following.lost:
                return
        self.following.skip()
        self._retry_at = time.monotonic() + RETRY_S

    def _request(self, wish: Wish) -> bytes:
        number = self.following.replay_from
        return SNAPSHOT if wish == "snapshot" else number.to_bytes(8, "big")

    def _has_mended(self, wish: Wish, answer: list[Message]) -> bool:
        """Hand on an answer; return whether nothing is wished for any more."""
        if wish == "replay":
            self.following.refill(answer)
        elif answer:
            try:
                self.following.restore(answer[0][0], [payload for _, payload in answer])
            except RecordError:
                self.following.num_unreadable += 1
        return self.following.wish is None

    def _ask(self, request: bytes) -> list[Message] | None:
        """Return the answer to a request, None where it does not come."""
        assert self._replay is not None
        with self._context.socket(zmq.DEALER) as dealer:
            dealer.set(zmq.RCVHWM, 0)
            dealer.set(zmq.LINGER, 0)
            dealer.connect(self._replay)
            dealer.send_multipart([b"", request])
            answer: list[Message] = []
            for frames in _frames(dealer, time.monotonic() + ANSWER_S):
                if frames[-2] == END:
                    return answer
                message = _message(frames[1:])
                if message is not None:
                    answer.append(message)
        return None


def _frames(socket: zmq.Socket[bytes], until: float) -> Iterator[list[bytes]]:
    """Yield messages of several frames until a time."""
    while (left := until - time.monotonic()) > 0 and socket.poll(round(left * 1000)):
        frames = socket.recv_multipart()
        if len(frames) >= 4:
            yield frames


def _message(frames: list[bytes]) -> Message | None:
    """Return what (topic, number, batch) says; None for other frames."""
    if len(frames) != 3 or len(frames[1]) != 8:
        return None
    return int.from_bytes(frames[1], "big"), frames[2]
