"""Causes of lost tokens: a rule for each, tried in this order at the first difference of two prompts."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple, cast

from quire_sim.lint import patterns
from quire_sim.logs import Section

_THOUGHT = re.compile(r"<think(?:ing)?>.*?</think(?:ing)?>\s*", re.DOTALL)


class Parting(NamedTuple):
    """Two prompts where they part: `place` is the first section that differs, `at` its first such character.

    `place` is -1 if another model or salt divides their caches.
    """

    earlier: list[Section]
    later: list[Section]
    place: int
    at: int

    @property
    def pair(self) -> tuple[Section, Section] | None:
        """The two sections that differ; None if a prompt ends before."""
        if not 0 <= self.place < min(len(self.earlier), len(self.later)):
            return None
        return self.earlier[self.place], self.later[self.place]

    @property
    def texts(self) -> tuple[str, str]:
        """Their texts; empty without a pair."""
        return (self.pair[0].text, self.pair[1].text) if self.pair else ("", "")


class Cause(NamedTuple):
    """A cause: its name, its words for people, the advice, and the rule that finds it."""

    name: str
    title: str
    advice: str
    rule: Callable[[Parting], bool]


def cause_of(parting: Parting) -> Cause:
    """Return the first cause whose rule holds; the last one always does."""
    return next(each for each in CAUSES if each.rule(parting))


def _texts(rule: Callable[[str, str, int], bool]) -> Callable[[Parting], bool]:
    def holds(parting: Parting) -> bool:
        pair = parting.pair
        return (
            pair is not None
            and pair[0].kind == pair[1].kind != "media"
            and rule(*parting.texts, parting.at)
        )

    return holds


def _pattern(pattern: re.Pattern[str]) -> Callable[[Parting], bool]:
    return _texts(lambda old, new, at: patterns.both(pattern, old, new, at))


def _is_header(old: str, new: str, at: int) -> bool:
    return any(patterns.BILLING.match(patterns.line_at(each, at)) for each in (old, new))


def _is_of_user(old: str, new: str, at: int) -> bool:
    return patterns.both(patterns.EMAIL, old, new, at) or bool(
        patterns.USER.search(patterns.line_before(new, at))
    )


def _tools(sections: list[Section]) -> list[str]:
    return [each.text for each in sections if each.kind == "tool"]


def _is_tool_order(parting: Parting) -> bool:
    old, new = _tools(parting.earlier), _tools(parting.later)
    if not _at_tools(parting) or Counter(map(_name, old)) != Counter(map(_name, new)):
        return False
    return [*map(_name, old)] != [*map(_name, new)]


def _is_tool_set(parting: Parting) -> bool:
    names = (Counter(map(_name, _tools(each))) for each in (parting.earlier, parting.later))
    return _at_tools(parting) and len(set(map(frozenset, (each.items() for each in names)))) > 1


def _at_tools(parting: Parting) -> bool:
    at = slice(parting.place, parting.place + 1)
    return parting.place >= 0 and any(
        each.kind == "tool" for each in parting.earlier[at] + parting.later[at]
    )


def _name(tool: str) -> str:
    value: Any = json.loads(tool)
    fields = cast("dict[str, Any]", value) if isinstance(value, dict) else {}
    inner: Any = fields.get("function", fields)
    return str(cast("dict[str, Any]", inner).get("name", tool)) if isinstance(inner, dict) else tool


def _is_key_order(old: str, new: str, at: int) -> bool:
    """Whether the JSON object around a place has the same content in both texts, in another order."""
    decode = json.JSONDecoder().raw_decode
    start = old.rfind("{", 0, at + 1)
    for _ in range(12):
        if start < 0:
            return False
        try:
            first, then = decode(old, start)[0], decode(new, start)[0]
        except ValueError:
            first, then = None, 0
        if first == then:
            return True
        start = old.rfind("{", 0, start)
    return False


def _is_passage_order(old: str, new: str, at: int) -> bool:
    """Whether the passage at a place stands elsewhere in the other text, for both texts."""
    for mark in ("\n\n", "\n"):
        before, after = _passage(old, at, mark), _passage(new, at, mark)
        if (
            min(len(before), len(after)) >= 20
            and before in new
            and after in old
            and before != after
        ):
            return True
    return False


def _passage(text: str, at: int, mark: str) -> str:
    start = text.rfind(mark, 0, at)
    start = 0 if start < 0 else start + len(mark)
    end = text.find(mark, at)
    return text[start : len(text) if end < 0 else end].strip()


def _is_message_order(parting: Parting) -> bool:
    old, new = parting.earlier[parting.place :], parting.later[parting.place :]
    if parting.place < 0 or not old or not new:
        return False
    return old[0] in new and new[0] in old and old[0].kind != "tool" and len(old[0].text) >= 20


def _is_history_cut(parting: Parting) -> bool:
    old, new = parting.earlier[parting.place :], parting.later[parting.place :]
    if parting.place < 0 or not new or new[0].role in {"system", "tools"} or new[0] not in old:
        return False
    start = old.index(new[0])
    length = min(len(old) - start, len(new))
    return (
        start > 0
        and old[start : start + length] == new[:length]
        and (length > 1 or len(new[0].text) >= 20)
    )


def _is_summary(parting: Parting) -> bool:
    old, new = parting.earlier[parting.place :], parting.later[parting.place :]
    if (
        parting.place < 0
        or len(new) < 2
        or new[0].role == "tools"
        or new[0] in old
        or new[1] not in old
    ):
        return False
    return old.index(new[1]) > 1


def _is_thinking(parting: Parting) -> bool:
    pair = parting.pair
    if pair is None:
        return False
    old, new = pair
    if (old.kind == "thinking") != (new.kind == "thinking"):
        return True
    first, then = (_THOUGHT.sub("", each.text).strip() for each in pair)
    return old.role == "assistant" and "<think" in old.text + new.text and first == then


def _is_moved(parting: Parting) -> bool:
    """Whether a block of an earlier turn is gone and stands in the last turn."""
    old, new = parting.earlier[parting.place :], parting.later[parting.place :]
    if parting.place < 0 or not old or not new:
        return False
    last = parting.later[-3:]
    if old[0] not in new[:1] and old[0] in last and len(old[0].text) >= 20 and old[1:2] == new[:1]:
        return True
    first, then = old[0].text, new[0].text
    if old[0].role != new[0].role or old[0].role == "system" or len(first) <= len(then):
        return False
    extra = (
        first[len(then) :].strip()
        if first.startswith(then)
        else first[: -len(then) or None].strip()
    )
    held = first.startswith(then) or first.endswith(then)
    return (
        held and len(extra) >= 20 and any(extra in each.text for each in last if each is not new[0])
    )


def _is_image(parting: Parting) -> bool:
    pair = parting.pair
    return (
        pair is not None
        and pair[0].kind == pair[1].kind == "media"
        and pair[0].text == pair[1].text
    )


def _is_other_scope(parting: Parting) -> bool:
    return parting.place < 0


def _always(_: Parting) -> bool:
    return True


def _never(_: Parting) -> bool:
    return False


_END = "Move the line behind everything that stays: to the end of the last user message."

TEMPLATE = "template"
"""The cause of a difference that the chat template alone makes: no rule on bodies can see it."""

CAUSES = (
    Cause("scope", "another model or cache_salt", "Keep one model and one cache_salt per conversation; each has a cache of its own.", _is_other_scope),
    Cause(TEMPLATE, "the chat template writes earlier turns otherwise", "Use a chat template that writes a turn the same way whatever follows it, or send back what it leaves out.", _never),
    Cause("header-line", "a client's header line in the prompt", "Drop the line: it is for billing, not for the model. Claude Code leaves it out with CLAUDE_CODE_ATTRIBUTION_HEADER=0.", _texts(_is_header)),
    Cause("tool-order", "order of tools", "Sort the tools by name before each request.", _is_tool_order),
    Cause("tool-set", "tools added or removed", "Send the same tools in every request, and restrict them by tool_choice.", _is_tool_set),
    Cause("image", "an image encoded again", "Encode an image once and send the same bytes again.", _is_image),
    Cause("thinking", "reasoning removed from earlier turns", "Use a chat template that keeps reasoning, or send the reasoning back.", _is_thinking),
    Cause("moved-block", "a block that moves with the last turn", "Leave the block where it was sent first, or send it in a last message of its own.", _is_moved),
    Cause("history-cut", "history cut at the front", "Cut many messages at once and rarely, so that most requests continue the one before.", _is_history_cut),
    Cause("summary", "history summarised", "Summarise rarely; the summary starts a new prefix each time.", _is_summary),
    Cause("message-order", "order of messages or examples", "Send examples in one fixed order; another order may change answers.", _is_message_order),
    Cause("line-ends", "line ends", "Write the same line ends everywhere: replace CR LF by LF.", _texts(patterns.is_same_but_for_line_ends)),
    Cause("whitespace", "whitespace", "Normalise blanks where the prompt is put together.", _texts(patterns.is_same_but_for_blanks)),
    Cause("unicode", "Unicode forms", "Normalise texts to NFC where they enter the prompt.", _texts(patterns.is_same_but_for_form)),
    Cause("key-order", "order of JSON keys", "Write JSON with sorted keys.", _texts(_is_key_order)),
    Cause("passage-order", "order of passages", "Sort passages by an id of their own; another order may change answers.", _texts(_is_passage_order)),
    Cause("time", "a time or date", f"{_END} A date alone changes once a day.", _pattern(patterns.TIME)),
    Cause("user-data", "data of a user", f"Put what all users share first. {_END}", _texts(_is_of_user)),
    Cause("identifier", "an identifier", f"{_END} Or leave it out, if the model does not need it.", _pattern(patterns.IDENTIFIER)),
    Cause("counter", "a counter or number", _END, _pattern(patterns.NUMBER)),
    Cause("other", "other words", "Put what changes behind what stays.", _always),
)  # fmt: skip
"""All causes, the more particular first."""
