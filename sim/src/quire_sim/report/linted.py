"""A linted log as one HTML file: tokens by cause and section, conversations in time, where prompts part, the words."""

from __future__ import annotations

from pathlib import PurePath
from typing import Any

from quire_sim.lint import LintReport, Loss
from quire_sim.lint.joined import cause_named
from quire_sim.lint.mends import MendReport
from quire_sim.lint.picture import DEPTHS, FIRST_DEPTH, LintPicture, Point, Talk
from quire_sim.report.figures import short
from quire_sim.report.templates import as_is, rendered

SHOWN_TALKS = 12
"""Conversations on the page that lose most, and as many that have most tokens."""

WIDTH, HEIGHT = 1000, 26
"""Size of the strip of a conversation."""

ROLE_NAMES = {
    "tools": "tools",
    "system": "system prompt",
    "user": "user",
    "assistant": "assistant",
    "tool": "results of tools",
    "the end": "nothing: it ends there",
}


def lint_html(
    report: LintReport, picture: LintPicture, mending: MendReport | None = None, *, private: bool
) -> str:
    """Return a report, its picture and its mends as one HTML document; without words of prompts if it is private."""
    factor = 1 / report.chars_per_token if report.is_estimated else 1.0
    whole = max(report.prompt_tokens, 1)
    return rendered(
        "lint.html.j2",
        report=report,
        title=PurePath(report.source).name,
        about="about " * report.is_estimated,
        found=report.hit_tokens / whole,
        mended=(report.hit_tokens + report.lost_tokens) / whole,
        new=1 - (report.hit_tokens + report.lost_tokens) / whole,
        causes=[_cause(share, private=private) for share in report.causes if share.requests],
        mends=[] if mending is None else _mends(mending),
        roles=_roles(picture),
        talks=_talks(picture, factor, private=private),
        num_talks=len(picture.talks),
        depths=[_depth(FIRST_DEPTH << column) for column in range(DEPTHS - 1)],
        rows=_map(picture, factor),
    )


def _depth(tokens: int) -> str:
    return f"{tokens >> 10}k" if tokens >= 1024 else str(tokens)


def _cause(share: Any, *, private: bool) -> dict[str, Any]:
    cause = cause_named(share.cause)
    place = max(share.paths, key=lambda path: share.paths[path])
    more = len(share.paths) - 1
    return {
        "title": cause.title,
        "advice": cause.advice,
        "requests": share.requests,
        "tokens": share.tokens,
        "share": share.share,
        "place": place + (f" and {more:,} more" if more else ""),
        "loss": share.example,
        "words": None if private or share.example is None else _words(share.example),
    }


def _mends(mending: MendReport) -> list[dict[str, Any]]:
    """Return the hits of the log as it is, with each mend alone, and with all together."""
    rows = [("as it is", mending.before)]
    rows += [(each.title, each.after) for each in mending.mends]
    rows.append(("all that keep the meaning and do not find less", mending.together))
    return [
        {
            "title": title,
            "tokens": hits.hit_tokens,
            "rate": hits.hit_tokens / max(hits.prompt_tokens, 1),
        }
        for title, hits in rows
    ]


def _words(loss: Loss) -> dict[str, str] | None:
    """Return the words of both sides, their blanks visible."""
    if not loss.old and not loss.new:
        return None
    before = loss.before.rpartition("\n")[2]
    return {"before": _visible(before), "old": _visible(loss.old), "new": _visible(loss.new)}


def _visible(text: str) -> str:
    """Return a text with line ends and tabs as arrows, and other characters that print nothing as their codes."""
    text = text.replace("\n", "↵").replace("\t", "⇥")
    return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in text)


def _roles(picture: LintPicture) -> list[dict[str, Any]]:
    whole = max(sum(each.size for each in picture.roles.values()), 1)
    return [
        {
            "name": ROLE_NAMES[role],
            "share": each.size / whole,
            "found": each.hit / whole,
            "of_own": each.hit / max(each.size, 1),
        }
        for role in ROLE_NAMES
        if (each := picture.roles.get(role)) is not None
    ]


def _talks(picture: LintPicture, factor: float, *, private: bool) -> list[dict[str, Any]]:
    """Return conversations in the order of their begin, each with a strip of its requests."""
    several = [each for each in picture.talks.values() if each.num_requests > 1]
    talks = sorted(several, key=_lost, reverse=True)[:SHOWN_TALKS]
    others = [each for each in several if all(each is not talk for talk in talks)]
    talks += sorted(others, key=lambda each: each.size, reverse=True)[:SHOWN_TALKS]
    points = [point for talk in talks for point in talk.points]
    if not points:
        return []
    has_times = all(point.time_s is not None for point in points)
    at = {point: (point.time_s or 0.0) if has_times else float(point.row) for point in points}
    first, last = min(at.values()), max(at.values())
    most = max(point.size for point in points)

    def strip(talk: Talk) -> str:
        bars = "".join(
            _bar((at[point] - first) / max(last - first, 1e-9), point, most)
            for point in talk.points
        )
        return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" preserveAspectRatio="none" aria-hidden="true">{bars}</svg>'

    return [
        {
            "name": f"from line {talk.points[0].row:,}"
            if private or not talk.begin
            else talk.begin,
            "requests": talk.num_requests,
            "tokens": talk.size * factor,
            "lost": _lost(talk) * factor,
            "strip": as_is(strip(talk)),
        }
        for talk in sorted(talks, key=lambda talk: at[talk.points[0]])
    ]


def _lost(talk: Talk) -> float:
    return sum(point.lost for point in talk.points)


def _bar(place: float, point: Point, most: float) -> str:
    """Return a request as a bar: found at its foot, then lost, then new."""
    x, y, found = place * (WIDTH - 7), float(HEIGHT), ""
    new = max(point.size - point.hit - point.lost, 0)
    for name, part in (("hit", point.hit), ("lost", point.lost), ("new", new)):
        height = part / most * HEIGHT
        y -= height
        if height >= 0.2:
            found += (
                f'<rect class="{name}" x="{x:.1f}" y="{y:.1f}" width="6" height="{height:.1f}"/>'
            )
    return found


def _map(picture: LintPicture, factor: float) -> list[dict[str, Any]]:
    """Return the rows of the map; `heat` is the lost tokens of a cell beside those of the hottest."""
    most = max((each.lost for each in picture.cells.values()), default=0) or 1
    rows: list[dict[str, Any]] = []
    for role, name in ROLE_NAMES.items():
        cells = [picture.cells.get((role, column)) for column in range(DEPTHS)]
        if any(cells):
            rows.append(
                {
                    "name": name,
                    "cells": [
                        {
                            "requests": 0 if cell is None else cell.requests,
                            "label": "" if cell is None else short(cell.requests),
                            "lost": 0 if cell is None else cell.lost * factor,
                            "heat": 0 if cell is None else (cell.lost / most) ** 0.5,
                        }
                        for cell in cells
                    ],
                }
            )
    return rows
