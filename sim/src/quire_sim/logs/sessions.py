"""Session files of coding agents: Claude Code's and Codex's. They have the conversation, not system prompt and tools."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import msgspec

from quire_sim.logs.bodies import texts_of
from quire_sim.logs.entries import logged
from quire_sim.logs.records import LogRecord, records_of
from quire_sim.logs.rows import LoggedRequest, TokenUsage, Unread
from quire_sim.logs.usages import seconds_of, usage_of

Body = dict[str, Any]

_CODEX_TYPES = ("session_meta", "response_item", "turn_context", "event_msg", "compacted")


def is_claude_code(fields: Body) -> bool:
    """Whether a record is a line of a session of Claude Code."""
    return "sessionId" in fields and (
        "parentUuid" in fields or "leafUuid" in fields or "uuid" in fields
    )


def is_codex(fields: Body) -> bool:
    """Whether a record is a line of a rollout of Codex."""
    return fields.get("type") in _CODEX_TYPES and isinstance(fields.get("payload"), dict)


def claude_code(path: Path, unread: Unread) -> Iterator[LoggedRequest]:
    """Yield a request for each answer: its prompt is the chain of messages before it."""
    talk = _Chain()
    for record in records_of(path, unread):
        fields = record.fields
        message: Any = fields.get("message")
        if fields.get("type") not in {"user", "assistant"} or not isinstance(message, dict):
            continue  # summaries, snapshots of files: no part of a prompt
        said = cast("Body", message)
        if fields["type"] == "user":
            talk.add(fields, said)
            continue
        name = str(said.get("id") or fields.get("uuid"))
        if name in talk.answered or said.get("model") == "<synthetic>":
            talk.add(fields, said)
            continue
        talk.answered.add(name)
        messages = talk.before(fields)
        talk.add(fields, said)
        if not messages:
            unread.add("an answer without a message before it", record.row)
            continue
        body: Body = {"model": said.get("model"), "messages": messages}
        yield logged(
            record.row, body, "messages", answer=texts_of(said.get("content")), usage=usage_of(said),
            time_s=seconds_of(fields.get("timestamp")), session=str(fields.get("sessionId") or ""),
        )  # fmt: skip


class _Chain:
    """Messages of a session by the id of their line, each with the id of the one before."""

    def __init__(self) -> None:
        self.answered: set[str] = set()
        self._said: dict[str, tuple[str, Body]] = {}

    def add(self, fields: Body, message: Body) -> None:
        self._said[str(fields.get("uuid"))] = str(fields.get("parentUuid")), message

    def before(self, fields: Body) -> list[Body]:
        """Return the messages before a line; lines of one answer are one message."""
        chain: list[Body] = []
        at = str(fields.get("parentUuid"))
        while at in self._said and len(chain) <= len(self._said):
            at, message = self._said[at]
            chain.append(message)
        found: list[Body] = []
        last = ""
        for message in reversed(chain):
            name = str(message.get("id") or "")
            content: Any = message.get("content")
            parts: list[Any] = (
                cast("list[Any]", content)
                if isinstance(content, list)
                else [{"type": "text", "text": content}]
            )
            if name and name == last:
                found[-1]["content"] += parts
            else:
                found.append({"role": message.get("role", "user"), "content": list(parts)})
            last = name
        return found


def codex(path: Path, unread: Unread) -> Iterator[LoggedRequest]:
    """Yield a request for each count of tokens: its prompt is all items that the answer was made from."""
    items: list[Any] = []
    facts: Body = {}
    begun, start, last = 0, None, None
    for record in records_of(path, unread):
        kind, payload = record.fields.get("type"), cast("Body", record.fields.get("payload") or {})
        if kind == "session_meta":
            instructions = payload.get("instructions") or payload.get("base_instructions")
            facts |= {
                "instructions": texts_of(instructions),
                "session": str(payload.get("id") or ""),
            }
        elif kind == "turn_context":
            facts["model"] = payload.get("model")
        elif kind == "compacted":
            items = [{"role": "user", "content": str(payload.get("message") or "")}]
            items = cast("list[Any]", payload.get("replacement_history")) or items
            begun = len(items)
        elif kind == "response_item":
            if _is_given(payload):
                begun = len(items) + 1
                start = record.fields.get("timestamp")
            items.append(payload)
        elif kind == "event_msg" and payload.get("type") == "token_count":
            info = cast("Body", payload.get("info") or {})
            told = info.get("last_token_usage")
            if told is None or info == last or not begun:
                continue  # told again
            last = info
            yield _codex_request(record, items[:begun], facts, told, start)
            begun = len(items)
    if items and last is None:
        unread.add("a session without counts of tokens (event_msg token_count)", 1)


def _codex_request(
    record: LogRecord, items: list[Any], facts: Body, told: Any, start: Any
) -> LoggedRequest:
    body: Body = {"model": facts.get("model"), "input": list(items)}
    if facts.get("instructions"):
        body["instructions"] = facts["instructions"]
    time_s = seconds_of(start) or seconds_of(record.fields.get("timestamp"))
    usage = usage_of(told) if isinstance(told, dict) else TokenUsage()
    found = logged(record.row, body, "responses", usage=usage, time_s=time_s)
    return msgspec.structs.replace(found, session=str(facts.get("session") or ""))


def _is_given(item: Body) -> bool:
    """Whether an item is given to the model, not made by it."""
    return str(item.get("type", "")).endswith("_output") or item.get("role") in {
        "user",
        "developer",
        "system",
    }
