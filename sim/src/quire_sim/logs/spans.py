"""Spans of OpenTelemetry with the conventions for GenAI, as OTLP JSON or one span a line."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import msgspec

from quire_sim.logs.bodies import texts_of
from quire_sim.logs.entries import logged
from quire_sim.logs.records import records_of
from quire_sim.logs.rows import LoggedRequest, TokenUsage, Unread
from quire_sim.logs.usages import seconds_of

Body = dict[str, Any]

_NUMBERED = re.compile(r"gen_ai\.prompt\.(\d+)\.(role|content)")
_INPUTS = ("gen_ai.input.messages", "gen_ai.prompt", "input.value", "llm.prompts")
_NO_PROMPT = "a span without the prompt; have the instrumentation capture the content of messages"


def is_span(fields: Body) -> bool:
    """Whether a record is a span, or an object with spans."""
    if any(name in fields for name in ("resourceSpans", "scopeSpans")):
        return True
    given = fields.get("attributes")
    if isinstance(given, list):
        return any(key in fields for key in ("spanId", "startTimeUnixNano"))
    return isinstance(given, dict) and any(
        str(name).startswith(("gen_ai.", "llm.")) for name in cast("Body", given)
    )


def requests(path: Path, unread: Unread) -> Iterator[LoggedRequest]:
    """Yield a request for each span of a model's call; other spans are no requests."""
    for record in records_of(path, unread):
        for span in _spans(record.fields):
            facts = _facts(span)
            if not any(name.startswith("gen_ai.") for name in facts):
                continue
            if facts.get("gen_ai.operation.name", "chat") not in {
                "chat",
                "text_completion",
                "generate_content",
                "completion",
            }:
                continue
            body = _body(facts)
            if body is None:
                unread.add(_NO_PROMPT, record.row)
                continue
            start, end = (seconds_of(_number(span.get(each) or span.get(other))) for each, other in (
                ("startTimeUnixNano", "start_time"), ("endTimeUnixNano", "end_time")))  # fmt: skip
            yield logged(
                record.row, body, "completions" if "prompt" in body else "chat", usage=_usage(facts), time_s=start,
                answer=texts_of(_messages(facts.get("gen_ai.output.messages"))) or None,
                duration_s=None if start is None or end is None else end - start,
                session=str(facts.get("gen_ai.conversation.id") or ""), replica=_server(facts),
            )  # fmt: skip


def _spans(fields: Body) -> Iterator[Body]:
    """Yield the spans in an object, however deep they are."""
    for name in ("resourceSpans", "scopeSpans", "instrumentationLibrarySpans", "spans"):
        if isinstance(fields.get(name), list):
            for each in fields[name]:
                yield from _spans(each)
            return
    yield fields


def _facts(span: Body) -> Body:
    """Return the attributes of a span and of its events by name."""
    found: Body = {}
    for holder in (span, *cast("list[Body]", span.get("events") or [])):
        given = holder.get("attributes")
        if isinstance(given, dict):
            found |= cast("Body", given)
        elif isinstance(given, list):
            found |= {
                str(each["key"]): _value(each.get("value")) for each in cast("list[Body]", given)
            }
    return found


def _value(value: Any) -> Any:
    """Return a value of OTLP: `{"stringValue": "x"}` and its siblings."""
    if not isinstance(value, dict):
        return value
    ((kind, inner),) = list(cast("Body", value).items())[:1] or [("", None)]
    if kind == "arrayValue":
        return [_value(each) for each in cast("Body", inner).get("values", [])]
    if kind == "kvlistValue":
        return {
            each["key"]: _value(each.get("value")) for each in cast("Body", inner).get("values", [])
        }
    return int(inner) if kind == "intValue" else inner


