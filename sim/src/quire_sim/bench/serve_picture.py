"""Rows of `quire bench serve` as a picture: for each load, a bar of every system, in three figures."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from quire.bench.drawing import drawing, text
from quire.bench.timing import Row

FIGURES = {
    "requests_per_s": "requests per second",
    "ttft_ms_median": "ms to the first token",
    "itl_ms_median": "ms between tokens",
}
"""What is drawn, by its key; each group of bars has a scale of its own."""
COLOURS = {
    "quire": "#3d8fc7",
    "vllm-cpu": "#e39a3b",
    "transformers-cb": "#8c9a5b",
    "prefix-cache": "#a88bb5",
}

LEFT, TOP, WIDTH, LONGEST_BAR = 240, 54, 220, 140
BAR, GAP = 16, 10
"""Of one system, and between the loads."""


def picture(rows: Sequence[Row]) -> str:
    """Return rows of `serve_rows.rows` as SVG."""
    parts = [
        text(LEFT + at * WIDTH, 24, head, "start", "head")
        for at, head in enumerate(FIGURES.values())
    ]
    top = TOP
    for load, each in groupby(rows, key=lambda row: f"{row['workload']}, {row['dtype']}"):
        group = list(each)
        parts.append(text(10, top + 12, load, "start", "head"))
        for row in group:
            system = str(row["system"])
            parts.append(text(LEFT - 10, top + 12, system, "end"))
            for at, key in enumerate(FIGURES):
                left, value = LEFT + at * WIDTH, float(row[key])
                length = LONGEST_BAR * value / max(float(other[key]) for other in group)
                size = f'width="{length:.1f}" height="{BAR - 3}"'
                parts += (
                    f'<rect x="{left}" y="{top}" {size} rx="2" fill="{COLOURS[system]}"/>',
                    text(left + length + 6, top + 11, f"{value:,.{value < 100:d}f}", "start"),
                )
            top += BAR
        top += GAP
    return drawing("Many requests at once", (LEFT + len(FIGURES) * WIDTH, top), parts)
