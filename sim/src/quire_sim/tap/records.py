"""Exchanges as lines of a file that logs are read from, without credentials."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, cast

import httpx
import msgspec

from quire.errors import ConfigError
from quire_sim.tap.observing import Exchange

REMOVED = "[removed]"

_CREDENTIALS = frozenset(
    ("authorization", "authorization_token", "x-api-key", "api-key", "api_key", "apikey",
     "cookie", "set-cookie", "proxy-authorization")
)  # fmt: skip
"""Names of fields whose text no record has; tools of bodies may bring headers for other servers."""

_MARKS = tuple(name.encode() for name in _CREDENTIALS)


MOST_KEYS = 10_000
"""API keys that have a number of their own."""


class KeyNumbers:
    """API keys by number: which requests have the same key, and nothing of the keys.

    Keys are what clients say, invalid ones too: those beyond `MOST_KEYS` are all called `key-more`.
    """

    def __init__(self) -> None:
        self._known: dict[int, str] = {}
        self._salt = os.urandom(16)

    def name_of(self, exchange: Exchange) -> str:
        """Return `key-1`, `key-2`, ... for an exchange's key; empty without one."""
        given = [
            value
            for name, value in exchange.headers
            if name in (b"authorization", b"x-api-key", b"api-key")
        ]
        if not given:
            return ""
        digest = hash((self._salt, *given))
        if len(self._known) >= MOST_KEYS:
            return self._known.get(digest, "key-more")
        return self._known.setdefault(digest, f"key-{len(self._known) + 1}")


def fields_of(exchange: Exchange, key: str) -> dict[str, Any]:
    """Return an exchange as the fields of a record, its bodies as `msgspec.Raw` JSON, or as text."""
    fields: dict[str, Any] = {
        "time": round(exchange.sent_s, 6),
        "duration_s": round(exchange.duration_s, 6),
        "url": exchange.path,
        "status": exchange.status,
        "end": exchange.end,
    }
    if exchange.first_s is not None:
        fields["first_s"] = round(exchange.first_s, 6)
    if key:
        fields["tenant"] = key
    if exchange.differences:
        fields["mended"] = list(dict.fromkeys(each.rule for each in exchange.differences))
    fields["request"] = _body(exchange.sent, exchange.headers)
    fields["response"] = _body(exchange.told, exchange.said)
    return fields


def _body(body: bytes | None, headers: list[tuple[bytes, bytes]]) -> Any:
    """Return a body as JSON or as text; None for one that was not kept, or that no decoder here reads."""
    if body is None:
        return None
    encoded = [pair for pair in headers if pair[0] == b"content-encoding"]
    if encoded:
        read = httpx.Response(200, headers=encoded, stream=httpx.ByteStream(body))
        try:
            body = read.read()
        except httpx.DecodingError:
            return None
    try:
        value = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        text = body.decode("utf-8", "replace")
        return None if encoded and "\ufffd" in text else text
    lowered = body.lower()
    if any(mark in lowered for mark in _MARKS):
        return _cleared(value)
    # Line ends stand between the tokens of JSON only: within a text they are escaped.
    return msgspec.Raw(body.replace(b"\n", b" ").replace(b"\r", b" "))


def _cleared(value: Any) -> Any:
    """Return a value without the text of credentials."""
    if isinstance(value, dict):
        fields = cast("dict[str, Any]", value)
        return {
            name: REMOVED
            if name.lower() in _CREDENTIALS and isinstance(inner, str)
            else _cleared(inner)
            for name, inner in fields.items()
        }
    if isinstance(value, list):
        return [_cleared(each) for each in cast("list[Any]", value)]
    return value


class RecordFile:
    """A file of records, one a line, that only its owner reads. Raises `ConfigError` if it cannot be written.

    A line that would make it longer than `limit` bytes begins a new file; the full one is renamed to NAME.1 in place
    of the one before. So both have at most twice the limit. A line that is longer itself is left out and counted.
    """

    def __init__(self, path: Path, limit: int) -> None:
        if limit < 1:
            raise ConfigError(f"--log-limit is at least 1 byte, got {limit}")
        self._path, self._limit = path.expanduser(), limit
        self.num_omitted = 0
        self._file = self._opened()
        self._size = self._file.seek(0, os.SEEK_END)

    def write(self, fields: dict[str, Any]) -> None:
        """Write a record. Raises `OSError`."""
        line = msgspec.json.encode(fields) + b"\n"
        if len(line) > self._limit:
            self.num_omitted += 1
            return
        if self._size + len(line) > self._limit:
            self._file.close()
            self._path.replace(self._path.with_name(self._path.name + ".1"))
            self._file = self._opened()
            self._size = 0
        self._file.write(line)
        self._size += len(line)

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _opened(self) -> Any:
        try:
            number = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        except OSError as error:
            raise ConfigError(f"cannot write {str(self._path)!r}: {error.strerror}") from error
        return os.fdopen(number, "ab", buffering=0)
