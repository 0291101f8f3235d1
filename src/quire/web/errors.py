"""Errors as answers: OpenAI's error object, and nothing of the inside."""

from collections.abc import Mapping
from typing import Any

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

KINDS = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}

HANDLED = (HTTPException, ClientDisconnect, Exception)
"""Of what else than its own errors an application has `failed` make an answer."""


class ApiError(Exception):
    """A request that is answered with an error: its status, and what OpenAI's error object says."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code
        self.headers = dict(headers or {})

    def document(self) -> dict[str, Any]:
        """Return the error object."""
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        error = {"message": str(self), "type": KINDS.get(self.status, kind)}
        return {"error": error | {"param": self.param, "code": self.code}}


async def failed(request: Request, error: Exception) -> Response:
    """Answer an error; one that nobody foresaw says nothing of the server's inside."""
    if isinstance(error, ClientDisconnect):
        return Response(status_code=499)  # nobody reads it
    if isinstance(error, HTTPException):
        what = f"{request.method} {request.url.path[:80]!r} is not offered here"
        error = ApiError(error.status_code, what)
    if not isinstance(error, ApiError):
        error = ApiError(500, "the server failed at this request; its log says where")
    answer = as_json(error.document(), error.status)
    answer.headers.update(error.headers)
    return answer


def as_json(document: Any, status: int = 200) -> Response:
    """Return a document as an answer."""
    return Response(msgspec.json.encode(document), status, media_type="application/json")
