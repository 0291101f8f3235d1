"""The terms that a request names: how firmly its blocks are kept, and how many of them."""

from __future__ import annotations

from typing import TypedDict

import msgspec

from quire.core.hints import NO_HINT, Hint
from quire.core.settings import ManagerSettings
from quire.errors import ConfigError

MAX_PRIORITY = 100

ENDLESS = 2**31
"""More blocks than a sequence has: all of them may be published."""


def check_priority(priority: object) -> int:
    """Return a priority; raise `ConfigError` if it is none."""
    if type(priority) is not int or abs(priority) > MAX_PRIORITY:
        msg = f"priority must be an integer from {-MAX_PRIORITY} to {MAX_PRIORITY}"
        raise ConfigError(f"{msg}, got {priority!r}")
    return priority


def check_store_until(num_tokens: object) -> int:
    """Return a number of tokens, 0 or more; raise `ConfigError` if it is none."""
    if type(num_tokens) is not int or num_tokens < 0:
        msg = "store_until is the number of tokens to store, an integer from 0 (or None for all of them)"
        raise ConfigError(f"{msg}, got {num_tokens!r}")
    return num_tokens


class RequestTerms(TypedDict, total=False):
    """What `CacheManager.open` takes beside a prompt.

    `priority`     from -100 to 100: blocks of a higher one are evicted later than any of a lower one
    `retain_s`     seconds after its last use for which the path is evicted only when nothing else is left
    `store_until`  tokens that are stored at most, rounded down to a block: 0 stores nothing of the request,
                   the prompt's length none of its answer
    `hint`         what the caller foresees of their reuse
    """

    priority: int
    retain_s: float | None
    store_until: int | None
    hint: Hint


class Wanted(msgspec.Struct, frozen=True):
    """The terms of a request, checked."""

    priority: int = 0
    retain_s: float = 0.0
    store_until: int = ENDLESS
    hint: Hint = NO_HINT


USUAL = Wanted()


def wanted_terms(settings: ManagerSettings, given: RequestTerms) -> Wanted:
    """Return the terms that a request names, checked; raise `ConfigError`."""
    unknown = given.keys() - RequestTerms.__annotations__.keys()
    if unknown:
        names = ", ".join(RequestTerms.__annotations__)
        raise ConfigError(f"open takes {names} beside a prompt, not {', '.join(sorted(unknown))}")
    hint: object = given.get("hint", NO_HINT)
    if not isinstance(hint, Hint):
        raise ConfigError(f"hint must be a quire.Hint, got {hint!r}")
    settings.check_duration("a hint's ttl_s", hint.ttl_s)
    store_until = given.get("store_until")
    wanted = Wanted(
        check_priority(given.get("priority", 0)),
        settings.check_duration("retain_s", given.get("retain_s")),
        ENDLESS if store_until is None else check_store_until(store_until),
        hint,
    )
    return USUAL if wanted == USUAL else wanted
