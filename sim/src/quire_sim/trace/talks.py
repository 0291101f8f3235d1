"""Conversations in files: a list or lines of JSON objects, read one at a time."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import msgspec

from quire.errors import TraceError
from quire_sim.trace.chunks import LINE_LIMIT, open_text, read_some

TALK_KEYS = ("conversations", "messages", "conversation")
"""Keys that the messages of a conversation stand under."""

ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bing": "assistant",
         "bard": "assistant", "model": "assistant", "function": "tool"}  # fmt: skip
"""Names of roles that mean others; every name that is not here is its own."""

_SPACE = re.compile(r"[\s,]*")


class Message(msgspec.Struct, frozen=True):
    """A role and its text; `left_out` counts parts that are no text."""

    role: str
    text: str
    left_out: int = 0


def read_talks(path: Path) -> Iterator[list[Message]]:
    """Yield the conversations of a file. Raises `TraceError` with their number, from 1."""
    for number, record in enumerate(_records(path), 1):
        try:
            yield messages_of(record)
        except ValueError as error:
            raise TraceError(f"{path}, conversation {number:,}: {error}") from None


def _records(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the objects of a JSON list, or of lines; memory stays that of the largest one."""
    decode = json.JSONDecoder().raw_decode
    text, number = "", 1
    in_list: bool | None = None

    def fault(why: str) -> TraceError:
        return TraceError(f"{path}, conversation {number:,}: {why}")

    for piece, is_last in _pieces(path):
        text += piece
        at = 0
        while True:
            space = _SPACE.match(text, at)
            at = space.end() if space else at
            if at == len(text):
                break
            if in_list is None:
                in_list = text[at] == "["
                at += in_list
                continue
            if in_list and text[at] == "]":
                in_list = False
                at += 1
                continue
            if text[at] != "{":
                raise fault(f"an object is expected, got {text[at : at + 40]!r}")
            try:
                record, at = decode(text, at)
            except (json.JSONDecodeError, RecursionError) as error:
                if is_last or len(text) - at > LINE_LIMIT or isinstance(error, RecursionError):
                    raise fault(f"not JSON ({error})") from None
                break
            number += 1
            yield cast("dict[str, Any]", record)
        text = text[at:]
    if in_list:
        raise fault("the file ends within the list")


def _pieces(path: Path) -> Iterator[tuple[str, bool]]:
    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    with open_text(path) as stream:
        try:
            while piece := read_some(stream, path):
                yield decoder.decode(piece), False
            yield decoder.decode(b"", final=True), True
        except UnicodeDecodeError as error:
            raise TraceError(f"{path} is not UTF-8 text: {error.reason}") from None


def messages_of(record: dict[str, Any]) -> list[Message]:
    """Return the messages of a conversation. Raises `ValueError` for an object that is none."""
    said: Any = next((record[key] for key in TALK_KEYS if key in record), None)
    if not isinstance(said, list):
        keys = ", ".join(list(record)[:5]) or "none"
        why = f"no list of {' or '.join(TALK_KEYS[:2])}; its keys are {keys}"
        raise ValueError(why)  # noqa: TRY004 - it is the file's
    return [_message(place, message) for place, message in enumerate(cast("list[Any]", said), 1)]


def _message(place: int, message: Any) -> Message:
    fields = cast("dict[str, Any]", message) if isinstance(message, dict) else {}
    role: Any = fields.get("from", fields.get("role"))
    if not isinstance(role, str):
        raise ValueError(f"message {place:,} has no role (from, role)")  # noqa: TRY004 - it is the file's
    content: Any = fields.get("value", fields.get("content"))
    texts: list[str] = []
    left_out = 0
    for part in cast("list[Any]", content) if isinstance(content, list) else [content]:
        text: Any = cast("dict[str, Any]", part).get("text") if isinstance(part, dict) else part
        if isinstance(text, str):
            texts.append(text)
        else:
            left_out += text is not None or part is not None
    calls = fields.get("tool_calls")
    if calls:
        texts.append(json.dumps(calls))
    said_by = role.strip().lower()
    return Message(ROLES.get(said_by, said_by), "\n".join(texts), left_out)
