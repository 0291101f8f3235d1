"""Prompts beside the nearest earlier ones: the kind of each, and where the two part."""

from __future__ import annotations

import re
from collections import Counter, OrderedDict, deque
from collections.abc import Sequence
from typing import Literal, NamedTuple, TypeAlias

from quire_sim.lint.texts import common_prefix, equal_behind
from quire_sim.logs.rows import LoggedRequest, Section

Kind: TypeAlias = Literal[
    "cold", "continuation", "tool round trip", "repeat", "rewrite", "compaction", "new chat", "side request"
]  # fmt: skip

MOST_BESIDE = 8
"""Earlier prompts with the same beginning that a prompt is compared to, the latest ones."""

SIDE_S = 600.0
"""Seconds for which a conversation goes on without a request."""

SHOWN = 60
"""Characters of the two texts that a difference shows."""

_SUMMARY = re.compile(
    r"summar|compact|continued from a previous|conversation so far|context was truncated",
    re.IGNORECASE,
)


class Difference(NamedTuple):
    """The first difference between a prompt and the nearest earlier one.

    `path`, `at`        the section of this prompt, and the character in it
    `earlier`, `this`   the two texts from a little before there
    `num_equal_behind`  characters behind it that both have: pieces of that section, and whole sections
    """

    path: str
    at: int
    earlier: str
    this: str
    num_equal_behind: int


class Beside(NamedTuple):
    """A prompt beside the nearest earlier one.

    `nearest`    the row of that one; None for none
    `num_chars`  characters of the prompt; `num_equal` of them, from the start, stand in the earlier one
    `difference` None if the earlier prompt is a beginning of this one, or there is none
    """

    kind: Kind
    nearest: int | None
    num_chars: int
    num_equal: int
    difference: Difference | None


class _Prompt(NamedTuple):
    number: int
    sections: tuple[Section, ...]
    keys: tuple[int, ...]
    num_head: int
    num_chars: int
    time_s: float
    owner: str


