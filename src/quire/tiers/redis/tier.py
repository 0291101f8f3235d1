"""Records in Redis or Valkey, one server or a cluster, shared by any number of machines."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import msgspec

from quire.errors import ConfigError, RecordError, TierError
from quire.tiers.base import Answers, Buffers, Keys, ListedRecord, Outcome, Tier
from quire.tiers.format import HEADER_BYTES, KEY_BYTES, read_header, record_bytes, verify
from quire.tiers.redis.link import Failure, RedisRequest, Value, command
from quire.tiers.redis.server import Answer, NoAnswer, tier_errors
from quire.tiers.redis.servers import Servers
from quire.tiers.redis.url import parse_server

ASK_FIRST_BYTES = 128 << 10
"""From this size on, a record is sent only after the server said that it has none; below, it is cheaper to just send it."""

OPEN_TIMEOUT_S = 5.0
TOUCH_TIMEOUT_S = 0.25
SCAN_COUNT = 512


class ServerInfo(msgspec.Struct, frozen=True):
    """The figures that a server gives of itself.

    `used_bytes`, `max_bytes`  of its memory; `max_bytes` is -1 where it has no limit
    `policy`                   what it does when they meet: for instance "noeviction", "allkeys-lru"
    `evicted`                  keys that made room since it started
    `mode`                     "standalone" or "cluster"
    `role`                     "master", or "slave" for a replica, which takes no records
    """

    name: str
    version: str
    mode: str
    role: str
    num_keys: int
    used_bytes: int
    max_bytes: int
    policy: str
    evicted: int


class Redis(Tier):
    """A Redis or Valkey server (6.2 or later) or cluster. A record is a string under `prefix` + the key in hex.

    `url`          `redis://[user:password@]host[:port][/db]`; `rediss://` for TLS, `redis+cluster://` and
                   `rediss+cluster://` for a cluster by any node, `unix:///path`; options: `url.parse_server`
    `ttl_s`        records are dropped so long after they were last put or touched; None: never
    `prefix`       of all keys that the tier reads, writes, lists and deletes
    `connections`  to each server, at most; more threads wait in turn

    Where the server has a `maxmemory` and evicts, evicted records are absent; where it may not evict, `put` is `FULL`. An ACL
    user needs `+get +set +exists +unlink +pexpire +touch +strlen +scan +info +ping +select +cluster|slots` on the keys of the prefix.

    Opening connects and logs in. Raises `ConfigError` for bad arguments, `TierError` with the server's reason where it
    cannot be opened. After that no failure raises: a connection that failed is closed and made again by the next call;
    `last_failure` says what went wrong last. Values of a wrong type or length are dropped and read as `CORRUPT`.
    """

    name = "redis"
    is_local = False

    def __init__(
        self,
        url: str,
        *,
        ttl_s: float | None = None,
        prefix: str = "quire:",
        connections: int = 8,
    ) -> None:
        super().__init__()
        if ttl_s is not None and not 0.001 <= ttl_s <= 1e9:
            raise ConfigError(f"ttl_s is from 0.001 to 1e9 seconds or None, not {ttl_s!r}")
        if not 1 <= connections <= 1024:
            raise ConfigError(f"connections are from 1 to 1024, not {connections!r}")
        words, self._is_cluster = parse_server(url)
        self._db = words["db"]
        self._ttl_ms = None if ttl_s is None else b"%d" % round(ttl_s * 1000)
        self._prefix = prefix.encode()
        self._servers = Servers(words, connections, is_cluster=self._is_cluster)
        self._max_bytes = -1
        self.last_failure = ""
        try:
            self._open()
        except BaseException:
            self._servers.close()
            raise

    def touch(self, keys: Keys) -> None:
        """Renew the time to live, or the server's notion of recent use; the tail first, so that the head is newest."""
        names = [self._prefix + key.hex().encode() for key in reversed(keys)]
        deadline = time.monotonic() + TOUCH_TIMEOUT_S
        if self._ttl_ms is None:
            requests = [RedisRequest((command(b"TOUCH", name),), (int,)) for name in names]
        else:
            requests = [self._renewal(name) for name in names]
        for answer in self._servers.ask(names, requests, deadline):
            self._failed(answer)

    def scan(self) -> Iterator[ListedRecord]:
        seen: set[bytes] = set()
        for place, client in self._servers.clients().items():
            for keys in self._scan_one(place, client):
                fresh = [key for key in dict.fromkeys(keys) if key not in seen]
                seen.update(fresh)
                for key, size in zip(fresh, self._sizes(fresh), strict=True):
                    if size:
                        yield ListedRecord(key, size)

    def servers(self) -> list[ServerInfo]:
        """Return the figures of each server that holds keys. Raises `TierError`."""
        return [self._info(*each) for each in self._servers.clients().items()]

    def check(self) -> None:
        self._servers.check()

    def close(self) -> None:
        self._servers.close()

    def _open(self) -> None:
        where = self._servers.home
        deadline = time.monotonic() + OPEN_TIMEOUT_S
        try:
            self._servers.open(deadline)
        except TimeoutError:
            raise TierError(f"{where} did not answer within {OPEN_TIMEOUT_S} s") from None
        except TierError as error:
            raise TierError(f"{where} cannot be opened: {error}") from None
        name = self._prefix + b"0" * (2 * KEY_BYTES)
        (answer,) = self._servers.ask([name], [_exists(name)], deadline)
        is_moved = isinstance(answer, Failure) and answer.text.startswith("MOVED ")
        if isinstance(answer, (Failure, NoAnswer)) and not is_moved:
            reason = answer.text if isinstance(answer, Failure) else answer.reason
            raise TierError(f"{where} refuses to look for a key: {reason}")
        try:
            servers = self.servers()
        except TierError:
            # A user that may not ask for INFO: the limit stays unknown.
            servers = []
        if is_moved or (not self._is_cluster and any(each.mode == "cluster" for each in servers)):
            raise TierError(
                f"{where} is a node of a cluster: write redis+cluster:// or rediss+cluster://"
            )
        limits = [each.max_bytes for each in servers]
        if limits and min(limits) > 0:
            self._max_bytes = sum(limits)

    def _get(self, keys: Keys, buffers: Buffers, timeout_s: float, answers: Answers) -> None:
        deadline = time.monotonic() + timeout_s
        names = self._names(keys)

        def arrived(index: int, value: Value) -> None:
            if value.num_bytes == len(buffers[index]):
                answers.settle(index, Outcome.HIT)

        requests = [
            RedisRequest(
                (command(b"GET", name),), (Value, type(None)), buffer, partial(arrived, index)
            )
            for index, (name, buffer) in enumerate(zip(names, buffers, strict=True))
        ]
        dropped: list[bytes] = []
        for index, answer in enumerate(self._servers.ask(names, requests, deadline)):
            if answers.outcomes[index] is not Outcome.SKIPPED:
                continue
            if isinstance(answer, Value) and answer.num_bytes == len(buffers[index]):
                answers.settle(index, Outcome.HIT)
                continue
            answers.settle(index, self._why_not(answer, keys[index], buffers[index]))
            if answers.outcomes[index] is Outcome.CORRUPT:
                dropped.append(names[index])
        if dropped:
            self._servers.ask(dropped, [_unlink(name) for name in dropped], deadline)

    def _why_not(self, answer: Answer, key: bytes, buffer: memoryview) -> Outcome:
        if answer is None:
            return Outcome.ABSENT
        if isinstance(answer, Value):
            return _misfit(key, buffer, answer.num_bytes)
        if isinstance(answer, Failure) and answer.text.startswith("WRONGTYPE"):
            return Outcome.CORRUPT
        return self._failed(answer) or Outcome.ERROR

    def _put(self, keys: Keys, records: Buffers, timeout_s: float, done: list[Outcome]) -> None:
        deadline = time.monotonic() + timeout_s
        names = self._names(keys)
        large = [i for i, record in enumerate(records) if len(record) >= ASK_FIRST_BYTES]
        self._keep_present(names, large, deadline, done)
        rest = [i for i, outcome in enumerate(done) if outcome is Outcome.SKIPPED]
        requests = [self._setting(names[i], records[i]) for i in rest]
        lost_races: list[int] = []
        for i, answer in zip(
            rest, self._servers.ask([names[i] for i in rest], requests, deadline), strict=True
        ):
            if answer == "OK":
                done[i] = Outcome.STORED
            elif answer is None:
                done[i] = Outcome.PRESENT
                lost_races.append(i)
            elif isinstance(answer, Failure) and answer.text.startswith("OOM"):
                done[i] = Outcome.FULL
            else:
                done[i] = self._failed(answer) or Outcome.ERROR
        if self._ttl_ms is not None:
            self._keep_present(names, lost_races, deadline, done)

    def _keep_present(
        self, names: list[bytes], indices: list[int], deadline: float, done: list[Outcome]
    ) -> None:
        """Set `done` where a record is there already, and renew its time to live; or where the server fails."""
        asked = [names[i] for i in indices]
        ask = _exists if self._ttl_ms is None else self._renewal
        answers = self._servers.ask(asked, [ask(name) for name in asked], deadline)
        for i, answer in zip(indices, answers, strict=True):
            if answer == 1:
                done[i] = Outcome.PRESENT
            elif answer == 0:
                done[i] = Outcome.SKIPPED
            else:
                done[i] = self._failed(answer) or Outcome.ERROR

    def _contains(self, keys: Keys, timeout_s: float) -> list[bool]:
        names = self._names(keys)
        answers = self._servers.ask(
            names, [_exists(name) for name in names], time.monotonic() + timeout_s
        )
        self._raise_failure(answers)
        return [answer == 1 for answer in answers]

    def _delete(self, keys: Keys, timeout_s: float) -> None:
        names = self._names(keys)
        self._raise_failure(
            self._servers.ask(
                names, [_unlink(name) for name in names], time.monotonic() + timeout_s
            )
        )

    def _size(self) -> tuple[int, int, int]:
        return -1, -1, self._max_bytes

    def _names(self, keys: Keys) -> list[bytes]:
        return [self._prefix + key.hex().encode() for key in keys]

    def _setting(self, name: bytes, record: memoryview) -> RedisRequest:
        life = () if self._ttl_ms is None else (b"PX", self._ttl_ms)
        words = command(b"SET", name, b"", b"NX", *life)
        head, _, tail = words.rpartition(b"$0\r\n")
        return RedisRequest((head + b"$%d\r\n" % len(record), record, tail), (str, type(None)))

    def _renewal(self, name: bytes) -> RedisRequest:
        return RedisRequest((command(b"PEXPIRE", name, self._ttl_ms or b"0"),), (int,))

    def _scan_one(self, place: str, client: Any) -> Iterator[list[bytes]]:
        """Yield the keys that one server has, in parts; some may come twice."""
        pattern = re.sub(rb"([*?\[\]\\^-])", rb"\\\1", self._prefix) + b"?" * (2 * KEY_BYTES)
        shape = re.compile(re.escape(self._prefix) + rb"([0-9a-f]{%d})" % (2 * KEY_BYTES))
        cursor: int | None = None
        while cursor != 0:
            try:
                with tier_errors():
                    cursor, names = client.scan(cursor or 0, match=pattern, count=SCAN_COUNT)
                    matches = [shape.fullmatch(name) for name in names]
            except (TierError, TimeoutError) as error:
                raise TierError(f"{place} cannot be listed: {error or 'no answer'}") from None
            yield [bytes.fromhex(match[1].decode()) for match in matches if match]

    def _sizes(self, keys: list[bytes]) -> list[int]:
        """Return the bytes of each record; 0 for what is none."""
        names = self._names(keys)
        requests = [RedisRequest((command(b"STRLEN", name),), (int,)) for name in names]
        answers = self._servers.ask(names, requests, time.monotonic() + OPEN_TIMEOUT_S)
        for answer in answers:
            if isinstance(answer, NoAnswer):
                raise TierError(f"listing failed: {answer.reason}")
        return [answer if isinstance(answer, int) else 0 for answer in answers]

    def _info(self, place: str, client: Any) -> ServerInfo:
        try:
            with tier_errors():
                words = client.info()
                return ServerInfo(
                    place,
                    str(words.get("redis_version", "")),
                    words.get("redis_mode", ""),
                    words.get("role", ""),
                    int(words.get(f"db{self._db}", {}).get("keys", 0)),
                    int(words.get("used_memory", -1)),
                    int(words.get("maxmemory", -1)) or -1,
                    words.get("maxmemory_policy", ""),
                    int(words.get("evicted_keys", -1)),
                )
        except (TierError, TimeoutError) as error:
            raise TierError(f"{place} gives no INFO: {error or 'no answer'}") from None

    def _failed(self, answer: Answer) -> Outcome | None:
        """Note a failure and return its outcome; None for an answer that is none."""
        if isinstance(answer, NoAnswer):
            self.last_failure = answer.reason
            return answer.outcome
        if isinstance(answer, Failure):
            self.last_failure = answer.text
            return Outcome.ERROR
        return None

    def _raise_failure(self, answers: Sequence[Answer]) -> None:
        for answer in answers:
            outcome = self._failed(answer)
            if outcome is Outcome.TIMEOUT:
                raise TimeoutError
            if outcome is not None:
                raise TierError(self.last_failure)


def _exists(name: bytes) -> RedisRequest:
    return RedisRequest((command(b"EXISTS", name),), (int,))


def _unlink(name: bytes) -> RedisRequest:
    return RedisRequest((command(b"UNLINK", name),), (int,))


def _misfit(key: bytes, buffer: memoryview, num_bytes: int) -> Outcome:
    """Return the outcome of a value of another size than the buffer's, which holds as much of it as fits."""
    if len(buffer) < HEADER_BYTES:
        return Outcome.FOREIGN
    try:
        header = verify(buffer[:num_bytes]) if num_bytes < len(buffer) else read_header(buffer)
    except RecordError as error:
        return Outcome.FOREIGN if error.is_foreign else Outcome.CORRUPT
    is_record = header.key == key and record_bytes(header.payload_bytes) == num_bytes
    return Outcome.FOREIGN if is_record else Outcome.CORRUPT
