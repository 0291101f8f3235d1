"""The relay and its page as one application, with a thread that reads what has passed."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Mount, Route

from quire.errors import ConfigError
from quire.web.errors import ApiError, as_json, handlers
from quire.web.keys import is_loopback
from quire.web.pages import page
from quire_sim.tap.records import KeyNumbers, RecordFile, fields_of
from quire_sim.tap.relay import Exchange, Relay
from quire_sim.tap.watching import Seen, Watch

PAGE = "/tap"
"""The path of the page; all but it and `/tap/requests` is the server's."""

MOST_WAITING = 256 << 20
"""Bytes of bodies that wait to be read; exchanges beyond them pass unread, and are counted."""


class Tap:
    """A relay whose exchanges are recorded, compared and shown. Raises `ConfigError` for an invalid URL.

    A thread of its own reads them, so that no client waits for that.

    `most`   bytes of a body that is read and recorded
    `file`   where they are recorded; None: nowhere
    `show`   called on the thread with each request that was read
    `is_private`  whether texts of prompts are left out of what is shown
    """

    def __init__(
        self,
        upstream: str,
        *,
        most: int,
        file: RecordFile | None = None,
        show: Callable[[Seen], None] | None = None,
        is_private: bool = False,
    ) -> None:
        self.relay = Relay(upstream, self._tell, most=most)
        self.watch = Watch(is_private=is_private)
        self.num_unread = 0
        self.failure = ""
        self._file, self._show, self._keys = file, show, KeyNumbers()
        self._thread = ThreadPoolExecutor(1, "tap")
        self._num_waiting = 0

    def app(self) -> Starlette:
        """Return the application."""
        routes = [
            Route(PAGE, self._page),
            Route(f"{PAGE}/requests", self._requests),
            Mount("/", self.relay),
        ]
        return Starlette(routes=routes, exception_handlers=handlers(), lifespan=self._life)

    def flush(self) -> None:
        """Wait until all exchanges that have ended are read and recorded."""
        self._thread.submit(lambda: None).result()

    @asynccontextmanager
    async def _life(self, _: Starlette) -> AsyncGenerator[None]:
        yield
        await self.relay.aclose()
        self._thread.shutdown()

    def _tell(self, exchange: Exchange) -> None:
        size = len(exchange.sent or b"") + len(exchange.told or b"")
        if self._num_waiting + size > MOST_WAITING:
            self.num_unread += 1
            return
        self._num_waiting += size
        self._thread.submit(self._read, exchange, size)

    def _read(self, exchange: Exchange, size: int) -> None:
        try:
            fields = fields_of(exchange, self._keys.name_of(exchange))
            if exchange.method != "POST":
                return  # lists of models, health: no prompts
            if self._file is not None:
                self._file.write(fields)
            seen = self.watch.add(exchange, fields)
            if self._show is not None:
                self._show(seen)
        except Exception as error:  # noqa: BLE001 - a full disk, or a body that nobody foresaw, ends no relay
            self.num_unread += 1
            self.failure = f"{type(error).__name__}: {error}"
        finally:
            self._num_waiting -= size

    async def _page(self, request: Request) -> Response:
        _check_reader(request)
        return page("quire_sim.tap", "tap.html")

    async def _requests(self, request: Request) -> Response:
        """`/tap/requests`: the last requests and the sums, for the page."""
        _check_reader(request)
        return as_json(self._document())

    def _document(self) -> dict[str, Any]:
        said = {"upstream": self.relay.upstream, "unread": self.num_unread, "failure": self.failure}
        omitted = 0 if self._file is None else self._file.num_omitted
        return said | {"omitted": omitted} | self.watch.document()


def _check_reader(request: Request) -> None:
    """Refuse who is not on this machine, or was led here by another name of it: the page shows prompts."""
    client, named = request.client, request.url.hostname or ""
    try:
        is_own = client is not None and is_loopback(client.host) and is_loopback(named)
    except ConfigError:
        is_own = False  # another name
    if not is_own:
        raise ApiError(403, "the page of quire tap is for this machine: open it at 127.0.0.1")
