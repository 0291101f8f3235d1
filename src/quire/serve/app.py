"""All routes as one application, and how errors are answered."""

from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any, TypeAlias

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from quire.errors import QuireError
from quire.serve.generation import answered
from quire.serve.operator import Operator
from quire.serve.protocol import (
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
from quire.web.clients import body_of
from quire.web.errors import HANDLED, ApiError, as_json, failed

Answer: TypeAlias = Callable[[Any, Request], Awaitable[Any]]
Admit: TypeAlias = Callable[[Mapping[str, str]], str | None]


def make_app(service: ServedModel) -> Starlette:
    """Return the application: what clients with a key may ask, and what the operator may.

    Each answer gets the request's document, of the struct that stands beside it, and the request, whose state has the tenant.
    """
    keys, client, operator = service.keys, ClientRoutes(service), Operator(service)

    def route(path: str, kind: Any, answer: Answer, admit: Admit, method: str = "") -> Route:
        async def handle(request: Request) -> Response:
            request.state.tenant = admit(request.headers)
            asked = (
                read(kind, await body_of(request, service.bounds.max_body, service.bounds.slow_s))
                if kind
                else None
            )
            said = await answer(asked, request)
            return said if isinstance(said, Response) else as_json(said)

        return Route(path, handle, methods=[method or ("POST" if kind else "GET")])

    routes = [
        route("/v1/completions", CompletionRequest, client.generate, keys.tenant),
        route("/v1/chat/completions", ChatRequest, client.generate, keys.tenant),
        route("/v1/models", None, client.models, keys.tenant),
        route("/v1/models/{name:path}", None, client.model, keys.tenant),
        route("/tokenize", PromptRequest, client.tokenize, keys.tenant),
        route("/detokenize", Detokenize, client.detokenize, keys.tenant),
        route("/health", None, client.health, anybody),
        route("/", None, operator.page, keys.check_operator),
        route("/metrics", None, operator.metrics, keys.check_operator),
        route("/v1/cache", None, operator.state, keys.check_operator),
        route("/v1/cache/what-if", None, operator.what_if, keys.check_operator),
        route("/v1/cache/explain", PromptRequest, operator.explain, keys.check_operator),
        route("/v1/cache/pin", PinRequest, operator.pin, keys.check_operator),
        route("/v1/cache/pins", None, operator.pins, keys.check_operator),
        route("/v1/cache/pins/{number:int}", None, operator.unpin, keys.check_operator, "DELETE"),
        route("/v1/cache/evict", EvictRequest, operator.evict, keys.check_operator),
    ]

    @asynccontextmanager
    async def life(_: Starlette) -> AsyncGenerator[None]:
        async with service.metrics.sampled():
            yield

    handlers: Any = dict.fromkeys((ApiError, QuireError, *HANDLED), _failed)
    return Starlette(routes=routes, exception_handlers=handlers, lifespan=life)


class ClientRoutes:
    """What clients ask."""

    def __init__(self, service: ServedModel) -> None:
        self._service = service

    async def generate(self, asked: ChatRequest | CompletionRequest, request: Request) -> Any:
        """`/v1/completions` and `/v1/chat/completions`."""
        return await answered(self._service, request, asked)

    async def models(self, asked: None, request: Request) -> Any:
        """`/v1/models`."""
        return {"object": "list", "data": [self._model()]}

    async def model(self, asked: None, request: Request) -> Any:
        """`/v1/models/NAME`."""
        self._service.check_model(request.path_params["name"])
        return self._model()

    def _model(self) -> dict[str, Any]:
        own = {"id": self._service.model, "object": "model", "created": self._service.created}
        return own | {"owned_by": "quire", "max_model_len": self._service.max_model_len}

    async def tokenize(self, asked: PromptRequest, request: Request) -> Any:
        """`/tokenize`."""
        self._service.check_model(asked.model)
        ids = await self._service.ids(asked)
        return {"count": len(ids), "max_model_len": self._service.max_model_len, "tokens": ids}

    async def detokenize(self, asked: Detokenize, request: Request) -> Any:
        """`/detokenize`."""
        return {"prompt": await self._service.text(asked.tokens)}

    async def health(self, asked: None, request: Request) -> Response:
        """`/health`: whether requests are taken; of anybody, from anywhere."""
        return Response(status_code=200 if self._service.is_taking else 503)


def anybody(headers: Mapping[str, str]) -> None:
    """Admit whoever asks."""


async def _failed(request: Request, error: Exception) -> Response:
    return await failed(request, refused(error) if isinstance(error, QuireError) else error)
