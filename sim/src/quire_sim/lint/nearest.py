"""The earlier prompts of a log: what a prefix cache without limits finds, and the prompt that is most alike."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from itertools import takewhile
from sys import getsizeof

import msgspec

from quire_sim.lint.alike import alike, size_of
from quire_sim.lint.texts import PIECE, common_prefix
from quire_sim.logs import LoggedRequest, Section

CANDIDATES = 4
"""Earlier prompts that are compared as a whole."""

MAX_BYTES = 1 << 30
"""Memory of earlier prompts; beyond it the first half of them is forgotten."""

SECTION_BYTES, NODE_BYTES, PROMPT_BYTES, LINE_BYTES = 450, 200, 250, 150
"""Memory of a section beside its text, of a node, of a prompt beside its sections, and of a line that is known."""

RARE = 3
"""Earlier prompts beside them that share lines which few have: the same user, the same day."""

TOOL_SETS = 64
"""Sets of tools of which the last prompt is known."""

MOST_LINES = 400
"""Lines of a section by which such prompts are found."""


class EarlierPrompt(msgspec.Struct, eq=False):
    """An earlier prompt: its row, its scope, the numbers of its sections, and the same prompt in tokens."""

    row: int
    scope: dict[str, str]
    time_s: float | None
    ids: list[int]
    rendered: EarlierPrompt | None = None


def scope_of(request: LoggedRequest) -> dict[str, str]:
    """Return the fields beside a prompt that divide caches, by name."""
    beside = () if request.api == "messages" else ("tool_choice", "parallel_tool_calls")
    names = sorted({*request.parameters} - {*beside})
    scope = {name: request.parameters[name] for name in names}
    return {"model": request.model, "cache_salt": request.salt, **scope}


class Finding(msgspec.Struct, eq=False):
    """A prompt beside the earlier ones, in characters.

    `size`     all of it; `hit`: those that an earlier prompt begins with
    `lost`     those behind the first difference that stand in the nearest prompt as well
    `earlier`  the nearest prompt, or None; `place`: the first section that differs from it
    `at`       the first character of that section that differs
    """

    request: LoggedRequest
    prompt: EarlierPrompt
    size: int
    hit: int
    lost: int = 0
    earlier: EarlierPrompt | None = None
    place: int = 0
    at: int = 0


class Siblings(msgspec.Struct, eq=False):
    """Sections of one role and kind behind a node, by their texts: a text begins most like a neighbour."""

    texts: list[str] = []
    numbers: list[int] = []

    def add(self, text: str, number: int) -> None:
        """Add a section."""
        at = bisect_left(self.texts, text)
        self.texts.insert(at, text)
        self.numbers.insert(at, number)

    def most_alike(self, text: str) -> tuple[int, int]:
        """Return the section that has the longest begin in common with a text, and that length."""
        at = bisect_left(self.texts, text)
        near = range(max(at - 1, 0), min(at + 1, len(self.texts)))
        size, place = max((common_prefix(self.texts[each], text), each) for each in near)
        return self.numbers[place], size


class PromptTrie:
    """The last prompts of a log as a trie of sections, each text once, in about `max_bytes`.

    A node is a run of sections that a prompt of its scope begins with; `_last` has the latest prompt of each. Unless it
    `compares`, the nearest prompt is not sought, and nothing counts as lost.
    """

    def __init__(self, max_bytes: int = MAX_BYTES, *, compares: bool = True) -> None:
        self._max_bytes, self._compares = max_bytes, compares
        self._prompts: list[EarlierPrompt] = []
        self._sections: dict[int, Section] = {}
        self._sizes: dict[int, int] = {}
        self._num_sections = 0
        self._clear()

    def add(self, request: LoggedRequest) -> Finding:
        """Return a prompt beside the earlier ones, and keep it."""
        while self._bytes > self._max_bytes and len(self._prompts) > 1:
            self._forget()
        ids = [self._number(each) for each in request.sections]
        scope = scope_of(request)
        node, depth = self._root(scope), 0
        while depth < len(ids) and (child := self._next.get(node << 32 | ids[depth])) is not None:
            node = child
            depth += 1
        sizes = [self._sizes[each] for each in ids]
        prompt = EarlierPrompt(request.row, scope, request.time_s, ids)
        finding = Finding(request, prompt, sum(sizes), sum(sizes[:depth]))
        partial = self._partial(node, ids[depth]) if depth < len(ids) else None
        finding.place, finding.at = depth, 0 if partial is None else partial[1]
        finding.hit += finding.at
        if self._compares:
            self._compare(finding, self._candidates(ids, depth, node, partial))
        self._keep(prompt)
        return finding

    def sections(self, ids: list[int]) -> list[Section]:
        """Return sections by their numbers, without paths."""
        return [self._sections[each] for each in ids]

    def text(self, number: int) -> str:
        """Return the text of a section; empty if it is forgotten."""
        section = self._sections.get(number)
        return "" if section is None else section.text

    def _clear(self) -> None:
        self._bytes = 0
        self._numbers: dict[tuple[str, str, str, str], int] = {}
        self._next: dict[int, int] = {}
        self._roots: dict[tuple[tuple[str, str], ...], int] = {}
        self._last: list[EarlierPrompt | None] = []
        self._children: list[int | dict[tuple[str, str], Siblings] | None] = []
        self._holders: dict[int, EarlierPrompt] = {}
        self._lines: dict[int, int] = {}
        self._tool_sets: dict[frozenset[int], EarlierPrompt] = {}

    def _forget(self) -> None:
        """Forget the first half of the prompts, and what they alone have."""
        prompts = self._prompts[len(self._prompts) // 2 :]
        used = {number for each in prompts for number in each.ids}
        self._clear()
        self._sections = {number: self._sections[number] for number in sorted(used)}
        self._sizes = {number: self._sizes[number] for number in sorted(used)}
        for number, section in self._sections.items():
            self._numbers[_key(section)] = number
            self._bytes += SECTION_BYTES + getsizeof(section.text)
        self._prompts = []
        for prompt in prompts:
            self._root(prompt.scope)
            self._keep(prompt)

    def _root(self, scope: dict[str, str]) -> int:
        key = tuple(scope.items())
        root = self._roots.get(key)
        if root is None:
            root = self._roots[key] = self._node()
        return root

    def _node(self) -> int:
        self._bytes += NODE_BYTES
        self._last.append(None)
        self._children.append(None)
        return len(self._last) - 1

    def _number(self, section: Section) -> int:
        key = _key(section)
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = self._num_sections
            self._num_sections += 1
            self._sections[number] = Section(
                "", section.role, section.kind, section.text, section.media
            )
            self._sizes[number] = size_of(section)
            self._bytes += SECTION_BYTES + getsizeof(section.text)
        return number

    def _partial(self, node: int, number: int) -> tuple[int, int] | None:
        """Return the section behind a node that begins most like this one, and the characters that are equal."""
        section, children = self._sections[number], self._children[node]
        if children is None or section.kind == "media":
            return None
        if isinstance(children, int):
            other = self._sections[children]
            if (other.role, other.kind) != (section.role, section.kind):
                return None
            return children, common_prefix(other.text, section.text)
        siblings = children.get((section.role, section.kind))
        return None if siblings is None else siblings.most_alike(section.text)

    def _candidates(
        self, ids: list[int], depth: int, node: int, partial: tuple[int, int] | None
    ) -> list[EarlierPrompt]:
        """Return earlier prompts that may be most alike: by prefix, by their last sections, and by their tools."""
        first = (
            None
            if partial is None or partial[1] < PIECE
            else self._last[self._next[node << 32 | partial[0]]]
        )
        found = {each: None for each in (first, self._last[node]) if each is not None}
        if depth < len(ids):
            found |= dict.fromkeys(self._by_rare_lines(ids[depth]))
        for number in reversed(ids[depth:]):
            if len(found) >= CANDIDATES + RARE:
                break
            if self._sizes[number] >= PIECE and (holder := self._holders.get(number)) is not None:
                found[holder] = None
        tools = self._tools(ids)
        if tools and depth <= len(tools) and self._tool_sets:
            found[self._by_tools(tools)] = None
        return list(found)

    def _tools(self, ids: list[int]) -> frozenset[int]:
        """Return the tools of a prompt, which stand before all else."""
        return frozenset(takewhile(lambda each: self._sections[each].kind == "tool", ids))

    def _by_tools(self, tools: frozenset[int]) -> EarlierPrompt:
        """Return the last prompt that has most of some tools."""
        same = self._tool_sets.get(tools)
        return (
            same
            or self._tool_sets[
                max(
                    reversed(self._tool_sets),
                    key=lambda each: sum(self._sizes[n] for n in each & tools),
                )
            ]
        )

    def _by_rare_lines(self, number: int) -> list[EarlierPrompt]:
        """Return the prompts that last had the lines of a section that fewest prompts have."""
        held = Counter(self._lines.get(each, -1) for each in _line_hashes(self.text(number)))
        rare = sorted((count, number) for number, count in held.items() if number >= 0)
        return [self._holders[number] for _, number in rare[:RARE]]

    def _compare(self, finding: Finding, candidates: list[EarlierPrompt]) -> None:
        if not candidates:
            return
        best, finding.earlier = 0, candidates[0]
        new = self.sections(finding.prompt.ids)
        for earlier in candidates:
            if finding.size - max(best, finding.hit) < PIECE:  # no other can have more
                break
            total, _, place, at = alike(self.sections(earlier.ids), new)
            if earlier.scope != finding.prompt.scope:
                place, at = -1, 0
            if total > best:
                best, finding.place, finding.at, finding.earlier = total, place, at, earlier
        finding.lost = max(min(best, finding.size) - finding.hit, 0)

    def _keep(self, prompt: EarlierPrompt) -> None:
        self._prompts.append(prompt)
        if tools := self._tools(prompt.ids):
            self._tool_sets.pop(tools, None)
            self._tool_sets[tools] = prompt
            if len(self._tool_sets) > TOOL_SETS:
                del self._tool_sets[next(iter(self._tool_sets))]
        self._bytes += PROMPT_BYTES + 8 * len(prompt.ids)
        node = self._root(prompt.scope)
        self._last[node] = prompt
        is_first = True
        for number in prompt.ids:
            key = node << 32 | number
            child = self._next.get(key)
            if child is None:
                child = self._next[key] = self._node()
                self._adopt(node, number)
                if is_first and self._compares:
                    self._index(number)
                is_first = False
            node = child
            self._last[node] = prompt
            self._holders[number] = prompt

    def _index(self, number: int) -> None:
        """Note which section had the lines of one last."""
        hashes = _line_hashes(self.text(number))
        known = len(self._lines)
        self._lines |= dict.fromkeys(hashes, number)
        self._bytes += LINE_BYTES * (len(self._lines) - known)

    def _adopt(self, node: int, number: int) -> None:
        """Add a section to those behind a node."""
        children = self._children[node]
        if children is None:
            self._children[node] = number
            return
        if isinstance(children, int):
            only, children = children, dict[tuple[str, str], Siblings]()
            self._children[node] = children
            self._place(children, only)
        self._place(children, number)

    def _place(self, children: dict[tuple[str, str], Siblings], number: int) -> None:
        section = self._sections[number]
        if section.kind != "media":
            siblings = children.setdefault((section.role, section.kind), Siblings())
            siblings.add(section.text, number)


def _key(section: Section) -> tuple[str, str, str, str]:
    return section.role, section.kind, section.text, section.media


def _line_hashes(text: str) -> list[int]:
    return [hash(each) for each in text.split("\n", MOST_LINES)[:MOST_LINES] if len(each) >= 8]
