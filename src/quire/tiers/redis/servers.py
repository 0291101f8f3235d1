"""The servers behind a tier: one, or a cluster that moves slots between its nodes."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

from quire.errors import TierError
from quire.tiers.redis.link import Answer, Failure, RedisRequest, command, remaining
from quire.tiers.redis.server import Server, bound, tier_errors
from quire.tiers.redis.url import Words, place_of
from quire.tiers.threads import Background, Bell

MAX_HOPS = 5
MAX_NODES = 1024
REFRESH_S = 1.0
"""The least time between two questions for the whole map of slots, and the longest wait for a node's answer to one."""

_ASKING = RedisRequest((command(b"ASKING"),), (str,))


class Servers:
    """One server for all keys, or the nodes of a cluster, each for the slots that redis-py's map gives it.

    The map is read anew in the background after a slot moved or a node gave no answer. The nodes of a call are asked one after the other, each within its share of what is left of the
    deadline, so one that hangs costs only its own keys. `home` is the server that the URL names.
    """

    def __init__(self, words: Words, connections: int, *, is_cluster: bool) -> None:
        self._words, self._connections, self._is_cluster = words, connections, is_cluster
        self.home = place_of(words)
        self._lock = threading.Lock()
        self._servers = {self.home: Server(words, connections)}
        self._map: Any = None
        self._refreshed = float("-inf")
        self._latest = float("inf")
        self._is_closed = False
        self._closing = Bell()
        self._refresher = Background(self._refresh, "quire-redis-map")

    def open(self, deadline: float) -> None:
        """Reach the servers. Raises `TierError` or `OSError`."""
        self._servers[self.home].open(deadline)
        if not self._is_cluster:
            return
        from redis.cluster import ClusterNode, NodesManager  # noqa: PLC0415 - an extra

        words = self._client_words()
        home = ClusterNode(words.pop("host", "localhost"), words.pop("port", 6379))
        self._latest = deadline
        try:
            with tier_errors(self._words):
                self._map = NodesManager(
                    [home], from_url=True, require_full_coverage=False, **words
                )
        except TierError as error:
            raise TierError(f"no map of slots from {self.home}: {error}") from None
        finally:
            self._latest = float("inf")

    def ask(
        self, names: Sequence[bytes], requests: Sequence[RedisRequest], deadline: float
    ) -> list[Answer]:
        """Return an answer for each request from the server that has the key of its name."""
        if not self._is_cluster:
            return self._servers[self.home].ask(requests, deadline)
        answers: list[Answer] = [Failure("moved too often")] * len(requests)
        targets = [self.owner_of(name) for name in names]
        asking: set[int] = set()
        pending: Sequence[int] = range(len(requests))
        is_stale = False
        for _ in range(MAX_HOPS):
            groups: dict[str, list[int]] = {}
            for index in pending:
                groups.setdefault(targets[index], []).append(index)
            again: list[int] = []
            for left, (target, indices) in zip(
                range(len(groups), 0, -1), groups.items(), strict=True
            ):
                now = time.monotonic()
                batch = [(requests[index], index in asking) for index in indices]
                replies = self._ask_node(target, batch, now + (deadline - now) / left)
                for index, reply in zip(indices, replies, strict=True):
                    asking.discard(index)
                    word, next_target = _redirect(reply, target)
                    if next_target:
                        targets[index] = next_target
                        again.append(index)
                    else:
                        answers[index] = reply
                    if word == "ASK":
                        asking.add(index)
                    is_stale |= word == "MOVED" or _is_lost(reply)
            pending = again
            if not pending:
                break
        if is_stale:
            self._refresher.wake()
        return answers

    def owner_of(self, name: bytes) -> str:
        """Return the node of a cluster that has a name, as far as the map knows."""
        from redis.crc import key_slot  # noqa: PLC0415 - an extra

        nodes = self._map.slots_cache.get(key_slot(name))
        return str(nodes[0].name) if nodes else self.home

    def places(self) -> list[str]:
        """Return where the servers are that hold keys."""
        if not self._is_cluster:
            return [self.home]
        return [str(node.name) for node in self._map.get_nodes_by_server_type("primary")]

    def client(self, place: str, deadline: float = float("inf")) -> Any:
        """Return a redis-py client to be entered, whose answers come by `deadline`. It owns its connection."""
        from redis import ConnectionPool, Redis  # noqa: PLC0415 - an extra

        words = self._client_words(deadline) | self._words_of(place)
        return Redis.from_pool(ConnectionPool(**words))

    def infos(self, deadline: float) -> list[dict[str, Any]]:
        """Return the INFO of each server that holds keys. Raises `TierError` or `OSError`."""
        infos: list[dict[str, Any]] = []
        for place in self.places():
            remaining(deadline)
            with tier_errors(), self.client(place, deadline) as client:
                infos.append(client.info())
        return infos

    def check(self) -> None:
        """Verify the connections of all nodes. Raises `InvariantError`."""
        for server in list(self._servers.values()):
            server.check()

    def close(self) -> None:
        """Close all connections."""
        self._is_closed = True
        self._closing.ring()
        self._refresher.stop()
        if self._map is not None:
            self._map.close()
        for server in list(self._servers.values()):
            server.close()

    def _client_words(self, deadline: float | None = None) -> Words:
        """Return what redis-py makes connections of, whose answers come within `REFRESH_S` and by `deadline`."""

        def until() -> float:
            return min(self._latest if deadline is None else deadline, time.monotonic() + REFRESH_S)

        return {
            "socket_timeout": REFRESH_S,
            "socket_connect_timeout": REFRESH_S,
            "redis_connect_func": partial(bound, until=until),
            **self._words,
        }

    def _words_of(self, place: str) -> Words:
        """Return the words that name a server of a place; none for `home`."""
        if place == self.home:
            return {}
        host, _, port = place.rpartition(":")
        return {"host": host, "port": int(port)}

    def _ask_node(
        self, target: str, batch: Sequence[tuple[RedisRequest, bool]], deadline: float
    ) -> list[Answer]:
        """Ask one node; the second of each pair says whether for a key that is on its way to it."""
        requests: list[RedisRequest] = []
        for request, is_asking in batch:
            requests += [_ASKING, request] if is_asking else [request]
        try:
            answers = self._server(target).ask(requests, deadline)
        except TierError as error:
            return [Failure(str(error), is_answer=False)] * len(batch)
        return [
            answer
            for request, answer in zip(requests, answers, strict=True)
            if request is not _ASKING
        ]

    def _server(self, target: str) -> Server:
        with self._lock:
            if target not in self._servers:
                if len(self._servers) >= MAX_NODES:
                    raise TierError(f"more than {MAX_NODES} nodes; {target} is one too many")
                words = self._words | self._words_of(target)
                self._servers[target] = Server(words, self._connections)
            return self._servers[target]

    def _refresh(self) -> bool:
        """Read the map of slots anew, and forget the nodes that are gone."""
        rest_s = self._refreshed + REFRESH_S - time.monotonic()
        if self._closing.wait_for(lambda: self._is_closed, rest_s):
            return False
        try:
            with tier_errors():
                self._map.initialize()
        except (TierError, OSError):
            pass
        else:
            known = {self.home, *self._map.nodes_cache}
            with self._lock:
                gone = [self._servers.pop(each) for each in self._servers.keys() - known]
            for server in gone:
                server.close()
        self._refreshed = time.monotonic()
        return False


def _is_lost(answer: Answer) -> bool:
    return isinstance(answer, Failure) and not answer.is_answer


def _redirect(answer: Answer, asked: str) -> tuple[str, str]:
    """Return `MOVED` or `ASK` and the node that they send to; a node without a name means the one that was asked."""
    words = answer.text.split(" ") if isinstance(answer, Failure) else []
    if len(words) != 3 or words[0] not in ("MOVED", "ASK"):
        return "", ""
    host, _, port = words[2].rpartition(":")
    if not port.isdigit() or not 0 < int(port) < 1 << 16:
        return "", ""
    if host in ("", "?"):
        host = asked.rpartition(":")[0]
    return words[0], f"{host.strip('[]')}:{port}"