def _body(facts: Body) -> Body | None:
    """Return what was asked as a body; None without a prompt."""
    given: Any = next((facts[name] for name in _INPUTS if name in facts), None)
    messages = _messages(given) if given is not None else _numbered(facts)
    if not messages:
        return None
    model = str(facts.get("gen_ai.request.model") or facts.get("gen_ai.response.model") or "")
    if facts.get("gen_ai.operation.name") in {"text_completion", "completion"}:
        return {"model": model, "prompt": texts_of([each.get("content") for each in messages])}
    body: Body = {"model": model, "messages": messages}
    system = _decoded(facts.get("gen_ai.system_instructions"))
    if system:
        parts = _message(
            {
                "role": "system",
                "parts": system
                if isinstance(system, list)
                else [{"type": "text", "content": system}],
            }
        )
        body["messages"].insert(0, parts)
    tools = _decoded(facts.get("gen_ai.tool.definitions"))
    if isinstance(tools, list):
        body["tools"] = [_tool(each) for each in cast("list[Any]", tools)]
    return body


def _server(facts: Body) -> str:
    """Return the server that a span names, with its port."""
    named = [facts.get(name) for name in ("server.address", "server.port")]
    return ":".join(str(each) for each in named if each)


def _messages(given: Any) -> list[Any]:
    """Return the messages of an attribute: a list or one text, maybe as JSON."""
    value = _decoded(given)
    if isinstance(value, dict):
        value = cast("Body", value).get("messages")
    if isinstance(value, str):
        value = [{"role": "user", "content": value}]
    return [_message(each) for each in cast("list[Any]", value)] if isinstance(value, list) else []


def _tool(tool: Any) -> Any:
    """Return a tool of the conventions, whose name stands beside its type, as one of chats."""
    if not isinstance(tool, dict) or "name" not in tool:
        return cast("Any", tool)
    function = {name: value for name, value in cast("Body", tool).items() if name != "type"}
    return {"type": "function", "function": function}


def _message(message: Any) -> Any:
    """Return a message of the conventions as one of chats: its `parts` become content."""
    if not isinstance(message, dict) or "parts" not in message:
        return cast("Any", message)
    fields = cast("Body", message)
    return {
        "role": fields.get("role", "user"),
        "content": [_part(each) for each in fields["parts"]],
    }


def _part(part: Any) -> Any:
    if not isinstance(part, dict):
        return str(part)
    fields = cast("Body", part)
    kind = fields.get("type")
    if kind == "text":
        return {"type": "text", "text": str(fields.get("content", ""))}
    if kind == "reasoning":
        return {"type": "thinking", "thinking": str(fields.get("content", ""))}
    if kind == "tool_call_response":
        answer = fields.get("response", fields.get("result"))
        text = answer if isinstance(answer, str) else msgspec.json.encode(answer).decode()
        return {"type": "tool_result", "tool_use_id": fields.get("id"), "content": text}
    return fields


def _numbered(facts: Body) -> list[Any]:
    """Return messages from attributes like `gen_ai.prompt.0.content`."""
    found: dict[int, Body] = {}
    for name, value in facts.items():
        if match := _NUMBERED.fullmatch(name):
            found.setdefault(int(match[1]), {"role": "user"})[match[2]] = value
    return [found[place] for place in sorted(found)]


def _usage(facts: Body) -> TokenUsage:
    def count(*names: str) -> int | None:
        return next((int(facts[name]) for name in names if facts.get(name) is not None), None)

    return TokenUsage(
        count("gen_ai.usage.input_tokens", "gen_ai.usage.prompt_tokens"),
        count("gen_ai.usage.cache_read.input_tokens", "gen_ai.usage.cache_read_input_tokens"),
        count("gen_ai.usage.cache_creation.input_tokens", "gen_ai.usage.cache_creation_input_tokens"),
        output_tokens=count("gen_ai.usage.output_tokens", "gen_ai.usage.completion_tokens"),
    )  # fmt: skip


def _number(value: Any) -> Any:
    return int(value) if isinstance(value, str) and value.isdigit() else value


def _decoded(value: Any) -> Any:
    if isinstance(value, str) and value.lstrip()[:1] in {"[", "{"}:
        try:
            return msgspec.json.decode(value)
        except msgspec.DecodeError:
            return value
    return value
