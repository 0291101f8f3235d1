"""Differences of two prompts one after the other: each is taken out of both, so that the next one shows."""

from __future__ import annotations

import json
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeAlias

import msgspec

from quire.web.rewrites import canonical
from quire_sim.lint import patterns
from quire_sim.lint.alike import alike
from quire_sim.lint.causes import (
    Cause,
    Parting,
    cause_of,
    moved_text,
    passages,
    plain,
    resumed,
    tool_name,
)
from quire_sim.lint.texts import first_hunk
from quire_sim.logs import Section

Prompt: TypeAlias = list[Section]
Pair: TypeAlias = tuple[Prompt, Prompt]

MOST = 6
"""Differences of two prompts that are told."""


class PromptDifference(NamedTuple):
    """A difference of two prompts: its cause, where it is, and the characters behind it that stand in both.

    `parting` is the two prompts with earlier differences taken out. `source` is the number of the later prompt's
    section before anything was taken out; -1 for the model or a parameter.
    """

    cause: Cause
    parting: Parting
    source: int
    chars: int


def differences(parting: Parting, lost: int, least: int) -> Iterator[PromptDifference]:
    """Yield the differences of two prompts in order, while at least `least` characters behind one stand in both.

    `lost` is how many stand behind the first.
    """
    sources = list(range(len(parting.later)))
    for _ in range(MOST):
        if lost < least:
            return
        cause = cause_of(parting)
        source = _source(parting, sources)
        yield PromptDifference(cause, parting, source, lost)
        old, new = _WITHOUT.get(cause.name, _without_hunk)(parting)
        if old == parting.earlier and new == parting.later and parting.place >= 0:
            return
        sources = _sources(parting.later, new, sources)
        then = alike(old, new)
        lost = then.total - then.begin
        parting = Parting(old, new, then.place, then.at)


def _source(parting: Parting, sources: list[int]) -> int:
    if parting.place < 0:
        return -1
    return sources[parting.place] if parting.place < len(sources) else len(sources)


def _sources(old: Prompt, new: Prompt, sources: list[int]) -> list[int]:
    """Return where the sections of a changed prompt stood: equal ones where they were, others in order."""
    left: dict[Section, list[int]] = {}
    for section, source in zip(old, sources, strict=True):
        left.setdefault(section, []).append(source)
    found = [left[each].pop(0) if left.get(each) else -1 for each in new]
    rest = iter(sorted(source for each in left.values() for source in each))
    return [next(rest, 0) if each < 0 else each for each in found]


def _changed(section: Section, text: str) -> Section:
    return section if section.text == text else msgspec.structs.replace(section, text=text)


def _replaced(prompt: Prompt, place: int, text: str) -> Prompt:
    return [*prompt[:place], _changed(prompt[place], text), *prompt[place + 1 :]]


def _without_hunk(parting: Parting) -> Pair:
    """Cut the first difference: the words that a pattern covers, or those up to the next equal ones."""
    old, new, place, at = parting.earlier, parting.later, parting.place, parting.at
    if place < 0:
        return old, new
    if parting.pair is None or parting.pair[0].kind != parting.pair[1].kind:
        return _without_sections(parting)
    pattern = _PATTERNS.get(cause_of(parting).name)
    first, then = parting.texts
    begin, ends = at, first_hunk(first, then, at)
    if pattern is not None:
        spans = [patterns.span(pattern, each, at) for each in (first, then)]
        begin = min([at, *(each[0] for each in spans if each)])
        ends = tuple(each[1] if each else end for each, end in zip(spans, ends, strict=True))
    if ends == (at, at) or not parting.pair[0].text:
        return _without_sections(parting)
    return (
        _replaced(old, place, first[:begin] + first[ends[0] :]),
        _replaced(new, place, then[:begin] + then[ends[1] :]),
    )


def _without_line(parting: Parting) -> Pair:
    """Cut the line of the place where it is a header."""
    found: list[Prompt] = []
    for prompt, text in zip((parting.earlier, parting.later), parting.texts, strict=True):
        line = patterns.line_at(text, parting.at)
        is_header = patterns.BILLING.match(line)
        start = text.rfind("\n", 0, parting.at) + 1
        end = start + len(line) + 1 if is_header else start
        found.append(_replaced(prompt, parting.place, text[:start] + text[end:]))
    return found[0], found[1]


def _without_user_data(parting: Parting) -> Pair:
    """Cut the value: up to the end of its line, or of its clause if the lines go on differently."""
    begin = parting.at
    while begin and parting.texts[1][begin - 1].isalnum():
        begin -= 1
    ends = [_end_of_value(text, parting.at) for text in parting.texts]
    first, then = parting.texts
    return (
        _replaced(parting.earlier, parting.place, first[:begin] + first[ends[0] :]),
        _replaced(parting.later, parting.place, then[:begin] + then[ends[1] :]),
    )


def _end_of_value(text: str, at: int) -> int:
    found = patterns.VALUE_END.search(text, at)
    return found.start() if found else len(text)


def _without_sections(parting: Parting) -> Pair:
    """Cut sections that differ up to the next equal ones."""
    old, new, place = parting.earlier, parting.later, parting.place
    behind = {each: n for n, each in reversed([*enumerate(old[place:])])}
    for far, each in enumerate(new[place:]):
        if each in behind and (far or behind[each]):
            return old[:place] + old[place + behind[each] :], new[:place] + new[place + far :]
    return old[:place] + old[place + 1 :], new[:place] + new[place + 1 :]


def _with_order(parting: Parting) -> Pair:
    """Put what both prompts have behind the place in the order of the later one."""
    old, new, place = parting.earlier, parting.later, parting.place
    both = Counter(old[place:]) & Counter(new[place:])
    common = _taken(new[place:], Counter(both))
    rest = (_rest(each[place:], Counter(both)) for each in (old, new))
    first, then = rest
    return old[:place] + common + first, new[:place] + common + then


