"""Calls of an object store, many at once, each with a deadline that holds whatever the store does."""

from __future__ import annotations

import asyncio
import logging
import os
import queue
import re
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import finalize

from quire.errors import ConfigError, TierError
from quire.extras import lacking
from quire.tiers.addresses import shown, without
from quire.tiers.threads import Bell, last_at_exit, start

try:
    import obstore
    from obstore.exceptions import InvalidPathError
    from obstore.store import MemoryStore, from_url
except ImportError as error:  # pragma: no cover - depends on what is installed
    raise ConfigError(lacking("an object store", "obstore", "objects")) from error

from quire.tiers.objects.refused import is_listable, is_refused, list_names

if TYPE_CHECKING:
    from obstore.store import ObjectStore

Result = TypeVar("Result")

_log = logging.getLogger(__name__)

_RETRIES = {
    "max_retries": 8,
    "backoff": {
        "init_backoff": timedelta(milliseconds=50),
        "max_backoff": timedelta(seconds=1),
        "base": 2,
    },
    "retry_timeout": timedelta(seconds=15),
}
"""obstore's own, for requests whose callers wait so long; a caller's deadline ends them earlier."""

_LEAVING_S = 0.05
"""A thread of obstore needs microseconds to leave Python after an answer, and its turn on a busy processor."""

_CLIENT_OPTIONS = re.compile(
    "allow_http|allow_invalid_certificates|default_content_type|disable_system_certificates|http[12]_.*|pool_.*|"
    "proxy_.*|randomize_addresses|root_certificate|(connect_|read_)?timeout|user_agent"
)
"""What obstore takes for its HTTP client and, as text, in a URL; among a store's settings it panics over them."""

_PREFIXES = re.compile("^(aws|azure|google)_")
_PAGE_TIMEOUT_S = 10.0
_CLOSE_TIMEOUT_S = 5.0


def open_store(
    url: str,
    config: Mapping[str, str | bool] | None,
    client_options: Mapping[str, Any] | None,
) -> ObjectStore:
    """Open the store of a URL; options of the HTTP client may stand in `config`, too.

    Raises `ConfigError` for settings that cannot be.
    """
    scheme, _, rest = url.partition("://")
    if scheme == "file":
        raise ConfigError(
            f"{shown(url)!r} is no object store; for a directory of files: files:{rest}"
        )
    if scheme in ("http", "https"):
        raise ConfigError(
            f"{shown(url)!r}: a web server takes no records; give s3://, gs:// or az://"
        )
    if scheme == "memory":
        if config or client_options:
            raise ConfigError(f"{shown(url)!r} takes no config or client options: it is not remote")
        return MemoryStore()
    settings, options = _apart(config or {}, client_options or {})
    secrets = [str(value) for value in (*settings.values(), *options.values(), url)]
    endpoints = [value for name, value in settings.items() if "endpoint" in name.lower()]
    if any(str(value).startswith("http://") for value in endpoints):
        options.setdefault("allow_http", True)
    # As one mapping: its stubs have no overload for schemes that are not literals.
    remote: dict[str, Any] = {
        "config": settings or None,
        "client_options": options or None,
        "retry_config": _RETRIES,
    }
    try:
        return from_url(url, **remote)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # noqa: BLE001 - a panic of obstore is no Exception
        # obstore raises its own errors, ValueError and TypeError for what it cannot read.
        reason = without(reason_of(error), secrets)
        if "Account must be specified" in reason:
            reason = "give account_name, az://container/path?account_name=mine"
        given = f"; client options: {', '.join(options)}" if options else ""
        raise ConfigError(f"cannot open {shown(url)!r}: {reason}{given}") from None


def _apart(
    config: Mapping[str, str | bool], client_options: Mapping[str, Any]
) -> tuple[dict[str, str | bool], dict[str, Any]]:
    """Return the settings of the store, and the options of the HTTP client from both."""
    settings: dict[str, str | bool] = {}
    options = dict(client_options)
    for name, value in config.items():
        plain = _PREFIXES.sub("", name.lower())
        if not _CLIENT_OPTIONS.fullmatch(plain):
            settings[name] = value
        elif plain in options:
            raise ConfigError(f"the option {plain!r} of an object store is given twice")
        else:
            options[plain] = value
    return settings, options


def reason_of(error: BaseException) -> str:
    """Return the first line of an error of obstore, below which stand its insides, without what signs a request."""
    return without(str(error).partition("\n")[0] or type(error).__name__)[:300]


