"""The terms on which the blocks of a request are kept, and its caller's forecast of their reuse."""

from __future__ import annotations

from typing import Literal, TypeAlias, TypedDict, get_args

import msgspec

from quire.config import check_number, check_seconds, check_text
from quire.core.node import FOREVER, Owner
from quire.core.policy import Clock
from quire.errors import ConfigError

MAX_PRIORITY = 100

MAX_WITHIN = 1e3
"""A forecast that may be wrong by more says nothing."""

Reuse: TypeAlias = Literal["unknown", "session", "never"]


class Hint(msgspec.Struct, frozen=True, omit_defaults=True):
    """A caller's forecast of the reuse of the blocks that its request stores.

    `reuse`         "never": nobody comes back to them; "session": only this session does;
                    "unknown": nothing is known
    `ttl_s`         nobody comes back to them later than so many seconds after the request's end; with
                    a session, after the end of its last request
    `session_id`    whose turn it is, within the request's scope; `CacheManager.end_session` says
                    that none follows
    `returns_in_s`  seconds from the request's end to the next one of its session; with "never", that one
                    goes on from what this one found
    `within`        factor by which that may be wrong, either way, from 1 on

    A forecast, not a command: blocks that nobody is expected to come back to are evicted before all
    others, and found like any other until then. A request of somebody else that uses them makes them
    ordinary ones. The policy `learned` ranks by expected times, and believes each caller and session as far
    as theirs came true; other policies take no notice of times. A group with a window or a state still loses
    its own blocks by their last use, before whole prefixes go. Raises `ConfigError`.
    """

    reuse: Reuse = "unknown"
    ttl_s: float | None = None
    session_id: str | None = None
    returns_in_s: float | None = None
    within: float = 2.0

    def __post_init__(self) -> None:
        known = get_args(Reuse)
        if type(self.reuse) is not str or self.reuse not in known:
            raise ConfigError(f"a hint's reuse is one of {', '.join(known)}, got {self.reuse!r}")
        if self.session_id is not None:
            check_text("session_id", self.session_id)
        if self.reuse == "session" and self.session_id is None:
            raise ConfigError('reuse="session" needs a session_id: Hint("session", session_id="a")')
        check_number("within", self.within, 1, MAX_WITHIN)
        check_seconds("a hint's ttl_s", self.ttl_s)
        check_seconds("a hint's returns_in_s", self.returns_in_s)

    @property
    def lasts_s(self) -> float:
        """Seconds after a request's end for which its blocks are expected to be used again."""
        return 0.0 if self.reuse == "never" else self.ttl_s or FOREVER


NO_HINT = Hint()


class RequestTerms(TypedDict, total=False):
    """Keyword arguments of `CacheManager.open` beside a prompt: `Terms` without the owner."""

    priority: int
    retain_s: float | None
    store_until: int | None
    hint: Hint


class Terms(msgspec.Struct, frozen=True):
    """The terms on which the blocks of a request are kept.

    `priority`     from -100 to 100: blocks of a higher one are evicted later than any of a lower one
    `retain_s`     seconds after its last use for which the path is evicted only when nothing else is left; 0 (None, to `open`) for none
    `store_until`  tokens that are stored at most, rounded down to a block: 0 stores nothing of the request,
                   the prompt's length none of its answer; None all
    `hint`         what the caller foresees of their reuse
    `owner`        of the nodes that the request stores, once it is open
    """

    priority: int = 0
    retain_s: float = 0.0
    store_until: int | None = None
    hint: Hint = NO_HINT
    owner: Owner | None = None


ORDINARY = Terms()


def terms_of(clock: Clock | None, given: RequestTerms) -> Terms:
    """Return the terms that a request names, checked; raise `ConfigError`."""
    known = RequestTerms.__annotations__
    if unknown := ", ".join(sorted(given.keys() - known.keys())):
        raise ConfigError(f"open takes {', '.join(known)} beside a prompt, not {unknown}")
    priority, store_until = given.get("priority", 0), given.get("store_until")
    hint: object = given.get("hint", NO_HINT)
    if not isinstance(hint, Hint):
        raise ConfigError(f"hint must be a quire.Hint, got {hint!r}")
    if type(priority) is not int or abs(priority) > MAX_PRIORITY:
        limit = f"from {-MAX_PRIORITY} to {MAX_PRIORITY}"
        raise ConfigError(f"priority must be an integer {limit}, got {priority!r}")
    retain_s = check_seconds("retain_s", given.get("retain_s"))
    check_timed(clock, retain_s=retain_s, ttl_s=hint.ttl_s, returns_in_s=hint.returns_in_s)
    if store_until is not None and (type(store_until) is not int or store_until < 0):
        msg = "store_until is the number of tokens to store, an integer from 0 (or None for all of them)"
        raise ConfigError(f"{msg}, got {store_until!r}")
    terms = Terms(priority, retain_s, store_until, hint)
    return ORDINARY if terms == ORDINARY else terms


def check_timed(clock: Clock | None, **seconds: float | None) -> None:
    """Raise `ConfigError` for durations, by their names, that nobody can measure."""
    for name, each in seconds.items():
        if each and clock is None:
            msg = f"{name}={each} needs a clock: CacheManager(..., clock=time.monotonic)"
            raise ConfigError(msg)
