"""Tool calls in a model's answers."""

import json
import re
from collections.abc import Iterator, Mapping
from math import isfinite
from typing import Any, NamedTuple

import msgspec


class ToolFormat(NamedTuple):
    """A way to write tool calls.

    `openers`  what a call begins with; those of `_HEADS` do at the beginning of an answer only
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
    "harmony": ToolFormat(
        ("<|end|><|start|>assistant", "<|channel|>commentary to=", "to=functions."),
        marks=("<|channel|>commentary",),
    ),
    "hermes": ToolFormat(("<tool_call>",)),
    "json": ToolFormat(("{",)),
}
"""The formats by name; `json` is that of an answer which a schema makes a call."""

_HEADS = ("{", "to=functions.")

_BETWEEN = re.compile(r"(\s|[,;]|</?tool_call>|\[TOOL_CALLS\]|<\|python_tag\|>)+")
_TO = r"(?:\s?to=(?:functions\.)?(?P<{}>[^\s<]+))?"
_NAMED = {
    "mistral": re.compile(
        r"(?P<name>[^\s\[\]{}]+)(?:\[CALL_ID\](?P<id>[^\[\]{}]*))?(?:\[ARGS\])?\s*(?=\{)"
    ),
    "harmony": re.compile(
        rf"(?:<\|end\|>)?(?:<\|start\|>assistant)?{_TO.format('role')}<\|channel\|>commentary{_TO.format('name')}"
        r"\s*(?:<\|constrain\|>)?\w*<\|message\|>\s*(?=\{)"
    ),
}
"""Names before the arguments of a call, by format: Mistral's newer form, and gpt-oss's channel of commentary."""

_HALF = re.compile("[\ud800-\udfff]")


class ToolCall(NamedTuple):
    """A call that a model asks for: a function, its arguments as JSON text, the model's id of it."""

    name: str
    arguments: str
    id: str | None = None


def tool_format(template: str) -> str:
    """Return the name of the format that a model writes, as its chat template shows."""
    shown = (name for name, each in FORMATS.items() if any(mark in template for mark in each.marks))
    return next(shown, "hermes")


def parse_tools(text: str, form: str) -> tuple[str, list[ToolCall]]:
    """Return an answer's text before its first tool call, and the calls; the whole text where there is none."""
    found = list(_calls(text, form))
    return (text[: found[0][0]].rstrip(), [call for _, call in found]) if found else (text, [])


def held_from(text: str, form: str) -> int:
    """Return where a tool call begins in an answer, or may begin as more comes, with the blanks before it."""
    at = _opener(text, form)
    if at == len(text):
        at -= _begun(text, form)
    return len(text[:at].rstrip())


def without_cut_call(text: str, form: str) -> str:
    """Return the text of an answer without calls that its limit of tokens cut, less the call that it cut.

    One character that may begin a call stays: it is more likely text.
    """
    at = _opener(text, form)
    while at < len(text) and not _is_cut(text, at, form):
        at = _opener(text, form, at + 1)
    if at == len(text) and (size := _begun(text, form)) > 1:
        at -= size
    return text if at == len(text) else text[:at].rstrip()