def _taken(prompt: Sequence[Section], left: Counter[Section]) -> Prompt:
    found: Prompt = []
    for each in prompt:
        if left[each] > 0:
            left[each] -= 1
            found.append(each)
    return found


def _rest(prompt: Sequence[Section], left: Counter[Section]) -> Prompt:
    found: Prompt = []
    for each in prompt:
        if left[each] > 0:
            left[each] -= 1
        else:
            found.append(each)
    return found


def _with_tools(parting: Parting) -> Pair:
    """Keep the tools whose names both prompts have, in the order of the later one."""
    order = {tool_name(each.text): n for n, each in enumerate(parting.later) if each.kind == "tool"}
    names = {tool_name(each.text) for each in parting.earlier if each.kind == "tool"} & set(order)

    def sent(prompt: Prompt) -> Prompt:
        tools = [each for each in prompt if each.kind == "tool" and tool_name(each.text) in names]
        tools.sort(key=lambda each: order[tool_name(each.text)])
        return tools + [each for each in prompt if each.kind != "tool"]

    return sent(parting.earlier), sent(parting.later)


def _normalised(change: Callable[[str], str]) -> Callable[[Parting], Pair]:
    def mended(parting: Parting) -> Pair:
        old, new = (
            [_changed(each, change(each.text)) for each in prompt]
            for prompt in (parting.earlier, parting.later)
        )
        return old, new

    return mended


def _sorted_keys(text: str) -> str:
    try:
        return json.dumps(canonical(json.loads(text)), ensure_ascii=False)
    except ValueError:
        return text


def _with_key_order(parting: Parting) -> Pair:
    """Sort the keys of tools and calls; in a text, take the object of the later prompt."""
    if parting.pair is not None and parting.pair[1].kind in {"tool", "call"}:
        old, new = (
            [_changed(each, _sorted_keys(each.text)) if each.kind in {"tool", "call"} else each for each in prompt]
            for prompt in (parting.earlier, parting.later)
        )  # fmt: skip
        return old, new
    first, then = parting.texts
    found = patterns.objects_at(first, then, parting.at)
    if found is None:
        return _without_hunk(parting)
    start, end, other = found
    text = first[:start] + then[start:other] + first[end:]
    return _replaced(parting.earlier, parting.place, text), parting.later


def _with_passages(parting: Parting) -> Pair:
    """Put passages that both texts have in the order of the later one."""
    first, then = parting.texts
    for mark in ("\n\n", "\n"):
        old, new = (passages(each, parting.at, mark) for each in (first, then))
        both = Counter(old) & Counter(new)
        order = [each for each in new if both[each]]
        if len(order) < 2:
            continue
        start = max(then.rfind(mark, 0, parting.at), 0)

        def text(parts: list[str], order: list[str] = order, mark: str = mark) -> str:
            return mark + mark.join([*order, *(each for each in parts if each not in order)])

        return (
            _replaced(parting.earlier, parting.place, first[:start] + text(old)),
            _replaced(parting.later, parting.place, then[:start] + text(new)),
        )
    return _without_hunk(parting)


def _without_thoughts(parting: Parting) -> Pair:
    old, new = (
        [_changed(each, plain(each.text)) for each in prompt if each.kind != "thinking"]
        for prompt in (parting.earlier, parting.later)
    )
    return old, new


def _without_moved(parting: Parting) -> Pair:
    """Cut the block where it was and where it is."""
    old, new, place = parting.earlier, parting.later, parting.place
    if old[place] in new[place:]:
        again = place + new[place:].index(old[place])
        return old[:place] + old[place + 1 :], new[:again] + new[again + 1 :]
    extra = moved_text(old[place], new[place])
    earlier, later = (
        [_changed(each, each.text.replace(extra, "").strip()) if extra in each.text else each for each in prompt]
        for prompt in (old, new)
    )  # fmt: skip
    return earlier, later


def _without_front(parting: Parting) -> Pair:
    """Cut the messages of the earlier prompt that the later one has no more."""
    old, new, place = parting.earlier, parting.later, parting.place
    start = old.index(new[place], place)
    return old[:place] + old[start:], new


def _without_summary(parting: Parting) -> Pair:
    """Cut what both prompts have before the first message that they share again; or the differing words."""
    found = resumed(parting)
    if found is None:
        return _without_hunk(parting)
    place, (far, start) = parting.place, found
    return parting.earlier[:place] + parting.earlier[place + start :], parting.later[
        :place
    ] + parting.later[place + far :]


def _with_image(parting: Parting) -> Pair:
    old, new, place = parting.earlier, parting.later, parting.place
    return [*old[:place], new[place], *old[place + 1 :]], new


_PATTERNS = {
    "time": patterns.TIME,
    "identifier": patterns.IDENTIFIER,
    "counter": patterns.NUMBER,
}

_WITHOUT: dict[str, Callable[[Parting], Pair]] = {
    "header-line": _without_line,
    "tool-order": _with_tools,
    "tool-set": _with_tools,
    "image": _with_image,
    "thinking": _without_thoughts,
    "moved-block": _without_moved,
    "history-cut": _without_front,
    "summary": _without_summary,
    "message-order": _with_order,
    "line-ends": _normalised(lambda text: text.replace("\r\n", "\n").replace("\r", "\n")),
    "whitespace": _normalised(patterns.without_blanks),
    "unicode": _normalised(lambda text: unicodedata.normalize("NFC", text)),
    "key-order": _with_key_order,
    "passage-order": _with_passages,
    "user-data": _without_user_data,
}
"""Functions that take a difference out of both prompts, by its cause; for other causes it is cut."""
