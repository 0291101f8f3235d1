"""Items of `/v1/responses`, and the chat messages that they become."""

import uuid
from collections.abc import Mapping, Sequence
from itertools import accumulate, islice, takewhile
from typing import Any, Literal

import msgspec

from quire.chat.conversation import ChatMessage, Function, Tool
from quire.errors import ConfigError

TEXTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text")

KINDS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "message": ("msg", ("role", "content")),
    "function_call": ("fc", ("call_id", "name", "arguments")),
    "function_call_output": ("fco", ("call_id", "output")),
    "reasoning": ("rs", ()),
    "item_reference": ("ref", ("id",)),
}
"""The types of items, each with what its ids begin with and the fields that it needs."""


class ItemText(msgspec.Struct):
    """A part of an item's content: text."""

    type: str
    text: str = ""

    def __post_init__(self) -> None:
        if self.type not in TEXTS:  # a ValueError: the error of the body adds the place
            raise ValueError(f"{self.type!r} is not offered; send input_text")


class ResponseItem(msgspec.Struct, kw_only=True, omit_defaults=True):
    """An item of a conversation: a message, a function call, its output, reasoning, or a reference.

    An item without an id gets one; the other fields are those of its type (`KINDS`).
    """

    type: str | None = None
    id: str | None = None
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: str | list[ItemText] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[ItemText] | None = None
    summary: list[ItemText] | None = None

    def __post_init__(self) -> None:
        kind = self.type = self.type or ("item_reference" if self.role is None else "message")
        if kind not in KINDS:
            raise ValueError(f"items of type {kind!r} are not offered")
        prefix, needed = KINDS[kind]
        if missing := [name for name in needed if getattr(self, name) is None]:
            raise ValueError(f"an item of type {kind!r} needs {missing[0]}")
        self.id = self.id or new_id(prefix)

    def plain(self) -> dict[str, Any]:
        """Return it as the API lists it: content in parts, and complete."""
        said = msgspec.to_builtins(self) | {"status": "completed"}
        if self.type == "message":
            is_answer, given = self.role == "assistant", self.content
            kind = {"type": "output_text" if is_answer else "input_text"}
            more: dict[str, Any] = {"annotations": []} if is_answer else {}
            texts = [given] if isinstance(given, str) else [each.text for each in given or ()]
            said["content"] = [kind | {"text": text} | more for text in texts]
        return said


def new_id(prefix: str) -> str:
    """Return an id that nobody can guess."""
    return f"{prefix}_{uuid.uuid4().hex}"


def messages_of(
    items: Sequence[ResponseItem], instructions: str | None = None
) -> list[ChatMessage]:
    """Return the chat messages of items. Raises `ConfigError` for the output of a call that is not there.

    Instructions and the system's messages before all others are one message, since many templates take one only.
    Calls join the assistant's message before them, with its reasoning, as the model wrote them in one answer.
    """
    messages: list[ChatMessage] = []
    called: dict[str | None, str | None] = {}
    thought: str | None = None
    if instructions:
        messages.append(ChatMessage(role="system", content=instructions))
    for at, item in enumerate(items):
        last = messages[-1] if messages else None
        if item.type == "reasoning":
            thought = _text(item.content) or _text(item.summary) or thought
            continue
        if item.type == "function_call":
            if last is None or last.role != "assistant":
                last = ChatMessage(role="assistant")
                messages.append(last)
            last.reasoning_content = last.reasoning_content or thought
            function = Function(item.name or "", arguments=item.arguments)
            call = Tool(function=function, type="function", id=item.call_id)
            last.tool_calls = [*(last.tool_calls or ()), call]
            called[item.call_id] = item.name
        elif item.type == "function_call_output":
            if (call_id := item.call_id) not in called:
                said = f"input: item {at} is the output of call {call_id!r}, which no item before it makes"
                raise ConfigError(said)
            message = ChatMessage(role="tool", content=_text(item.output))
            message.tool_call_id, message.name = call_id, called[call_id]
            messages.append(message)
        else:
            role = "system" if item.role == "developer" else item.role or ""
            message = ChatMessage(role=role, content=_text(item.content))
            message.reasoning_content = thought if role == "assistant" else None
            if role == "system" and last and all(each.role == role for each in messages):
                last.content = f"{last.content}\n\n{message.content}"
            else:
                messages.append(message)
        thought = None
    return messages


def places_of(items: Sequence[ResponseItem], step: int) -> list[int]:
    """Return the places at which a conversation that is too long may begin: 0, others, that of its last round.

    None parts an output from its call. Between two of them are about `step` bytes, wherever the conversation ends: the
    prompts of one that grows begin alike for long, and are found in the cache.
    """
    calls: dict[str | None, int] = {}
    needed: list[int] = []
    for at, item in enumerate(items):
        if item.type == "function_call":
            calls[item.call_id] = at
        is_output = item.type == "function_call_output"
        needed.append(calls.get(item.call_id, at) if is_output else at)
    places, last, done, size = [0], 0, 0, 0
    firsts = [*accumulate(reversed(needed), min)][::-1]
    for at, (item, first) in enumerate(zip(items, firsts, strict=True)):
        last = at if first == at else last
        if first == at and size // step > done:
            places.append(at)
            done = size // step
        told = _text(item.content) + _text(item.output) + (item.arguments or "")
        size += len(told.encode())
    return places if last in places else [*places, last]


def items_from(items: Sequence[ResponseItem], at: int) -> list[ResponseItem]:
    """Return a conversation from a place on.

    The system's messages before all others stay, and so does the user's last message before a place within the answer.
    """
    system = takewhile(lambda each: each.role in ("system", "developer"), items[:at])
    is_asked = at == 0 or items[at].role == "user"
    asked = (each for each in reversed(items[:at]) if each.role == "user" and not is_asked)
    return [*system, *islice(asked, 1), *items[at:]]


def _text(content: str | Sequence[ItemText] | None) -> str:
    return content if isinstance(content, str) else "".join(each.text for each in content or ())
