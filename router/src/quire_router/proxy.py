"""A reverse proxy for servers of OpenAI's API, with a router that chooses among those that are well."""

import asyncio
import re
from collections import Counter
from collections.abc import AsyncGenerator, Mapping
from contextlib import ExitStack, asynccontextmanager

import msgspec
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from quire.errors import QuireError
from quire.routing import Router
from quire.web.errors import ApiError, as_json, handlers
from quire.web.keys import ApiKeys
from quire.web.origin import OriginRequest
from quire.web.origin_answer import BrokenOff, OriginError, Unreached
from quire_router.candidates import Candidates
from quire_router.counts import ProxyCounts
from quire_router.fleet import Fleet
from quire_router.gateway import Gateway, Incoming, Passed, keys_of
from quire_router.listing import UpstreamList
from quire_router.mending import UpstreamMends
from quire_router.prefixes import Known, Prefixes
from quire_router.rates import RateLimits
from quire_router.relay import ELSEWHERE, MADE_BY, TO_ALL, UpstreamRelay
from quire_router.spans import Spans
from quire_router.upstreams import PATIENCE_S, Slow, Upstream
from quire_router.usage import AnswerUsage

FOR_CLIENTS = re.compile(
    r"(?!.*[/\\](\.\.?(;[^/\\]*)?([/\\]|$)|[/\\]))"
    r"/(v1/(?!(?i:cache|upstreams|replicas|(un)?load_lora_adapter)\b).*|v2/rerank|rerank|score|pooling|classify"
    r"|embeddings?|generate|completions?|chat/completions|infill|apply-template|tokenize|detokenize|version|ping)"
)
"""Paths for everybody who has a key; all others are the operator's, and those that a server may read as others."""


class ProxyLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of a proxy.

    `retries`   upstreams that see a request beside the first one
    `hung_s`    seconds for which an upstream that does not answer `/health` may say nothing before its requests end
    `slow_s`    seconds in which a body has to arrive, a client has to take what it is sent, and a server has to go on
    `max_body`  bytes of a request
    `session_header`  the header that names a conversation, before fields of the body
    """

    retries: int = 1
    hung_s: float = 15.0
    slow_s: float = 600.0
    max_body: int = 64 << 20
    session_header: str = "x-session-id"


class Proxy(Gateway):
    """Passes requests on to servers behind it, those that it cannot read as well.

    A request that an upstream fails before the first byte of its answer goes to another one, `retries` times; without
    retries each request has a connection of its own, as an idle one may be closed the moment that it is used.
    Nothing is sent again after that byte: a whole answer that breaks off is a 502, and a stream ends with an error.

    `mends`  rules by which requests are changed on their way to an upstream
    `rates`  limits by key; None: there are none
    `spans`  spans of OpenTelemetry; None: there are none
    """

    def __init__(
        self,
        listing: UpstreamList,
        router: Router,
        prefixes: Prefixes,
        keys: ApiKeys,
        limits: ProxyLimits | None = None,
    ) -> None:
        self.limits = limits or ProxyLimits()
        super().__init__(keys, max_body=self.limits.max_body, slow_s=self.limits.slow_s)
        self.prefixes, self._router = prefixes, router
        self.fleet = Fleet(listing, prefixes, self.limits.hung_s, self.limits.slow_s)
        self.counts, self.mends = ProxyCounts(), UpstreamMends()
        self.rates: RateLimits | None = None
        self.spans: Spans | None = None
        self._relay = UpstreamRelay(self.counts, max_body=self.max_body, slow_s=self.slow_s)
        self._session_header = self.limits.session_header.lower()

    @property
    def upstreams(self) -> list[Upstream]:
        """The servers behind it, those that are leaving too."""
        return self.fleet.upstreams

    def app(self, *routes: Route) -> ASGIApp:
        """Return the application: the operator's routes, and all others as they are."""
        routes += (
            Route("/health", self._health),
            Route("/metrics", self._metrics),
            Route("/v1/upstreams", self._state),
        )
        paths = frozenset(each.path for each in routes)
        own = Starlette(routes=routes, exception_handlers=handlers(), lifespan=self.life)

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            """Keep what is passed on clear of the routes' middleware, which costs as much as a choice."""
            if scope["type"] == "lifespan" or scope["path"] in paths:
                await own(scope, receive, send)
            else:
                await self._pass(scope, receive, send)

        return app

    @asynccontextmanager
    async def life(self, _: Starlette) -> AsyncGenerator[None]:
        async with self.fleet.running():
            yield

    async def _health(self, request: Request) -> Response:
        """`/health`: whether any upstream is well."""
        return Response(status_code=200 if any(each.is_well for each in self.upstreams) else 503)

    async def _metrics(self, request: Request) -> Response:
        """`/metrics`: the router's own."""
        self.keys.check_operator(request.headers)
        limited = self.rates.refused if self.rates else Counter[tuple[str, str]]()
        text = self.counts.text(self.upstreams, self.mends.counts, limited)
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    async def _state(self, request: Request) -> Response:
        """`/v1/upstreams`: who is well, has how much to do, and whose events were missed."""
        self.keys.check_operator(request.headers)
        known, index = self.prefixes.index.replicas, self.prefixes.index
        listed = [
            {
                "number": each.number,
                "url": each.name,
                "is_well": each.is_well,
                "is_leaving": each.is_leaving,
                "breaker": each.breaker.state,
                "inflight": each.num_inflight,
                "requests": each.num_requests,
                "failures": each.num_failures,
                "is_degraded": known.get(each.name, False),
            }
            for each in self.upstreams
        ]
        said = {"upstreams": listed, "blocks": index.num_blocks, "capacity": index.capacity}
        return as_json(said | {"list_failure": self.fleet.listing.failure})

    # -- requests --------------------------------------------------------------------------

    async def _pass(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request of any path."""
        if scope["type"] != "http":  # a WebSocket
            await receive()
            await send({"type": "websocket.close", "code": 1011})
            return
        request = Request(scope, receive)
        try:
            response = await self._handle(request)
        except Exception as error:
            if isinstance(error, ApiError):
                self.counts.refused[error.status] += 1
            self.counts.num_gone += isinstance(error, ClientDisconnect)
            response = await _REFUSAL(request, error)
            await response(scope, receive, send)
            if not isinstance(error, (ApiError, QuireError, ClientDisconnect)):
                raise  # for the log
        else:
            await response(scope, receive, send)

    def tenant(self, path: str, headers: Mapping[str, str]) -> str | None:
        if path == "/openapi.json" or FOR_CLIENTS.fullmatch(path):
            return super().tenant(path, headers)
        self.keys.check_operator(headers)
        return None

    def reads(self, path: str) -> bool:
        return True

    async def answered(self, incoming: Incoming) -> Response:
        """Return an answer, within the limits of the request's key, and under a span where these are wanted."""
        if self.rates is None and self.spans is None:
            return await self._routed(incoming)
        name = incoming.who.tenant if self.keys.names else incoming.who.key
        usage = AnswerUsage()
        with ExitStack() as held:
            span = self.spans and held.enter_context(self.spans.begin(incoming, usage))
            if self.rates is not None and name is not None and incoming.request.method == "POST":
                held.callback(await self.rates.begin(name, len(incoming.body)), usage)
            response = await self._routed(incoming)
            if span is not None:
                span.answered(response, self._maker_of(response))
            if isinstance(response, Passed):
                response.observe(usage, held.pop_all())
            elif response.status_code < 400:
                usage.read(bytes(response.body))
        return response

    def _maker_of(self, response: Response) -> str | None:
        """Return the name of the upstream that made an answer."""
        number = dict(response.raw_headers).get(MADE_BY.encode())
        numbered = {b"%d" % each.number: each.name for each in self.upstreams}
        return None if number is None else numbered.get(number)

    async def _routed(self, incoming: Incoming) -> Response:
        """Return the answer of the upstream that the router names, or of another one where that fails."""
        path: str = incoming.request.scope["path"]
        if path in TO_ALL:
            return await self._answered_by_all(incoming)
        choice = await self._choice(await self._as_mended(incoming), path)
        reasons: list[str] = []
        refusal: Response | None = None
        num_seen, status = 0, 502
        while num_seen <= self.limits.retries and (upstream := choice.next()):
            try:
                is_fresh = choice.is_fresh or not self.limits.retries
                mends = self.mends.of(upstream.name)
                answer = await self._relay.ask(upstream, incoming, mends, is_fresh=is_fresh)
            except Unreached as error:
                upstream.failed()
                self._note(reasons, upstream, error, "unreached")
                continue
            except OriginError as error:
                num_seen += 1
                if isinstance(error, BrokenOff) and error.is_stale:
                    choice.stale = upstream
                else:
                    upstream.failed()
                self._note(reasons, upstream, error, "broken")
                status = 502 if isinstance(error, BrokenOff) else 504
                if isinstance(error, Slow):
                    break
                continue
            if answer.status_code not in ELSEWHERE:
                self.prefixes.sent(choice.known, upstream.name)
                return answer
            num_seen += 1
            refusal = answer
            self.counts.retries["busy"] += 1
        if refusal is not None:
            return refusal
        told = "; ".join(reasons)
        if num_seen:
            code = "broken_off" if status == 502 else "upstream_timeout"
            said = f"no answer: {told}. It was sent to {num_seen} upstreams and is not sent again"
            raise ApiError(status, said, code=code)
        raise ApiError(
            503,
            f"none of {len(self.upstreams)} upstreams answers; they may be starting: come back later. {told}",
            code="no_upstream",
            headers={"Retry-After": "1"},
        )

    def _note(self, reasons: list[str], upstream: Upstream, error: Exception, kind: str) -> None:
        reasons.append(f"upstream {upstream.number}: {error}")
        self.counts.retries[kind] += 1

    async def _as_mended(self, incoming: Incoming) -> Incoming:
        """Return a request as it is looked up: with all rules applied, so that equal prompts of servers are equal here."""
        scope, every = incoming.request.scope, self.mends.every
        if incoming.question is None or not every.reads(
            scope["method"], scope["path"], scope["headers"]
        ):
            return incoming
        found = await every.later(scope["path"], scope["headers"], incoming.body, self.max_body)
        return incoming if found is None else self.with_body(incoming, found.body)

    async def _choice(self, incoming: Incoming, path: str) -> Candidates:
        """Return the upstreams to ask, by what the request says."""
        asked, named = incoming.question, incoming.headers.get(MADE_BY)
        session = incoming.headers.get(self._session_header)
        able, home = self.fleet.staying, incoming.home
        if named is not None and not FOR_CLIENTS.fullmatch(path):
            able = [each for each in able if str(each.number) == named]
        homes = [each for each in able if each.home == home and each.is_well]
        known = Known({})
        if asked is not None and self._router.sees_prefix and asked.has_prompt and not homes:
            read = asked
            self.counts.num_looked += 1
            known = await self.prefixes.held(
                read, incoming.who, lambda: self.tokens(incoming, read)
            )
            self.counts.num_found += bool(known.held)
        if session is None and asked is not None:
            session = asked.session
        return Candidates(able, self._router, homes, known, session)

    async def _answered_by_all(self, incoming: Incoming) -> Response:
        """Return the first refusal of all upstreams, else the last one's answer."""
        able = self.fleet.staying
        asked = [
            self._relay.ask(each, incoming, self.mends.of(each.name), is_fresh=False)
            for each in able
        ]
        answers = await asyncio.gather(*asked, return_exceptions=True)
        for upstream, answer in zip(able, answers, strict=True):
            if isinstance(answer, BaseException):
                said = f"upstream {upstream.number} did not answer ({answer}); the others may have"
                raise ApiError(502, said, code="broken_off") from answer
        said = [each for each in answers if isinstance(each, Response)]
        if not said:
            raise ApiError(503, "there is no upstream", code="no_upstream")
        return next((each for each in said if each.status_code >= 400), said[-1])

    async def tokenized(self, document: bytes, incoming: Incoming, path: str) -> bytes:
        """Return an upstream's answer at a path; empty without one."""
        able = self.fleet.staying
        if not able:
            return b""
        upstream = min(able, key=lambda each: (not each.is_well, each.num_inflight))
        headers = [
            (name.encode(), value.encode("latin-1"))
            for name, value in keys_of(incoming.headers).items()
        ]
        headers.append((b"content-type", b"application/json"))
        try:
            async with asyncio.timeout(PATIENCE_S):
                answer = await upstream.origin.ask(
                    OriginRequest("POST", path.encode(), headers, document)
                )
                try:
                    return await answer.read(self.max_body)
                finally:
                    answer.close()
        except (OriginError, TimeoutError):
            return b""


_REFUSAL = handlers()[Exception]
"""Makes an answer of an error."""