class Client:
    """A store and a thread that waits for it.

    Calls run as coroutines on the thread; what they bring is handed to the caller's thread, which alone touches
    the caller's buffers: an answer that comes too late is dropped. A caller that a signal cuts off holds no lock of
    the thread's (`tiers.threads`); its requests end by themselves. The thread ends with the client.
    """

    def __init__(self, store: ObjectStore, concurrency: int) -> None:
        self.store = store
        self._loop = asyncio.new_event_loop()
        self._permits = asyncio.Semaphore(concurrency)
        self.num_refused = 0
        """Objects of names that obstore cannot read: the most that a listing has found."""
        self._is_closed = False
        self._process = os.getpid()
        last_at_exit(_let_go)
        to_run = deque([self._loop])
        thread = threading.Thread(target=_run, args=(to_run,), name="quire-objects", daemon=True)
        try:
            finalize(self, _stop, self._loop).atexit = False
            start(thread)
        except BaseException:
            _stop(self._loop)
            with suppress(IndexError):  # the thread has taken it, and ends it
                to_run.pop().close()
            raise

    def gather(
        self, calls: Sequence[Callable[[], Awaitable[Result]]], deadline: float
    ) -> Iterator[tuple[int, Result | Exception]]:
        """Run calls at once; yield (index, result or exception) as they end.

        Raises `TimeoutError` at the deadline, by `time.monotonic`; then the rest is cancelled.
        """
        answers: queue.SimpleQueue[tuple[int, Result | Exception]] = queue.SimpleQueue()
        permits, loop = self._permits, self._loop
        tasks: list[asyncio.Task[None]] = []

        async def one(index: int) -> None:
            try:
                async with permits:
                    answer = await calls[index]()
            except Exception as error:  # noqa: BLE001 - whatever it is, the caller gets it
                answers.put((index, error))
            else:
                answers.put((index, answer))

        def begin() -> None:
            tasks.extend(loop.create_task(one(index)) for index in range(len(calls)))

        def cancel() -> None:
            for task in tasks:
                task.cancel()

        self.check_open()
        try:
            loop.call_soon_threadsafe(begin)
        except RuntimeError:
            raise TierError("the tier is closed") from None
        try:
            for _ in calls:
                try:
                    yield answers.get(timeout=max(0.0, deadline - time.monotonic()))
                except queue.Empty:
                    raise TimeoutError("the object store did not answer in time") from None
        finally:
            with suppress(RuntimeError):  # closed meanwhile
                loop.call_soon_threadsafe(cancel)

    def wait(self, call: Callable[[], Awaitable[Result]], deadline: float) -> Result:
        """Run one call. Raises its exception, `TimeoutError` at the deadline."""
        ((_, answer),) = self.gather([call], deadline)
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def read(self, path: str, start: int, stop: int) -> tuple[int, memoryview]:
        """Return the object's size and the bytes of a range, fewer where it ends before."""
        answer = await obstore.get_async(self.store, path, options={"range": (start, stop)})
        return answer.meta["size"], memoryview(await answer.bytes_async())

    async def size(self, path: str) -> int:
        """Return the size of an object."""
        return (await obstore.head_async(self.store, path))["size"]

    async def write(self, path: str, content: bytes) -> None:
        """Write an object, all of it or nothing."""
        await obstore.put_async(self.store, path, content, use_multipart=False)

    async def remove(self, paths: Sequence[str]) -> None:
        """Delete objects, whether they are there or not."""
        with suppress(FileNotFoundError):
            await obstore.delete_async(self.store, list(paths))

    async def names(
        self, prefix: str, offset: str | None, see: Callable[[str, int], object]
    ) -> None:
        """Show all (path, size) under a prefix, behind `offset` where it is given."""
        stream = obstore.list(self.store, prefix, offset=offset, chunk_size=1000)  # pyright: ignore[reportUnknownMemberType] - another overload needs pyarrow
        pages = stream.__aiter__()
        try:
            with suppress(StopAsyncIteration):
                while True:
                    for item in await asyncio.wait_for(pages.__anext__(), _PAGE_TIMEOUT_S):
                        see(item["path"], item["size"])
        except InvalidPathError as error:
            await self._names_past(error, prefix, offset, see)

    async def _names_past(
        self,
        error: InvalidPathError,
        prefix: str,
        offset: str | None,
        see: Callable[[str, int], object],
    ) -> None:
        """Show what `names` does where obstore refuses a whole page over one name that anybody wrote there."""
        if not is_listable(self.store):
            raise TierError(
                f"{reason_of(error)}; nothing is listed beside an object of such a name: delete it"
            ) from None
        refused: list[str] = []

        def show(path: str, size: int) -> None:
            if is_refused(path):
                refused.append(path)
            else:
                see(path, size)

        await asyncio.to_thread(list_names, self.store, prefix, offset or "", show)
        if len(refused) > self.num_refused:
            _log.warning(
                "%d objects beside the records have names that obstore cannot read, as %r: they are passed over, and "
                "cost each listing a request; delete them",
                len(refused),
                refused[0],
            )
        self.num_refused = max(self.num_refused, len(refused))

    def check_open(self) -> None:
        """Raise `TierError` after `close`, and in a forked process: the thread is the parent's."""
        if os.getpid() != self._process:
            raise TierError(
                f"the object store is open in process {self._process}, from which this one was "
                "forked; open a tier after the fork"
            )
        if self._is_closed:
            raise TierError("the tier is closed")

    def close(self) -> None:
        """Cancel running calls and end the thread. Closing twice does nothing."""
        self._is_closed = True
        if os.getpid() == self._process:
            _stop(self._loop)
            Bell().wait_for(self._loop.is_closed, _CLOSE_TIMEOUT_S)


def _run(to_run: deque[asyncio.AbstractEventLoop]) -> None:
    """Run a loop until `_stop`, on a thread of its own, unless it was taken back before the thread began."""
    with suppress(IndexError):
        loop = to_run.pop()
        try:
            loop.run_forever()
        finally:
            loop.close()


def _let_go() -> None:
    """Give obstore's own threads time to leave Python: one that comes back to its end aborts the process."""
    time.sleep(_LEAVING_S)


def _stop(loop: asyncio.AbstractEventLoop) -> None:
    """Cancel what a loop runs and end it. Twice does nothing."""

    def stop() -> None:
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.call_soon(loop.stop)

    with suppress(RuntimeError):  # it has ended
        loop.call_soon_threadsafe(stop)
