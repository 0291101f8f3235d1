"""Exact tokens of a log's prompts: those that a cache without limits finds, and those that a difference loses."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from itertools import takewhile
from typing import Protocol

import msgspec

from quire_sim.lint.nearest import EarlierPrompt, Finding, PromptTrie
from quire_sim.lint.texts import common_prefix, common_suffix
from quire_sim.logs import LoggedRequest, Section

MAX_BYTES = 256 << 20
"""Memory of earlier prompts in tokens."""

PIECE_TOKENS = 8
"""Tokens of a run that counts as equal; shorter ones are chance."""


class Renderer(Protocol):
    """Prompts as segments of tokens, each token a character; `line_ends` are tokens that have a line end."""

    line_ends: str

    def segments(self, request: LoggedRequest) -> list[str]:
        """Return the prompt of a request. Raises `ConfigError`."""
        ...

    def text(self, tokens: str) -> str:
        """Return tokens as text."""
        ...


class ExactPrompts:
    """The prompts of a log in tokens, by a renderer."""

    def __init__(self, renderer: Renderer, max_bytes: int = MAX_BYTES) -> None:
        self._renderer = renderer
        self._trie = PromptTrie(max_bytes, compares=False)
        ends = re.escape(renderer.line_ends) or "\n"
        self._lines = re.compile(f"[^{ends}]*[{ends}]+|[^{ends}]+")

    def add(self, request: LoggedRequest) -> Finding:
        """Return the prompt of a request beside the earlier ones, in tokens, and keep it. Raises `ConfigError`."""
        segments = self._renderer.segments(request)
        sections = tuple(Section("", "", "text", tokens) for tokens in segments)
        return self._trie.add(msgspec.structs.replace(request, sections=sections, parameters={}))

    def lost(self, finding: Finding, earlier: EarlierPrompt | None) -> int:
        """Return the tokens behind a prompt's hit that an earlier one has, in any order of lines."""
        old, new = earlier.ids if earlier else [], finding.prompt.ids
        pairs = zip(old, new, strict=False)
        equal = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        begin = sum(len(self._trie.text(each)) for each in new[:equal])
        before, after = self._lines_of(old[equal:]), self._lines_of(new[equal:])
        shorter = min(len(before), len(after))
        place = next((n for n in range(shorter) if before[n] != after[n]), shorter)
        begin += sum(map(len, after[:place]))
        before, after = before[place:], after[place:]
        if before and after:
            size = common_prefix(before[0], after[0])
            begin += size
            before[0], after[0] = before[0][size:], after[0][size:]
        behind, left = Counter(before), list[str]()
        found = run = 0
        for line in after:
            if behind[line]:
                behind[line] -= 1
                run += len(line)
            else:
                found += run if run >= PIECE_TOKENS else 0
                run = 0
                left.append(line)
        found += run if run >= PIECE_TOKENS else 0
        for number, (one, other) in enumerate(zip(behind.elements(), left, strict=False)):
            first = common_prefix(one, other) if number else 0  # of the first pair, it is the hit
            last = common_suffix(one, other, min(len(one), len(other)) - first)
            found += sum(size for size in (first, last) if size >= PIECE_TOKENS)
        return max(begin + found - finding.hit, 0)

    def parting(
        self, finding: Finding, earlier: EarlierPrompt | None, words: int
    ) -> tuple[str, str, str]:
        """Return the text before the place where two prompts part, and both from it on, cut to so many characters."""
        old, new = self._tokens(earlier), self._tokens(finding.prompt)
        at = common_prefix(old, new)
        before = self._renderer.text(new[max(at - words, 0) : at])[-words:]
        one, other = (self._renderer.text(each[at : at + words])[:words] for each in (old, new))
        return before, one, other

    def _lines_of(self, ids: Sequence[int]) -> list[str]:
        """Return the tokens of segments in lines."""
        return [line for each in ids for line in self._lines.findall(self._trie.text(each))]

    def _tokens(self, prompt: EarlierPrompt | None) -> str:
        """Return all tokens of a prompt; without those that are forgotten."""
        return "" if prompt is None else "".join(map(self._trie.text, prompt.ids))