def call_schema(functions: Mapping[str, dict[str, Any] | None]) -> dict[str, Any]:
    """Return the JSON schema of a call of one of these functions.

    References within a schema are to its own root: it has an `$id`.
    """
    calls = [
        {
            "type": "object",
            "properties": {
                "name": {"const": name},
                "arguments": {"$id": f"quire:///functions/{at}"} | arguments_schema(schema),
            },
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for at, (name, schema) in enumerate(functions.items())
    ]
    return calls[0] if len(calls) == 1 else {"anyOf": calls}


def arguments_schema(schema: dict[str, Any] | None) -> dict[str, Any]:
    """Return the JSON schema of a function's arguments: an object, which is empty where it takes none."""
    nothing: dict[str, Any] = {"properties": {}, "additionalProperties": False}
    return {"type": "object"} | (nothing if schema is None else schema)


def _openers(form: str) -> tuple[tuple[str, ...], list[str]]:
    """Return the openers that begin an answer only, and the others."""
    openers = FORMATS[form].openers
    return tuple(set(_HEADS).intersection(openers)), [
        each for each in openers if each not in _HEADS
    ]


def _opener(text: str, form: str, start: int = 0) -> int:
    """Return where an opener stands from `start` on; the text's length where none does."""
    heads, openers = _openers(form)
    if not start and text.lstrip().startswith(heads):
        return 0
    found = (text.find(opener, start) for opener in openers)
    return min((at for at in found if at >= 0), default=len(text))


def _calls(text: str, form: str) -> Iterator[tuple[int, ToolCall]]:
    """Yield the calls in an answer, each with the place of its opener: JSON values in a row, or each behind its name."""
    at = opened = _opener(text, form)
    while at < len(text):
        if between := _BETWEEN.match(text, at):
            at = between.end()
        named = _NAMED[form].match(text, at) if form in _NAMED else None
        try:
            value, end = _DECODER.raw_decode(text, named.end() if named else at)
        except (ValueError, RecursionError):
            at = opened = _opener(text, form, at + 1)  # what stood here was no call
            continue
        called = _called(named.groupdict(), value) if named else value
        is_bare = not named and at == len(text) - len(text.lstrip())
        if is_bare and not _has_arguments(value):
            called = None  # JSON without an opener that has a name, as answers of a form may have
        for call in _meant(called):
            yield opened, call
        at = opened = end


def _begun(text: str, form: str) -> int:
    """Return how many characters at the end of a text are the beginning of an opener."""
    heads, openers = _openers(form)
    if (begun := text.lstrip()) and any(each.startswith(begun) for each in heads):
        return len(text)
    parts = {each[:size] for each in openers for size in range(1, len(each))}
    return max((len(part) for part in parts if text.endswith(part)), default=0)


_CUT_VALUE = re.compile(r"\s*|-|\.|[eE][+-]?|t(ru?)?|f(a(ls?)?)?|n(ul?)?|[\\u\da-fA-F]{1,6}")
"""The rest of a text from where JSON ends early."""

_CALL_KEYS = re.compile(r"\s*\{\s*(\"(name|arguments|parameters|type|id)\"|\"[a-z]{0,9}$|$)")


def _is_cut(text: str, at: int, form: str) -> bool:
    """Whether a call begins at an opener, and the text ends before the call does."""
    if text.startswith("{", len(text) - len(text.lstrip())) and not _CALL_KEYS.match(text):
        return False  # an answer in JSON that is no call
    if between := _BETWEEN.match(text, at):
        at = between.end()
    if form in _NAMED and (named := _NAMED[form].match(text, at)):
        at = named.end()
    if at == len(text) or (form in _NAMED and text[at] not in "[{"):
        return "{" not in text[at:]
    try:
        _DECODER.raw_decode(text, at)
    except json.JSONDecodeError as error:
        is_string = error.msg.startswith("Unterminated string")
        return is_string or _CUT_VALUE.fullmatch(text, error.pos) is not None
    except (ValueError, RecursionError):
        return False
    return False


def _finite(text: str) -> float:
    """Return a number of JSON text. Raises `ValueError` for one that no JSON can tell."""
    if not isfinite(number := float(text)):
        raise ValueError(f"{text} is no number in JSON")
    return number


_DECODER = json.JSONDecoder(parse_float=_finite, parse_constant=_finite)


def _meant(value: Any) -> list[ToolCall]:
    """Return the calls that a JSON value means: an object with a name, or a list of such."""
    try:
        meant = msgspec.convert(value if isinstance(value, list) else [value], list[_Called])
    except msgspec.ValidationError:
        return []
    return [
        ToolCall(each.name, _json(each.arguments or each.parameters or {}), each.id or None)
        for each in meant
        if not _HALF.search(each.name)
    ]


def _called(named: dict[str, str | None], arguments: Any) -> dict[str, Any]:
    """Return a call whose name stands before its arguments."""
    name = named["name"] or named.get("role")
    return {"name": name, "arguments": arguments, "id": named.get("id")}


def _has_arguments(value: Any) -> bool:
    """Whether a JSON value may be a call, of which it has the arguments."""
    return isinstance(value, list) or (
        isinstance(value, dict) and bool({"arguments", "parameters"} & {*value})
    )


def _json(value: Any) -> str:
    """Return JSON text, in which half of a surrogate pair stays an escape."""
    return _HALF.sub(lambda half: f"\\u{ord(half[0]):04x}", json.dumps(value, ensure_ascii=False))


class _Called(msgspec.Struct):
    name: str
    arguments: dict[str, Any] | None = None
    parameters: dict[str, Any] | None = None
    id: str | None = None
