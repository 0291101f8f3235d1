"""A gateway between clients and servers of OpenAI's API, and of Anthropic's messages.

It reads requests as far as routing needs, and passes answers on.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import ExitStack, asynccontextmanager, suppress
from hashlib import sha256
from typing import Any, NamedTuple

import msgspec
import numpy as np
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from quire.core.tokens import IntArray
from quire.web.bodies import body_of
from quire.web.clients import DONE, RESPONSES, EventStream, sse, until_gone
from quire.web.errors import MESSAGES, ApiError, error_document, handlers
from quire.web.keys import ApiKeys
from quire_router.prefixes import Asker, Question
from quire_router.usage import AnswerUsage

ROUTED = ("/v1/completions", "/v1/chat/completions", MESSAGES)
READ = (*ROUTED, RESPONSES, f"{RESPONSES}/input_tokens", f"{RESPONSES}/tokenize")
"""Paths of which a router reads the body."""

OPEN = ("/health", "/ping", "/openapi.json")
"""Paths that need no key."""

_GET, _POST = ("GET",), ("POST",)
PASSED = {
    "/openapi.json": _GET,
    "/ping": _GET + _POST,
    "/version": _GET,
    "/v1/models": _GET,
    "/v1/models/{name:path}": _GET,
    "/tokenize": _POST,
    "/detokenize": _POST,
    f"{MESSAGES}/count_tokens": _POST,
    f"{MESSAGES}/tokenize": _POST,
    RESPONSES: _POST,
    f"{RESPONSES}/input_tokens": _POST,
    f"{RESPONSES}/tokenize": _POST,
    f"{RESPONSES}/{{name}}": ("GET", "DELETE"),
    f"{RESPONSES}/{{name}}/input_items": _GET,
}

PROMPT_FIELDS = frozenset(
    (
        "add_generation_prompt",
        "add_special_tokens",
        "chat_template_kwargs",
        "continue_final_message",
        "documents",
        "messages",
        "model",
        "reasoning_effort",
        "tool_choice",
        "tools",
    )
)
"""Fields of completions and chats on which the tokens of a prompt depend, but for `prompt`."""

_KEPT = re.compile("resp_([0-9a-f]{8})_")
"""The beginning of a response's id; the group is the home of the server that keeps it."""


class Incoming(NamedTuple):
    """An incoming request: as received, its API key and tenant, body, and parsed fields.

    `headers` has the first of each name. `question` is None if the body cannot be parsed, or is not needed to choose
    a server.
    """

    request: Request
    headers: Mapping[str, str]
    who: Asker
    body: bytes
    question: Question | None

    @property
    def home(self) -> str | None:
        """The home of the server that keeps the response which the request names."""
        name = self.question and self.question.previous_response_id
        path: str = self.request.scope["path"]
        found = _KEPT.match(str(name or path.removeprefix(f"{RESPONSES}/")))
        return found and found[1]


class Broken(Exception):  # noqa: N818 - what happened, not a programmer's error
    """A server that broke off in its answer."""


