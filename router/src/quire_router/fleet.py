"""The upstreams of a proxy while it runs: looked at, added and removed."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Iterable
from contextlib import asynccontextmanager

from quire.errors import ConfigError
from quire_router.listing import Listed, UpstreamList
from quire_router.prefixes import Prefixes
from quire_router.upstreams import CHECK_S, Upstream

logger = logging.getLogger("uvicorn.error")  # which uvicorn prints


class Fleet:
    """The upstreams that a list names, and those removed from it whose requests still run.

    An upstream that is removed gets no new request and leaves when its last one has ended; one that is named again keeps
    its number. Raises `ConfigError` for an invalid endpoint of events.

    `hung_s`, `slow_s`  as in `ProxyLimits`
    """

    def __init__(
        self, listing: UpstreamList, prefixes: Prefixes, hung_s: float, slow_s: float
    ) -> None:
        self.upstreams: list[Upstream] = []
        self.listing = listing
        self._prefixes, self._patience = prefixes, (hung_s, slow_s)
        self._numbers: dict[str, int] = {}
        self._tasks: dict[Upstream, asyncio.Task[None]] = {}
        self._is_running = False
        for each in listing.fixed:
            self._add(each)

    @property
    def staying(self) -> list[Upstream]:
        """Those that get requests."""
        return [each for each in self.upstreams if not each.is_leaving]

    @asynccontextmanager
    async def running(self) -> AsyncGenerator[None]:
        """Look at all of them, and at the list, until the end."""
        self._is_running = True
        for each in self.upstreams:
            self._watch(each)
        following = asyncio.create_task(self._follow()) if self.listing.changes else None
        try:
            yield
        finally:
            tasks = [*self._tasks.values(), *([following] if following else [])]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for each in self.upstreams:
                each.origin.close()

    def update(self, listed: Iterable[Listed]) -> None:
        """Have the upstreams of a list, and no others."""
        wanted = {Upstream(each.url).name: each for each in listed}
        known = {each.name: each for each in self.upstreams}
        for name, each in wanted.items():
            if name not in known:
                try:
                    self._add(each)
                except ConfigError as error:
                    logger.warning("%s is left out: %s", each.url, error)
        for name, upstream in known.items():
            upstream.is_leaving = name not in wanted
            if upstream.is_leaving and not upstream.num_inflight:
                self._remove(upstream)

    async def _follow(self) -> None:
        while True:
            self.update(await self.listing.now())
            await asyncio.sleep(CHECK_S)

    def _add(self, each: Listed) -> None:
        name = Upstream(each.url).name
        if each.follow is not None:
            self._prefixes.follow(name, each.follow)
        upstream = Upstream(each.url, self._numbers.setdefault(name, len(self._numbers)))
        self.upstreams.append(upstream)
        if self._is_running:
            self._watch(upstream)

    def _watch(self, upstream: Upstream) -> None:
        self._tasks[upstream] = asyncio.create_task(upstream.watch(*self._patience))

    def _remove(self, upstream: Upstream) -> None:
        self.upstreams.remove(upstream)
        self._tasks.pop(upstream).cancel()
        upstream.origin.close()
        self._prefixes.forget(upstream.name)
