"""Tool calls in a model's answers."""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import msgspec


class ToolFormat(NamedTuple):
    """A way to write tool calls.

    `openers`  what a call begins with; a brace does at the beginning of an answer only
    `marks`    what the chat templates of models have that write so
    """

    openers: tuple[str, ...]
    marks: tuple[str, ...] = ()

    @property
    def is_special(self) -> bool:
        """Whether openers are special tokens, which the text must not leave out."""
        return bool(self.marks)


FORMATS: Mapping[str, ToolFormat] = {
    "mistral": ToolFormat(("[TOOL_CALLS]",), marks=("[TOOL_CALLS]",)),
    "llama3": ToolFormat(("<|python_tag|>", "{"), marks=("<|python_tag|>", "ipython")),
    "hermes": ToolFormat(("<tool_call>",)),
    "json": ToolFormat(("{",)),
}
"""The formats by name; `json` is that of an answer which a schema makes a call."""

_BETWEEN = re.compile(r"(\s|[,;]|</?tool_call>|\[TOOL_CALLS\]|<\|python_tag\|>)+")


class ToolCall(NamedTuple):
    """A call that a model asks for: a function and its arguments as JSON text."""

    name: str
    arguments: str


def tool_format(template: object) -> str:
    """Return the name of the format that a model writes, as its chat template shows."""
    text = template if isinstance(template, str) else ""
    shown = (name for name, each in FORMATS.items() if any(mark in text for mark in each.marks))
    return next(shown, "hermes")


def parse_tools(text: str, form: str) -> tuple[str, list[ToolCall]]:
    """Return an answer's text before its first tool call, and the calls; the whole text where there is none."""
    at = held_from(text, form)
    opener = next((each for each in FORMATS[form].openers if text.startswith(each, at)), None)
    if opener is None:
        return text, []
    body = text[at:] if opener == "{" else text[at + len(opener) :]
    calls = [call for value in _values(body, form) for call in _calls(value)]
    return (text[:at].rstrip(), calls) if calls else (text, [])


def held_from(text: str, form: str) -> int:
    """Return where a tool call begins in an answer, or may begin as more comes: text before it can be sent."""
    return min(_begin(text, opener) for opener in FORMATS[form].openers)


def call_schema(functions: Mapping[str, dict[str, Any] | None]) -> dict[str, Any]:
    """Return the JSON schema of a call of one of these functions, each with the schema of its arguments."""
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": name}, "arguments": schema or {"type": "object"}},
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for name, schema in functions.items()
    ]
    return calls[0] if len(calls) == 1 else {"anyOf": calls}


def _begin(text: str, opener: str) -> int:
    """Return where an opener stands, or a part of one at the end; the text's length where neither does."""
    if opener == "{":
        begin = len(text) - len(text.lstrip())
        return begin if text.startswith(opener, begin) else len(text)
    found = text.find(opener)
    if found >= 0:
        return found
    parts = (size for size in range(len(opener) - 1, 0, -1) if text.endswith(opener[:size]))
    return len(text) - next(parts, 0)


def _values(body: str, form: str) -> Iterator[Any]:
    """Yield the JSON values in a row of them; of `name{...}`, Mistral's newer form, a call."""
    decoder, at = json.JSONDecoder(), 0
    while at < len(body):
        if between := _BETWEEN.match(body, at):
            at = between.end()
            continue
        brace = body.find("{", at)
        named = form == "mistral" and body[at] not in "[{" and brace > at
        try:
            value, end = decoder.raw_decode(body, brace if named else at)
        except (ValueError, RecursionError):
            return
        name = body[at:brace].removesuffix("[ARGS]").strip()
        yield {"name": name, "arguments": value} if named else value
        at = end


def _calls(value: Any) -> list[ToolCall]:
    """Return the calls that a JSON value means: an object with a name, or a list of such."""
    try:
        meant = msgspec.convert(value if isinstance(value, list) else [value], list[_Called])
    except msgspec.ValidationError:
        return []
    return [
        ToolCall(each.name, json.dumps(each.arguments or each.parameters or {}, ensure_ascii=False))
        for each in meant
    ]


class _Called(msgspec.Struct):
    name: str
    arguments: dict[str, Any] | None = None
    parameters: dict[str, Any] | None = None
