"""Two prompts against each other: where they part, and the text of one that stands in the other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from quire_sim.lint.texts import PIECE, common_prefix, common_suffix, equal_behind, may_be_equal
from quire_sim.logs import Section

SAID = 160
"""Characters of a message that have to be equal behind its first difference to count; fewer are a turn of phrase."""

MOST_PAIRS = 400
"""Pairs of differing sections of which the most alike are sought; beyond it the first that can be."""


MAY_BE = 0.3
"""Share of a message that stands in another one in whole pieces, below which they are not compared further."""


class Alike(NamedTuple):
    """A prompt beside an earlier one: `total` characters stand in both, `begin` of them before they part.

    `place` is the first section that differs, and `at` its first such character.
    """

    total: int
    begin: int
    place: int
    at: int


def size_of(section: Section) -> int:
    """Return the characters of a section; an empty one has one."""
    return max(len(section.text) + len(section.media), 1)


def alike(old: Sequence[Section], new: Sequence[Section]) -> Alike:
    """Return a prompt beside an earlier one. Sections behind the first difference may stand in any order."""
    shorter = min(len(old), len(new))
    place = next((n for n in range(shorter) if old[n] is not new[n] and old[n] != new[n]), shorter)
    begin = sum(size_of(each) for each in new[:place])
    at = 0
    if place < shorter and are_siblings(old[place], new[place]):
        at = common_prefix(old[place].text, new[place].text)
    behind, left = Counter(old[place:]), list[Section]()
    total, follows = begin, False
    for section in new[place:]:
        if behind[section]:
            behind[section] -= 1
            follows |= size_of(section) >= PIECE
            total += size_of(section) if follows else 0
        else:
            left.append(section)
            follows = False
    others = list(behind.elements())
    for section in left:
        other = _sibling(section, others, len(left))
        if other is None:
            continue
        others.remove(other)
        is_first = place < shorter and section is new[place]
        cut = at if is_first and other is old[place] else common_prefix(other.text, section.text)
        is_place = is_first and other is old[place]
        least = max(SAID, 0.6 * len(section.text))
        is_said = section.role not in {"tools", "system"} and len(new) > 1
        found = 0
        if not is_said or may_be_equal(other.text, section.text, cut, MAY_BE):
            found = equal_behind(other.text, section.text, cut)
        if is_place and old[place + 1 : place + 2] == new[place + 1 : place + 2] != []:
            # The same message, however short it is: the next one is the same.
            shorter = min(len(other.text), len(section.text))
            found = max(found, common_suffix(other.text, section.text, shorter - cut))
        elif is_said and found + cut < least:
            found = 0
            cut = cut if is_place else 0
        total += found + (cut if cut >= PIECE or is_place else 0)
    return Alike(total, begin + at, place, at)


def are_siblings(one: Section, other: Section) -> bool:
    """Whether two sections can be versions of each other."""
    return (one.role, one.kind) == (other.role, other.kind) and one.kind != "media"


def _sibling(section: Section, others: list[Section], num_left: int) -> Section | None:
    """Return the section of an earlier prompt that begins most like this one, the first of equals."""
    found = (each for each in others if are_siblings(each, section))
    if num_left * len(others) > MOST_PAIRS:
        return next(found, None)
    return max(found, key=lambda each: common_prefix(each.text, section.text), default=None)
