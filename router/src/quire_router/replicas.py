"""Replicas of quire's server as an application of Ray Serve: actors with an engine each, and an ingress before them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    ExitStack,
)
from typing import Any, NamedTuple, TypeAlias

import msgspec
from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError, RayServeException
from starlette.applications import Starlette
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message

from quire.routing import router_named
from quire.web.clients import HOME
from quire.web.cors import with_cors
from quire.web.errors import ApiError
from quire.web.keys import ApiKeys
from quire_router.figures import ReplicaFigures
from quire_router.gateway import Broken, Gateway, Incoming, Passed
from quire_router.sent import EVENTS, Sent, SentPrompt, Told, home_of, to_replica

_serve: Any = serve  # its types say too little
logger = logging.getLogger("ray.serve")

MADE_BY = "x-quire-replica"
"""The header that says which replica answered."""

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

ATTEMPTS = 3
"""So many replicas are asked, where one after another dies before its answer has reached the client."""

SOON = {"Retry-After": "1"}

LOOK_S = 10.0
"""Replicas have so long to tell their figures."""


class Opened(NamedTuple):
    """The server in a replica: application, health check, and event endpoint.

    `events` is the endpoint as `ToldPrefixes.follow` takes it, None without events.
    """

    app: Starlette
    is_well: Callable[[], bool]
    events: str | None = None


Opener: TypeAlias = Callable[[], AbstractContextManager[Opened]]
"""Makes what a replica serves."""


class ServedReplica:
    """A server in a process of Ray's: its routes are asked through `answer`."""

    def __init__(self, opener: Opener) -> None:
        self._held = ExitStack()
        self._opened = self._held.enter_context(opener())
        self._name = serve.get_replica_context().replica_id.unique_id
        self._life: AbstractAsyncContextManager[Any] | None = None

    def record_replica_metadata(self) -> dict[str, Any]:
        """Return the facts of this replica for routers."""
        events = self._opened.events
        return {} if events is None else {EVENTS: events}

    def check_health(self) -> None:
        """Raise `RuntimeError` where the engine has broken down: Ray Serve starts another replica."""
        if not self._opened.is_well():
            raise RuntimeError("the engine takes nothing any more")

    async def answer(self, sent: Sent) -> AsyncGenerator[Message]:
        """Yield the application's answer, message by message; if the reader leaves early, the request ends."""
        if self._life is None:  # what it does beside requests begins with the first
            app = self._opened.app
            self._life = app.router.lifespan_context(app)
            await self._life.__aenter__()
        said: asyncio.Queue[Message | None] = asyncio.Queue()
        home = (HOME.encode(), home_of(self._name).encode())
        own = [pair for pair in sent.scope["headers"] if pair[0] != home[0]]
        scope = sent.scope | {"headers": [*own, home]}
        asked: list[Message] = [{"type": "http.request", "body": sent.body, "more_body": False}]

        async def receive() -> Message:
            if asked:
                return asked.pop()
            return await asyncio.Future()  # nobody leaves but by a cancellation

        task = asyncio.ensure_future(self._opened.app(scope, receive, said.put))
        task.add_done_callback(lambda _: said.put_nowait(None))
        try:
            while (message := await said.get()) is not None:
                if message["type"] == "http.response.start":
                    message["headers"] = [
                        *message["headers"],
                        (MADE_BY.encode(), self._name.encode()),
                    ]
                yield message
            if (error := task.exception()) is not None:
                logger.error("%s failed", sent.scope["path"], exc_info=error)
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def told(self, sent: Sent, name: str | None = None) -> Told | None:
        """Return the application's whole answer; None if the replica of another name is asked."""
        if name not in (None, self._name):
            return None
        messages = [message async for message in self.answer(sent)]
        headers = {key.decode(): value.decode() for key, value in messages[0]["headers"]}
        kept = {key: text for key, text in headers.items() if key not in OF_THE_HOP}
        body = b"".join(message.get("body", b"") for message in messages[1:])
        return Told(self._name, messages[0]["status"], kept, body)

    def __del__(self) -> None:
        """Close: cached blocks are written to the tiers."""
        self._held.close()


