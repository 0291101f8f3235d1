"""Addresses and errors as people may see them: without passwords."""

from __future__ import annotations

import re
from collections.abc import Iterable

_KIND = re.compile(r"[a-z0-9+]*:(//)?")
_USER = re.compile(r"(?<=//)\S*(?=@)")
_OPTIONS = re.compile(r"(?<=\?)[^\s'\"<>]+")


def shown(line: str) -> str:
    """Return a line or an address without what may be secret: user, password and options.

    What stands before the last @ is taken for user and password, whatever is in it.
    """
    if "@" not in line:
        return line.partition("?")[0]
    kind = _KIND.match(line)
    before, _, where = line.rpartition("@")
    # Behind a question mark an @ may be part of an option: nothing of that is shown.
    return f"{kind[0] if kind else ''}..." + (
        "" if "?" in before else f"@{where.partition('?')[0]}"
    )


def without(text: str, secrets: Iterable[str] = ()) -> str:
    """Return what a library or a server said, without secrets, and without users and options of addresses in it."""
    for secret in filter(None, secrets):
        text = text.replace(secret, "...")
    return _OPTIONS.sub("...", _USER.sub("...", text))
