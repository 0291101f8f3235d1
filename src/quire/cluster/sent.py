"""A request on its way from the ingress to a replica, past the request router."""

from typing import Any, NamedTuple

import msgspec

from quire.core.tokens import IntArray

EVENTS = "events"
"""Of a replica's metadata, where it publishes its events, as `ToldPrefixes.follow` takes it."""


class SentPrompt(NamedTuple):
    """What is looked at of a request: tokens, int32 [num_tokens] (None: nobody looks at them), its `cache_salt`, whose, in which conversation."""

    tokens: "IntArray | None"
    salt: str | None = None
    tenant: str | None = None
    session: str | None = None


class Sent(msgspec.Struct):
    """A request on its way to a replica: what the replica's application is told, as ASGI has it, and the prompt where it matters who answers."""

    scope: dict[str, Any]
    body: bytes
    prompt: SentPrompt | None = None
