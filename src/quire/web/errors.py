"""Errors as answers: OpenAI's error object, or that of another API, and nothing of the inside."""

import logging
import re
import uuid
from collections.abc import Awaitable, Callable, Container, Mapping
from functools import partial
from typing import Any, TypeAlias

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from quire.errors import (
    ConfigError,
    DeadlinePassed,
    OutOfBlocks,
    PinBudgetExceeded,
    QueueTimeout,
    QuireError,
    ScopeError,
    TenantPurged,
    TokensError,
)
from quire.web.mends import MENDED

logger = logging.getLogger("uvicorn.error")  # which uvicorn prints

MAX_MESSAGE = 2000
"""Characters of an error's message: it may repeat what was sent."""

UNFORESEEN = "the server failed at this request; its log says where"
MESSAGES = "/v1/messages"
"""The beginning of the paths of Anthropic's API."""

MESSAGES_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
KINDS = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}

Handlers: TypeAlias = dict[Any, Callable[[Request, Exception], Awaitable[Response]]]


class ApiError(Exception):
    """A request that is answered with an error: its status, and OpenAI's error object."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        cut = message if len(message) <= MAX_MESSAGE else message[:MAX_MESSAGE] + "..."
        super().__init__(cut)
        self.status, self.param, self.code = status, param, code
        self.headers = dict(headers or {})

    def document(self) -> dict[str, Any]:
        """Return the error object."""
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        error = {"message": str(self), "type": KINDS.get(self.status, kind)}
        return {"error": error | {"param": self.param, "code": self.code}}


def refused(error: Exception, fields: Container[str] = ()) -> ApiError:
    """Return the client's view of an error that quire raised for its request.

    What is wrong with a request is about that of its `fields` which the message begins with, if it begins with one.
    """
    match error:
        case ApiError():
            return error
        case ConfigError() | TokensError() | ScopeError():
            first = re.split(r"\W", str(error), maxsplit=1)[0]
            own = "prompt" if isinstance(error, TokensError) else None
            return ApiError(400, str(error), param=first if first in fields else own)
        case OutOfBlocks():
            pool = error.free + error.cached + error.active
            if error.needed > pool or isinstance(error, PinBudgetExceeded):
                return ApiError(400, str(error), code="out_of_memory")
            said = f"there is no room at the moment, ask again later: {error}"
            return ApiError(503, said, code="out_of_memory", headers={"Retry-After": "10"})
        case QueueTimeout():
            return ApiError(503, str(error), code="overloaded", headers={"Retry-After": "10"})
        case TenantPurged():
            return ApiError(503, str(error), code="purged", headers={"Retry-After": "1"})
        case DeadlinePassed():
            return ApiError(504, str(error), param="deadline_s", code="deadline_passed")
        case QuireError():
            said = f"the engine failed at this request: {error or type(error).__name__}"
            return ApiError(500, said)
        case _:  # in a stream that has begun; before, the server itself logs it
            logger.error("a stream broke off", exc_info=error)
            return ApiError(500, UNFORESEEN)


def error_document(path: str, error: ApiError) -> dict[str, Any]:
    """Return an error in the shape of a path's API: OpenAI's, or Anthropic's, which has a type itself."""
    if not path.startswith(MESSAGES):
        return error.document()
    kind = "api_error" if error.status >= 500 else "invalid_request_error"
    said = {"type": MESSAGES_KINDS.get(error.status, kind), "message": str(error)}
    return {"type": "error", "error": said, "request_id": f"req_{uuid.uuid4().hex[:24]}"}


def handlers(fields: Container[str] = ()) -> Handlers:
    """Return what makes answers of the errors of an application, whose requests have these fields."""
    kinds = (ApiError, QuireError, HTTPException, ClientDisconnect, Exception)
    return dict.fromkeys(kinds, partial(_answer, fields))


async def _answer(fields: Container[str], request: Request, error: Exception) -> Response:
    """Answer an error; an unforeseen one reveals nothing of the server."""
    if isinstance(error, ClientDisconnect):
        return Response(status_code=499)  # nobody reads it
    if isinstance(error, HTTPException):
        what = f"{request.method} {request.url.path[:80]!r} is not offered here"
        error = ApiError(error.status_code, what)
    elif not isinstance(error, (ApiError, QuireError)):
        error = ApiError(500, UNFORESEEN)
    said = refused(error, fields)
    document = error_document(request.url.path, said)
    answer = as_json(document, said.status)
    if "request_id" in document:
        answer.headers["request-id"] = document["request_id"]
    if (mended := request.scope.get("state", {}).get("mended")) is not None:
        answer.headers[MENDED] = mended.told
    answer.headers.update(said.headers)
    return answer


def as_json(document: Any, status: int = 200) -> Response:
    """Return a document as an answer."""
    return Response(msgspec.json.encode(document), status, media_type="application/json")
