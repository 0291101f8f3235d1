"""Words that change from request to request: times, identifiers, counters, data of users."""

from __future__ import annotations

import re
import unicodedata

_MONTH = r"(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)[a-z]*\.?"
_DAY = r"(?:Mon|Tues|Wednes|Thurs|Fri|Satur|Sun)day"
_CLOCK = r"\d{1,2}:\d{2}(?::\d{2}(?:\.\d+)?)?(?:\s?[AaPp]\.?[Mm]\.?)?"
_DATE = rf"\d{{4}}[-/.]\d{{1,2}}[-/.]\d{{1,2}}|\d{{1,2}}[/.]\d{{1,2}}[/.]\d{{2,4}}|{_MONTH}\s+\d{{1,2}}(?:st|nd|rd|th)?(?:,?\s+\d{{4}})?|\d{{1,2}}\.?\s+{_MONTH}(?:\s+\d{{4}})?"
_ONE = rf"(?:{_DATE}|{_CLOCK}|{_DAY})"
TIME = re.compile(
    rf"{_ONE}(?:(?:,|\s|T|Z|at|UTC|[+-]\d\d:?\d\d|\.\d+)*{_ONE})*|\b1[5-9]\d{{8}}(?:\d{{3}})?(?:\.\d+)?\b"
)
"""Dates, times of day, weekdays, and seconds or milliseconds since 1970."""

IDENTIFIER = re.compile(
    r"[0-9a-fA-F]{8}-(?:[0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12}|\b[A-Za-z]{1,12}[_-][A-Za-z0-9_-]{5,}\b"
    r"|\b(?=[A-Fa-f]*\d)[0-9a-fA-F]{5,}\b|\b(?=\w*\d)(?=\w*[A-Za-z])\w{8,}\b"
)
NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?")
USER = re.compile(
    r"\b(?:user|customer|client|account|tenant|organi[sz]ation|company|e-?mail|phone|address|first|last|full)?[ _-]?"
    r"(?:name|user|customer|client|account|tenant|organi[sz]ation|company|e-?mail|phone|address|city|country|"
    r"location|locale|language|time ?zone|plan|tier|talking to|speaking with|assisting)\b[^\n]{0,24}$",
    re.IGNORECASE,
)
EMAIL = re.compile(r"[\w.+-]+@[\w-]+\.[\w.]+")
BILLING = re.compile(r"^x-[\w-]+-header:", re.IGNORECASE)

REACH = 48
"""Characters before and behind a place within which a pattern that covers it begins and ends."""


def covers(pattern: re.Pattern[str], text: str, at: int) -> str:
    """Return the match of a pattern that has a place of a text in or beside it; empty without one."""
    start = max(at - REACH, 0)
    for found in pattern.finditer(text, start, min(at + REACH, len(text))):
        if found.start() <= at <= found.end():
            return found[0]
    return ""


def both(pattern: re.Pattern[str], earlier: str, text: str, at: int) -> bool:
    """Whether a pattern covers the place in both texts, with other words."""
    old, new = covers(pattern, earlier, at), covers(pattern, text, at)
    return bool(old and new and old != new)


def line_before(text: str, at: int) -> str:
    """Return the line of a place up to it."""
    return text[text.rfind("\n", 0, at) + 1 : at]


def line_at(text: str, at: int) -> str:
    """Return the line of a place."""
    end = text.find("\n", at)
    return text[text.rfind("\n", 0, at) + 1 : len(text) if end < 0 else end]


def is_same_but_for_blanks(earlier: str, text: str, at: int) -> bool:
    """Whether blanks alone differ at a place, so that the words behind go on alike."""
    old, new = earlier[at : at + 200], text[at : at + 200]
    if not (old[:1].isspace() or new[:1].isspace() or not old or not new):
        return False
    first, then = "".join(old.split())[:40], "".join(new.split())[:40]
    return first == then or (min(len(first), len(then)) >= 12 and first[:12] == then[:12])


def is_same_but_for_line_ends(earlier: str, text: str, at: int) -> bool:
    """Whether line ends alone differ at a place."""
    old, new = earlier[at : at + 200], text[at : at + 200]
    return ("\r" in old[:1] + new[:1]) and is_same_but_for_blanks(earlier, text, at)


def is_same_but_for_form(earlier: str, text: str, at: int) -> bool:
    """Whether the Unicode form alone differs at a place, where a letter is not ASCII."""
    start = max(at - 1, 0)
    old, new = earlier[start : at + 40], text[start : at + 40]
    if old.isascii() and new.isascii():
        return False
    first, then = (unicodedata.normalize("NFKC", each)[:12] for each in (old, new))
    return bool(first) and first == then
