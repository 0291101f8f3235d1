"""Hints: what callers foresee of the reuse of what they store."""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

from quire.errors import ConfigError

Reuse: TypeAlias = Literal["unknown", "session", "never"]

REUSES = ("unknown", "session", "never")

FOREVER = float("inf")
"""Seconds that do not run out: of a retention, or until a use that nothing says is the last."""


class Hint(msgspec.Struct, frozen=True, omit_defaults=True):
    """A caller's forecast of the reuse of the blocks that its request stores.

    `reuse`       "never": nobody comes back to them; "session": only this session does;
                  "unknown": nothing is known
    `ttl_s`       nobody comes back to them later than so many seconds after the request's end; with
                  a session, after the end of its last request
    `session_id`  whose turn it is, within the request's scope; `CacheManager.end_session` says
                  that none follows

    A forecast, not a command: blocks that nobody is expected to come back to are evicted before all
    others, and found like any other until then. A request of somebody else that uses them makes them
    ordinary ones. A group with a window or a state still loses its own blocks by their last use, before
    whole prefixes go. Raises `ConfigError`.
    """

    reuse: Reuse = "unknown"
    ttl_s: float | None = None
    session_id: str | None = None

    def __post_init__(self) -> None:
        if self.reuse not in REUSES:
            raise ConfigError(f"a hint's reuse is one of {', '.join(REUSES)}, got {self.reuse!r}")
        if self.session_id is not None:
            check_session_id(self.session_id)
        if self.reuse == "session" and self.session_id is None:
            raise ConfigError('reuse="session" needs a session_id: Hint("session", session_id="a")')

    @property
    def lasts_s(self) -> float:
        """Seconds after a request's end for which its blocks are expected to be used again."""
        if self.reuse == "never":
            return 0.0
        return FOREVER if self.ttl_s is None else self.ttl_s


NO_HINT = Hint()


def check_session_id(session_id: object) -> None:
    """Raise `ConfigError` unless this is a name of a session."""
    if not isinstance(session_id, str) or not session_id:
        raise ConfigError(f"session_id is a text that names the session, got {session_id!r}")