class RecentPrompts:
    """The last prompts, to which new ones are compared.

    A prompt is found by its first sections, so a comparison takes time for the prompt alone, however many are there.

    `most`        prompts that are remembered
    `most_chars`  characters of them together
    """

    def __init__(self, most: int = 512, most_chars: int = 128 << 20) -> None:
        self._most, self._most_chars = most, most_chars
        self._prompts: OrderedDict[int, _Prompt] = OrderedDict()
        self._by_key: dict[int, deque[int]] = {}
        self._num_chars = 0

    def add(self, request: LoggedRequest) -> Beside:
        """Return a request beside the nearest earlier one, and remember it by its row, which no earlier one has."""
        prompt = self._prompt(request)
        nearest, depth = self._nearest(prompt)
        found = self._compared(prompt, nearest, depth)
        self._remember(prompt)
        return found

    def _prompt(self, request: LoggedRequest) -> _Prompt:
        key = hash((request.tenant, request.model, request.salt))
        keys = [key]
        for each in request.sections:
            key = hash((key, each.role, each.kind, each.text, each.media))
            keys.append(key)
        heads = [each.role in ("tools", "system") for each in request.sections]
        num_head = heads.index(False) if False in heads else len(heads)
        sections = request.sections
        num_chars = sum(len(each.text) for each in sections)
        time_s = request.time_s or 0.0
        return _Prompt(
            request.row, sections, tuple(keys), num_head, num_chars, time_s, request.tenant
        )

    def _nearest(self, prompt: _Prompt) -> tuple[_Prompt | None, int]:
        """Return the earlier prompt with the longest equal beginning, and how many sections of it are equal."""
        for depth in range(len(prompt.keys) - 1, -1, -1):
            found = [self._prompts[each] for each in self._by_key.get(prompt.keys[depth], ())]
            if found:
                ranked = [
                    (_behind(each, prompt, depth), _same_start(each, prompt, depth), each.number)
                    for each in found
                ]
                best = max(range(len(found)), key=ranked.__getitem__)
                return found[best], depth
        return None, 0

    def _compared(self, this: _Prompt, earlier: _Prompt | None, depth: int) -> Beside:
        if earlier is None:
            return Beside(self._apart(this), None, this.num_chars, 0, None)
        chars = _same_start(earlier, this, depth)
        num_equal = sum(len(each.text) for each in this.sections[:depth]) + chars
        is_whole = depth == len(earlier.sections) or (
            depth == len(earlier.sections) - 1
            and depth < len(this.sections)
            and _is_beginning(earlier.sections[depth], this.sections[depth])
        )
        if depth == len(this.sections):
            return Beside("repeat", earlier.number, this.num_chars, num_equal, None)
        if is_whole:
            added = this.sections[depth:]
            is_tool = any(each.kind == "result" for each in added)
            kind: Kind = "tool round trip" if is_tool else "continuation"
            if depth <= this.num_head and not chars:
                kind = "new chat"  # the earlier prompt was a system text alone
            return Beside(kind, earlier.number, this.num_chars, num_equal, None)
        behind = _behind(earlier, this, depth)
        section = this.sections[depth]
        start = max(0, chars - SHOWN // 3)
        other = earlier.sections[depth]
        end = equal_behind(other.text, section.text, chars)
        difference = Difference(
            section.path, chars, other.text[start : start + SHOWN],
            section.text[start : start + SHOWN], behind + end,
        )  # fmt: skip
        kind = self._kind(this, earlier, depth, behind, num_equal)
        if kind in {"cold", "side request"}:
            return Beside(kind, None, this.num_chars, 0, None)
        return Beside(kind, earlier.number, this.num_chars, num_equal, difference)

    def _kind(
        self, this: _Prompt, earlier: _Prompt, depth: int, behind: int, num_equal: int
    ) -> Kind:
        has_head = depth >= max(this.num_head, earlier.num_head)
        if has_head and this.num_head and depth < len(this.sections):
            is_shorter = len(this.sections) < len(earlier.sections)
            is_talk = len(earlier.sections) - earlier.num_head >= 3
            new = this.sections[depth:]
            if is_shorter and is_talk and (behind or any(_SUMMARY.search(s.text) for s in new)):
                return "compaction"
        if behind or depth > max(this.num_head, earlier.num_head):
            return "rewrite"
        if has_head and this.num_head:
            return "new chat"
        if 2 * num_equal >= this.num_chars:
            return "rewrite"
        return self._apart(this)

    def _apart(self, this: _Prompt) -> Kind:
        """Return the kind of a prompt that shares nothing: a side request while a longer conversation goes on."""
        for each in reversed(self._prompts.values()):
            if this.time_s - each.time_s > SIDE_S:
                break
            if each.owner == this.owner and each.num_chars > 2 * this.num_chars:
                return "side request"
        return "cold"

    def _remember(self, prompt: _Prompt) -> None:
        self._prompts[prompt.number] = prompt
        self._num_chars += prompt.num_chars
        for key in set(prompt.keys):
            known = self._by_key.setdefault(key, deque(maxlen=MOST_BESIDE))
            known.append(prompt.number)
        while len(self._prompts) > self._most or (
            self._num_chars > self._most_chars and len(self._prompts) > 1
        ):
            number, gone = self._prompts.popitem(last=False)
            self._num_chars -= gone.num_chars
            for key in set(gone.keys):
                known = self._by_key[key]
                if number in known:
                    known.remove(number)
                if not known:
                    del self._by_key[key]


def _content(section: Section) -> tuple[str, str, str, str]:
    return section.role, section.kind, section.text, section.media


def _is_beginning(earlier: Section, this: Section) -> bool:
    if (earlier.role, earlier.kind) != (this.role, this.kind) or earlier.media or this.media:
        return False
    return bool(earlier.text) and this.text.startswith(earlier.text)


def _same_start(earlier: _Prompt, this: _Prompt, depth: int) -> int:
    """Return how many characters of the section at a depth both prompts begin it with."""
    if depth >= min(len(earlier.sections), len(this.sections)):
        return 0
    one, other = earlier.sections[depth], this.sections[depth]
    if (one.role, one.kind) != (other.role, other.kind) or one.media or other.media:
        return 0
    return common_prefix(one.text, other.text)


def _behind(earlier: _Prompt, this: _Prompt, depth: int) -> int:
    """Return the characters of sections behind the first difference that both prompts have."""
    left: Counter[tuple[str, str, str, str]] = Counter(
        _content(each) for each in _tail(earlier.sections, depth)
    )
    found = 0
    for each in _tail(this.sections, depth):
        content = _content(each)
        if left[content] > 0:
            left[content] -= 1
            found += len(each.text)
    return found


def _tail(sections: Sequence[Section], depth: int) -> Sequence[Section]:
    return sections[depth:]