class Gateway(ABC):
    """Passes requests on; who answers, and how it is reached, is its subclass's.

    `max_body`  bytes of a request
    `slow_s`    seconds in which a body has to arrive, a client has to take what it is sent, and a server has to go on
    """

    def __init__(self, keys: ApiKeys, *, max_body: int = 64 << 20, slow_s: float = 600.0) -> None:
        self.keys, self.max_body, self.slow_s = keys, max_body, slow_s

    def app(self, *routes: Route) -> ASGIApp:
        """Return the application: the routes of clients, and `routes`."""
        passed = [Route(path, self._handle, methods=["POST"]) for path in ROUTED]
        passed += [Route(path, self._handle, methods=[*each]) for path, each in PASSED.items()]
        return Starlette(
            routes=[*passed, *routes], exception_handlers=handlers(), lifespan=self.life
        )

    @asynccontextmanager
    async def life(self, _: Starlette) -> AsyncGenerator[None]:
        """Background tasks of the gateway, from start to shutdown."""
        yield

    @abstractmethod
    async def answered(self, incoming: Incoming) -> Response:
        """Return the answer to a request: `whole`, or a `Passed` stream."""

    @abstractmethod
    async def tokenized(self, document: bytes, incoming: Incoming, path: str) -> bytes:
        """Return a server's answer at a path for a request's sender; empty if none answers."""

    async def tokens(self, incoming: Incoming, asked: Question) -> IntArray | None:
        """Return a prompt as tokens, as a server reads it, int32 [num_tokens]; None where it cannot be read."""
        path: str = incoming.request.scope["path"]
        api = next((each for each in (MESSAGES, RESPONSES) if path.startswith(each)), "")
        document, prompt = incoming.body, None if api else asked.first_prompt
        try:
            if isinstance(prompt, list):
                return np.array(prompt, np.int32)
            if not api:
                given = msgspec.json.decode(document, type=dict[str, msgspec.Raw])
                fields: dict[str, Any] = {
                    name: given[name] for name in PROMPT_FIELDS & given.keys()
                }
                own = {} if "messages" in fields else {"prompt": prompt}
                document = msgspec.json.encode(fields | own)
            said = await self.tokenized(document, incoming, f"{api}/tokenize")
            return np.array(msgspec.json.decode(said, type=_Tokenized).tokens, np.int32)
        except (msgspec.MsgspecError, ValueError, TypeError, OverflowError):
            return None

    def tenant(self, path: str, headers: Mapping[str, str]) -> str | None:
        """Return the sender of a request, None on a gateway without keys. Raises `ApiError`."""
        return None if path in OPEN else self.keys.tenant(headers)

    def reads(self, path: str) -> bool:
        """Whether the body of a path's requests is read."""
        return path in READ

    async def _handle(self, request: Request) -> Response:
        headers = _headers_of(request.scope)
        key = sha256("\n".join(keys_of(headers).values()).encode()).hexdigest()
        who = Asker(key, self.tenant(request.scope["path"], headers))
        body = await body_of(request, self.max_body, self.slow_s)
        incoming = self.with_body(Incoming(request, headers, who, b"", None), body)
        return await until_gone(request, self.answered(incoming))

    def with_body(self, incoming: Incoming, body: bytes) -> Incoming:
        """Return a request with another body."""
        question = None
        if self.reads(incoming.request.scope["path"]):
            try:
                question = msgspec.json.decode(body, type=Question)
            except (msgspec.MsgspecError, UnicodeError, RecursionError):
                question = None  # the server says what is wrong with it
        return incoming._replace(body=body, question=question)


class _Tokenized(msgspec.Struct):
    """An answer of `/tokenize`."""

    tokens: list[int]


class Passed(EventStream):
    """A stream that lets go of its server at its end, whatever ends it.

    `path`  of the API whose error it ends with when its server breaks off; None: it then breaks off as well
    """

    def __init__(
        self,
        pieces: AsyncGenerator[bytes],
        path: str | None,
        slow_s: float,
        held: ExitStack,
    ) -> None:
        super().__init__(pieces if path is None else _events(pieces, path), slow_s)
        self._held = held

    def observe(self, usage: AnswerUsage, held: ExitStack) -> None:
        """Read its usage as it passes, and let go of more at its end."""
        self._events = usage.reading(self._events)
        self._held.push(held)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with suppress(Broken), self._held:  # an answer without its end closes the connection
            await super().__call__(scope, receive, send)


def keys_of(headers: Mapping[str, str]) -> dict[str, str]:
    """Return the headers of a request that have its key."""
    names = ("authorization", "x-api-key")
    return {name: headers[name] for name in names if name in headers}


def _headers_of(scope: Scope) -> dict[str, str]:
    """Return the first header of each name."""
    pairs = reversed(scope["headers"])
    return {name.decode("latin-1"): value.decode("latin-1") for name, value in pairs}


async def _events(pieces: AsyncIterator[bytes], path: str) -> AsyncGenerator[bytes]:
    """Yield a path's stream by whole lines; one that is `Broken` off ends with an error."""
    line: list[bytes] = []  # its pieces: a long one is joined once
    try:
        async for piece in pieces:
            whole, end, rest = piece.rpartition(b"\n")
            if end:
                yield b"".join([*line, whole, end])
                line = []
            line.append(rest)
    except Broken:
        error = ApiError(502, "the server that answered broke off; ask again", code="broken_off")
        is_message = path.startswith(MESSAGES)
        head, end = (b"\n\nevent: error\n", b"") if is_message else (b"\n", DONE)
        yield head + sse(error_document(path, error)) + end
    else:
        if last := b"".join(line):
            yield last
