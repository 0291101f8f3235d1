"""All routes as one application."""

from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any, TypeAlias

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from quire._version import __version__
from quire.engines.purging import PurgeRequest
from quire.errors import ConfigError
from quire.serve import protocol
from quire.serve.completions import CompletionReply
from quire.serve.fields import MAX_TOLD, unknown_in
from quire.serve.generation import answered
from quire.serve.message_requests import MessagePrompt, MessageRequest
from quire.serve.messages import MessageReply
from quire.serve.openapi import Made, document
from quire.serve.operator import Operator
from quire.serve.response_routes import ResponseRoutes
from quire.serve.responses import ResponseRequest
from quire.serve.service import ServedModel
from quire.web.bodies import body_of, read
from quire.web.errors import as_json, handlers
from quire.web.mends import MENDED

Answer: TypeAlias = Callable[[Any, Request], Awaitable[Any]]
Admit: TypeAlias = Callable[[Mapping[str, str]], str | None]


def make_app(service: ServedModel) -> Starlette:
    """Return the application: the routes of clients with a key, and those of the operator.

    Each answer gets the request's document, of the struct that stands before it, and the request, whose state has the tenant.
    """
    client, operator, bounds = ClientRoutes(service), Operator(service), service.bounds
    responses = ResponseRoutes(service)
    generate = partial(answered, service, CompletionReply)

    def route(admit: Admit, method: str, path: str, kind: Any, answer: Answer) -> Route:
        async def handle(request: Request) -> Response:
            request.state.tenant, asked, ignored = admit(request.headers), None, list[str]()
            mended = None
            if kind is not None:
                body = await body_of(request, bounds.max_body, bounds.slow_s)
                if mended := await service.mends.of(request.scope, body, bounds.max_body):
                    body = mended.body
                asked, ignored = read(kind, body), unknown_in(kind, body)
            said = await answer(asked, request)
            response = said if isinstance(said, Response) else as_json(said)
            if mended:
                response.headers[MENDED] = mended.told
            if ignored:
                service.log.num_ignored_fields += len(ignored)
                response.headers["X-Quire-Ignored"] = ", ".join(ignored[:MAX_TOLD])
            return response

        return Route(path, handle, methods=[method])

    for_clients: list[Made] = [
        ("POST", "/v1/completions", protocol.CompletionRequest, generate),
        ("POST", "/v1/chat/completions", protocol.ChatRequest, generate),
        ("POST", "/v1/messages", MessageRequest, client.message),
        ("POST", "/v1/messages/count_tokens", MessagePrompt, client.count_tokens),
        ("POST", "/v1/messages/tokenize", MessageRequest, client.tokenize),
        ("POST", "/v1/responses", ResponseRequest, responses.create),
        ("POST", "/v1/responses/input_tokens", ResponseRequest, responses.count),
        ("POST", "/v1/responses/tokenize", ResponseRequest, responses.tokenize),
        ("GET", "/v1/responses/{name}", None, responses.get),
        ("DELETE", "/v1/responses/{name}", None, responses.delete),
        ("GET", "/v1/responses/{name}/input_items", None, responses.input_items),
        ("GET", "/v1/models", None, client.models),
        ("GET", "/v1/models/{name:path}", None, client.model),
        ("GET", "/version", None, client.version),
        ("POST", "/tokenize", protocol.PromptRequest, client.tokenize),
        ("POST", "/detokenize", protocol.Detokenize, client.detokenize),
    ]
    for_operators: list[Made] = [
        ("GET", "/", None, operator.page),
        ("GET", "/metrics", None, operator.metrics),
        ("GET", "/v1/cache", None, operator.state),
        ("GET", "/v1/cache/tree", None, operator.tree),
        ("GET", "/v1/cache/what-if", None, operator.what_if),
        ("POST", "/v1/cache/explain", protocol.CacheRequest, operator.explain),
        ("POST", "/v1/cache/pin", protocol.PinRequest, operator.pin),
        ("GET", "/v1/cache/pins", None, operator.pins),
        ("DELETE", "/v1/cache/pins/{number:int}", None, operator.unpin),
        ("POST", "/v1/cache/evict", protocol.EvictRequest, operator.evict),
        ("POST", "/v1/cache/purge", PurgeRequest, operator.purge),
    ]
    asks = [("GET", "/health"), ("GET", "/ping"), ("POST", "/ping")]
    open_to_all: list[Made] = [(*each, None, client.health) for each in asks]
    has_keys = bool(service.keys.names)
    said = as_json(document(open_to_all, for_clients, for_operators, has_keys=has_keys)).body

    async def described(_: Request) -> Response:
        return Response(said, media_type="application/json")

    routes = [Route("/openapi.json", described)]
    routes += [route(lambda _: None, *each) for each in open_to_all]
    routes += [route(service.keys.tenant, *each) for each in for_clients]
    routes += [route(service.keys.check_operator, *each) for each in for_operators]
    return Starlette(
        routes=routes,
        exception_handlers=handlers(protocol.FIELDS | {*ResponseRequest.__struct_encode_fields__}),
        lifespan=lambda _: operator.overview.sampling(service.running.call),
    )


class ClientRoutes:
    """The routes of clients."""

    def __init__(self, service: ServedModel) -> None:
        self._service = service
        size = service.running.engine.manager.block_size
        self._message = partial(answered, service, partial(MessageReply, block_size=size))

    async def message(self, asked: MessageRequest, request: Request) -> Any:
        enabled = asked.thinking is not None and asked.thinking.type == "enabled"
        if enabled and self._service.reasoning is None:
            said = "thinking of type enabled is not offered: the model's chat template has no reasoning; send disabled"
            raise ConfigError(said)
        return await self._message(asked.chat(), request)

    async def count_tokens(self, asked: MessagePrompt, request: Request) -> Any:
        return {"input_tokens": (await self.tokenize(asked, request))["count"]}

    async def models(self, asked: None, request: Request) -> Any:
        return {
            "object": "list",
            "data": [
                self._service.card(each) for each in self._service.names + self._service.adapters
            ],
        }

    async def model(self, asked: None, request: Request) -> Any:
        self._service.check_model(name := request.path_params["name"])
        return self._service.card(name)

    async def version(self, asked: None, request: Request) -> Any:
        return {"version": __version__}

    async def tokenize(
        self, asked: protocol.PromptRequest | MessagePrompt, request: Request
    ) -> dict[str, Any]:
        self._service.check_model(asked.model)
        prompt = asked.chat() if isinstance(asked, MessagePrompt) else asked
        ids = await self._service.one_prompt(prompt)
        return self._service.counted(ids)

    async def detokenize(self, asked: protocol.Detokenize, request: Request) -> Any:
        self._service.check_model(asked.model)
        return {"prompt": await self._service.reader.text(asked.tokens)}

    async def health(self, asked: None, request: Request) -> Response:
        """Tell anybody, from anywhere, whether requests are taken."""
        is_taking = self._service.running.is_alive and not self._service.is_ending
        return Response(status_code=200 if is_taking else 503)
