"""Records in an object store: S3, Google Cloud Storage, Azure, memory."""

from __future__ import annotations

import secrets
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from quire.config import check_count, parse_bytes
from quire.errors import ConfigError, TierError
from quire.runs import runs_of
from quire.tiers.base import Answers, Buffers, Keys, ListedRecord, Outcome, Tier
from quire.tiers.format import tag_of_key
from quire.tiers.objects.client import Client, Result, open_store, reason_of
from quire.tiers.objects.index import Bundle, BundleIndex
from quire.tiers.objects.listing import PREFIX, Listing
from quire.tiers.objects.names import (
    MAX_RECORDS,
    bundle_name,
    burial_name,
    footer_bytes,
    make_footer,
    parse_footer,
)
from quire.tiers.objects.purging import ObjectsPurge
from quire.tiers.purging import Purge

if TYPE_CHECKING:
    from obstore.store import ObjectStore

MAX_REFRESH_S = 30.0
"""Half of what names may be late: a writer that lists so often makes names that others find."""

_MARKS = "quire-purged"
_SCAN_TIMEOUT_S = 60.0
_SCAN_BATCH = 64


class Objects(Tier):
    """Records of an object store that any number of processes and machines share.

    `url`             `s3://bucket/path`, `gs://bucket/path`, `memory://`, and `az://container/path` with the setting
                      `account_name` (`AZURE_STORAGE_ACCOUNT_NAME` in the environment);
                      or a store that obstore has opened, for instance with a provider of credentials
    `config`          of the store, as obstore names it: `{"endpoint": "https://…", "region": "…", "access_key_id": "…"}`;
                      what is not given comes from the environment
    `client_options`  of the HTTP client, as obstore names them: `{"timeout": "10s", "allow_http": True}`; those that are
                      text or bools may stand in `config`, too, and so behind the `?` of an address
    `bundle`          records of one call, one tenant and one size share an object up to this size, and up to 20 of them
    `concurrency`     requests at once
    `refresh_s`       how old what is known of other writers may be where a key is not known; 0: list each time
    `clock`           seconds since 1970, for names; wrong clocks cost requests, never records

    **How a key is found.** The name of an object lists its records (`objects_names`), so listing the store
    is reading its index: one request per 1,000 objects, that is up to 20,000 records. A process lists all names once, when
    it is first asked, and from then on those that are newer, at most once per `refresh_s` and only when it is asked for a key
    that it does not know. Nothing is private: another process lists the same names. Names of all objects take about
    160 bytes of memory per record.

    **Requests.** `put`: one per bundle, and the listing. `get`: one per run of records that lie side by side. `contains`: none,
    or the listing. `delete`: one. Where each record had an object, all of these would be one per record.

    **Deleting and overwriting.** Objects never change. A deleted record leaves an empty object whose name says so,
    until its bundle has no other; then bundle and burials are deleted. A key that is there is not written again (`PRESENT`);
    two processes that write it at once leave two copies, and `delete` reaches both.

    There is no capacity: give the bucket a lifecycle rule that expires objects under the prefix. What expired reads as `ABSENT`
    and is forgotten then. An object that took its writer over a minute, or whose writer could not list before and has a clock that is
    behind, is seen by processes that start later, not by those that run. Stores that cannot list from a name on (memory and Azure)
    send all names each time. For a directory take `Files`.

    Opening asks nothing of the store; why calls fail stands in `last_failure`. Raises `ConfigError` for settings that cannot be.
    """

    is_local = False
    marks_purges = True

    def __init__(
        self,
        url: str | ObjectStore,
        *,
        config: Mapping[str, str | bool] | None = None,
        client_options: Mapping[str, Any] | None = None,
        bundle: str | int = "4MiB",
        concurrency: int = 16,
        refresh_s: float = 1.0,
        name: str = "objects",
        clock: Callable[[], float] = time.time,
    ) -> None:
        super().__init__()
        self._bundle_bytes = parse_bytes(bundle)
        check_count("concurrency", concurrency)
        if not 0 <= refresh_s <= MAX_REFRESH_S:
            raise ConfigError(f"refresh_s is {refresh_s}; give 0 to {MAX_REFRESH_S} seconds")
        self.name = name
        if not isinstance(url, str) and not hasattr(url, "head"):
            raise ConfigError(
                f"a bucket is named by a URL, as 's3://bucket/prefix', or is a store of obstore, got {type(url).__name__}"
            )
        store = open_store(url, config, client_options) if isinstance(url, str) else url
        self._client = Client(store, concurrency)
        self._index = BundleIndex()
        self._listing = Listing(self._client, self._index, secrets.token_hex(4), clock)
        self._refresh_s = refresh_s

    def scan(self) -> Iterator[ListedRecord]:
        """List the records: one request per bundle, for its footer. Raises `TierError`."""
        try:
            self._refresh(0.0, time.monotonic() + _SCAN_TIMEOUT_S)
            bundles = list(self._index.bundles())
            for start in range(0, len(bundles), _SCAN_BATCH):
                yield from self._entries(bundles[start : start + _SCAN_BATCH])
        except TimeoutError as error:
            raise TierError(f"the object store does not list: {error}") from error

    def check(self) -> None:
        self._index.check()

    def close(self) -> None:
        self._client.close()

    def _size(self) -> tuple[int, int, int]:
        return *self._index.size, -1

    def _mend(self, why: str) -> None:
        self._index.mend()

    # reading

    def _get(self, keys: Keys, buffers: Buffers, timeout_s: float, answers: Answers) -> None:
        self._client.check_open()
        deadline = time.monotonic() + timeout_s
        self._read(keys, buffers, range(len(keys)), deadline, answers)
        unknown = [i for i, outcome in enumerate(answers.outcomes) if outcome is Outcome.SKIPPED]
        if unknown:
            self._refresh(self._refresh_s, deadline)
            self._read(keys, buffers, unknown, deadline, answers)
            for index in unknown:
                if answers.outcomes[index] is Outcome.SKIPPED:
                    answers.settle(index, Outcome.ABSENT)

    def _read(
        self,
        keys: Keys,
        buffers: Buffers,
        asked: range | list[int],
        deadline: float,
        answers: Answers,
    ) -> None:
        """Fill the buffers of keys that are known."""
        wanted: dict[Bundle, dict[int, list[int]]] = {}
        for index in asked:
            place = self._index.find(keys[index])
            if place is None:
                continue
            if place[0].record_bytes != len(buffers[index]):
                answers.settle(index, Outcome.FOREIGN)
                continue
            wanted.setdefault(place[0], {}).setdefault(place[1], []).append(index)
        runs = [
            (bundle, run, [each[position] for position in run])
            for bundle, each in wanted.items()
            for run in runs_of(sorted(each))
        ]
        if not runs:
            return
        calls = [partial(self._read_run, bundle, run) for bundle, run, _ in runs]
        try:
            for number, answer in self._client.gather(calls, deadline):
                bundle, run, indices = runs[number]
                if isinstance(answer, memoryview):
                    for position, some in zip(run, indices, strict=True):
                        start = (position - run[0]) * bundle.record_bytes
                        for index in some:
                            buffers[index][:] = answer[start : start + bundle.record_bytes]
                            answers.settle(index, Outcome.HIT)
                    continue
                outcome = self._outcome_of(answer)
                for index in (i for some in indices for i in some):
                    answers.settle(index, outcome)
                if outcome is Outcome.ABSENT:
                    self._index.drop(bundle)
        finally:
            self._bury_damaged(runs, answers, deadline)

    def _bury_damaged(
        self, runs: list[tuple[Bundle, range, list[list[int]]]], answers: Answers, deadline: float
    ) -> None:
        """Delete damaged records where they were read: copies that lie elsewhere stay."""
        masks: dict[Bundle, int] = {}
        for bundle, run, indices in runs if answers.damaged else ():
            for position, some in zip(run, indices, strict=True):
                if [index for index in some if answers.claims_drop(index)]:
                    masks[bundle] = masks.get(bundle, 0) | 1 << position
        for bundle, mask in masks.items():
            with suppress(TimeoutError, TierError):
                self._bury(bundle, mask, deadline)

    async def _read_run(self, bundle: Bundle, run: range) -> memoryview:
        """Return records side by side. Raises `_WrongSizeError` where the object is not what its name says."""
        size = bundle.record_bytes
        try:
            total, data = await self._client.read(bundle.path, run[0] * size, (run[-1] + 1) * size)
        except FileNotFoundError:
            raise
        except Exception:
            # A range behind the end of a truncated object is an error as well.
            if await self._client.size(bundle.path) != bundle.object_bytes:
                raise _WrongSizeError from None
            raise
        if total != bundle.object_bytes:
            raise _WrongSizeError
        if len(data) != len(run) * size:
            raise TierError(f"{len(data)} bytes of {len(run) * size} came of {bundle.path}")
        return data

    def _contains(self, keys: Keys, timeout_s: float) -> list[bool]:
        self._client.check_open()
        if any(self._index.find(key) is None for key in keys):
            deadline = time.monotonic() + timeout_s
            failures = self._guarded([], self._refresh, self._refresh_s, deadline)
            self._outcomes.update(failures)
        return [self._index.find(key) is not None for key in keys]

    def _refresh(self, max_age_s: float, deadline: float) -> None:
        """Learn what others wrote. Raises `TierError` or `TimeoutError`."""
        self._wait(partial(self._listing.refresh, max_age_s), deadline)

    # writing

    def _put(self, keys: Keys, records: Buffers, timeout_s: float, done: list[Outcome]) -> None:
        self._client.check_open()
        began = time.monotonic()
        deadline = began + timeout_s
        if any(self._index.find(key) is None for key in keys):
            # A slow first listing must not keep a writer from writing: copies do no harm.
            with suppress(TimeoutError, TierError):
                self._refresh(self._refresh_s, began + timeout_s / 2)
        stale = [
            key
            for key, record in zip(keys, records, strict=True)
            if (place := self._index.find(key)) and place[0].record_bytes != len(record)
        ]
        if stale:
            self._delete(stale, deadline - time.monotonic())
        bundles = self._bundles_of(keys, records, done)
        for bundle in bundles:
            for index in bundle:
                done[index] = Outcome.TIMEOUT
        calls = [
            partial(self._write, [keys[i] for i in b], [records[i] for i in b]) for b in bundles
        ]
        for number, answer in self._client.gather(calls, deadline):
            outcome = Outcome.STORED
            if isinstance(answer, Exception):
                outcome = self._outcome_of(answer)
                outcome = Outcome.ERROR if outcome is Outcome.ABSENT else outcome
            for index in bundles[number]:
                done[index] = outcome

    def _bundles_of(self, keys: Keys, records: Buffers, done: list[Outcome]) -> list[list[int]]:
        """Split what is not there yet into bundles, in the order of the keys."""
        kinds: dict[tuple[int, bytes], list[int]] = {}
        for index, key in enumerate(keys):
            if self._index.find(key) is not None:
                done[index] = Outcome.PRESENT
            else:
                kinds.setdefault((len(records[index]), tag_of_key(key)), []).append(index)
        bundles: list[list[int]] = []
        for (size, _), indices in kinds.items():
            count = max(1, min(MAX_RECORDS, self._bundle_bytes // size))
            bundles += [indices[at : at + count] for at in range(0, len(indices), count)]
        return sorted(bundles)

    async def _write(self, keys: list[bytes], records: list[memoryview]) -> None:
        path = f"{PREFIX}/{bundle_name(self._listing.new_id(), keys)}"
        # Joined into bytes of its own: an upload that outlives its caller must not see reused buffers.
        content = b"".join([*records, make_footer(keys)])
        await self._client.write(path, content)
        self._index.learn(path, len(content))

    def _delete(self, keys: Keys, timeout_s: float) -> None:
        self._client.check_open()
        deadline = time.monotonic() + timeout_s
        if any(self._index.find(key) is None for key in keys):
            self._refresh(self._refresh_s, deadline)
        masks: dict[Bundle, int] = {}
        for key in keys:
            for bundle, position in self._index.places(key):
                masks[bundle] = masks.get(bundle, 0) | 1 << position
        for bundle, mask in masks.items():
            self._bury(bundle, mask, deadline)

    def _purge(self, purge: Purge) -> None:
        self._client.check_open()
        ObjectsPurge(self._client, self._index, purge, self._wait).run()

    def _read_mark(self, name: str, timeout_s: float) -> bytes:
        async def read() -> bytes:
            try:
                return bytes((await self._client.read(f"{_MARKS}/{name}", 0, 64))[1])
            except FileNotFoundError:
                return b""

        return self._wait(read, time.monotonic() + timeout_s)

    def _set_mark(self, name: str, timeout_s: float) -> None:
        writing = partial(self._client.write, f"{_MARKS}/{name}", secrets.token_bytes(16))
        self._wait(writing, time.monotonic() + timeout_s)

    def _bury(self, bundle: Bundle, mask: int, deadline: float) -> None:
        """Delete records of a bundle: here at once, for others by a name that they will list."""
        burials = self._index.bury(bundle, mask)
        if bundle.is_dead:
            self._wait(partial(self._client.remove, [bundle.path, *burials]), deadline)
            self._index.drop(bundle)
        else:
            path = f"{PREFIX}/{burial_name(self._listing.new_id(), bundle.id, mask)}"
            self._wait(partial(self._client.write, path, b""), deadline)
            self._index.learn(path, 0)
            if bundle.is_dead:  # by another thread, which may not have known of this burial
                self._wait(partial(self._client.remove, [path]), deadline)
                self._index.drop(bundle)

    def _wait(self, call: Callable[[], Awaitable[Result]], deadline: float) -> Result:
        try:
            return self._client.wait(call, deadline)
        except Exception as error:
            self.last_failure = reason_of(error)
            if isinstance(error, (TimeoutError, TierError)):
                raise
            raise TierError(self.last_failure) from error

    def _outcome_of(self, error: Exception) -> Outcome:
        if isinstance(error, _WrongSizeError):
            return Outcome.CORRUPT
        self.last_failure = reason_of(error)
        if isinstance(error, FileNotFoundError):
            return Outcome.ABSENT
        return Outcome.TIMEOUT if isinstance(error, TimeoutError) else Outcome.ERROR

    def _entries(self, bundles: list[Bundle]) -> Iterator[ListedRecord]:
        calls = [partial(self._read_footer, bundle) for bundle in bundles]
        for number, answer in self._client.gather(calls, time.monotonic() + _SCAN_TIMEOUT_S):
            bundle = bundles[number]
            if isinstance(answer, FileNotFoundError):
                continue
            if isinstance(answer, Exception):
                raise TierError(f"{bundle.path}: {reason_of(answer)}") from answer
            for position, key in enumerate(parse_footer(answer) or ()):
                if self._index.find(key) == (bundle, position):
                    yield ListedRecord(key, bundle.record_bytes)

    async def _read_footer(self, bundle: Bundle) -> bytes:
        start = bundle.object_bytes - footer_bytes(len(bundle.shorts))
        return bytes((await self._client.read(bundle.path, start, bundle.object_bytes))[1])


class _WrongSizeError(Exception):
    """An object has another size than it was listed with."""
