"""Texts against each other: their common begin, and the pieces of one that stand in the other."""

from __future__ import annotations

import re
from collections import Counter
from difflib import SequenceMatcher
from functools import lru_cache

PIECE = 32
"""Characters of a run of pieces that counts as equal; shorter ones are chance."""

IN_ORDER = 8
"""Characters of such a run that stands in order between other equal ones."""

SMALL = 6000
"""Characters of a text up to which sentences are compared, however short its lines are."""

LONG = 600
"""Mean characters of lines beyond which sentences are compared."""

MOST_PIECES = 1000
"""Pieces of a differing middle that are compared one by one; of a longer middle, lines are."""

SHORT = 96
"""Characters of a differing middle that is not compared piece by piece."""

BYTES_PER_TOKEN = 4.0
"""Bytes of UTF-8 of a token, where no server told another figure."""

_END = r'(?:[.!?;:,]\s+|[\u3002\uff01\uff1f\uff1b\uff0c]|",|\},|\n+)'
_BEGINS_END = r'.!?;:,\u3002\uff01\uff1f\uff1b\uff0c"}\n'
_PIECES = re.compile(
    rf".[^{_BEGINS_END}]*(?:(?!{_END})[{_BEGINS_END}][^{_BEGINS_END}]*)*(?:{_END}|\Z)", re.DOTALL
)
_ENDED = re.compile(rf"{_END}\Z")
_LAST = "\u3002\uff01\uff1f\uff1b\uff0c,"
_AROUND = " \t\r\n,{}[]"

MOST_BEGUN = 400
"""Characters before a difference in which its sentence begins."""

NUMBERED = re.compile(
    r"^\s*(?:[-*•>]|\[?\(?\d+[\].):]|(?i:document|passage|source|chunk|example|doc|result|context|snippet)"
    r"\s*[#\[(]?\d+[\])]?\s*[:.)-]?|<\w+[^>\n]*>)\s*"
)
"""The number of a passage in a list, or the mark of an item."""

_WORDS = re.compile(r"\w+|\s+|[^\w\s]")


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
    """Return the characters of a text behind a place that stand in an earlier one behind it, in any order."""
    tail = common_suffix(earlier, text, min(len(earlier), len(text)) - at)
    middle = (len(earlier) - tail - at, len(text) - tail - at)
    if min(middle) < PIECE or max(middle) < SHORT:
        return tail if tail >= PIECE else 0
    if not _share_lines(earlier[at : len(earlier) - tail], text[at : len(text) - tail]):
        return tail if tail >= PIECE else 0
    begun = _PIECES.findall(text[max(at - MOST_BEGUN, 0) : at])
    start = at - (len(begun[-1]) if begun and not _is_ended(begun[-1]) else 0)
    ended = _PIECES.match(text, len(text) - tail) if tail else None
    tail -= len(ended[0]) if ended else 0
    before = _pieces(earlier[start : len(earlier) - tail])
    after = _pieces(text[start : len(text) - tail])
    found = _in_pieces(before, after, tail)
    known = at - start if after and _key(after[0]) in set(map(_key, before)) else 0
    return tail + max(found - known, 0)


def may_be_equal(earlier: str, text: str, cut: int, share: float) -> bool:
    """Return whether a share of a text may stand in an earlier one, by whole pieces, begin and end."""
    keys = _keys_of(earlier)
    found = cut + common_suffix(earlier, text, min(len(earlier), len(text)) - cut)
    if found >= share * len(text):
        return True
    found += sum(len(key) for key in _keys_of(text) if key in keys)
    return found >= share * len(text)


@lru_cache(256)
def _keys_of(text: str) -> dict[str, None]:
    return dict.fromkeys(map(_key, _pieces(text)))


