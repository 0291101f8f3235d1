"""The rules of mends in flight: what each changes in a decoded body, and the differences that it makes."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, TypeAlias, cast

import msgspec

from quire.errors import ConfigError
from quire.web import rewrites
from quire.web.rewrites import Body

SHOWN = 60
"""Characters of each side of a difference that are shown."""

BILLING = r"x-anthropic-billing-header:.*"
"""The line that coding agents put before their system prompt; it changes with each request."""

_PINNED_BILLING = r"x-anthropic-billing-header:(?:.*?cc_version=([^;\s]*))?(?:.*?cch=([^;\s]*))?.*"

LINES = {"drop-lines": BILLING, "pin-lines": _PINNED_BILLING, "move-lines": None}
"""Rules for lines, with the pattern of those that have one of their own."""

FORMS: dict[str, Callable[[str], str]] = {
    "line-ends": rewrites.line_ends,
    "blanks": rewrites.single_blanks,
    "nfc": rewrites.composed,
}
"""Rules for the form of texts."""

TOOLS = {"sort-keys": rewrites.sort_tool_keys, "sort-tools": rewrites.sort_tools}
"""Rules for tools."""

RULES = (*LINES, *FORMS, *TOOLS)
"""The names of all rules."""


class MendDifference(NamedTuple):
    """A change of a request: rule, place in the body, and both texts from where they part."""

    rule: str
    path: str
    before: str
    after: str


Told: TypeAlias = list[MendDifference]


class LineRule(NamedTuple):
    """A rule for whole lines of system texts: those that match are dropped, pinned or moved to the end."""

    name: str
    pattern: re.Pattern[str]

    def apply(self, text: str, taken: list[str]) -> str:
        """Return a text without the lines that match, which are added to `taken`, or with them pinned."""
        if self.name == "pin-lines":
            return "".join(_pinned(self.pattern, line) for line in _lines(text))
        kept: list[str] = []
        for line in _lines(text):
            bare = line.rstrip("\r\n")
            if self.pattern.fullmatch(bare):
                taken.append(bare)
            else:
                kept.append(line)
        return "".join(kept)


def line_rule(name: str, pattern: str | None) -> LineRule:
    """Return a rule for lines. Raises `ConfigError` for a pattern that cannot be used."""
    if pattern is None:
        raise ConfigError(
            f"--mend {name} needs a pattern of whole lines: {name}='Today is .*'; "
            "drop-lines and pin-lines alone are for the billing line of coding agents"
        )
    try:
        made = re.compile(pattern, re.IGNORECASE)
    except re.error as error:
        raise ConfigError(f"--mend {name}: {pattern[:60]!r} is no pattern: {error}") from None
    if made.fullmatch(""):
        raise ConfigError(
            f"--mend {name}: {pattern[:60]!r} matches an empty line; name words of the line"
        )
    if name == "pin-lines" and not made.groups:
        raise ConfigError(
            f"--mend pin-lines: {pattern[:60]!r} has no group; put what changes in parentheses: 'Build: (.*)'"
        )
    return LineRule(name, made)


class TextRules(NamedTuple):
    """The rules for system texts: forms by name, and lines."""

    forms: list[str]
    lines: list[LineRule]

    def apply(self, body: Body, api: str, told: Told) -> Body:
        """Return a body with other system texts, and moved lines at its end; differences are added to `told`."""
        if not (self.lines or self.forms):
            return body
        taken: list[str] = []

        def change(text: str, role: str, path: str) -> str:
            is_prompt = api == "completions"
            if role != "system" and not is_prompt:
                return text
            made: Told = []
            moved: list[str] = []
            found = self._changed(text, [] if is_prompt else self.forms, partial(_note, made, path), moved)  # fmt: skip
            if is_prompt and not found.strip():  # a prompt has some text
                return text
            told.extend(made)
            taken.extend(moved)
            return found

        changed = rewrites.with_texts(body, api, change)
        if taken:
            changed = rewrites.append(changed, api, "\n".join(taken))
        if changed == body:  # a line moved to where it was
            told.clear()
        return changed if told else body

    def _changed(
        self, text: str, forms: list[str], note: Callable[[str, str, str], str], moved: list[str]
    ) -> str:
        """Return a text with forms, lines, and forms again, as lines that go leave gaps."""
        for name in forms:
            text = note(name, text, FORMS[name](text))
        for rule in self.lines:
            taken: list[str] = []
            text = note(rule.name, text, rule.apply(text, taken))
            moved += taken if rule.name == "move-lines" else ()
        for name in forms:
            text = note(name, text, FORMS[name](text))
        return text


def with_tools(name: str, body: Body, told: Told) -> Body:
    """Return a body with a rule for tools applied; differences are added to `told`.

    They are the names in order, or the first definition that is written otherwise.
    """
    after = TOOLS[name](body)
    for field in ("tools", "functions"):
        old, new = body.get(field), after.get(field)
        if old is new or _json(old) == _json(new):
            continue
        if name == "sort-tools":
            texts = [
                ", ".join(map(rewrites.tool_name, cast("list[Any]", each))) for each in (old, new)
            ]
            told.append(MendDifference(name, field, *_parted(*texts)))
            continue
        pairs = zip(cast("list[Any]", old), cast("list[Any]", new), strict=True)
        at, texts = next(
            (at, pair)
            for at, pair in enumerate((_json(one), _json(other)) for one, other in pairs)
            if pair[0] != pair[1]
        )
        told.append(MendDifference(name, f"{field}[{at}]", *_parted(*texts)))
    return after


def without_emptied(body: Body, before: Body) -> Body:
    """Return a body without system texts that have lost all their words: servers refuse empty ones."""
    found = dict(body)
    for name in ("system", "instructions"):
        if found.get(name) in ("", []) and found[name] != before[name]:
            del found[name]
    for name in ("messages", "input"):
        given: Any = found.get(name)
        if isinstance(given, list):
            messages = cast("list[Any]", given)
            kept = [each for each in messages if not _is_emptied(each)]
            if 0 < len(kept) < len(messages):
                found[name] = kept
    return found


def _is_emptied(message: Any) -> bool:
    fields = cast("Body", message) if isinstance(message, dict) else {}
    content: Any = fields.get("content")
    is_blank = isinstance(content, str) and not content.strip()
    return fields.get("role") in ("system", "developer") and (content == [] or is_blank)


def _note(told: Told, path: str, rule: str, before: str, after: str) -> str:
    if after != before:
        told.append(MendDifference(rule, path, *_parted(before, after)))
    return after


def _lines(text: str) -> list[str]:
    """Return a text in lines with their ends; LF alone ends one."""
    return re.findall(r"[^\n]*\n|[^\n]+", text)


def _pinned(pattern: re.Pattern[str], line: str) -> str:
    """Return a line with `0` in place of what the groups of a pattern match."""
    bare = line.rstrip("\r\n")
    found = pattern.fullmatch(bare)
    if found is None:
        return line
    made, at = "", 0
    spans = (found.span(number + 1) for number in range(pattern.groups))
    for start, end in sorted(spans, key=lambda span: (span[0], -span[1])):
        if at <= start < end:  # neither empty nor within another one
            made, at = f"{made}{bare[at:start]}0", end
    return made + line[at:]


def _parted(before: str, after: str) -> tuple[str, str]:
    """Return two texts from a little before they part."""
    at, end, step = 0, min(len(before), len(after)), 1 << 12
    while at + step <= end and before[at : at + step] == after[at : at + step]:
        at += step
    while at < end and before[at] == after[at]:
        at += 1
    start = max(at - SHOWN // 3, 0)
    return before[start : start + SHOWN], after[start : start + SHOWN]


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()
