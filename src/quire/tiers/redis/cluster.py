"""Routes from keys to Redis servers: one server for all, or a cluster that moves slots between its nodes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from quire.errors import TierError
from quire.tiers.base import Outcome
from quire.tiers.redis.resp import Failure, RedisRequest, Reply, command
from quire.tiers.redis.server import Answer, NoAnswer, Server
from quire.tiers.redis.url import Endpoint, ServerAddress

NUM_SLOTS = 1 << 14
MAX_HOPS = 5
MAX_NODES = 1024
REFRESH_S = 1.0
"""The least time between two questions for the whole map of slots."""

_ASKING = RedisRequest((command(b"ASKING"),), (str,))
_SLOTS = RedisRequest((command(b"CLUSTER", b"SLOTS"),), (list,))


class Routes(Protocol):
    """The servers behind a tier."""

    def open(self, deadline: float) -> None:
        """Reach the servers. Raises `TierError`, `TimeoutError` or `OSError`."""
        ...

    def ask(
        self, keys: Sequence[bytes], requests: Sequence[RedisRequest], deadline: float
    ) -> list[Answer]:
        """Return an answer for each request from the server that has its key."""
        ...

    def endpoints(self) -> list[Endpoint]:
        """Return the servers that hold keys."""
        ...

    def ask_at(self, endpoint: Endpoint, request: RedisRequest, deadline: float) -> Answer:
        """Return the answer of one of these servers."""
        ...

    def check(self) -> None:
        """Verify the connections of all nodes."""
        ...

    def close(self) -> None:
        """Close all connections."""
        ...


class Single:
    """One server."""

    def __init__(self, server: ServerAddress, connections: int) -> None:
        self._endpoint = server.endpoint
        self._node = Server(lambda until: server.connect(server.endpoint, until), connections)

    def open(self, deadline: float) -> None:
        self._node.open(deadline)

    def ask(
        self, keys: Sequence[bytes], requests: Sequence[RedisRequest], deadline: float
    ) -> list[Answer]:
        del keys
        return self._node.ask(requests, deadline)

    def endpoints(self) -> list[Endpoint]:
        return [self._endpoint]

    def ask_at(self, endpoint: Endpoint, request: RedisRequest, deadline: float) -> Answer:
        del endpoint
        return self._node.ask([request], deadline)[0]

    def check(self) -> None:
        self._node.check()

    def close(self) -> None:
        self._node.close()


class RedisCluster:
    """A Redis Cluster: a map from slots to nodes, corrected by each `MOVED` and read anew after it.

    The nodes of a call are asked one after the other, each within its share of what is left of the
    deadline, so one that hangs costs only its own keys.
    """

    def __init__(
        self, server: ServerAddress, connections: int, slot_of: Callable[[bytes], int]
    ) -> None:
        self._server = server
        self._connections = connections
        self._slot_of = slot_of
        self._lock = threading.Lock()
        self._refreshing = threading.Lock()
        self._nodes: dict[Endpoint, Server] = {}
        self._owners: list[Endpoint] = [server.endpoint] * NUM_SLOTS
        self._is_stale = True
        self._refreshed = float("-inf")

    def open(self, deadline: float) -> None:
        self._node(self._server.endpoint).open(deadline)
        answer = self.ask_at(self._server.endpoint, _SLOTS, deadline)
        if isinstance(answer, NoAnswer):
            raise TierError(f"no map of slots from {self._server.endpoint}: {answer.reason}")
        if isinstance(answer, Failure):
            raise TierError(f"no map of slots from {self._server.endpoint}: {answer.text}")
        self._learn(answer, self._server.endpoint)

    def ask(
        self, keys: Sequence[bytes], requests: Sequence[RedisRequest], deadline: float
    ) -> list[Answer]:
        if self._is_stale:
            self._refresh(deadline)
        answers: list[Answer] = [NoAnswer(Outcome.ERROR, "moved too often")] * len(requests)
        slots = [self._slot_of(key) for key in keys]
        targets = [self._owners[slot] for slot in slots]
        asking: set[int] = set()
        pending = range(len(requests))
        for _ in range(MAX_HOPS):
            groups: dict[Endpoint, list[int]] = {}
            for index in pending:
                groups.setdefault(targets[index], []).append(index)
            again: list[int] = []
            for left, (endpoint, indices) in zip(
                range(len(groups), 0, -1), groups.items(), strict=True
            ):
                now = time.monotonic()
                share = now + (deadline - now) / left
                replies = self._ask_node(endpoint, indices, requests, asking, share)
                for index, reply in zip(indices, replies, strict=True):
                    asking.discard(index)
                    redirect = _redirect(reply, endpoint)
                    if redirect is None:
                        answers[index] = reply
                        self._is_stale |= isinstance(reply, NoAnswer)
                        continue
                    targets[index], is_moved = redirect
                    again.append(index)
                    if is_moved:
                        self._owners[slots[index]] = targets[index]
                        self._is_stale = True
                    else:
                        asking.add(index)
            pending = again
            if not pending:
                break
        return answers

    def endpoints(self) -> list[Endpoint]:
        return list(dict.fromkeys(self._owners))

    def ask_at(self, endpoint: Endpoint, request: RedisRequest, deadline: float) -> Answer:
        return self._ask_node(endpoint, [0], [request], set(), deadline)[0]

    def check(self) -> None:
        for node in list(self._nodes.values()):
            node.check()

    def close(self) -> None:
        for node in list(self._nodes.values()):
            node.close()

    def _ask_node(
        self,
        endpoint: Endpoint,
        indices: Sequence[int],
        requests: Sequence[RedisRequest],
        asking: set[int],
        deadline: float,
    ) -> list[Answer]:
        batch: list[RedisRequest] = []
        for index in indices:
            if index in asking:
                batch.append(_ASKING)
            batch.append(requests[index])
        try:
            answers = self._node(endpoint).ask(batch, deadline)
        except TierError as error:
            return [NoAnswer(Outcome.ERROR, str(error))] * len(indices)
        return [
            answer for request, answer in zip(batch, answers, strict=True) if request is not _ASKING
        ]

    def _node(self, endpoint: Endpoint) -> Server:
        with self._lock:
            node = self._nodes.get(endpoint)
            if node is None:
                if len(self._nodes) >= MAX_NODES:
                    raise TierError(f"more than {MAX_NODES} nodes; {endpoint} is one too many")
                node = Server(
                    lambda until: self._server.connect(endpoint, until), self._connections
                )
                self._nodes[endpoint] = node
            return node

    def _refresh(self, deadline: float) -> None:
        """Ask one node after the other for the map, unless another thread does or just did."""
        if time.monotonic() < self._refreshed + REFRESH_S:
            return
        if not self._refreshing.acquire(blocking=False):
            return
        try:
            self._refreshed = time.monotonic()
            candidates = list(dict.fromkeys([*self._owners, self._server.endpoint]))
            for left, endpoint in zip(range(len(candidates), 0, -1), candidates, strict=True):
                now = time.monotonic()
                # Half of the time, so that a node that hangs leaves the rest to the call itself.
                share = now + (deadline - now) / (2 * left)
                answer = self.ask_at(endpoint, _SLOTS, share)
                if isinstance(answer, list):
                    self._learn(answer, endpoint)
                    return
        except TierError:
            return
        finally:
            self._refreshing.release()

    def _learn(self, answer: Reply, asked: Endpoint) -> None:
        owners = _owners(answer, asked)
        if not owners:
            raise TierError(f"a map of slots that is none, from {asked}")
        for slot, endpoint in owners.items():
            self._owners[slot] = endpoint
        self._is_stale = False
        known = {*self._owners, self._server.endpoint}
        with self._lock:
            gone = [endpoint for endpoint in self._nodes if endpoint not in known]
            closed = [self._nodes.pop(endpoint) for endpoint in gone]
        for node in closed:
            node.close()


def _owners(answer: Reply, asked: Endpoint) -> dict[int, Endpoint]:
    """Return the owner of each slot that a reply to CLUSTER SLOTS names, as far as it makes sense."""
    owners: dict[int, Endpoint] = {}
    for row in answer if isinstance(answer, list) else []:
        match row:
            case [int(first), int(last), [host, int(port), *_], *_] if (
                0 <= first <= last < NUM_SLOTS
            ):
                endpoint = _endpoint(host, port, asked)
                if endpoint is not None:
                    owners.update(dict.fromkeys(range(first, last + 1), endpoint))
            case _:
                pass
    return owners


def _redirect(answer: Answer, asked: Endpoint) -> tuple[Endpoint, bool] | None:
    """Return the endpoint that `MOVED` or `ASK` sends to, and whether for good."""
    if not isinstance(answer, Failure):
        return None
    words = answer.text.split(" ")
    if len(words) != 3 or words[0] not in ("MOVED", "ASK"):
        return None
    host, _, port = words[2].rpartition(":")
    if not port.isdigit():
        return None
    endpoint = _endpoint(host.encode(), int(port), asked)
    return None if endpoint is None else (endpoint, words[0] == "MOVED")


def _endpoint(host: object, port: int, asked: Endpoint) -> Endpoint | None:
    """Return an endpoint; a node that does not know its own name means the one that was asked."""
    if not 0 < port < 1 << 16:
        return None
    name = host.decode("latin-1").strip("[]") if isinstance(host, bytes) else ""
    return Endpoint(asked.host if name in ("", "?") else name, port)
