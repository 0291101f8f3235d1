"""Texts against each other: their common begin, and the pieces of one that stand in the other."""

from __future__ import annotations

from difflib import SequenceMatcher

PIECE = 32
"""Characters of a piece that counts as equal; shorter ones are chance."""

MOST_LINES = 400
"""Lines of a differing middle that are compared one by one."""

BYTES_PER_TOKEN = 4.0
"""Bytes of UTF-8 of a token, where no server told another figure."""


def common_prefix(first: str, then: str) -> int:
    """Return the characters that two texts begin with in common."""
    low, high = 0, min(len(first), len(then))
    if first[:high] == then[:high]:
        return high
    while low + 1 < high:
        middle = (low + high) // 2
        if first[low:middle] == then[low:middle]:
            low = middle
        else:
            high = middle
    return low if first[low : low + 1] != then[low : low + 1] else low + 1


def common_suffix(first: str, then: str, most: int) -> int:
    """Return the characters that two texts end with in common, at most so many."""
    low, high = 0, most + 1
    while low + 1 < high:
        middle = (low + high) // 2
        if first.endswith(then[len(then) - middle :]):
            low = middle
        else:
            high = middle
    return low


def equal_behind(earlier: str, text: str, at: int) -> int:
    """Return the characters of a text behind a place that stand in an earlier one behind it, in pieces."""
    return _equal(earlier[at:], text[at:])


def _equal(earlier: str, text: str) -> int:
    tail = common_suffix(earlier, text, min(len(earlier), len(text)))
    found = tail if tail >= PIECE else 0
    old = earlier[: len(earlier) - tail].splitlines(keepends=True)
    new = text[: len(text) - tail].splitlines(keepends=True)
    if 1 < len(new) <= MOST_LINES and 1 < len(old) <= MOST_LINES:
        matcher = SequenceMatcher(None, old, new, autojunk=False)
        for _, start, length in matcher.get_matching_blocks():
            piece = sum(map(len, new[start : start + length]))
            found += piece if piece >= PIECE else 0
    return found


def estimate(text: str) -> int:
    """Return the tokens of a text, about."""
    size = len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))
    return round(size / BYTES_PER_TOKEN)
