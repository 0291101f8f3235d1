"""Calls of tools in answers of any API, whole or streamed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, cast

from quire_sim.logs.bodies import Body, as_json, objects_of
from quire_sim.logs.rows import AnswerCall
from quire_sim.logs.streams import events_of

_NAMES = ("tool_use", "tool_calls", "function_call")


def calls_of(answer: Any) -> tuple[AnswerCall, ...]:
    """Return the calls of an answer, or of the text of its stream; of several choices those of the first."""
    if not isinstance(answer, str):
        return tuple(call for fields in objects_of([answer]) for call in _whole(fields))
    return _streamed(events_of(answer)) if any(name in answer for name in _NAMES) else ()


def _whole(answer: Body) -> Iterator[AnswerCall]:
    for message in _first(answer, "message"):
        for call in objects_of(message.get("tool_calls")):
            for function in objects_of([call.get("function")]):
                yield _call(function, call.get("id"))
    for name in ("content", "output"):
        for item in objects_of(answer.get(name)):
            if item.get("type") in {"tool_use", "function_call"}:
                yield _call(item, item.get("call_id") or item.get("id"))


def _first(fields: Body, name: str) -> Iterator[Body]:
    """Yield an object of the first choice, if there is one."""
    for choice in [*objects_of(fields.get("choices"))][:1]:
        yield from objects_of([choice.get(name)])


def _call(named: Body, number: Any) -> AnswerCall:
    given: Any = named.get("arguments", named.get("input", ""))
    text = given if isinstance(given, str) else as_json(given)
    return AnswerCall(str(named.get("name") or ""), text, str(number or ""))


def _streamed(events: Iterable[Body]) -> tuple[AnswerCall, ...]:
    parts: dict[int, AnswerCall] = {}
    for event in events:
        ended: Any = event.get("response")
        if event.get("type") == "response.completed" and isinstance(ended, dict):
            return tuple(_whole(cast("Body", ended)))
        for index, part in _parts(event):
            known = parts.get(index, AnswerCall("", ""))
            parts[index] = AnswerCall(*(old + new for old, new in zip(known, part, strict=True)))
    return tuple(parts[index] for index in sorted(parts))


def _parts(event: Body) -> Iterator[tuple[int, AnswerCall]]:
    """Yield what an event adds to calls, by their places in the answer."""
    for block in objects_of([event.get("content_block")]):
        if block.get("type") == "tool_use":
            yield _index(event), _call({"name": block.get("name")}, block.get("id"))
    for delta in objects_of([event.get("delta")]):
        if delta.get("type") == "input_json_delta":
            yield _index(event), AnswerCall("", str(delta.get("partial_json") or ""))
    for delta in _first(event, "delta"):
        for call in objects_of(delta.get("tool_calls")):
            for function in objects_of([call.get("function") or {}]):
                told = (function.get("name"), function.get("arguments"), call.get("id"))
                yield _index(call), AnswerCall(*(str(each or "") for each in told))


def _index(fields: Body) -> int:
    index: Any = fields.get("index")
    return index if isinstance(index, int) else 0
