"""A request on its way from the ingress to a replica, past the request router."""

from hashlib import sha256
from typing import Any, NamedTuple

import msgspec
from starlette.requests import Request

from quire.core.tokens import IntArray

ASGI_KEYS = ("type", "asgi", "http_version", "method", "scheme", "path", "raw_path", "query_string", "root_path", "headers", "client", "server")  # fmt: skip

EVENTS = "events"
"""Of a replica's metadata, where it publishes its events, as `ToldPrefixes.follow` takes it."""


class SentPrompt(NamedTuple):
    """The prompt of a request, as far as a router reads it.

    `tokens`  int32 [num_tokens]; None: the router does not need them
    `salt`    its `cache_salt`
    `tenant`, `session`  its tenant and its conversation
    `model`   its model, which may be an adapter
    """

    tokens: "IntArray | None"
    salt: str | None = None
    tenant: str | None = None
    session: str | None = None
    model: Any = None


class Sent(msgspec.Struct):
    """A request on its way to a replica: ASGI scope and body for its application.

    `prompt` is given where routing depends on it, and `home` where a replica keeps what the request names.
    """

    scope: dict[str, Any]
    body: bytes
    prompt: SentPrompt | None = None
    home: str | None = None


class Told(NamedTuple):
    """A complete answer of one replica."""

    replica: str
    status: int
    headers: dict[str, str]
    body: bytes


def home_of(name: str) -> str:
    """Return the digest of a server's name with which the ids of the responses begin that it keeps."""
    return sha256(name.encode()).hexdigest()[:8]


def to_replica(
    request: Request, body: bytes, method: str | None = None, path: str | None = None
) -> Sent:
    """Return a request as it is sent to a replica; with a path, for that one instead of its own."""
    scope = {key: value for key, value in request.scope.items() if key in ASGI_KEYS}
    if path is not None:
        scope |= {"method": method, "path": path, "raw_path": path.encode()}
    return Sent(scope, body)
