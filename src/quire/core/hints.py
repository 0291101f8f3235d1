"""Hints: what the caller knows about the reuse of a request, and sessions that end."""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

from quire.errors import ConfigError

Reuse: TypeAlias = Literal["unknown", "session", "never"]

REUSES = ("unknown", "session", "never")


class Hint(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a caller knows about the next use of what a request stores.

    `reuse`       "never": nothing new of it comes back; "session": only its session comes
                  back to it; "unknown": nothing is known
    `ttl_s`       nobody comes back to it later than so many seconds after its end
    `session_id`  whose turn it is; `CacheManager.end_session` says that no other follows

    A hint is a forecast, not an order: what is not expected back is evicted before all else,
    and found like anything else until then. Raises `ConfigError`.
    """

    reuse: Reuse = "unknown"
    ttl_s: float | None = None
    session_id: str | None = None

    def __post_init__(self) -> None:
        if self.reuse not in REUSES:
            raise ConfigError(f"a hint's reuse is one of {', '.join(REUSES)}, got {self.reuse!r}")
        if self.session_id is not None and not isinstance(self.session_id, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigError(f"session_id is text or None, got {self.session_id!r}")
        if self.reuse == "session" and self.session_id is None:
            raise ConfigError('reuse="session" needs a session_id: Hint("session", session_id="a")')
