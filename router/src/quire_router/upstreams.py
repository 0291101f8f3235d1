"""Servers behind a proxy: whether they are well, and how much they have to do."""

import asyncio
from collections.abc import Generator
from contextlib import contextmanager, suppress
from urllib.parse import urlsplit

import httpx

from quire.errors import ConfigError
from quire_router.sent import home_of

CHECK_S = 1.0
"""Seconds between two looks at an upstream."""

PATIENCE_S = 2.0
"""Seconds in which an upstream takes a connection and says that it is well."""


class Upstream:
    """A server that answers requests. Raises `ConfigError` for an invalid URL.

    `name`          its URL, which tells it from the others
    `home`          a digest of the name, with which the ids of the responses that it keeps begin
    `is_well`       whether it answered when it was last looked at or asked
    `num_inflight`  requests that it has from this proxy
    """

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query:
            raise ConfigError(f"an upstream is http://HOST:PORT, got {url!r}")
        if parts.username is not None:
            raise ConfigError("an upstream's URL has no user: clients send their keys themselves")
        self.name = url.rstrip("/").removesuffix("/v1")
        self.home = home_of(self.name)
        self.is_well = False
        self.num_inflight = self.num_requests = self.num_failures = 0

    @contextmanager
    def asked(self) -> Generator[None]:
        """Count a request, as long as it runs."""
        self.num_requests += 1
        self.num_inflight += 1
        try:
            yield
        finally:
            self.num_inflight -= 1

    def failed(self) -> None:
        """Note that it broke a connection, or took none: it gets nothing until it is well again."""
        self.num_failures += 1
        self.is_well = False

    async def watch(self, client: httpx.AsyncClient) -> None:
        """Look at it again and again, until cancelled."""
        while True:
            await self.check(client)
            await asyncio.sleep(CHECK_S)

    async def check(self, client: httpx.AsyncClient) -> None:
        """Look at it: it is well if `/health` is answered with anything but a failure of the server's."""
        with suppress(httpx.HTTPError):
            answer = await client.get(f"{self.name}/health", timeout=PATIENCE_S)
            self.is_well = answer.status_code < 500
            return
        self.is_well = False
