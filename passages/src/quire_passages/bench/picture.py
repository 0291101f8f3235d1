"""Rows of `quire bench passages` as a picture: agreement with the full forward against rows computed again."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from itertools import groupby

from quire.bench.drawing import drawing, text
from quire.bench.timing import Row
from quire_passages.bench.frontier_picture import frontier_picture
from quire_passages.bench.methods import FULL, family

COLOURS = {
    "naive": "#c0341d",
    "moved": "#7a7f86",
    "random": "#a88bb5",
    "epic": "#e39a3b",
    "cache_craft_published": "#8c9a5b",
    "cache_craft": "#4f9d69",
    "kv_deviation": "#3d8fc7",
}
"""By family; methods of others are not drawn."""

WIDTH, HEIGHT, BETWEEN, LEFT, TOP = 300, 220, 56, 52, 44
ABREAST, LINE = 3, TOP + HEIGHT + 64
"""Plots beside each other, and the height of a line of them."""

MOST_ROWS = 0.6
"""At the right end; what computes more again is not drawn."""
AGREEMENTS = (0.4, 0.6, 0.8, 1.0)
SHARES = (0.0, 0.2, 0.4, 0.6)


def picture(rows: Sequence[Row]) -> str:
    """Return rows of `rows.rows` as SVG: a plot for each judged workload, a line for each method.

    Methods of one family, which differ in the budget, share a line. Rows with bounds are drawn by `frontier_picture`.
    """
    if rows and "agree_low" in rows[0]:
        return frontier_picture(rows)
    judged = [row for row in rows if "agree_rate" in row]
    plots = [list(each) for _, each in groupby(judged, key=lambda row: row["workload"])]
    parts: list[str] = []
    for number, plot in enumerate(plots):
        right, down = LEFT + number % ABREAST * (WIDTH + BETWEEN), number // ABREAST * LINE
        parts += [f'<g transform="translate({right},{down})">', *_plot(plot), "</g>"]
    num_lines = -(-len(plots) // ABREAST)
    parts += _legend(num_lines * LINE - 8)
    size = LEFT + min(len(plots), ABREAST) * (WIDTH + BETWEEN), num_lines * LINE + 12
    return drawing("Agreement with the full forward, by rows computed again", size, parts)


def page(rows: Sequence[Row]) -> str:
    """Return the picture and the rows as a page of HTML that needs nothing else."""
    tables: list[str] = []
    for workload, each in groupby(rows, key=lambda row: row["workload"]):
        group = list(each)
        keys = [
            key for key in dict.fromkeys(key for row in group for key in row) if key != "workload"
        ]
        lines = ["".join(f"<th>{escape(key.replace('_', ' '))}</th>" for key in keys)]
        lines += ["".join(f"<td>{cell(key, row.get(key))}</td>" for key in keys) for row in group]
        body = "\n".join(f"<tr>{line}</tr>" for line in lines)
        tables.append(f"<h2>{escape(str(workload))}</h2>\n<table>\n{body}\n</table>")
    return _PAGE.format(picture(rows), "\n".join(tables))


def cell(key: str, value: float | str | None) -> str:
    """Return a figure of a row as text."""
    if value is None or isinstance(value, str):
        return value or ""
    if key.endswith("rate") or key.startswith("agree"):
        return f"{value:.1%}"
    return f"{value:.4f}" if key.startswith("kl") else f"{value:.2f}"


def _plot(rows: Sequence[Row]) -> list[str]:
    parts = [text(0, 20, str(rows[0]["workload"]), "start", "head")]
    least = min([AGREEMENTS[0], *(float(row["agree_rate"]) for row in rows)])

    def place(share: float, agreement: float) -> tuple[float, float]:
        height = HEIGHT * (1 - agreement) / (1 - least)
        return WIDTH * share / MOST_ROWS, TOP + height

    for agreement in AGREEMENTS:
        _, y = place(0, agreement)
        parts += _line([(0, y), (WIDTH, y)], "#7a7f8640", 1)
        parts.append(text(-6, y + 4, f"{agreement:.0%}", "end"))
    for share in SHARES:
        x, _ = place(share, 1)
        parts.append(text(x, TOP + HEIGHT + 18, f"{share:.0%}", "middle"))
    parts.append(text(WIDTH / 2, TOP + HEIGHT + 36, "rows computed again", "middle"))
    for name, colour in COLOURS.items():
        points = sorted(
            place(float(row["rows_rate"]), float(row["agree_rate"]))
            for row in rows
            if row["name"] != FULL
            and family(str(row["name"])) == name
            and float(row["rows_rate"]) <= MOST_ROWS
        )
        parts += _line(points, colour, 2)
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{colour}"/>' for x, y in points]
    return parts


def _line(points: Sequence[tuple[float, float]], colour: str, width: float) -> list[str]:
    if len(points) < 2:
        return []
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return [f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="{width}"/>']


def _legend(top: float) -> list[str]:
    parts: list[str] = []
    x = float(LEFT)
    for name, colour in COLOURS.items():
        label = name.replace("_", " ")
        parts.append(f'<circle cx="{x + 5:g}" cy="{top:g}" r="5" fill="{colour}"/>')
        parts.append(text(x + 16, top + 4, label, "start"))
        x += 40 + 7 * len(label)
    return parts


_PAGE = """\
<!doctype html>
<html lang="en">
<meta charset="utf-8">
<title>Passages reused</title>
<style>
body {{ font: 14px system-ui, sans-serif; margin: 2em; }}
td, th {{ padding: 2px 10px; text-align: right; }}
td:first-child, th:first-child {{ text-align: left; }}
</style>
<h1>Passages reused, beside the full forward</h1>
{}
{}
</html>
"""