def _share_lines(old: str, new: str) -> bool:
    """Whether two texts have a line or sentence in common, or are too short to have one."""
    if min(len(old), len(new)) < 4 * PIECE:
        return True
    lines, others = (set(each.replace(". ", "\n").split("\n")) for each in (old, new))
    return (
        any(len(each) >= PIECE // 2 for each in lines & others)
        or len(lines) == 1
        or len(others) == 1
    )


def _in_pieces(before: list[str], after: list[str], tail: int) -> int:
    """Return the characters of pieces that stand in others; so many behind the last ones are equal."""
    gone, come = Counter[str](), list[tuple[str, int]]()
    found = equal = 0
    codes = _opcodes(before, after)
    for place, (tag, low, high, start, end) in enumerate(codes):
        if tag == "equal":
            equal = sum(map(len, after[start:end]))
            found += equal if equal >= IN_ORDER else 0
            come.append(("", 0))
            continue
        changed = [(each, 0) for each in after[start:end]]
        gone.update(map(_key, before[low:high]))
        if low < high and start < end:
            then = codes[place + 1][3:] if place + 1 < len(codes) else None
            behind = tail if then is None else sum(map(len, after[slice(*then)]))
            begin = _begin(before[low], after[start], equal) if low else 0
            changed[0] = (changed[0][0], begin)
            last = _end(before[high - 1], after[end - 1], behind, is_first=not low)
            changed[-1] = (changed[-1][0], changed[-1][1] + last)
        come += changed
    return found + _moved(gone, come)


def first_hunk(earlier: str, text: str, at: int) -> tuple[int, int]:
    """Return where the first difference of two texts, which is at a place, ends in each."""
    tail = common_suffix(earlier, text, min(len(earlier), len(text)) - at)
    old, new = earlier[at : len(earlier) - tail], text[at : len(text) - tail]
    low, high = len(old), len(new)
    if max(low, high) > SHORT or "\n" in old[:-1] or "\n" in new[:-1]:
        start = max(text.rfind("\n", 0, at), text.rfind(". ", 0, at)) + 1
        before, after = _pieces(earlier[start : at + low]), _pieces(text[start : at + high])
        code = next((each for each in _opcodes(before, after) if each[0] != "equal"), None)
        if code is not None:
            both = code[2] - code[1] == code[4] - code[3]
            ends = (code[1] + 1, code[3] + 1) if both else (code[2], code[4])
            low = max(len("".join(before[: ends[0]])) - (at - start), 0)
            high = max(len("".join(after[: ends[1]])) - (at - start), 0)
    return _first_words(earlier, text, at, (at + low, at + high))


def _first_words(earlier: str, text: str, at: int, ends: tuple[int, int]) -> tuple[int, int]:
    """Return the end of the first words that differ, within two spans from a place."""
    start = at
    while start and text[start - 1].isalnum():
        start -= 1
    old, new = _WORDS.findall(earlier[start : ends[0]]), _WORDS.findall(text[start : ends[1]])
    if not old or not new or max(len(old), len(new)) > MOST_PIECES:
        return ends
    codes = _opcodes(old, new)
    for place, code in enumerate(codes):
        behind = codes[place + 1] if place + 1 < len(codes) else None
        is_long = behind is not None and len("".join(new[behind[3] : behind[4]])) >= 4
        if code[0] != "equal" and is_long:
            low, high = len("".join(old[: code[2]])), len("".join(new[: code[4]]))
            return max(start + low, at), max(start + high, at)
    return ends


def _pieces(text: str) -> list[str]:
    """Return a text in lines; in sentences where lines are long, if these are not too many."""
    lines = text.splitlines(keepends=True)
    if SMALL < len(text) <= LONG * max(len(lines), 1):
        return lines
    found = _PIECES.findall(text)
    return found if len(found) <= MOST_PIECES else lines


def _opcodes(old: list[str], new: list[str]) -> list[tuple[str, int, int, int, int]]:
    if max(len(old), len(new)) > 4 * MOST_PIECES:
        return [("replace", 0, len(old), 0, len(new))]
    return list(SequenceMatcher(str.isspace, old, new, autojunk=len(new) >= 400).get_opcodes())


def _begin(old: str, new: str, equal: int) -> int:
    """Return the characters that two pieces begin with in common behind so many equal ones; few alone are chance."""
    found = common_prefix(old, new)
    return found if found >= PIECE or equal >= IN_ORDER else 0


def _end(old: str, new: str, equal: int, *, is_first: bool) -> int:
    """Return the characters that two pieces end with in common before so many equal ones."""
    found = common_suffix(old, new, min(len(old), len(new)) - common_prefix(old, new))
    return found if found >= (IN_ORDER if is_first else PIECE) or equal >= IN_ORDER else 0


def unnumbered(piece: str) -> str:
    """Return a piece without its number in a list, or its mark of an item."""
    mark = NUMBERED.match(piece)
    return piece[mark.end() :] if mark else piece


def _is_ended(piece: str) -> bool:
    return (piece[-1].isspace() or piece[-1] in _LAST) and bool(_ENDED.search(piece))


@lru_cache(1 << 16)
def _key(piece: str) -> str:
    """Return a piece without its number in a list, unless that is all of it, and without blanks and marks around it."""
    return unnumbered(piece).strip(_AROUND) or piece.strip(_AROUND)


def _moved(gone: Counter[str], come: list[tuple[str, int]]) -> int:
    """Return the characters of pieces that stand elsewhere in the earlier text, in runs.

    A piece that does not has so many that are equal where it stands.
    """
    found = run = 0
    for piece, equal in [*come, ("", 0)]:
        key = _key(piece)
        if piece and (not key or gone[key] > 0):
            gone[key] -= 1
            run += len(piece)
        else:
            found += equal + (run if run >= PIECE else 0)
            run = 0
    return found


def estimate(text: str) -> int:
    """Return the tokens of a text, about."""
    size = len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))
    return round(size / BYTES_PER_TOKEN)