class Ingress(Gateway):
    """Passes requests on to replicas; Ray Serve's request router says to which.

    A replica that dies before its answer has begun is passed over; one that dies in a stream ends it with an error.
    """

    def __init__(self, replicas: Any, keys: ApiKeys, *, sees_prefix: bool, max_body: int) -> None:
        super().__init__(keys, max_body=max_body)
        self._replicas = replicas.options(stream=True)
        self._sees_prefix = sees_prefix

    def __serve_build_asgi_app__(self) -> ASGIApp:
        figures = ReplicaFigures(self.keys, self._told, max_body=self.max_body, slow_s=self.slow_s)
        app = self.app(Route("/health", self._handle), *figures.routes())
        return with_cors(app, self.keys.origins)

    async def answered(self, incoming: Incoming) -> Response:
        """Return a replica's answer. Raises `ApiError` where none answers."""
        sent, asked = to_replica(incoming.request, incoming.body), incoming.question
        sent.home = incoming.home
        if asked is not None:
            tokens = await self.tokens(incoming, asked) if self._sees_prefix else None
            tenant, session = incoming.who.tenant, asked.session
            sent.prompt = SentPrompt(tokens, asked.cache_salt, tenant, session, asked.model_name)
        for _ in range(ATTEMPTS):
            try:
                return await self._ask(sent)
            except (RayError, Broken):
                continue
            except BackPressureError:
                said = "all replicas are full, and as many requests wait as may; come back later"
                raise ApiError(429, said, code="overloaded", headers=SOON) from None
            except DeploymentUnavailableError:
                break
        said = "no replica answers, others are started: come back later"
        raise ApiError(503, said, code="no_replica", headers=SOON)

    async def _told(self, sent: Sent, name: str | None) -> list[Told]:
        """Return the answers of all replicas, or of the named one; without those that die or are too slow."""
        try:
            said = self._replicas.broadcast("told", sent, name)
            answers = await said.results_async(timeout_s=LOOK_S, return_exceptions=True)
        except (DeploymentUnavailableError, TimeoutError):
            message = f"not all replicas answer within {LOOK_S:g} s; ask again"
            raise ApiError(503, message, code="no_replica", headers=SOON) from None
        return [each for each in answers if isinstance(each, Told)]

    async def _ask(self, sent: Sent) -> Response:
        """Return a replica's answer: whole, or a stream that has begun. Raises `RayError`."""
        with ExitStack() as held:
            messages = self._replicas.answer.remote(sent)
            held.callback(messages.cancel)
            start = await anext(messages)
            headers = {name.decode(): value.decode() for name, value in start["headers"]}
            kept = {name: text for name, text in headers.items() if name not in OF_THE_HOP}
            pieces = _bodies(messages)
            if not headers.get("content-type", "").startswith("text/event-stream"):
                body = b"".join([piece async for piece in pieces])
                return Response(body, start["status"], kept)
            stream = Passed(pieces, sent.scope["path"], self.slow_s, held.pop_all())
        stream.status_code = start["status"]
        stream.headers.update(kept)
        return stream

    async def tokenized(self, document: bytes, incoming: Incoming, path: str) -> bytes:
        """Return a replica's answer at a path; empty without one."""
        try:
            said = await self._ask(to_replica(incoming.request, document, "POST", path))
        except (RayError, RayServeException, Broken):
            return b""
        return bytes(said.body)


async def _bodies(messages: AsyncIterator[Message]) -> AsyncGenerator[bytes]:
    """Yield the pieces of an answer that has begun. Raises `Broken`."""
    try:
        async for message in messages:
            yield message.get("body", b"")
    except RayError as error:
        raise Broken from error


class ReplicaPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The number, size and limits of replicas.

    `num_replicas`, `max_replicas`  a fixed number; with the second, Ray Serve chooses one between the two
    `num_cpus`       cores of each
    `max_inflight`   requests that each has at most, and that wait beside
    `running`        requests for which a replica is enough, where their number changes
    `max_body`       bytes of a request
    `grace_s`        seconds that running requests have to end when a replica stops
    """

    num_replicas: int
    max_replicas: int | None = None
    num_cpus: float = 1.0
    max_inflight: int = 256
    running: int = 64
    max_body: int = 64 << 20
    grace_s: float = 30.0
    router: str = "prefix"
    load_limit: float = 1.25


def application(opener: Opener, keys: ApiKeys, plan: ReplicaPlan) -> serve.Application:
    """Return the application, to be run by `ray.serve.run`. Raises `ConfigError` for an unknown router."""
    router = router_named(plan.router, load_limit=plan.load_limit)
    count: dict[str, Any] = {"num_replicas": plan.num_replicas}
    if plan.max_replicas is not None:
        sizes = {"min_replicas": plan.num_replicas, "max_replicas": plan.max_replicas}
        count = {"autoscaling_config": sizes | {"target_ongoing_requests": plan.running}}
    routing = {
        "request_router_class": "quire_router.request_router.ReplicaRouter",
        "request_router_kwargs": {"router": plan.router, "load_limit": plan.load_limit},
    }
    made: Any = _serve.deployment
    replicas = made(
        name="Replica",
        **count,
        ray_actor_options={"num_cpus": plan.num_cpus},
        max_ongoing_requests=plan.max_inflight,
        max_queued_requests=plan.max_inflight,
        graceful_shutdown_timeout_s=plan.grace_s,
        request_router_config=routing,
    )(ServedReplica)
    ingress = made(
        ray_actor_options={"num_cpus": 0},
        max_ongoing_requests=1 << 20,
        graceful_shutdown_timeout_s=plan.grace_s,
    )(_serve.ingress()(Ingress))
    return ingress.bind(
        replicas.bind(opener), keys, sees_prefix=router.sees_prefix, max_body=plan.max_body
    )
