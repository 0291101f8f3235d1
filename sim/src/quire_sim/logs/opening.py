"""Opening a request log, whatever its format."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from quire.errors import TraceError
from quire_sim.logs import conversations, entries, hashed, plain, servers, sessions, spans
from quire_sim.logs.records import LogRecord, has_lines, head_of, objects_in
from quire_sim.logs.rows import LoggedRequest, Unread
from quire_sim.names import unknown

READERS = {
    "requests": entries.requests,
    "claude-code": sessions.claude_code,
    "codex": sessions.codex,
    "otel": spans.requests,
    "conversations": conversations.requests,
    "hashed": hashed.requests,
    "llama-server": servers.llama_server,
    "vllm": servers.vllm,
    "usage": entries.usages,
    "prompts": plain.requests,
}
"""Formats of request logs, each with its reader."""

LOG_FORMATS = tuple(READERS)

_CONTROL = re.compile(r"[\x00-\x08\x0e-\x1a]")

_OPEN = "requests, or conversations without an answer at the end"

HEAD_RECORDS = 20
"""Records by which a format is recognised."""


class LogFile:
    """The requests in a file, plain, gzip or zstd. Every iteration reads it anew and counts `unread` anew."""

    def __init__(self, path: Path, format_name: str) -> None:
        self.path = path
        self.format = format_name
        self.unread = Unread()

    def __iter__(self) -> Iterator[LoggedRequest]:
        self.unread = Unread()
        num_requests = 0
        for request in READERS[self.format](self.path, self.unread):
            num_requests += 1
            yield request
        if not num_requests:
            reasons = "; ".join(self.unread.sentences()[:3]) or "it is empty"
            raise TraceError(
                f"{self.path} has no request that can be read as {self.format}: {reasons}"
            )


def open_log(path: str | Path, *, format: str | None = None) -> LogFile:  # noqa: A002 - the word of everybody
    """Return the request log in a file, its format found out from its content.

    Raises `TraceError` for a file that cannot be read or is no request log, and if its first records are of two
    formats: then `format`, one of `LOG_FORMATS`, decides.
    """
    if format is not None and format not in READERS:
        raise unknown("format", format, LOG_FORMATS)
    path = Path(path).expanduser()
    return LogFile(path, format or _found(path))


def log_format(head: bytes) -> str | None:
    """Return the format of a file that begins so; None for none or several."""
    found = _formats(head) if head else set[str]()
    return found.pop() if len(found) == 1 else None


def _found(path: Path) -> str:
    head = head_of(path)
    if not head:
        raise TraceError(f"{path} is empty: a request log has at least one request")
    found = _formats(head)
    if len(found) == 1:
        return found.pop()
    if found:
        names = " and ".join(sorted(found))
        raise TraceError(
            f"{path} is ambiguous: its first records are {names}; name one of them with --format"
        )
    raise TraceError(
        f"{path} is no request log that is known, by its first {min(len(head), 1 << 16):,} bytes; "
        f"name one of {', '.join(LOG_FORMATS)} with --format"
    )


def _formats(head: bytes) -> set[str]:
    """Return the formats that the first records of a file have."""
    if head[:1] not in {b"{", b"["} or (head[:1] == b"[" and re.match(rb"\[[^\[\]{}\"]*\] ", head)):
        return _formats_of_text(head)
    records = _first_objects(head)
    if not records:
        return set()
    found = {_format_of(fields) for fields in records} - {""}
    if _OPEN in found:
        found.discard(_OPEN)
        found = found or {"requests"}
    return found


def _formats_of_text(head: bytes) -> set[str]:
    text = head.decode("utf-8", "replace")
    if servers.is_llama_server(text):
        return {"llama-server"}
    if servers.is_vllm(text):
        return {"vllm"}
    if plain.is_usage_table(text):
        return {"usage"}
    if _CONTROL.search(text):
        return set()
    return {"prompts", *map(_format_of, _objects_of_lines(head))} - {"", _OPEN}


def _first_objects(head: bytes) -> list[dict[str, Any]]:
    """Return the first objects of a file's first bytes."""
    if has_lines(head) and not head.startswith(b"["):
        return _objects_of_lines(head)
    return [each.fields for each in objects_in(head.decode("utf-8", "replace"), HEAD_RECORDS)]


def _objects_of_lines(head: bytes) -> list[dict[str, Any]]:
    """Return the objects among the first lines."""
    values: list[Any] = []
    for line in head.split(b"\n")[:HEAD_RECORDS]:
        try:
            values.append(msgspec.json.decode(line))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            continue
    return [value for value in values if isinstance(value, dict)]


def _format_of(fields: dict[str, Any]) -> str:
    """Return the format of a record; empty if it tells nothing."""
    if sessions.is_claude_code(fields):
        return "claude-code"
    if sessions.is_codex(fields):
        return "codex"
    if hashed.is_hashed(fields):
        return "hashed"
    if spans.is_span(fields):
        return "otel"
    if conversations.is_conversation(fields):
        return "conversations"
    try:
        request = entries.request_of(LogRecord(1, fields))
    except ValueError:
        return "prompts" if plain.is_prompt(fields) else ""
    if request.api == "usage":
        return "usage"
    return "requests" if "model" in request.body else _OPEN
