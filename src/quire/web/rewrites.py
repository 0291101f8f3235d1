"""Rewrites of request bodies that every API shares: texts by role, tools in order, blanks, line ends."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable
from typing import Any, TypeAlias, cast

import msgspec

Body: TypeAlias = dict[str, Any]
Change: TypeAlias = Callable[[str, str, str], str]
"""A new text for a text, its role, and its place in the body."""

MARK = "cache_control"
"""The field of a breakpoint in Anthropic's bodies."""

_INNER = re.compile(r"(?<=\S)[^\S\r\n]+(?=\S)")
_TRAILING = re.compile(r"[^\S\r\n]+(?=\r?\n|\Z)")
_EMPTY = re.compile(r"(\r?\n)(?:\r?\n){2,}")
_ODD = {0x200B: " ", 0x2060: " ", 0xFEFF: " ", 0x00A0: " "}
"""Blanks that look like none or like another one. Joiners are kept: they change letters and emoji."""


def with_texts(
    body: Body, api: str, change: Change, *, but_last: bool = False, only_last: bool = False
) -> Body:
    """Return a body with other texts: of all its messages, of those before the last, or of the last.

    The role of system and developer messages is `system`. Messages that are no objects stay as they are, and so do
    all parts whose texts do not change: they are the same objects.
    """
    found = dict(body)
    is_first = not only_last
    if api == "completions":
        if isinstance(body.get("prompt"), str) and is_first:
            found["prompt"] = change(body["prompt"], "user", "prompt")
        return found
    if is_first:
        for name in ("system", "instructions"):
            if name in body:
                content = _content(body[name], "system", name, change)
                found[name] = body[name] if content == body[name] else content
    name = "input" if api == "responses" else "messages"
    given: Any = body.get(name)
    if isinstance(given, str):
        if not but_last:
            found[name] = change(given, "user", name)
    elif isinstance(given, list):
        messages: list[Any] = list(cast("list[Any]", given))
        last = len(messages) - 1
        for place, message in enumerate(messages):
            fields = cast("Body", message) if isinstance(message, dict) else {}
            is_last = place == last
            is_system = fields.get("role") in {"system", "developer"}
            if (but_last and is_last and not is_system) or (only_last and not is_last):
                continue
            if "content" in fields:
                role = "system" if is_system else str(fields.get("role", "user"))
                content = _content(fields["content"], role, f"{name}[{place}].content", change)
                if content != fields["content"]:
                    messages[place] = fields | {"content": content}
                    found[name] = messages
    return found


def append(body: Body, api: str, text: str, *, apart: bool = False) -> Body:
    """Return a body with a text behind all others: in the user's last message, or in one of its own."""
    found = dict(body)
    if api == "completions":
        prompt = body["prompt"]
        at = prompt.rfind("\n\n")
        at = prompt.rfind("\n") if at < 0 else at
        found["prompt"] = f"{prompt[:at]}\n{text}{prompt[at:]}" if at >= 0 else f"{text}\n{prompt}"
        return found
    name = "input" if api == "responses" else "messages"
    given: Any = body.get(name)
    if isinstance(given, str):
        found[name] = f"{given}\n\n{text}"
        return found
    messages: list[Any] = list(given or [])
    last: Body = {}
    if messages and isinstance(messages[-1], dict):
        last = cast("Body", messages[-1])
    kind = "input_text" if api == "responses" else "text"
    if last.get("role") == "user" and (not apart or api == "messages"):
        content: Any = last.get("content")
        if isinstance(content, str) and not apart:
            content = f"{content}\n\n{text}"
        else:
            content = [*parts_of(content, kind), {"type": kind, "text": text}]
        messages[-1] = last | {"content": content}
    else:
        messages.append({"role": "user", "content": text})
    found[name] = messages
    return found


def sort_tools(body: Body) -> Body:
    """Return a body whose tools are sorted by name; a breakpoint stays behind the last one."""
    found = dict(body)
    for name in ("tools", "functions"):
        tools = objects(body.get(name))
        order = sorted(range(len(tools)), key=lambda n: (tool_name(tools[n]), n))
        if order == [*range(len(tools))]:
            continue
        controls = [each[MARK] for each in tools if MARK in each]
        if controls:
            bare = [{key: value for key, value in each.items() if key != MARK} for each in tools]
            found[name] = [bare[n] for n in order]
            found[name][-1] = found[name][-1] | {MARK: controls[-1]}
        else:
            found[name] = [tools[n] for n in order]
    return found


def sort_tool_keys(body: Body) -> Body:
    """Return a body with the keys of its tools sorted, and the lists of their schemas that are sets."""
    sets = {name: canonical(body[name]) for name in ("tools", "functions") if objects(body.get(name))}  # fmt: skip
    return body | sets


def tool_name(tool: Any) -> str:
    """Return the name of a tool; its definition as JSON for one without a name."""
    fields = cast("Body", tool) if isinstance(tool, dict) else {}
    inner: Any = fields.get("function", fields)
    named = cast("Body", inner) if isinstance(inner, dict) else {}
    found = named.get("name") or fields.get("name") or fields.get("type")
    return str(found or msgspec.json.encode(tool).decode())


def canonical(value: Any) -> Any:
    """Return a JSON value with sorted keys, and with the lists of schemas that are sets sorted."""
    if isinstance(value, dict):
        return {
            key: sorted(inner)
            if key in {"required", "enum"} and _are_words(inner)
            else canonical(inner)
            for key, inner in sorted(cast("Body", value).items())
        }
    if isinstance(value, list):
        return [canonical(each) for each in value]  # pyright: ignore[reportUnknownVariableType]
    return value


def line_ends(text: str) -> str:
    """Return a text with LF in place of CR LF and CR."""
    return text.replace("\r\n", "\n").replace("\r", "\n")


def single_blanks(text: str) -> str:
    """Return a text with single blanks within lines, none at their ends, and one empty line at most."""
    return _EMPTY.sub(r"\1\1", _TRAILING.sub("", _INNER.sub(" ", text.translate(_ODD))))


def composed(text: str) -> str:
    """Return a text in NFC."""
    return unicodedata.normalize("NFC", text)


def objects(given: Any) -> list[Body]:
    """Return a list of objects; empty for anything else."""
    items = cast("list[Any]", given) if isinstance(given, list) else []
    return items if all(isinstance(each, dict) for each in items) else []


def parts_of(content: Any, kind: str) -> list[Body]:
    """Return a message's content as parts."""
    return [{"type": kind, "text": content}] if isinstance(content, str) else [*objects(content)]


def _content(content: Any, role: str, path: str, change: Change) -> Any:
    """Return a content with changed texts. A part that loses all its text goes; its breakpoint stays, one part before."""
    if isinstance(content, str):
        return change(content, role, path)
    if not isinstance(content, list):
        return content
    found: list[Any] = []
    for place, part in enumerate(cast("list[Any]", content)):
        fields = cast("Body", part) if isinstance(part, dict) else {}
        if isinstance(before := fields.get("text"), str):
            text = change(before, role, f"{path}[{place}]")
            if text.strip() or not before.strip():
                found.append(fields if text == before else fields | {"text": text})
            elif MARK in fields and found and isinstance(found[-1], dict):
                found[-1] = {MARK: fields[MARK]} | found[-1]
        else:
            found.append(part)
    return found


def _are_words(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, str) for each in value)  # pyright: ignore[reportUnknownVariableType]
