"""Servers behind a proxy: whether they are well, and how much they have to do."""

import asyncio
import time

from quire.web.origin import OriginClient, OriginRequest
from quire.web.origin_answer import OriginError
from quire_router.breaker import UpstreamBreaker
from quire_router.sent import home_of

CHECK_S = 1.0
"""Seconds between two looks at an upstream."""

PATIENCE_S = 2.0
"""Seconds in which an upstream takes a connection and says that it is well."""

MOST_HEALTH = 1 << 20
"""Bytes of an answer of `/health`, beyond which it is none."""

IDLE_S = 3.0
"""Seconds for which an idle connection is kept: fewer than the 5 after which servers close one."""


class Hung(OriginError):  # noqa: N818 - what happened, not a programmer's error
    """An upstream that says nothing on any connection, and does not answer `/health`."""


class Slow(OriginError):  # noqa: N818 - likewise
    """An answer that does not go on, of an upstream that is well."""


class Upstream:
    """A server that answers requests. Raises `ConfigError` for an invalid URL.

    `name`          its URL, which tells it from the others
    `number`        its place among all that the proxy has ever had
    `home`          a digest of the name, with which the ids of the responses that it keeps begin
    `is_well`       whether it answered when it was last looked at or asked
    `is_leaving`    whether it gets no new request, as it was removed
    `num_inflight`  requests that it has from this proxy
    """

    def __init__(self, url: str, number: int = 0) -> None:
        url = url.rstrip("/").removesuffix("/v1")
        self.origin = OriginClient(url, what="an upstream", idle_s=IDLE_S, connect_s=PATIENCE_S)
        self.name, self.number = self.origin.url, number
        self.home = home_of(self.name)
        self.is_well = self.is_leaving = False
        self.breaker = UpstreamBreaker(time.monotonic)
        self.num_inflight = self.num_requests = self.num_failures = 0

    def asked(self) -> object:
        """Count a request, and return its sign for `left`, which is called once at its end."""
        self.num_requests += 1
        self.num_inflight += 1
        return self.breaker.asked()

    def left(self, request: object) -> None:
        """Note that a request has ended, however it did."""
        self.num_inflight -= 1
        self.breaker.left(request)

    def failed(self) -> None:
        """Note that it broke a connection, or took none: it gets nothing until it is well again."""
        self.num_failures += 1
        self.is_well = False
        self.breaker.failed()

    async def watch(self, hung_s: float, slow_s: float) -> None:
        """Look at it again and again, until cancelled."""
        while True:
            await self.check()
            self._end_stalled(hung_s, slow_s)
            await asyncio.sleep(CHECK_S)

    async def check(self) -> None:
        """Look at it: it is well if `/health` is answered with anything but a failure of the server's."""
        try:
            async with asyncio.timeout(PATIENCE_S):
                answer = await self.origin.ask(OriginRequest("GET", b"/health", []))
                try:
                    await answer.read(MOST_HEALTH)
                finally:
                    answer.close()
            self.is_well = answer.status < 500
        except (OriginError, TimeoutError):
            self.is_well = False

    def _end_stalled(self, hung_s: float, slow_s: float) -> None:
        """End the answers of a hung upstream, and those that do not go on."""
        now = asyncio.get_running_loop().time()
        for answer in [*self.origin.answers]:
            silent_s = now - max(answer.heard_s, self.origin.heard_s)
            if not self.is_well and silent_s > hung_s:
                answer.give_up(Hung(f"it has said nothing for {silent_s:.0f} s"))
            elif now - answer.heard_s > slow_s:
                answer.give_up(Slow(f"no answer in {slow_s:g} seconds"))
