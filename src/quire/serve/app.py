"""All routes as one application, and how errors are answered."""

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from quire.errors import QuireError
from quire.serve.generation import answered
from quire.serve.operator import Operator
from quire.serve.protocol import (
    ApiError,
    ChatRequest,
    CompletionRequest,
    Detokenize,
    EvictRequest,
    PinRequest,
    PromptRequest,
    read,
    refused,
)
from quire.serve.service import ServedModel


def make_app(service: ServedModel) -> Starlette:
    """Return the application: what clients with a key may ask, and what the operator may."""
    client, operator = ClientRoutes(service), Operator(service)

    def of_client(
        path: str, kind: Any, answer: Callable[[Any, Request, str | None], Awaitable[Any]]
    ) -> Route:
        async def handle(request: Request) -> Response:
            tenant = service.keys.tenant(request.headers)
            asked = read(kind, await service.body(request)) if kind else None
            return _response(await answer(asked, request, tenant))

        return Route(path, handle, methods=["POST" if kind else "GET"])

    def of_operator(
        path: str, kind: Any, answer: Callable[[Any, Request], Awaitable[Any]], method: str = ""
    ) -> Route:
        async def handle(request: Request) -> Response:
            service.keys.check_operator(request.headers)
            asked = read(kind, await service.body(request)) if kind else None
            return _response(await answer(asked, request))

        return Route(path, handle, methods=[method or ("POST" if kind else "GET")])

    routes = [
        of_client("/v1/completions", CompletionRequest, client.generate),
        of_client("/v1/chat/completions", ChatRequest, client.generate),
        of_client("/v1/models", None, client.models),
        of_client("/v1/models/{name:path}", None, client.model),
        of_client("/tokenize", PromptRequest, client.tokenize),
        of_client("/detokenize", Detokenize, client.detokenize),
        Route("/health", client.health),
        of_operator("/", None, operator.page),
        of_operator("/metrics", None, operator.metrics),
        of_operator("/v1/cache", None, operator.state),
        of_operator("/v1/cache/what-if", None, operator.what_if),
        of_operator("/v1/cache/explain", PromptRequest, operator.explain),
        of_operator("/v1/cache/pin", PinRequest, operator.pin),
        of_operator("/v1/cache/pins", None, operator.pins),
        of_operator("/v1/cache/pins/{number:int}", None, operator.unpin, "DELETE"),
        of_operator("/v1/cache/evict", EvictRequest, operator.evict),
    ]

    @asynccontextmanager
    async def life(_: Starlette) -> AsyncGenerator[None]:
        async with service.metrics.sampled():
            yield

    kinds = (ApiError, QuireError, HTTPException, ClientDisconnect, Exception)
    handlers: Any = dict.fromkeys(kinds, _failed)
    return Starlette(routes=routes, exception_handlers=handlers, lifespan=life)


class ClientRoutes:
    """What clients ask: each method takes a request's document, the request and its tenant."""

    def __init__(self, service: ServedModel) -> None:
        self._service = service

    async def generate(
        self, asked: ChatRequest | CompletionRequest, request: Request, tenant: str | None
    ) -> Any:
        """`/v1/completions` and `/v1/chat/completions`."""
        return await answered(self._service, request, tenant, asked)

    async def models(self, asked: None, request: Request, tenant: str | None) -> Any:
        """`/v1/models`."""
        return {"object": "list", "data": [self._model()]}

    async def model(self, asked: None, request: Request, tenant: str | None) -> Any:
        """`/v1/models/NAME`."""
        self._service.check_model(request.path_params["name"])
        return self._model()

    def _model(self) -> dict[str, Any]:
        own = {"id": self._service.model, "object": "model", "created": self._service.created}
        return own | {"owned_by": "quire", "max_model_len": self._service.max_model_len}

    async def tokenize(self, asked: PromptRequest, request: Request, tenant: str | None) -> Any:
        """`/tokenize`."""
        self._service.check_model(asked.model)
        ids = await self._service.ids(asked)
        return {"count": len(ids), "max_model_len": self._service.max_model_len, "tokens": ids}

    async def detokenize(self, asked: Detokenize, request: Request, tenant: str | None) -> Any:
        """`/detokenize`."""
        return {"prompt": await self._service.text(asked.tokens)}

    async def health(self, request: Request) -> Response:
        """`/health`: whether the engine takes requests."""
        return Response(status_code=200 if self._service.is_taking else 503)


def _response(answer: Any) -> Response:
    if isinstance(answer, Response):
        return answer
    return Response(msgspec.json.encode(answer), media_type="application/json")


async def _failed(request: Request, error: Exception) -> Response:
    """Answer an error; one that nobody foresaw says nothing of the server's inside."""
    if isinstance(error, ClientDisconnect):
        return Response(status_code=499)  # nobody reads it
    if isinstance(error, HTTPException):
        what = f"{request.method} {request.url.path[:80]!r} is not offered here"
        error = ApiError(error.status_code, what)
    elif not isinstance(error, (ApiError, QuireError)):
        error = ApiError(500, "the server failed at this request; its log says where")
    said = refused(error)
    body = msgspec.json.encode(said.document())
    return Response(body, said.status, headers=said.headers, media_type="application/json")
