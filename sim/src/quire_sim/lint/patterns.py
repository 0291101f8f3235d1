"""Words that change from request to request: times, identifiers, counters, data of users."""

from __future__ import annotations

import json
import re
import unicodedata
from typing import Any

_MONTH = (
    r"(?:Jan(?:uary|uar|vier)?|Feb(?:ruary|ruar|r)?|Mar(?:ch|zo|s)?|März?|Apr(?:ile?)?|Avr(?:il)?|Abril|May|Mai|Mayo|"
    r"Maggio|June?|Juni|Juin|Junio|Giugno|July?|Juli|Juil(?:let)?|Julio|Luglio|Aug(?:ust)?|Août|Agosto|"
    r"Sept?(?:ember|embre|iembre)?|Settembre|Okt(?:ober)?|Oct(?:ober|obre|ubre)?|Ottobre|Nov(?:ember|embre|iembre)?|"
    r"De[cz](?:ember)?|Déc(?:embre)?|Dic(?:embre|iembre)?|Enero|Febrero|Fév(?:rier)?|Gennaio|Febbraio)\b\.?"
)
_DAY = (
    r"\b(?:(?:Mon|Tues|Wednes|Thurs|Fri|Satur|Sun)day|Mon|Tue|Wed|Thu|Fri|Sat|Sun|"
    r"(?:Mon|Diens|Donners|Frei|Sams|Sonn)tag|Mittwoch|lundi|mardi|mercredi|jeudi|vendredi|samedi|dimanche|"
    r"lunes|martes|miércoles|jueves|viernes|sábado|domingo)\b"
)
_ZONE = r"(?:\s?(?:Z|UTC|GMT|[A-Z]{3,4}|[+-]\d\d:?\d\d)\b)?"
_CLOCK = (
    r"\d{1,2}(?:\.\d{2})? Uhr\b|\d{1,2}[時时点]\d{1,2}分(?:\d{1,2}秒)?|\b[a-z]{3,6} o['\u2019]clock\b"
    r"|\d{1,2}(?:[:h]| h )\d{2}(?::\d{2}(?:[.,]\d+)?)?(?:\s?[AaPp]\.?[Mm]\b\.?)?" + _ZONE
)
_DATE = (
    r"(?<![\d.])\d{4}[-/.]\d{1,2}[-/.]\d{1,2}(?![\d.]*\d\.)|(?<![\d.v])\d{1,2}[-/.]\d{1,2}[-/.](?:\d{4}|\d{2})(?![\d.])"
    rf"|(?i:\b{_MONTH} +\d{{1,2}}(?:st|nd|rd|th)?\b(?:,? +\d{{4}}\b)?)"
    rf"|(?i:\b\d{{1,2}}(?:st|nd|rd|th)?\.?[ -]+(?:de +|of +)?{_MONTH}(?:,?[ -]+(?:de +)?\d{{4}}\b)?)"
    r"|\d{4}年\d{1,2}月\d{1,2}日|\b20\d{6}(?:T?\d{4,6}Z?)?\b"
    r"|(?i:\b(?:week|quarter|q[1-4]|fiscal|day)\s+\d{1,3}\b)"
)
_ONE = rf"(?:{_DATE}|{_CLOCK}|{_DAY})"
_BETWEEN = r"(?:,|\s|T|Z|at\b|um\b|à|UTC|GMT|[+-]\d\d:?\d\d|\.\d+|[(|-])*"
_EPOCH = r"(?<![\w.])1[4-9]\d{8}(?:\d{3}|\d{6}|\d{9})?(?:\.\d+)?(?![\w])"
TIME = re.compile(rf"{_ONE}(?:{_BETWEEN}{_ONE})*{_ZONE}|{_EPOCH}")
"""Dates, times of day, weekdays, and seconds or milliseconds since 1970."""

IDENTIFIER = re.compile(
    r"[0-9a-fA-F]{8}-(?:[0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12}"
    r"|\b[A-Za-z]{1,12}[_-](?=[\w-]*(?:\d|[A-Z]))[\w-]{4,}\b|\b[A-Za-z]{2,12}[_-][0-9a-zA-Z]{8,}\b"
    r"|\b(?=[A-Fa-f]*\d)[0-9a-fA-F]{5,}\b|(?<![\w-])(?=[\w-]*\d)(?=[\w-]*[A-Za-z])[\w-]{8,}"
    r"|(?<![\w-])(?=[\w-]*[a-z][\w-]*[A-Z])[\w-]{16,}|(?<![\d.,])\d{9,}(?![\d.,])"
)
"""Identifiers: UUIDs, ULIDs, nanoids, hex, numbers of nine digits and more, and words like `req_8f3a` or `session-17b`."""

IDENTIFIED = re.compile(
    r"(?:\b(?:id|uuid|guid|nonce|hash|token|trace|span|session|correlation|transaction|ref|reference|fingerprint|seed)"
    r"|_id|Id|ID)\b[\"'`*]*\s*[:=#]?\s*[\"'`<\[#(]*[\w-]*$"
)
"""The words before an identifier, whatever it looks like."""

NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?%?")
USER = re.compile(
    r"\b(?:user|customer|client|account|tenant|organi[sz]ation|company|e-?mail|phone|address|first|last|full)?[ _-]?"
    r"(?:user ?name|name|user(?:[ _-](?:profile|data|info|context|preferences?))?|customer|client|account|tenant|organi[sz]ation|company|e-?mail|(?:tele)?phone|mobile|address|city|country|"
    r"region|latitude|longitude|lat|lon|lng|coordinates|birth(?:day|date)|age|ip|"
    r"location|locale|language|time ?zone|plan|tier|(?:talking|speaking|chatting|writing) (?:to|with)|assisting|helping|serving|hello|hi|dear|welcome)"
    r"\b(?:[^\n.;]|\.(?=\d|$)){0,24}$|/(?:home|users)/[\w.-]*$",
    re.IGNORECASE,
)
EMAIL = re.compile(r"[\w.+-]+@[\w-]+\.[\w.]+")
NAMES = re.compile(r"\b[A-Z][a-zà-ÿ]+(?:[ -][A-Z][a-zà-ÿ'-]+)+\b")
BILLING = re.compile(r"^x-[\w-]*(?:header|billing|attribution)[\w-]*\s*:", re.IGNORECASE)
RECAP = re.compile(
    r"(?:summary of|(?:conversation|chat|session) summary|conversation so far|earlier (?:in the )?conversation|recap of)"
    r"[^\n]{0,60}(?:[:\n]|$)",
    re.IGNORECASE,
)
CLEARED = re.compile(
    r"omitted|removed|truncated|trimmed|cleared|elided|dropped|earlier messages", re.IGNORECASE
)
VALUE_END = re.compile(r"[\n;|)\"<]|[.!?]\s|[.!?]$|\s[-\u2013]\s|$|\s+\w+\s*[=:]")
"""The end of a value in a text: of its line, clause or sentence, or where the next name begins."""

LABEL = 90
"""Characters before a value in which its name stands."""

LINE = 300
"""Characters of a line before a place that are looked at."""

REACH = 48
"""Characters before and behind a place within which a pattern that covers it begins and ends."""

_BLANKS = re.compile(r"[^\S\r\n]+")
_ENDS = re.compile(r"[^\S\r\n]*(\r?\n)\s*")
ODD = {0x200B: " ", 0x200C: " ", 0x200D: " ", 0x2060: " ", 0xFEFF: " ", 0x00A0: " "}
_SIGNS = {0x2018: "'", 0x2019: "'", 0x201C: '"', 0x201D: '"', 0x2013: "-", 0x2014: "-", 0x2212: "-"}


def span(pattern: re.Pattern[str], text: str, at: int) -> tuple[int, int] | None:
    """Return the match of a pattern that has a place of a text in or beside it."""
    start = max(at - REACH, 0)
    best: tuple[int, int] | None = None
    for found in pattern.finditer(text, start, min(at + REACH, len(text))):
        if found.start() <= at < found.end():
            return found.span()
        if found.start() <= at <= found.end():
            best = found.span()
    return best


def covers(pattern: re.Pattern[str], text: str, at: int) -> str:
    """Return the words of that match; empty without one."""
    found = span(pattern, text, at)
    return text[found[0] : found[1]] if found else ""


def both(pattern: re.Pattern[str], earlier: str, text: str, at: int) -> bool:
    """Whether a pattern covers the place in both texts, with other words."""
    old, new = covers(pattern, earlier, at), covers(pattern, text, at)
    return bool(old and new and old != new)


def tells_summary(text: str) -> bool:
    """Whether a text says that it sums a conversation up."""
    told = text.casefold()  # a search for these words is ten times as fast as for the pattern
    words = ("summary", "conversation", "recap of")
    return any(word in told for word in words) and RECAP.search(text) is not None


def line_before(text: str, at: int) -> str:
    """Return the line of a place up to it; of a long one its end."""
    return text[max(text.rfind("\n", 0, at) + 1, at - LINE) : at]


def line_at(text: str, at: int) -> str:
    """Return the line of a place."""
    end = text.find("\n", at)
    return text[text.rfind("\n", 0, at) + 1 : len(text) if end < 0 else end]


def without_blanks(text: str) -> str:
    """Return a text with single blanks, and none around line ends; line ends stay as they are."""
    return _BLANKS.sub(" ", _ENDS.sub(r"\1", text.translate(ODD)))


def is_same_but_for_blanks(earlier: str, text: str, at: int) -> bool:
    """Whether blanks alone differ at a place, so that the words behind go on alike."""
    old, new = (each[at : at + 200].translate(ODD) for each in (earlier, text))
    if not (old[:1].isspace() or new[:1].isspace() or not old or not new):
        return False
    first, then = "".join(old.split())[:40], "".join(new.split())[:40]
    if not first or not then:
        return first == then and len(earlier) != len(text)
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
    first, then = (
        unicodedata.normalize("NFKC", each.translate(ODD | _SIGNS))[:12] for each in (old, new)
    )
    return bool(first) and first == then


def objects_at(earlier: str, text: str, at: int) -> tuple[int, int, int] | None:
    """Return the start and both ends of the JSON value around a place, equal in both texts."""
    decode = json.JSONDecoder().raw_decode
    start = at + 1
    for _ in range(24):
        start = max(earlier.rfind("{", 0, start), earlier.rfind("[", 0, start))
        if start < 0:
            return None
        try:
            (first, end), (then, other) = decode(earlier, start), decode(text, start)
            if end > at < other and unordered(first) == unordered(then):
                return start, end, other
        except (ValueError, RecursionError):
            continue
    return None


def unordered(value: Any) -> Any:
    """Return a JSON value in a form that is equal for every order of keys and of lists."""
    if isinstance(value, dict):
        return {str(key): unordered(inner) for key, inner in value.items()}  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
    if isinstance(value, list):
        return sorted((unordered(each) for each in value), key=repr)  # pyright: ignore[reportUnknownVariableType]
    return value
