"""Rewrites of request bodies, each for one kind of cause. None loses text that the model sees."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import lru_cache
from hashlib import blake2b
from typing import Any, cast

import msgspec

from quire.web import rewrites
from quire.web.rewrites import Body, append, canonical, parts_of, with_texts
from quire_sim.lint import patterns
from quire_sim.lint.causes import MARKS, moved_text, passages
from quire_sim.lint.chains import PromptDifference
from quire_sim.lint.texts import NUMBERED
from quire_sim.logs import Api
from quire_sim.logs.bodies import as_json

KEY_RPM = 10
"""Requests a minute of one `prompt_cache_key`, so that some minutes may have half as many more."""

LONG_LINE = 300
"""Characters of a line of which the sentence is moved that changes, not all of it."""

_IN_FRONT = re.compile(r"prompt$|(?:messages|input)\[[01]\]")
"""Places of texts of users whose lines may move: the first message, which every request sends again."""

_UNITS = re.compile(r".*?(?:\n|\Z)", re.DOTALL)
_SENTENCES = re.compile(r".+?(?:[.!?]\s+|\Z)", re.DOTALL)


class ChangingParts(msgspec.Struct):
    """The parts of a log's bodies that rewrites change, as its differences show them.

    `shapes`    lines that change, by role, with what changes left out; `labels`: how lines with data of users begin
    `roles`     roles whose texts differ in form alone, by cause
    `parts`     passages that change places, by what divides them
    `blocks`    blocks that move with the last turn; `messages`: texts of messages that do
    `busiest`   requests a minute of one beginning at most
    """

    causes: set[str] = set()
    shapes: set[tuple[str, str]] = set()
    labels: set[tuple[str, str]] = set()
    roles: dict[str, set[str]] = {}
    parts: dict[str, set[str]] = {}
    blocks: set[str] = set()
    messages: set[str] = set()
    busiest: int = 0

    def add(self, difference: PromptDifference) -> None:
        """Learn from a difference."""
        name, parting = difference.cause.name, difference.parting
        self.causes.add(name)
        if name == "moved-block" and (moved := parting.earlier[parting.place]) in parting.later:
            self.messages.add(moved.text)
        if parting.pair is None:
            return
        role, (old, new) = parting.pair[1].role, parting.texts
        self.roles.setdefault(name, set()).add(role)
        if name in {"time", "identifier", "counter", "header-line"}:
            self.shapes |= {(role, _shape(_unit(each, parting.at))) for each in (old, new)}
        elif name == "user-data":
            label = _label(new, parting.at)
            if label:
                self.labels.add((role, label))
            else:
                self.shapes |= {(role, _shape(_unit(each, parting.at))) for each in (old, new)}
        elif name == "passage-order":
            for mark in MARKS:
                both = set(passages(old, parting.at, mark)) & set(passages(new, parting.at, mark))
                both = {each for each in both if len(each) >= 20}
                if len(both) > 1:
                    self.parts.setdefault(mark, set()).update(both)
                    break
        elif name == "moved-block":
            block = moved_text(*parting.pair)
            if len(block) >= 20:
                self.blocks.add(block)


def move_lines(body: Body, api: Api, learned: ChangingParts) -> Body:
    """Move lines that change to the end of the prompt."""
    taken: list[str] = []

    roles = {role for role, _ in learned.shapes | learned.labels}

    def change(text: str, role: str, path: str) -> str:
        if role not in roles or not (role == "system" or _IN_FRONT.match(path)):
            return text
        kept: list[str] = []
        for unit in _units(text):
            if unit.strip() and _is_moving(unit, role, learned):
                taken.append(unit.strip())
            else:
                kept.append(unit)
        return "".join(kept)

    found = with_texts(body, api, change, but_last=True)
    return append(found, api, "\n".join(taken)) if taken else body


def sort_tools(body: Body, _: Api, __: ChangingParts) -> Body:
    """Sort tools by name."""
    return rewrites.sort_tools(body)


def sort_keys(body: Body, api: Api, learned: ChangingParts) -> Body:
    """Sort the keys of tools, and of JSON objects in texts whose keys change their order."""
    found = rewrites.sort_tool_keys(body)
    roles = learned.roles.get("key-order", set()) - {"tools"}
    if roles:
        return with_texts(
            found, api, lambda text, role, _: _sorted_objects(text) if role in roles else text
        )
    return found


def normalise(cause: str) -> Callable[[Body, Api, ChangingParts], Body]:
    """Return the rewrite that gives texts one form: their line ends, blanks, or Unicode form."""
    forms = {
        "line-ends": rewrites.line_ends,
        "whitespace": rewrites.single_blanks,
        "unicode": rewrites.composed,
    }

    def rewrite(body: Body, api: Api, learned: ChangingParts) -> Body:
        roles = learned.roles.get(cause, set())
        form = forms[cause]
        return with_texts(body, api, lambda text, role, _: form(text) if role in roles else text)

    return rewrite


def sort_passages(body: Body, api: Api, learned: ChangingParts) -> Body:
    """Sort passages that change places, each number in its place. Answers may change."""
    roles = learned.roles.get("passage-order", set())
    return with_texts(
        body, api, lambda text, role, _: _sorted_passages(text, learned) if role in roles else text
    )


def split_off(body: Body, api: Api, learned: ChangingParts) -> Body:
    """Put blocks that move with the last turn into a last message, and messages that do at the end."""
    body = _with_last(body, "input" if api == "responses" else "messages", learned.messages)
    taken: list[str] = []

    def change(text: str, role: str, _: str) -> str:
        for block in sorted(learned.blocks, key=len, reverse=True):
            if role != "system" and block in text and text.strip() != block:
                taken.append(block)
                text = text.replace(block, "", 1).strip()
        return text

    found = with_texts(body, api, change, only_last=True)
    return append(found, api, "\n".join(taken), apart=True) if taken else body


def _with_last(body: Body, name: str, texts: set[str]) -> Body:
    """Return a body whose messages with these texts stand behind all others."""
    given: Any = body.get(name)
    if not texts or not isinstance(given, list):
        return body
    messages = cast("list[Any]", given)
    moving = [_own_text(each) in texts for each in messages]
    order = sorted(range(len(messages)), key=moving.__getitem__)
    if all(moving) or order == [*range(len(messages))]:
        return body
    return body | {name: [messages[place] for place in order]}


def _own_text(message: Any) -> str:
    """Return the text of a message that has one only, of a user or a system; empty for others."""
    fields = cast("Body", message) if isinstance(message, dict) else {}
    content: Any = fields.get("content")
    if isinstance(content, list) and len(cast("list[Any]", content)) == 1:
        content = (parts_of(content, "text") or [Body()])[0].get("text")
    is_said = fields.get("role") in {"user", "system", "developer"}
    return content if is_said and isinstance(content, str) else ""


def as_it_is(body: Body, _: Api, __: ChangingParts) -> Body:
    """Return the body: the mend changes when requests are sent."""
    return body


def place_breakpoints(body: Body, api: Api, _: ChangingParts) -> Body:
    """Place breakpoints behind tools and system, and behind the last message, where a body has none there."""
    if api != "messages" or as_json(body).count('"cache_control"') > 2:
        return body
    mark = {"cache_control": {"type": "ephemeral"}}
    found = dict(body)
    system: Any = body.get("system")
    if isinstance(system, str) and system:
        found["system"] = [{"type": "text", "text": system} | mark]
    elif isinstance(system, list) and system:
        found["system"] = [*system[:-1], system[-1] | mark]
    elif body.get("tools"):
        found["tools"] = [*body["tools"][:-1], body["tools"][-1] | mark]
    messages: Any = body.get("messages") or []
    if messages:
        last = messages[-1]
        content: Any = last.get("content")
        parts = parts_of(content, "text")
        if parts and parts[-1].get("type") != "thinking":
            parts[-1] = parts[-1] | mark
            found["messages"] = [*messages[:-1], last | {"content": parts}]
    return found


def set_cache_key(body: Body, api: Api, learned: ChangingParts) -> Body:
    """Set `prompt_cache_key` by the first message of a user: as few keys as keep each below the provider's rate."""
    num_keys = -(-learned.busiest // KEY_RPM)
    if api not in {"chat", "responses"} or body.get("prompt_cache_key") or num_keys < 2:
        return body
    said: Any = body.get("messages") or body.get("input")
    messages = cast("list[Any]", said) if isinstance(said, list) else []
    of_user = (
        cast("Body", each)
        for each in messages
        if isinstance(each, dict) and cast("Body", each).get("role") == "user"
    )
    first: Any = next(of_user, cast("Any", said))
    digest = blake2b(as_json(first).encode(), digest_size=8).digest()
    return body | {"prompt_cache_key": f"conversation-{int.from_bytes(digest) % num_keys}"}


def _units(text: str) -> list[str]:
    """Return a text in lines; long lines in sentences."""
    found: list[str] = []
    for line in _UNITS.findall(text):
        found += [line] if len(line) <= LONG_LINE else _SENTENCES.findall(line)
    return [each for each in found if each]


def _unit(text: str, at: int) -> str:
    start, end = text.rfind("\n", 0, at) + 1, text.find("\n", at)
    line = text[start : len(text) if end < 0 else end + 1]
    for unit in _units(line):
        start += len(unit)
        if at < start:
            return unit
    return line


def _label(text: str, at: int) -> str:
    """Return how a line with data of a user begins; empty if that is too short to know it by."""
    line = patterns.line_before(text, at)
    found = list(patterns.USER.finditer(line, max(len(line) - patterns.LABEL, 0)))
    label = line[: found[-1].end()] if found else ""
    words = re.match(r".*?\b(?:name|user|customer|client|account|tenant|company|e-?mail|phone|address|city|country|location|locale|language|zone|plan|helping|assisting|to|with|in|for)\b\W*", label, re.IGNORECASE)  # fmt: skip
    return words[0] if words and len(words[0].strip()) >= 4 else ""


@lru_cache(1 << 16)
def _shape(line: str) -> str:
    """Return a line with everything that may change left out."""
    for pattern in (patterns.TIME, patterns.EMAIL, patterns.IDENTIFIER, patterns.NUMBER):
        line = pattern.sub("\0", line)
    return re.sub(r"\0[\0\W]*\0", "\0", line.strip())


def _is_moving(unit: str, role: str, learned: ChangingParts) -> bool:
    if any(role == each and unit.startswith(label) for each, label in learned.labels):
        return True
    shape = _shape(unit)
    return "\0" in shape and (role, shape) in learned.shapes


def _sorted_passages(text: str, learned: ChangingParts) -> str:
    for mark in MARKS:
        known = learned.parts.get(mark)
        if not known or mark not in text:
            continue
        parts = text.split(mark)
        slots: list[tuple[int, str, str, str]] = []
        for place, part in enumerate(parts):
            bare = part.strip()
            found = NUMBERED.match(bare)
            body = bare[found.end() :] if found else bare
            if body not in known:  # the last one may have more text behind it
                body = body.partition("\n")[0]
            if body in known:
                start = part.index(body)
                slots.append((place, part[:start], body, part[start + len(body) :]))
        for (place, before, _, after), body in zip(slots, sorted(each[2] for each in slots), strict=True):  # fmt: skip
            parts[place] = before + body + after
        text = mark.join(parts)
    return text


def _sorted_objects(text: str) -> str:
    """Sort the keys of JSON objects in a text, in the style in which they are written."""
    decode = json.JSONDecoder().raw_decode
    found, at = "", 0
    while (start := text.find("{", at)) >= 0:
        try:
            value, end = decode(text, start)
        except ValueError:
            end, value = start + 1, None
        if isinstance(value, dict) and len(cast("Body", value)) > 1:
            source = text[start:end]
            indent = re.match(r"\{\n( +)", source)
            joints = (", " if ", " in source else ",", ": " if '": ' in source else ":")
            written = json.dumps(canonical(value), ensure_ascii=False, indent=len(indent[1]) if indent else None, separators=(",", ": ") if indent else joints)  # fmt: skip
            found += text[at:start] + written
        else:
            found += text[at:end]
        at = end
    return found + text[at:]
