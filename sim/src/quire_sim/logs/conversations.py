"""Conversations as requests: each answer is one, and its prompt is all messages before it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

from quire_sim.logs.entries import logged
from quire_sim.logs.records import records_of
from quire_sim.logs.rows import LoggedRequest, Unread
from quire_sim.logs.usages import seconds_of
from quire_sim.trace.talks import TALK_KEYS, messages_of


def is_conversation(fields: dict[str, Any]) -> bool:
    """Whether a record is a conversation with its answers: ShareGPT, or `messages` without a model."""
    said: Any = next((fields[key] for key in TALK_KEYS if key in fields), None)
    if not isinstance(said, list) or not said:
        return False
    if "messages" not in fields:
        return True
    last: Any = cast("list[Any]", said)[-1]
    ends = cast("dict[str, Any]", last).get("role") if isinstance(last, dict) else None
    return (
        "model" not in fields
        and set(fields) <= {"messages", "id", "tools", "metadata", "source"}
        and ends == "assistant"
    )


def requests(path: Path, unread: Unread) -> Iterator[LoggedRequest]:
    """Yield a request for each answer of each conversation; none has a time."""
    for record in records_of(path, unread):
        try:
            said = messages_of(record.fields)
        except ValueError as error:
            unread.add(str(error), record.row)
            continue
        messages = [{"role": each.role, "content": each.text} for each in said]
        for place, message in enumerate(messages):
            if message["role"] == "assistant" and place:
                body: dict[str, Any] = {"messages": messages[:place]}
                session = str(record.fields.get("id") or record.row)
                yield logged(record.row, body, "chat", answer=message["content"], session=session,
                             time_s=seconds_of(record.fields.get("time")))  # fmt: skip
