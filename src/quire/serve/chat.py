"""Conversations to prompts, by the model's chat template, and answers to tool calls."""

import json
import re
from collections.abc import Iterator
from inspect import signature
from typing import Any, Literal, NamedTuple, TypeAlias

import msgspec

from quire.serve.protocol import (
    SEEN,
    ChatMessage,
    ChatRequest,
    PromptRequest,
    Tool,
    shown,
)
from quire.web.errors import ApiError

ToolFormat: TypeAlias = Literal["hermes", "llama3", "mistral", "json"]

OPENERS: dict[ToolFormat, tuple[str, ...]] = {
    "hermes": ("<tool_call>",),
    "mistral": ("[TOOL_CALLS]",),
    "llama3": ("<|python_tag|>", "{"),
    "json": ("{",),
}
"""What a tool call begins with; a brace only at the beginning of an answer."""

_BETWEEN = re.compile(r"(\s|[,;]|</?tool_call>|\[TOOL_CALLS\]|<\|python_tag\|>)+")


class ToolCall(NamedTuple):
    """A call that a model asks for: a function and its arguments as JSON text."""

    name: str
    arguments: str


def tool_format(template: object) -> ToolFormat:
    """Return how a model writes tool calls, as its chat template shows."""
    text = template if isinstance(template, str) else ""
    if "[TOOL_CALLS]" in text:
        return "mistral"
    if "<|python_tag|>" in text or "ipython" in text:
        return "llama3"
    return "hermes"


def prompt_of(tokenizer: Any, chat: ChatRequest | PromptRequest) -> str:
    """Return a conversation as the model's text, ready for the answer. Raises `ApiError`."""
    if not chat.messages:
        raise ApiError(400, "messages is empty; send at least one", param="messages")
    if not getattr(tokenizer, "chat_template", None):
        raise ApiError(400, "this model has no chat template; use /v1/completions")
    from jinja2 import TemplateError  # noqa: PLC0415 - transformers brings it

    own = signature(tokenizer.apply_chat_template).parameters
    if taken := sorted(own.keys() & chat.chat_template_kwargs.keys()):
        raise ApiError(400, f"{taken[0]} is not for the template", param="chat_template_kwargs")
    messages = [_plain(each) for each in chat.messages]
    try:
        return tokenizer.apply_chat_template(
            messages,
            tools=msgspec.to_builtins(tools_of(chat)) or None,
            add_generation_prompt=chat.add_generation_prompt,
            tokenize=False,
            **chat.chat_template_kwargs,
        )
    except (TemplateError, ValueError, TypeError, KeyError) as error:
        raise ApiError(400, f"the chat template refuses this: {error}", param="messages") from None


def tools_of(chat: ChatRequest | PromptRequest) -> list[Tool]:
    """Return the tools that an answer may call: none where the choice is "none"."""
    return [] if chat.tool_choice == "none" else chat.tools or []


def forced_schema(chat: ChatRequest) -> dict[str, Any] | None:
    """Return the JSON schema of an answer that must be a tool call; None where it need not. Raises `ApiError`."""
    choice, functions = chat.tool_choice, [tool.function for tool in tools_of(chat)]
    if choice in (None, "auto", "none"):
        return None
    if isinstance(choice, Tool):
        functions = [each for each in functions if each.name == choice.function.name]
    if not functions or (isinstance(choice, str) and choice != "required"):
        raise ApiError(
            400,
            f"tool_choice is none, auto, required, or a function among the tools; got {shown(choice)}",
            param="tool_choice",
        )
    calls = [
        {
            "type": "object",
            "properties": {
                "name": {"const": each.name},
                "arguments": each.parameters or {"type": "object"},
            },
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for each in functions
    ]
    return calls[0] if len(calls) == 1 else {"anyOf": calls}


def parse_tools(text: str, form: ToolFormat) -> tuple[str, list[ToolCall]]:
    """Return an answer's text before its first tool call, and the calls; the whole text where there is none."""
    at = held_from(text, form)
    opener = next((o for o in OPENERS[form] if text.startswith(o, at)), None)
    if opener is None:
        return text, []
    body = text[at:] if opener == "{" else text[at + len(opener) :]
    calls = [call for value in _values(body, form) for call in _calls(value)]
    return (text[:at].rstrip(), calls) if calls else (text, [])


def held_from(text: str, form: ToolFormat) -> int:
    """Return where a tool call begins in an answer, or may begin as more comes: text before it can be sent."""
    at = len(text)
    for opener in OPENERS[form]:
        if opener == "{":
            begin = len(text) - len(text.lstrip())
            at = min(at, begin) if text.startswith(opener, begin) or begin == len(text) else at
            continue
        found = text.find(opener)
        tail = next((n for n in range(len(opener) - 1, 0, -1) if text.endswith(opener[:n])), 0)
        at = min(at, found if found >= 0 else len(text) - tail)
    return at


def _plain(message: ChatMessage) -> dict[str, Any]:
    """Return a message as templates read it: text joined, arguments of calls as data."""
    said: dict[str, Any] = {"content": "", **msgspec.to_builtins(message)}
    if isinstance(message.content, list):
        said["content"] = "".join(part.text for part in message.content)
    for call in said.get("tool_calls", ()):
        function = call["function"]
        try:
            function["arguments"] = msgspec.json.decode(function.get("arguments") or "{}")
        except msgspec.DecodeError:
            raise ApiError(
                400,
                f"the arguments of a call are JSON, got {function['arguments'][:SEEN]!r}",
                param="messages",
            ) from None
    return said


def _values(body: str, form: ToolFormat) -> Iterator[Any]:
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
