"""A reverse proxy for OpenAI's API: a router chooses among servers that are well, and a request goes there."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from hashlib import sha256

import httpx
import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from quire.cluster.prefixes import Asker, Prefixes, Question
from quire.cluster.upstreams import PATIENCE_S, Upstream
from quire.routing import Router, Target
from quire.web.bodies import body_of
from quire.web.clients import DONE, EventStream, sse, until_gone
from quire.web.errors import ApiError, as_json, handlers
from quire.web.keys import ApiKeys

ELSEWHERE = frozenset({429, 502, 503})
"""Answers of an upstream that has no room, or is none: another one is asked."""

ROUTED = ("/v1/completions", "/v1/chat/completions")
PASSED = {
    "/v1/models": "GET",
    "/v1/models/{name:path}": "GET",
    "/tokenize": "POST",
    "/detokenize": "POST",
}

OF_THE_HOP = frozenset(
    (
        "accept-encoding",
        "connection",
        "content-length",
        "date",
        "host",
        "keep-alive",
        "server",
        "transfer-encoding",
    )
)
"""Headers of one connection, which are not passed on."""

MADE_BY = "x-quire-upstream"
"""The header that says which upstream answered, by its place, from 0."""


class Proxy:
    """Passes requests on to servers behind it.

    A request that one fails before its answer has begun goes to another; a stream that breaks off ends with an error as its last event but one.

    `max_body`  bytes of a request
    `slow_s`    seconds in which a body has to arrive, a client has to take what it is sent, and an upstream has to go on
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
        self.upstreams, self.prefixes = upstreams, prefixes
        self._router, self._keys = router, keys
        self._max_body, self._slow_s = max_body, slow_s
        self._client = httpx.AsyncClient(
            timeout=httpx.Timeout(slow_s, connect=PATIENCE_S),
            limits=httpx.Limits(max_connections=None),
            trust_env=False,
        )

    def app(self) -> Starlette:
        """Return the application: what clients may ask, and what the operator may."""
        routes = [Route(path, self._handle, methods=["POST"]) for path in ROUTED]
        routes += [Route(path, self._handle, methods=[each]) for path, each in PASSED.items()]
        routes += [Route("/health", self._health), Route("/v1/upstreams", self._state)]
        return Starlette(routes=routes, exception_handlers=handlers(), lifespan=self._life)

    @asynccontextmanager
    async def _life(self, _: Starlette) -> AsyncGenerator[None]:
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
        self._keys.check_operator(request.headers)
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

    async def _handle(self, request: Request) -> Response:
        who = Asker(_key(request), self._keys.tenant(request.headers))
        body = await body_of(request, self._max_body, self._slow_s)
        return await until_gone(request, self._answered(request, who, body))

    async def _answered(self, request: Request, who: Asker, body: bytes) -> Response:
        """Return the answer of the upstream that the router names, or of another one where that fails."""
        asked, held = None, {}
        if request.url.path in ROUTED:
            try:
                asked = msgspec.json.decode(body, type=Question)
            except (msgspec.MsgspecError, UnicodeError, RecursionError):
                asked = None  # the upstream says what is wrong with it
        if asked is not None and self._router.sees_prefix:
            read = asked
            held = await self.prefixes.held(read, who, lambda: self._tokens(request, read))
        tried: list[Upstream] = []
        refusal: Response | None = None
        while upstream := self._chosen(tried, held, asked):
            tried.append(upstream)
            try:
                answer = await self._ask(upstream, request, body)
            except httpx.ReadTimeout:
                raise ApiError(504, f"no answer in {self._slow_s:g} seconds") from None
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

    def _chosen(
        self, tried: list[Upstream], held: dict[str, tuple[int, int, int]], asked: Question | None
    ) -> Upstream | None:
        """Return the upstream to ask next; where none is well, one that may have come up since it was looked at."""
        left = [each for each in self.upstreams if each not in tried]
        left = [each for each in left if each.is_well] or left
        if not left:
            return None
        targets = [Target(each.name, each.num_inflight, held.get(each.name, ())) for each in left]
        return left[self._router(targets, None if asked is None else asked.session)]

    async def _ask(self, upstream: Upstream, request: Request, body: bytes) -> Response:
        """Return an upstream's answer: whole, or a stream whose first piece has come. Raises `httpx.HTTPError`."""
        async with AsyncExitStack() as held:
            held.enter_context(upstream.asked())
            headers = [pair for pair in request.headers.items() if pair[0] not in OF_THE_HOP]
            sent = self._client.build_request(
                request.method,
                upstream.name + request.url.path,
                params=request.url.query or None,
                headers=[*headers, ("accept-encoding", "identity")],
                content=body,
            )
            answer = await self._client.send(sent, stream=True)
            held.push_async_callback(answer.aclose)
            kept = {name: text for name, text in answer.headers.items() if name not in OF_THE_HOP}
            kept[MADE_BY] = str(self.upstreams.index(upstream))
            if not answer.headers.get("content-type", "").startswith("text/event-stream"):
                return Response(await answer.aread(), answer.status_code, kept)
            pieces = answer.aiter_raw()
            first = await anext(pieces, b"")
            stream = _Passed(_events(first, pieces, upstream), self._slow_s, held.pop_all())
        stream.status_code = answer.status_code
        stream.headers.update(kept)
        return stream

    async def _tokens(self, request: Request, asked: Question) -> list[int]:
        """Return a prompt as tokens, as an upstream reads it. Raises `httpx.HTTPError`, `msgspec.MsgspecError`."""
        upstream = min(self.upstreams, key=lambda each: (not each.is_well, each.num_inflight))
        document = {"model": asked.model, "prompt": asked.first_prompt}
        if bytes(asked.messages):
            document = {"model": asked.model, "messages": asked.messages}
            if bytes(asked.tools):
                document["tools"] = asked.tools
        given = request.headers.get("authorization")
        answer = await self._client.post(
            f"{upstream.name}/tokenize",
            content=msgspec.json.encode(document),
            headers={"authorization": given} if given else {},
            timeout=PATIENCE_S,
        )
        return msgspec.json.decode(answer.raise_for_status().content, type=_Tokenized).tokens


class _Tokenized(msgspec.Struct):
    """What `/tokenize` answers."""

    tokens: list[int]


class _Passed(EventStream):
    """A stream that lets go of its upstream at its end, whatever ends it."""

    def __init__(self, events: AsyncGenerator[bytes], slow_s: float, held: AsyncExitStack) -> None:
        super().__init__(events, slow_s)
        self._held = held

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._held:
            await super().__call__(scope, receive, send)


async def _events(
    piece: bytes, pieces: AsyncIterator[bytes], upstream: Upstream
) -> AsyncGenerator[bytes]:
    """Yield a stream by whole lines; one that breaks off ends with an error."""
    line = b""
    try:
        while piece:
            whole, end, line = (line + piece).rpartition(b"\n")
            if end:
                yield whole + end
            piece = await anext(pieces, b"")
    except httpx.HTTPError:
        upstream.failed()
        error = ApiError(502, "the server that answered broke off; ask again", code="broken_off")
        yield b"\n" + sse(error.document()) + DONE
    else:
        if line:
            yield line


def _key(request: Request) -> str:
    """Return what stands for the key of a request."""
    return sha256(request.headers.get("authorization", "").encode()).hexdigest()
