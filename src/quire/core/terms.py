"""The terms that a request names: how firmly its blocks are kept, and how many of them."""

from __future__ import annotations

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
