"""A reverse proxy for OpenAI's API: a router chooses among servers that are well, and a request goes there."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import httpx
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from quire.routing import Router, Target
from quire.web.clients import HOME
from quire.web.errors import ApiError, as_json
from quire.web.keys import ApiKeys
from quire_router.gateway import OF_THE_HOP, Broken, Gateway, Incoming, Passed, keys_of
from quire_router.index import Held
from quire_router.prefixes import Prefixes
from quire_router.upstreams import PATIENCE_S, Upstream

ELSEWHERE = frozenset({429, 502, 503})
"""Answers of an upstream that has no room, or is none: another one is asked."""

MADE_BY = "x-quire-upstream"
"""The header that says which upstream answered, by its place, from 0."""


class Proxy(Gateway):
    """Passes requests on to servers behind it.

    A request that one fails before its answer has begun goes to another; a stream that breaks off ends with an error as its last event but one.
    """

    def __init__(
        self,
        upstreams: list[Upstream],
        router: Router,
        prefixes: Prefixes,
        keys: ApiKeys,
        *,
        max_body: int = 64 << 20,
        slow_s: float = 600.0,
    ) -> None:
        super().__init__(keys, max_body=max_body, slow_s=slow_s)
        self.upstreams, self.prefixes, self._router = upstreams, prefixes, router
        self._client = httpx.AsyncClient(
            timeout=httpx.Timeout(slow_s, connect=PATIENCE_S),
            limits=httpx.Limits(max_connections=None),
            trust_env=False,
        )

    def app(self, *routes: Route) -> Starlette:
        """Return the application: the routes of clients and of the operator."""
        own = [Route("/health", self._health), Route("/v1/upstreams", self._state)]
        return super().app(*own, *routes)

    @asynccontextmanager
    async def life(self, _: Starlette) -> AsyncGenerator[None]:
        watching = [asyncio.create_task(each.watch(self._client)) for each in self.upstreams]
        try:
            yield
        finally:
            for task in watching:
                task.cancel()
            await asyncio.gather(*watching, return_exceptions=True)
            await self._client.aclose()

    async def _health(self, request: Request) -> Response:
        """`/health`: whether any upstream is well."""
        return Response(status_code=200 if any(each.is_well for each in self.upstreams) else 503)

    async def _state(self, request: Request) -> Response:
        """`/v1/upstreams`: who is well, has how much to do, and whose events were missed."""
        self.keys.check_operator(request.headers)
        known, index = self.prefixes.index.replicas, self.prefixes.index
        listed = [
            {
                "url": each.name,
                "is_well": each.is_well,
                "inflight": each.num_inflight,
                "requests": each.num_requests,
                "failures": each.num_failures,
                "is_degraded": known.get(each.name, False),
            }
            for each in self.upstreams
        ]
        said = {"upstreams": listed, "blocks": index.num_blocks, "capacity": index.capacity}
        return as_json(said)

    async def answered(self, incoming: Incoming) -> Response:
        """Return the answer of the upstream that the router names, or of another one where that fails."""
        asked, who = incoming.question, incoming.who
        held: Held = {}
        homes = [each for each in self.upstreams if each.home == incoming.home and each.is_well]
        if asked is not None and self._router.sees_prefix and not homes:
            read = asked
            held = await self.prefixes.held(read, who, lambda: self.tokens(incoming, read))
        session = None if asked is None else asked.session
        tried: list[Upstream] = []
        refusal: Response | None = None
        while upstream := homes.pop() if homes else self._chosen(tried, held, session):
            tried.append(upstream)
            try:
                answer = await self._ask(upstream, incoming)
            except httpx.ReadTimeout:
                raise ApiError(504, f"no answer in {self.slow_s:g} seconds") from None
            except httpx.HTTPError:
                upstream.failed()
                continue
            if answer.status_code not in ELSEWHERE:
                if asked is not None:
                    self.prefixes.sent(asked, who, upstream.name)
                return answer
            refusal = answer
        if refusal is not None:
            return refusal
        raise ApiError(
            503,
            f"none of {len(self.upstreams)} upstreams answers; they may be starting: come back later",
            code="no_upstream",
            headers={"Retry-After": "1"},
        )

    def _chosen(self, tried: list[Upstream], held: Held, session: str | None) -> Upstream | None:
        """Return the upstream to ask next; where none is well, one that may have come up since it was looked at."""
        left = [each for each in self.upstreams if each not in tried]
        left = [each for each in left if each.is_well] or left
        if not left:
            return None
        targets = [Target(each.name, each.num_inflight, held.get(each.name, ())) for each in left]
        return left[self._router(targets, session)]

    async def _ask(self, upstream: Upstream, incoming: Incoming) -> Response:
        """Return an upstream's answer: whole, or a stream whose first piece has come. Raises `httpx.HTTPError`."""
        request = incoming.request
        async with AsyncExitStack() as held:
            held.enter_context(upstream.asked())
            dropped = OF_THE_HOP | {"origin", HOME}  # whether the page may ask was decided here
            headers = [pair for pair in request.headers.items() if pair[0] not in dropped]
            sent = self._client.build_request(
                request.method,
                upstream.name + request.url.path,
                params=request.url.query or None,
                headers=[*headers, ("accept-encoding", "identity"), (HOME, upstream.home)],
                content=incoming.body,
            )
            answer = await self._client.send(sent, stream=True)
            held.push_async_callback(answer.aclose)
            kept = {name: text for name, text in answer.headers.items() if name not in OF_THE_HOP}
            kept[MADE_BY] = str(self.upstreams.index(upstream))
            if not answer.headers.get("content-type", "").startswith("text/event-stream"):
                return Response(await answer.aread(), answer.status_code, kept)
            pieces = answer.aiter_raw()
            first = await anext(pieces, b"")
            stream = Passed(
                _whole(first, pieces, upstream), request.url.path, self.slow_s, held.pop_all()
            )
        stream.status_code = answer.status_code
        stream.headers.update(kept)
        return stream

    async def tokenized(self, document: bytes, incoming: Incoming, path: str) -> bytes:
        """Return an upstream's answer at a path; empty without one."""
        upstream = min(self.upstreams, key=lambda each: (not each.is_well, each.num_inflight))
        try:
            answer = await self._client.post(
                upstream.name + path,
                content=document,
                headers=keys_of(incoming.request),
                timeout=PATIENCE_S,
            )
        except httpx.HTTPError:
            return b""
        return answer.content


async def _whole(
    first: bytes, pieces: AsyncIterator[bytes], upstream: Upstream
) -> AsyncGenerator[bytes]:
    """Yield the pieces of an answer. Raises `Broken`."""
    try:
        yield first
        async for piece in pieces:
            yield piece
    except httpx.HTTPError as error:
        upstream.failed()
        raise Broken from error
