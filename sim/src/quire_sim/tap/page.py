"""The page of an application's requests, with a thread that compares and records them."""

from __future__ import annotations

import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from quire.web.errors import as_json, handlers
from quire.web.keys import ApiKeys
from quire.web.pages import page
from quire_sim.tap.observing import Exchange, Observed
from quire_sim.tap.records import KeyNumbers, RecordFile, fields_of
from quire_sim.tap.watching import Seen, Watch

PAGE = "/tap"
"""The path of the page; all but it and `/tap/requests` is the application's."""

PROMPTS = re.compile("/(?:completions?|messages|responses)/?$")
"""Paths of a server's own requests that are prompts: others, such as `/tokenize`, leave no cache."""

MOST_WAITING = 256 << 20
"""Bytes of bodies that wait to be read; exchanges beyond them pass unread, and are counted."""


class TapPage:
    """An application, whose exchanges are recorded, compared and shown on a page beside it.

    A thread of its own reads them, so that no client waits for that.

    `check`  refuses a reader of the page, which shows prompts; raises `ApiError`
    `about`  more fields of the page's document
    `most`   bytes of a body that is read and recorded
    `watch`  the last requests
    `file`   where they are recorded; None: nowhere
    `paths`  those of requests that are read
    `show`   called on the thread with each request that was read
    """

    def __init__(
        self,
        app: ASGIApp,
        check: Callable[[Request], None],
        about: Callable[[], dict[str, Any]],
        *,
        most: int,
    ) -> None:
        self.watch = Watch()
        self.file: RecordFile | None = None
        self.show: Callable[[Seen], None] | None = None
        self.paths = re.compile("")
        self.num_unread = 0
        self.failure = ""
        self._app, self._check, self._about = Observed(app, self._tell, most=most), check, about
        self._keys = KeyNumbers()
        self._thread = ThreadPoolExecutor(1, "tap")
        self._num_waiting = 0
        routes = [Route(PAGE, self._page), Route(f"{PAGE}/requests", self._requests)]
        self._own = Starlette(routes=routes, exception_handlers=handlers())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_own = scope["type"] == "http" and scope["path"] in (PAGE, f"{PAGE}/requests")
        await (self._own if is_own else self._app)(scope, receive, send)

    def close(self) -> None:
        """Read and record what has ended, and end the thread."""
        self._thread.shutdown()

    def document(self) -> dict[str, Any]:
        """Return what the page shows."""
        omitted = 0 if self.file is None else self.file.num_omitted
        said = {"unread": self.num_unread, "failure": self.failure, "omitted": omitted}
        return self._about() | said | self.watch.document()

    def _tell(self, exchange: Exchange) -> None:
        if exchange.method != "POST" or not self.paths.search(exchange.path):
            return  # lists of models, health: no prompts
        size = len(exchange.sent or b"") + len(exchange.told or b"")
        if self._num_waiting + size > MOST_WAITING:
            self.num_unread += 1
            return
        self._num_waiting += size
        self._thread.submit(self._read, exchange, size)

    def _read(self, exchange: Exchange, size: int) -> None:
        try:
            fields = fields_of(exchange, self._keys.name_of(exchange))
            if self.file is not None:
                self.file.write(fields)
            seen = self.watch.add(exchange, fields)
            if self.show is not None:
                self.show(seen)
        except Exception as error:  # noqa: BLE001 - a full disk, or a body that nobody foresaw, ends no relay
            self.num_unread += 1
            self.failure = f"{type(error).__name__}: {error}"
        finally:
            self._num_waiting -= size

    async def _page(self, request: Request) -> Response:
        self._check(request)
        return page("quire_sim.tap", "tap.html")

    async def _requests(self, request: Request) -> Response:
        """`/tap/requests`: the last requests and the sums, for the page."""
        self._check(request)
        return as_json(self.document())


def page_around(app: ASGIApp, name: str, keys: ApiKeys, most: int) -> TapPage:
    """Return a server's application with a page of its requests, which its operator may open.

    `name`  of the server, on the page
    `most`  bytes of a body that is read
    """
    made = TapPage(
        app,
        lambda request: keys.check_operator(request.headers),
        lambda: {"upstream": name},
        most=most,
    )
    made.paths = PROMPTS
    return made
