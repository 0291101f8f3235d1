"""The relay and its page as one application."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.routing import Mount

from quire.errors import ConfigError
from quire.web.errors import ApiError, handlers
from quire.web.keys import is_loopback
from quire.web.mends import Mends
from quire_sim.tap.page import TapPage
from quire_sim.tap.records import RecordFile
from quire_sim.tap.relay import Relay
from quire_sim.tap.watching import Seen, Watch


class Tap:
    """A relay whose exchanges are recorded, compared and shown. Raises `ConfigError` for an invalid URL.

    `most`   bytes of a body that is read and recorded
    `mends`  rules by which requests are changed on their way
    `file`   where they are recorded; None: nowhere
    `show`   called on a thread of its own with each request that was read
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
        mends: Mends | None = None,
    ) -> None:
        self.relay = Relay(upstream, mends, most=most)
        self.page = TapPage(self.relay, _check_reader, self._about, most=most)
        self.page.watch, self.page.file, self.page.show = Watch(is_private=is_private), file, show

    def app(self) -> Starlette:
        """Return the application."""
        routes = [Mount("/", self.page)]
        return Starlette(routes=routes, exception_handlers=handlers(), lifespan=self._life)

    def _about(self) -> dict[str, Any]:
        return {"upstream": self.relay.upstream, "unmended": self.relay.mends.num_unread}

    @asynccontextmanager
    async def _life(self, _: Starlette) -> AsyncGenerator[None]:
        yield
        await self.relay.aclose()
        self.page.close()


def _check_reader(request: Request) -> None:
    """Refuse who is not on this machine, or was led here by another name of it: the page shows prompts."""
    client, named = request.client, request.url.hostname or ""
    try:
        is_own = client is not None and is_loopback(client.host) and is_loopback(named)
    except ConfigError:
        is_own = False  # another name
    if not is_own:
        raise ApiError(403, "the page of quire tap is for this machine: open it at 127.0.0.1")
