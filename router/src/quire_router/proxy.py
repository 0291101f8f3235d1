"""A reverse proxy for servers of OpenAI's API, with a router that chooses among those that are well."""

import asyncio
import re
import time
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
from quire.web.clients import HOME
from quire.web.errors import ApiError, as_json, handlers
from quire.web.keys import ApiKeys
from quire.web.mends import MENDED
from quire.web.origin import OriginRequest, passed, target_of
from quire.web.origin_answer import BrokenOff, Headers, OriginAnswer, OriginError, Unreached
from quire_router.candidates import Candidates
from quire_router.counts import ProxyCounts
from quire_router.fleet import Fleet
from quire_router.gateway import Broken, Gateway, Incoming, Passed, keys_of
from quire_router.listing import UpstreamList
from quire_router.mending import UpstreamMends
from quire_router.prefixes import Known, Prefixes
from quire_router.upstreams import PATIENCE_S, Slow, Upstream

ELSEWHERE = frozenset({429, 502, 503})
"""Answers of an upstream that has no room, or is none: another one is asked."""

MADE_BY = "x-quire-upstream"
"""The header that says which upstream answered, by its number, from 0; the operator names one by it."""

MOST_WHOLE = 1 << 20
"""Bytes of an answer that is passed on only once it is whole, so that one that breaks off is a 502."""

FOR_CLIENTS = re.compile(
    r"(?!.*[/\\](\.\.?(;[^/\\]*)?([/\\]|$)|[/\\]))"
    r"/(v1/(?!(?i:cache|upstreams|replicas|(un)?load_lora_adapter)\b).*|v2/rerank|rerank|score|pooling|classify"
    r"|embeddings?|generate|completions?|chat/completions|infill|apply-template|tokenize|detokenize|version|ping)"
)
"""Paths for everybody who has a key; all others are the operator's, and those that a server may read as others."""

TO_ALL = frozenset(("/v1/load_lora_adapter", "/v1/unload_lora_adapter"))
"""Paths of requests that each upstream gets."""

_OWN = frozenset((b"content-length", b"origin", HOME.encode(), MADE_BY.encode()))
"""Headers of requests that are not passed on; whether a page may ask was decided here."""


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

    @property
    def upstreams(self) -> list[Upstream]:
        """The servers behind it, those that are leaving too."""
        return self.fleet.upstreams

    def app(self) -> ASGIApp:
        """Return the application: the operator's routes, and all others as they are."""
        routes = {
            "/health": self._health,
            "/metrics": self._metrics,
            "/v1/upstreams": self._state,
        }
        own = Starlette(
            routes=[*map(Route, routes, routes.values())],
            exception_handlers=handlers(),
            lifespan=self.life,
        )

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            """Keep what is passed on clear of the routes' middleware, which costs as much as a choice."""
            if scope["type"] == "lifespan" or scope["path"] in routes:
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
        text = self.counts.text(self.upstreams, self.mends.counts)
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
                answer = await self._ask(upstream, incoming, is_fresh=is_fresh)
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
        session = incoming.headers.get(self.limits.session_header)
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

    async def _ask(self, upstream: Upstream, incoming: Incoming, *, is_fresh: bool) -> Response:
        """Return an upstream's answer: whole, or a stream whose first piece has come. Raises `OriginError`."""
        scope, since = incoming.request.scope, time.monotonic()
        mended = await self.mends.of(upstream.name).of(scope, incoming.body, self.max_body)
        came, body = (
            (scope["headers"], incoming.body) if mended is None else (mended.headers, mended.body)
        )
        headers = [pair for pair in passed(came) if pair[0] not in _OWN]
        headers.append((HOME.encode(), upstream.home.encode()))
        if not body and scope["method"] not in ("POST", "PUT", "PATCH"):
            body = None
        asked = OriginRequest(scope["method"], target_of(scope), headers, body)
        with ExitStack() as held:
            held.callback(upstream.left, upstream.asked())
            try:
                answer = await upstream.origin.ask(asked, is_fresh=is_fresh)
                held.callback(answer.close)
                given = dict(answer.headers)
                kept = [pair for pair in passed(answer.headers) if pair[0] != b"date"]
                kept.append((MADE_BY.encode(), b"%d" % upstream.number))
                if mended is not None:
                    kept.append((MENDED.lower().encode(), mended.told.encode()))
                length = given.get(b"content-length", b"")
                is_whole = answer.is_whole or answer.status in ELSEWHERE
                is_whole = is_whole or (length.isdigit() and int(length) <= MOST_WHOLE)
                is_whole = is_whole or scope["path"] in TO_ALL
                first = await (answer.read(MOST_WHOLE) if is_whole else answer.pending())
            except OriginError as error:
                if not error.has_begun:
                    raise
                upstream.failed()
                said = f"upstream {upstream.number} broke off in its answer ({error}); ask again"
                raise ApiError(502, said, code="broken_off") from error
            upstream.breaker.answered()
            self.counts.answers[upstream.name, answer.status] += 1
            self.counts.first.add(time.monotonic() - since)
            held.callback(lambda: self.counts.whole.add(time.monotonic() - since))
            if is_whole:
                return WholeAnswer(answer.status, kept, first)
            is_told = b"content-encoding" not in given and given.get(
                b"content-type", b""
            ).startswith(b"text/event-stream")
            path = scope["path"] if is_told else None
            pieces = _whole(first, answer, upstream)
            made = Passed(pieces, path, self.slow_s, held.pop_all())
        made.status_code, made.raw_headers = answer.status, kept
        return made

    async def _answered_by_all(self, incoming: Incoming) -> Response:
        """Return the first refusal of all upstreams, else the last one's answer."""
        able = self.fleet.staying
        asked = [self._ask(each, incoming, is_fresh=False) for each in able]
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


class WholeAnswer(Response):
    """An upstream's whole answer, with its own headers."""

    def __init__(self, status: int, headers: Headers, body: bytes) -> None:
        self.status_code, self.raw_headers, self.body = status, headers, body
        self.background = None


_REFUSAL = handlers()[Exception]
"""Makes an answer of an error."""


async def _whole(first: bytes, answer: OriginAnswer, upstream: Upstream) -> AsyncGenerator[bytes]:
    """Yield the pieces of an answer. Raises `Broken`."""
    piece = first
    try:
        while piece:
            yield piece
            piece = await answer.pending()
    except OriginError as error:
        upstream.failed()
        raise Broken from error
