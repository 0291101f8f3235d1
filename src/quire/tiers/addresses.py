"""Addresses and errors as people may see them: without passwords."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path

from quire.errors import ConfigError

_KIND = re.compile(r"[a-z0-9+]*:(//)?")
_USER = re.compile(r"(?<=//)\S*(?=@)")
_OPTIONS = re.compile(r"(?<=\?)[^\s'\"<>]+")
_QUOTED = re.compile(r" '.*'", re.DOTALL)
_MAY_BE_SECRET = re.compile(
    "url|where|config|client_options|user|pass|secret|token|key|credential", re.IGNORECASE
)


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


def directory_of(path: str | os.PathLike[str]) -> Path:
    """Return the directory that a path names, whatever directory the process works in later. Raises `ConfigError`."""
    try:
        text = os.fspath(path)
    except TypeError:
        text = ""
    if not isinstance(text, str) or not text or "\0" in text:  # pyright: ignore[reportUnnecessaryIsInstance] - bytes
        raise ConfigError(
            f"a tier's directory is a path, as '/var/kv', not {path!r}; write '.' for the directory that the process works in"
        )
    return Path(text).absolute()


def is_word(value: object, length: int = 40) -> bool:
    """Return whether a value is text of one line, up to so many characters, with no address in it."""
    return (
        isinstance(value, str)
        and len(value) <= length
        and value.isprintable()
        and "://" not in value
        and "@" not in value
    )


def described(option: str, value: object) -> str:
    """Return the wrong value of an option for an error; its type if it may be secret.

    A number, a bool or a word is shown itself, unless the option's name says that it may be secret.
    """
    is_plain = isinstance(value, (bool, int, float)) or is_word(value)
    if is_plain and not _MAY_BE_SECRET.search(option):
        return repr(value)
    return f"a value of type {type(value).__name__}"


def unquoted(error: Exception) -> str:
    """Return msgspec's message on a wrong value without the value, which it puts in single quotes."""
    return _QUOTED.sub(" ...", str(error))


def without(text: str, secrets: Iterable[str] = ()) -> str:
    """Return a message of a library or server without secrets, and without users and options of addresses."""
    for secret in filter(None, secrets):
        text = text.replace(secret, "...")
    return _OPTIONS.sub("...", _USER.sub("...", text))
