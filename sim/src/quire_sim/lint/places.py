"""Places of differences in bodies, as paths and characters."""

from __future__ import annotations

import json
from typing import Any, cast

from quire_sim.lint.causes import Parting
from quire_sim.lint.chains import PromptDifference
from quire_sim.logs import Section

_BEFORE = 60
"""Characters before a difference by which its place in a section is found."""


def place_of(difference: PromptDifference, sections: tuple[Section, ...]) -> tuple[str, int]:
    """Return the path of a difference in the later prompt, and the character there."""
    parting = difference.parting
    if parting.place < 0:
        return parting.scope, 0
    if not 0 <= difference.source < len(sections):
        return "the end", 0
    section = sections[difference.source]
    if difference.cause.name == "tool-set" and section.kind != "tool":
        return f"tools[{difference.source}]", 0
    path = section.path + (_within(parting) if section.kind == "tool" else "")
    text = parting.texts[1]
    window = text[max(parting.at - _BEFORE, 0) : parting.at + 1]
    at = section.text.find(window) if text != section.text else -1
    return path, parting.at if at < 0 else at + len(window) - 1


def _within(parting: Parting) -> str:
    """Return the path within a tool to its first value that differs: `.function.description`; empty without one."""
    try:
        old, new = (json.loads(each) for each in parting.texts)
    except ValueError:
        return ""
    path = ""
    while True:
        step = _step(old, new)
        if step is None:
            return path
        path += f"[{step}]" if isinstance(step, int) else f".{step}"
        old, new = old[step], new[step]


def _step(old: Any, new: Any) -> str | int | None:
    if isinstance(old, dict) and isinstance(new, dict):
        one, other = cast("dict[str, Any]", old), cast("dict[str, Any]", new)
        if list(one) != list(other):
            return None
        return next((key for key in one if json.dumps(one[key]) != json.dumps(other[key])), None)
    if isinstance(old, list) and isinstance(new, list):
        pairs = zip(cast("list[Any]", old), cast("list[Any]", new), strict=False)
        return next(
            (
                place
                for place, pair in enumerate(pairs)
                if json.dumps(pair[0]) != json.dumps(pair[1])
            ),
            None,
        )
    return None
