"""Causes of lost tokens: a rule for each, tried in this order at the first difference of two prompts."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

from quire.web import rewrites
from quire_sim.lint import patterns
from quire_sim.lint.texts import PIECE, common_prefix, common_suffix, unnumbered
from quire_sim.logs import Section

_THOUGHT = re.compile(r"<(think|thinking|reasoning|thought)>.*?</\1>\s*", re.DOTALL | re.IGNORECASE)
MARKS = ("\n\n", "\n---\n", "\n")
"""Ends of passages in a text, the rarest first."""


class Parting(NamedTuple):
    """Two prompts where they part: `place` is the first section that differs, `at` its first such character.

    `place` is -1 if a field beside the prompt divides their caches: the model, the salt or a parameter, in `scope`.
    """

    earlier: list[Section]
    later: list[Section]
    place: int
    at: int
    scope: str = ""

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
    """A cause: its name, its words for people, and the advice."""

    name: str
    title: str
    advice: str


def cause_of(parting: Parting) -> Cause:
    """Return the cause of the first rule that holds."""
    return next(_BY_NAME[name] for name, rule in _RULES if rule(parting))


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
    if patterns.both(patterns.EMAIL, old, new, at):
        return True
    return bool(patterns.USER.search(patterns.line_before(new, at)[-patterns.LABEL :]))


def _has_names(old: str, new: str, at: int) -> bool:
    return patterns.both(patterns.NAMES, old, new, at)


def _is_identifier(old: str, new: str, at: int) -> bool:
    if patterns.both(patterns.IDENTIFIER, old, new, at):
        return True
    before = patterns.line_before(new, at)
    return bool(patterns.IDENTIFIED.search(before)) and new[at : at + 1].isalnum()


def _is_recap(_: str, new: str, at: int) -> bool:
    start = new.rfind("\n\n", 0, at) + 1
    return patterns.RECAP.search(new, max(start, at - 400), at) is not None


def _tools(sections: list[Section]) -> list[str]:
    return [tool_name(each.text) for each in sections if each.kind == "tool"]


def _is_tool_order(parting: Parting) -> bool:
    old, new = _tools(parting.earlier), _tools(parting.later)
    return _at_tools(parting) and Counter(old) == Counter(new) and old != new


def _is_tool_set(parting: Parting) -> bool:
    return _at_tools(parting) and Counter(_tools(parting.earlier)) != Counter(_tools(parting.later))


def _at_tools(parting: Parting) -> bool:
    at = slice(parting.place, parting.place + 1)
    return parting.place >= 0 and any(
        each.kind == "tool" for each in parting.earlier[at] + parting.later[at]
    )


def tool_name(tool: str) -> str:
    """Return the name of a tool by its definition; the definition itself for one without a name."""
    return rewrites.tool_name(json.loads(tool))


def _is_key_order(old: str, new: str, at: int) -> bool:
    """Whether the JSON value around a place has the same content in both texts, in another order."""
    return patterns.objects_at(old, new, at) is not None


def _is_passage_order(old: str, new: str, at: int) -> bool:
    """Whether the passage at a place stands elsewhere in the other text, for both texts; or items of a list."""
    for mark in MARKS:
        before, after = passages(old, at, mark, 1), passages(new, at, mark, 1)
        if (
            before
            and after
            and before != after
            and min(len(before[0]), len(after[0])) >= 20
            and before[0] in new
            and after[0] in old
        ):
            return True
    items = [re.split(r"[,;|]\s*", patterns.line_at(each, at)) for each in (old, new)]
    ends = [[each.strip(" .[](){}'\"") for each in line] for line in items]
    first, then = ([line[0].rpartition(":")[2].strip(" ['\"("), *line[1:]] for line in ends)
    return len(first) > 2 and first != then and Counter(first) == Counter(then)


def passages(text: str, at: int, mark: str, most: int = -1) -> list[str]:
    """Return the passages of a text from a place on, without their numbers; at most so many."""
    start = max(text.rfind(mark, 0, at), -len(mark)) + len(mark) if mark in text[:at] else 0
    parts = text[start:].split(mark, most)
    return [unnumbered(each).strip() for each in parts[: most if most > 0 else None]]


def _is_message_order(parting: Parting) -> bool:
    old, new = parting.earlier[parting.place :], parting.later[parting.place :]
    if parting.place < 0 or not old or not new:
        return False
    return old[0] in new and new[0] in old and old[0].kind != "tool" and len(old[0].text) >= 20


def _is_history_cut(parting: Parting) -> bool:
    old, new = parting.earlier[parting.place :], parting.later[parting.place :]
    if parting.place < 0 or not new or new[0].role in {"system", "tools"}:
        return False
    if _is_cleared(old, new):
        return True
    if new[0] not in old:
        return False
    start = old.index(new[0])
    length = min(len(old) - start, len(new))
    return (
        start > 0
        and old[start : start + length] == new[:length]
        and (length > 1 or len(new[0].text) >= 20)
    )


def _is_cleared(old: list[Section], new: list[Section]) -> bool:
    """Whether a message is cut to a remark that it was cut, and the next ones are as before."""
    return (
        len(old) > 1
        and old[1:2] == new[1:2]
        and len(new[0].text) < min(len(old[0].text), 160)
        and patterns.CLEARED.search(new[0].text) is not None
    )


def _is_summary(parting: Parting) -> bool:
    found = resumed(parting)
    if found is None:
        return False
    far, start = found
    goes_on = parting.place + far + 1 < len(parting.later)
    if start > far and goes_on:
        return True
    return start >= far and patterns.tells_summary(parting.later[parting.place].text)


def resumed(parting: Parting) -> tuple[int, int] | None:
    """Return how far behind the place the later prompt has the first message again, and the earlier one has it."""
    old, new = parting.earlier[parting.place :], parting.later[parting.place :]
    if parting.place < 0 or not new or new[0].role == "tools" or new[0] in old:
        return None
    for far in range(1, min(5, len(new))):
        if len(new[far].text) >= PIECE and new[far] in old:
            return far, old.index(new[far])
    return None


def _is_thinking(parting: Parting) -> bool:
    pair = parting.pair
    if pair is None:
        return False
    old, new = pair
    if (old.kind == "thinking") != (new.kind == "thinking"):
        return True
    first, then = (plain(each.text).strip() for each in pair)
    has_thoughts = any(_THOUGHT.search(each.text) for each in pair if "</" in each.text)
    return old.role == "assistant" and first == then and has_thoughts


def plain(text: str) -> str:
    """Return a text without its reasoning."""
    return _THOUGHT.sub("", text).strip() if "</" in text else text


def _is_moved(parting: Parting) -> bool:
    """Whether a block of an earlier turn is gone and stands in the last turn."""
    old, new = parting.earlier[parting.place :], parting.later[parting.place :]
    if parting.place < 0 or not old or not new:
        return False
    last = parting.later[-3:]
    is_answered = len(old) == 1 and new[0].role == "assistant" != old[0].role
    is_same = is_answered or old[1:2] == new[:1]
    if old[0] not in new[:1] and old[0] in last and len(old[0].text) >= 20 and is_same:
        return True
    extra = moved_text(old[0], new[0])
    return len(extra) >= 20 and any(
        extra[:60] in each.text for each in last if each is not new[0] and each.role != "system"
    )


def moved_text(old: Section, new: Section) -> str:
    """Return what a message has no more; empty if it has other words instead."""
    first, then = old.text, new.text
    if old.role != new.role or old.role in {"system", "tools"} or len(first) <= len(then):
        return ""
    begin = common_prefix(first, then)
    end = common_suffix(first, then, len(then) - begin)
    return "" if begin + end < len(then) else first[begin : len(first) - end].strip()


def _is_image(parting: Parting) -> bool:
    pair = parting.pair
    return (
        pair is not None
        and pair[0].kind == pair[1].kind == "media"
        and pair[0].text == pair[1].text
    )


def _scope(*names: str) -> Callable[[Parting], bool]:
    def holds(parting: Parting) -> bool:
        return parting.place < 0 and (not names or parting.scope in names)

    return holds


def _always(_: Parting) -> bool:
    return True


_END = "Move the line behind everything that stays: to the end of the last user message."

TEMPLATE = "template"
"""The cause of a difference that the chat template alone makes: no rule on bodies can see it."""

JOINT = "joint"
"""The cause of a difference that the tokenizer alone makes, between a prompt and its answer."""

CAUSES = (
    Cause("model", "another model", "Keep one model per conversation; each has a cache of its own."),
    Cause("cache-salt", "another cache_salt", "Give one cache_salt to all requests that may share."),
    Cause("parameters", "a parameter that changed", "Keep response formats, reasoning and template settings the same: caches are keyed by them."),
    Cause(TEMPLATE, "the chat template writes earlier turns otherwise", "Use a chat template that writes a turn the same way whatever follows it, or send back what it leaves out."),
    Cause(JOINT, "tokens that merge across a joint", "End prompts without a blank, or send back the tokens of the answer: its text has other tokens behind the prompt."),
    Cause("header-line", "a client's header line in the prompt", "Drop the line: it is for billing, not for the model. Claude Code leaves it out with CLAUDE_CODE_ATTRIBUTION_HEADER=0."),
    Cause("tool-order", "order of tools", "Sort the tools by name before each request."),
    Cause("tool-set", "tools added or removed", "Send the same tools in every request, and restrict them by tool_choice."),
    Cause("image", "an image encoded again", "Encode an image once and send the same bytes again."),
    Cause("thinking", "reasoning removed from earlier turns", "Use a chat template that keeps reasoning, or send the reasoning back."),
    Cause("moved-block", "a block that moves with the last turn", "Leave the block where it was sent first, or send it in a last message of its own."),
    Cause("history-cut", "history cut", "Cut many messages at once and rarely, so that most requests continue the one before."),
    Cause("summary", "history summarised", "Summarise rarely; the summary starts a new prefix each time."),
    Cause("message-order", "order of messages or examples", "Send examples in one fixed order; another order may change answers."),
    Cause("line-ends", "line ends", "Write the same line ends everywhere: replace CR LF by LF."),
    Cause("whitespace", "whitespace", "Normalise blanks where the prompt is put together."),
    Cause("unicode", "Unicode forms", "Normalise texts to NFC where they enter the prompt."),
    Cause("key-order", "order of JSON keys", "Write JSON with sorted keys."),
    Cause("passage-order", "order of passages or items", "Sort passages by an id of their own; another order may change answers."),
    Cause("time", "a time or date", f"{_END} A date alone changes once a day."),
    Cause("user-data", "data of a user", f"Put what all users share first. {_END}"),
    Cause("identifier", "an identifier", f"{_END} Or leave it out, if the model does not need it."),
    Cause("counter", "a counter or number", _END),
    Cause("other", "other words", "Put what changes behind what stays."),
)  # fmt: skip
"""All causes, the more particular first."""

_RULES: tuple[tuple[str, Callable[[Parting], bool]], ...] = (
    ("model", _scope("model")),
    ("cache-salt", _scope("cache_salt")),
    ("parameters", _scope()),
    ("header-line", _texts(_is_header)),
    ("tool-order", _is_tool_order),
    ("tool-set", _is_tool_set),
    ("image", _is_image),
    ("thinking", _is_thinking),
    ("moved-block", _is_moved),
    ("history-cut", _is_history_cut),
    ("summary", _is_summary),
    ("message-order", _is_message_order),
    ("line-ends", _texts(patterns.is_same_but_for_line_ends)),
    ("whitespace", _texts(patterns.is_same_but_for_blanks)),
    ("unicode", _texts(patterns.is_same_but_for_form)),
    ("key-order", _texts(_is_key_order)),
    ("passage-order", _texts(_is_passage_order)),
    ("summary", _texts(_is_recap)),
    ("time", _pattern(patterns.TIME)),
    ("user-data", _texts(_is_of_user)),
    ("identifier", _texts(_is_identifier)),
    ("counter", _pattern(patterns.NUMBER)),
    ("user-data", _texts(_has_names)),
    ("other", _always),
)
"""The rules in the order in which they are tried, each with its cause; the last one always holds."""

_BY_NAME = {cause.name: cause for cause in CAUSES}
