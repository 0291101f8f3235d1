"""Records in Redis or Valkey, one server or a cluster, shared by any number of machines."""

from __future__ import annotations

import logging
import re
import secrets
import time
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import islice
from typing import Any

from quire.config import check_count
from quire.errors import ConfigError, RecordError, TierError
from quire.tiers.base import Answers, Buffers, Keys, ListedRecord, Outcome, Tier
from quire.tiers.format import HEADER_BYTES, KEY_BYTES, read_header, record_bytes, verify
from quire.tiers.purging import Purge
from quire.tiers.redis.link import Answer, Failure, RedisRequest, Value, command
from quire.tiers.redis.server import tier_errors
from quire.tiers.redis.servers import Servers
from quire.tiers.redis.url import parse_server

_log = logging.getLogger(__name__)

ASK_FIRST_BYTES = 128 << 10
"""From this size on, a record is sent only after the server said that it has none; below, it is cheaper to just send it."""

OPEN_TIMEOUT_S = 5.0
TOUCH_TIMEOUT_S = 0.25
SCAN_COUNT = 512

_MARK_BYTES = 16
_MARK_MS = 3_600_000


class Redis(Tier):
    """A Redis or Valkey server (6.2 or later) or cluster as a tier.

    A record is a string under `prefix` + the key in hex.

    `url`          `redis://[user:password@]host[:port][/db]`; `rediss://` for TLS, `redis+cluster://` and
                   `rediss+cluster://` for a cluster by any node, `unix:///path`; options: `url.parse_server`
    `ttl_s`        records are dropped so long after they were last put or touched; None: never
    `prefix`       of all keys that the tier reads, writes, lists and deletes
    `connections`  to each server, at most; more threads wait in turn

    Where the server has a `maxmemory` and evicts, evicted records are absent; where it may not evict, `put` is `FULL`.
    The logger `quire.tiers.redis` warns once of an eviction policy that serves prompts badly. On the keys of the
    prefix an ACL user needs `+get +set +exists +unlink +pexpire +touch +strlen +scan +info +ping +select +cluster|slots`.

    Opening connects and logs in. Raises `ConfigError` for bad arguments, `TierError` with the server's reason where it
    cannot be opened. After that no failure raises: a failed connection is closed, and the next call makes it again;
    `last_failure` has the last error. Values of a wrong type or length are dropped and read as `CORRUPT`.
    """

    name = "redis"
    is_local = False
    marks_purges = True

    def __init__(
        self,
        url: str,
        *,
        ttl_s: float | None = None,
        prefix: str = "quire:",
        connections: int = 8,
    ) -> None:
        super().__init__()
        if ttl_s is not None:
            _check_ttl(ttl_s)
        check_count("connections", connections, limit=1024)
        if not isinstance(prefix, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigError(f"prefix is text that keys begin with, as 'quire:', not {prefix!r}")
        words, self._is_cluster = parse_server(url)
        life = b"%d" % round((ttl_s or 0.0) * 1000)
        self._life = () if ttl_s is None else (b"PX", life)
        self._touching = (b"TOUCH",) if ttl_s is None else (b"PEXPIRE", life)
        self._prefix = prefix.encode()
        self._servers = Servers(words, connections, is_cluster=self._is_cluster)
        self._max_bytes = -1
        try:
            self._open()
        except BaseException:
            self._servers.close()
            raise

    def touch(self, keys: Keys) -> None:
        """Renew the time to live, or the server's record of recent use.

        The tail of a prompt is touched first, so that its head is newest.
        """
        names = self._names(keys)[::-1]
        for answer in self._ask(self._touching, names, time.monotonic() + TOUCH_TIMEOUT_S):
            self._failed(answer)

    def scan(self) -> Iterator[ListedRecord]:
        return (each for each in self._found() if each.num_bytes)

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
        except OSError as error:
            raise TierError(f"{where} cannot be reached: {error}") from None
        except TierError as error:
            raise TierError(f"{where} cannot be opened: {error}") from None
        name = self._prefix + b"0" * (2 * KEY_BYTES)
        (answer,) = self._ask((b"EXISTS",), [name], deadline)
        is_moved = isinstance(answer, Failure) and answer.text.startswith("MOVED ")
        if isinstance(answer, Failure) and not is_moved:
            raise TierError(f"{where} refuses to look for a key: {answer.text}")
        try:
            with tier_errors():
                infos = self._servers.infos(deadline)
                limits = [int(each.get("maxmemory", 0)) for each in infos]
        except (TierError, OSError):
            # A user that may not ask for INFO: the limit stays unknown.
            infos, limits = [], []
        is_node = any(each.get("redis_mode") == "cluster" for each in infos)
        if is_moved or (is_node and not self._is_cluster):
            raise TierError(
                f"{where} is a node of a cluster: write redis+cluster:// or rediss+cluster://"
            )
        if limits and min(limits) > 0:
            self._max_bytes = sum(limits)
        policies = {str(each.get("maxmemory_policy", "")) for each in infos}
        for policy in sorted(policies) if infos else ():
            if trouble := _trouble(policy, min(limits), has_ttl=bool(self._life)):
                _log.warning("%s %s", where, trouble)

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
        for index, answer in enumerate(self._servers.ask(names, requests, deadline)):
            if answers.outcomes[index] is not Outcome.SKIPPED:
                continue
            if isinstance(answer, Value) and answer.num_bytes == len(buffers[index]):
                answers.settle(index, Outcome.HIT)
                continue
            answers.settle(index, self._why_not(answer, keys[index], buffers[index]))

    def _why_not(self, answer: Answer, key: bytes, buffer: memoryview) -> Outcome:
        if answer is None:
            return Outcome.ABSENT
        if isinstance(answer, Value):
            return _misfit(key, buffer, answer.num_bytes)
        if _is_of_another_type(answer):
            return Outcome.CORRUPT
        return self._failed(answer) or Outcome.ERROR

    def _put(self, keys: Keys, records: Buffers, timeout_s: float, done: list[Outcome]) -> None:
        deadline = time.monotonic() + timeout_s
        names = self._names(keys)
        large = [i for i, record in enumerate(records) if len(record) >= ASK_FIRST_BYTES]
        others = self._keep_present(names, records, large, deadline, done) if large else []
        new = [i for i, each in enumerate(done) if each is Outcome.SKIPPED and i not in others]
        self._set(names, records, new, deadline, done)
        there = [i for i in new if done[i] is Outcome.PRESENT]
        for i in (*there, *others):
            done[i] = Outcome.SKIPPED
        others += self._keep_present(names, records, there, deadline, done)
        self._delete([keys[i] for i in others], deadline - time.monotonic())
        again = [i for i, each in enumerate(done) if each is Outcome.SKIPPED]
        self._set(names, records, again, deadline, done)

    def _set(
        self,
        names: list[bytes],
        records: Buffers,
        indices: list[int],
        deadline: float,
        done: list[Outcome],
    ) -> None:
        """Store records where there is nothing, and set `done`: `PRESENT` where there is something."""
        requests = [self._setting(names[i], records[i]) for i in indices]
        answers = self._servers.ask([names[i] for i in indices], requests, deadline)
        for i, answer in zip(indices, answers, strict=True):
            if answer == "OK":
                done[i] = Outcome.STORED
            elif answer is None:
                done[i] = Outcome.PRESENT
            elif isinstance(answer, Failure) and answer.text.startswith("OOM"):
                done[i] = Outcome.FULL
            else:
                done[i] = self._failed(answer) or Outcome.ERROR

    def _keep_present(
        self,
        names: list[bytes],
        records: Buffers,
        indices: list[int],
        deadline: float,
        done: list[Outcome],
    ) -> list[int]:
        """Set `done` where the server has a record of this size, which counts as a use, or where it fails.

        Returns the indices of names that have another value: it is to go.
        """
        others: list[int] = []
        present: list[int] = []
        sizes = self._ask((b"STRLEN",), [names[i] for i in indices], deadline)
        for i, size in zip(indices, sizes, strict=True):
            if size == len(records[i]):
                done[i] = Outcome.PRESENT
                present.append(i)
            elif _is_of_another_type(size) or (isinstance(size, int) and size):
                others.append(i)
            elif size != 0:
                done[i] = self._failed(size) or Outcome.ERROR
        if self._life:
            renewed = self._ask(self._touching, [names[i] for i in present], deadline)
            for i, answer in zip(present, renewed, strict=True):
                if answer == 0:
                    done[i] = Outcome.SKIPPED
        return others

    def _contains(self, keys: Keys, timeout_s: float) -> list[bool]:
        return [answer == 1 for answer in self._answered(b"EXISTS", keys, timeout_s)]

    def _delete(self, keys: Keys, timeout_s: float) -> None:
        self._answered(b"UNLINK", keys, timeout_s)

    def _listed_of(self, purge: Purge) -> Iterator[ListedRecord]:
        return self._found(purge.tag)

    def _found(self, tag: bytes = b"") -> Iterator[ListedRecord]:
        """List the keys, or those of a tenant tag; of what is no record, 0 bytes."""
        seen: set[bytes] = set()
        for place in self._servers.places():
            listed = self._listed(place, tag)
            while some := list(islice(listed, SCAN_COUNT)):
                fresh = [key for key in dict.fromkeys(some) if key not in seen]
                seen.update(fresh)
                deadline = time.monotonic() + OPEN_TIMEOUT_S
                sizes = self._ask((b"STRLEN",), self._names(fresh), deadline)
                for key, size in zip(fresh, sizes, strict=True):
                    if isinstance(size, Failure) and not size.is_answer:
                        raise TierError(f"listing failed: {size.text}")
                    yield ListedRecord(key, size if isinstance(size, int) else 0)

    def _read_mark(self, name: str, timeout_s: float) -> bytes:
        where = self._prefix + b"purged:" + name.encode()
        mark = memoryview(bytearray(_MARK_BYTES))
        asking = RedisRequest((command(b"GET", where),), (Value, type(None)), mark)
        (answer,) = self._sure([where], [asking], timeout_s)
        return bytes(mark) if isinstance(answer, Value) else b""

    def _set_mark(self, name: str, timeout_s: float) -> None:
        """Set a mark that goes by itself when no write can be under way any more that began before."""
        where = self._prefix + b"purged:" + name.encode()
        words = b"SET", where, secrets.token_bytes(_MARK_BYTES), b"PX", b"%d" % _MARK_MS
        self._sure([where], [RedisRequest((command(*words),), (str,))], timeout_s)

    def _size(self) -> tuple[int, int, int]:
        return -1, -1, self._max_bytes

    def _names(self, keys: Keys) -> list[bytes]:
        return [self._prefix + key.hex().encode() for key in keys]

    def _setting(self, name: bytes, record: memoryview) -> RedisRequest:
        words = command(b"SET", name, b"", b"NX", *self._life)
        head, _, tail = words.rpartition(b"$0\r\n")
        return RedisRequest((head + b"$%d\r\n" % len(record), record, tail), (str, type(None)))

    def _ask(
        self, words: tuple[bytes, ...], names: Sequence[bytes], deadline: float
    ) -> list[Answer]:
        """Give a command for each name, which stands behind its first word; it answers with a number."""
        return self._servers.ask(names, _requests(words, names), deadline)

    def _answered(self, word: bytes, keys: Keys, timeout_s: float) -> list[Answer]:
        """Do the same for keys. Raises `TimeoutError` and `TierError` where one has no answer."""
        names = self._names(keys)
        return self._sure(names, _requests((word,), names), timeout_s)

    def _sure(
        self, names: Sequence[bytes], requests: Sequence[RedisRequest], timeout_s: float
    ) -> list[Answer]:
        """Return an answer for each request. Raises `TimeoutError` and `TierError` where one has none."""
        answers = self._servers.ask(names, requests, time.monotonic() + timeout_s)
        for outcome in filter(None, map(self._failed, answers)):
            raise TimeoutError if outcome is Outcome.TIMEOUT else TierError(self.last_failure)
        return answers

    def _listed(self, place: str, tag: bytes = b"") -> Iterator[bytes]:
        """Yield the keys, or those of a tenant tag, that one server has; some may come twice."""
        pattern = re.sub(rb"([*?\[\]\\^-])", rb"\\\1", self._prefix)
        pattern += b"?" * (2 * (KEY_BYTES - len(tag))) + tag.hex().encode()
        shape = re.compile(re.escape(self._prefix) + rb"([0-9a-f]{%d})" % (2 * KEY_BYTES))
        try:
            with tier_errors(), self._servers.client(place) as client:
                for name in client.scan_iter(match=pattern, count=SCAN_COUNT):
                    if match := shape.fullmatch(name):
                        yield bytes.fromhex(match[1].decode())
        except (TierError, OSError) as error:
            raise TierError(f"{place} cannot be listed: {error or 'no answer'}") from None

    def _failed(self, answer: Answer) -> Outcome | None:
        """Note a failure and return its outcome; None for an answer that is none."""
        if not isinstance(answer, Failure):
            return None
        self.last_failure = answer.text
        return answer.outcome


def _requests(words: tuple[bytes, ...], names: Sequence[bytes]) -> list[RedisRequest]:
    """Return a command for each name, which stands behind its first word; it answers with a number."""
    return [RedisRequest((command(words[0], name, *words[1:]),), (int,)) for name in names]


def _check_ttl(seconds: Any) -> None:
    is_number = isinstance(seconds, (int, float)) and not isinstance(seconds, bool)
    if not is_number or not 0.001 <= float(seconds) <= 1e9:
        raise ConfigError(f"ttl_s is from 0.001 to 1e9 seconds or None, not {seconds!r}")


def _trouble(policy: str, limit: int, *, has_ttl: bool) -> str:
    """Return what an operator should know of a server's memory; empty where all is well."""
    which, _, how = policy.partition("-")
    advice = "set maxmemory-policy allkeys-lru and maxmemory-samples 10"
    if not limit:
        unbounded = (
            f"has no maxmemory, and records have no ttl_s: it grows; set maxmemory, and {advice}"
        )
        return "" if has_ttl else unbounded
    if which == "volatile" and not has_ttl:
        return f"evicts what has a time to live only ({policy}), and records have no ttl_s: it will be full; {advice}"
    if which not in ("allkeys", "volatile"):
        return f"evicts nothing ({policy}): it will be full; {advice}"
    if how in ("lfu", "random"):
        return f"evicts heads of prompts before their tails ({policy}), which are of no use then; {advice}"
    return ""


def _is_of_another_type(answer: Answer) -> bool:
    return isinstance(answer, Failure) and answer.text.startswith("WRONGTYPE")


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
