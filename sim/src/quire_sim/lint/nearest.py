"""The earlier prompts of a log: what a prefix cache without limits finds, and the prompt that is most alike."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import msgspec

from quire_sim.lint.texts import PIECE, common_prefix, equal_behind
from quire_sim.logs import LoggedRequest, Section

PROBES = tuple(16 << step for step in range(14))
"""Lengths of beginnings by which a section with the longest common begin is found."""

CANDIDATES = 4
"""Earlier prompts that are compared as a whole."""

MAX_TEXTS = 1 << 29
"""Characters of texts that are kept; the oldest are forgotten beyond it."""


class EarlierPrompt(msgspec.Struct, eq=False):
    """An earlier prompt: its row, its scope, and the numbers of its sections."""

    row: int
    model: str
    salt: str
    time_s: float | None
    ids: list[int]


class Finding(msgspec.Struct, eq=False):
    """A prompt beside the earlier ones, in characters.

    `size`     all of it; `hit`: those that an earlier prompt begins with
    `lost`     those behind the first difference that stand in the nearest prompt as well
    `earlier`  the nearest prompt, or None; `place`: the first section that differs from it
    `at`       the first character of that section that differs
    """

    request: LoggedRequest
    ids: list[int]
    size: int
    hit: int
    lost: int = 0
    earlier: EarlierPrompt | None = None
    place: int = 0
    at: int = 0


class PromptTrie:
    """All prompts of a log so far, as a trie of sections. Texts are kept once each."""

    def __init__(self) -> None:
        self._numbers: dict[Section, int] = {}
        self._sections: list[Section | None] = []
        self._sizes: list[int] = []
        self._kept = 0
        self._oldest = 0
        self._next: dict[tuple[int, int], int] = {}
        self._roots: dict[tuple[str, str], int] = {}
        self._last: list[int] = [-1]
        self._root_last: dict[int, int] = {}
        self._probes: dict[tuple[int, int, int], int] = {}
        self._holders: dict[int, int] = {}
        self._prompts: list[EarlierPrompt] = []

    def add(self, request: LoggedRequest) -> Finding:
        """Return a prompt beside the earlier ones, and keep it."""
        ids = [self._number(each) for each in request.sections]
        scope = request.model, request.salt
        prompt = EarlierPrompt(request.row, *scope, request.time_s, ids)
        node = self._roots.setdefault(scope, -len(self._roots) - 1)
        depth = 0
        while depth < len(ids) and (child := self._next.get((node, ids[depth]))) is not None:
            node = child
            depth += 1
        partial = self._partial(node, ids[depth]) if depth < len(ids) else None
        hit = sum(self._sizes[each] for each in ids[:depth])
        if partial is not None:
            hit += common_prefix(self._text(partial[0]), self._text(ids[depth]))
        size = sum(self._sizes[each] for each in ids)
        finding = Finding(request, ids, size, hit)
        self._compare(finding, prompt, self._candidates(ids, depth, node, partial))
        self._keep(prompt, depth, node)
        return finding

    def sections(self, ids: list[int]) -> list[Section]:
        """Return sections by their numbers; forgotten ones are empty."""
        return [self._sections[each] or Section("", "", "text", "") for each in ids]

    def size(self, number: int) -> int:
        """Return the characters of a section."""
        return self._sizes[number]

    def _number(self, section: Section) -> int:
        key = (
            section
            if not section.breakpoint_s
            else msgspec.structs.replace(section, breakpoint_s=0)
        )
        key = msgspec.structs.replace(key, path="")
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = len(self._sections)
            self._sections.append(key)
            self._sizes.append(max(len(section.text) + len(section.media), 1))
            self._kept += len(section.text)
            self._forget()
        return number

    def _forget(self) -> None:
        while self._kept > MAX_TEXTS:
            section = self._sections[self._oldest]
            if section is not None:
                del self._numbers[section]
                self._kept -= len(section.text)
                self._sections[self._oldest] = None
            self._oldest += 1

    def _text(self, number: int) -> str:
        section = self._sections[number]
        return "" if section is None else section.text

    def _partial(self, node: int, number: int) -> tuple[int, int] | None:
        """Return the section behind a node that begins most like this one, and its prompt."""
        text = self._text(number)
        for length in reversed(PROBES):
            if length <= len(text):
                found = self._probes.get((node, length, hash(text[:length])))
                if found is not None:
                    child = self._next[node, found]
                    return found, self._last[child]
        return None

    def _candidates(
        self, ids: list[int], depth: int, node: int, partial: tuple[int, int] | None
    ) -> list[EarlierPrompt]:
        """Return earlier prompts that may be most alike: by prefix, and by their last sections."""
        found: dict[int, None] = {}
        if partial is not None:
            found[partial[1]] = None
        last = self._last[node] if node > 0 else self._root_last.get(node)
        if last is not None:
            found[last] = None
        for number in reversed(ids[depth:]):
            if len(found) >= CANDIDATES:
                break
            if self._sizes[number] >= PIECE and (holder := self._holders.get(number)) is not None:
                found[holder] = None
        return [self._prompts[each] for each in found]

    def _compare(
        self, finding: Finding, prompt: EarlierPrompt, candidates: list[EarlierPrompt]
    ) -> None:
        best = None
        for earlier in candidates:
            total, place, at = self._alike(earlier, finding.ids)
            if (earlier.model, earlier.salt) != (prompt.model, prompt.salt):
                place, at = -1, 0
            if best is None or total > best[0]:
                best = total, place, at, earlier
        if best is not None:
            total, finding.place, finding.at, finding.earlier = best
            finding.lost = max(min(total, finding.size) - finding.hit, 0)

    def _alike(self, earlier: EarlierPrompt, ids: list[int]) -> tuple[int, int, int]:
        """Return the characters of a prompt that stand in an earlier one, and the first that does not."""
        old = earlier.ids
        place = next(
            (n for n, pair in enumerate(zip(old, ids, strict=False)) if pair[0] != pair[1]),
            min(len(old), len(ids)),
        )
        total = sum(self._sizes[each] for each in ids[:place])
        behind, left = Counter(old[place:]), list[int]()
        follows = False
        for number in ids[place:]:
            if behind[number]:
                behind[number] -= 1
                follows |= self._sizes[number] >= PIECE
                total += self._sizes[number] if follows else 0
            else:
                left.append(number)
                follows = False
        at = 0
        if place < min(len(old), len(ids)):
            at = common_prefix(self._text(old[place]), self._text(ids[place]))
        others = list(behind.elements())
        for number in left:
            other = next((each for each in others if self._are_siblings(each, number)), None)
            if other is not None:
                others.remove(other)
                first, then = self._text(other), self._text(number)
                begin = common_prefix(first, then)
                total += (begin if begin >= PIECE or number == ids[place] else 0) + equal_behind(
                    first, then, begin
                )
        return total, place, at

    def _are_siblings(self, first: int, then: int) -> bool:
        one, other = self._sections[first], self._sections[then]
        return (
            one is not None
            and other is not None
            and (one.role, one.kind) == (other.role, other.kind)
        )

    def _keep(self, prompt: EarlierPrompt, depth: int, node: int) -> None:
        index = len(self._prompts)
        self._prompts.append(prompt)
        for number in prompt.ids[depth:]:
            child = self._next[node, number] = len(self._last)
            self._last.append(index)
            text = self._text(number)
            for length in self._probe_lengths(text):
                self._probes[node, length, hash(text[:length])] = number
            node = child
        at = self._roots[prompt.model, prompt.salt]
        self._root_last[at] = index
        for number in prompt.ids:
            at = self._next[at, number]
            self._last[at] = index
            self._holders[number] = index

    @staticmethod
    def _probe_lengths(text: str) -> Iterator[int]:
        return (length for length in PROBES if length <= len(text))
