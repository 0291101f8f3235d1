"""Answers to pages of other sites: the headers by which a browser shows them (CORS)."""

from collections.abc import Collection

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

EXPOSED = (
    "Request-Id",
    "Retry-After",
    "X-Quire-Ignored",
    "X-Quire-Mended",
    "X-Quire-Replica",
    "X-Quire-Upstream",
)
"""Headers of answers that pages may read, beside those that they always may."""

MAX_AGE_S = 600
"""Seconds for which a browser need not ask again whether it may ask."""


def with_cors(app: ASGIApp, origins: Collection[str]) -> ASGIApp:
    """Return an application that pages of these origins may ask; without any, the application itself.

    It stands around all of it, so that errors have the headers too. No cookies are allowed: clients send keys.
    """
    if not origins:
        return app
    return CORSMiddleware(
        app,
        allow_origins=origins,
        allow_methods=("DELETE", "GET", "POST"),
        allow_headers=("*",),
        expose_headers=EXPOSED,
        max_age=MAX_AGE_S,
    )
