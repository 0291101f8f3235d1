"""The grid of the cost gate as a picture: time of hits and misses, relative to the better choice.

The choices are loading and computing.
"""

from __future__ import annotations

from collections.abc import Sequence

from quire.bench.drawing import drawing, text
from quire.bench.gate_rows import SLACK_S, SLACK_SHARE, holds
from quire.bench.timing import Row

CELL_WIDTH, CELL_HEIGHT, GAP = 62, 40, 2
LEFT, TOP, BETWEEN, BOTTOM = 74, 64, 40, 66

STEPS = ((0.95, "#8cc5e8"), (1.05, "#cfe5f2"), (1.1, "#e9eef0"), (1.25, "#f6d9a8"))
"""Ratios up to which a cell has this colour."""

SLOWER = "#ef9a72"


def picture(rows: Sequence[Row]) -> str:
    """Return rows of `gate_rows.rows` as SVG: a line of cells for each round trip.

    Hits are on the left, misses on the right. A cell has the ratio and the milliseconds. A framed cell is over its
    limit.
    """
    lines = _lines(rows)
    lengths = list(dict.fromkeys(int(row["tokens"]) for row in rows))
    width = len(lengths) * CELL_WIDTH
    parts: list[str] = []
    for number, (kind, best) in enumerate(
        (("hit", "the better of loading and computing"), ("miss", "computing"))
    ):
        left = LEFT + number * (width + BETWEEN)
        parts.append(text(left, 20, f"a {kind}, over {best}", "start", "head"))
        for at, length in enumerate(lengths):
            middle = left + at * CELL_WIDTH + CELL_WIDTH / 2
            parts.append(text(middle, TOP - 10, f"{length:,}", "middle"))
        for at, line in enumerate(lines):
            top = TOP + at * CELL_HEIGHT
            if not number:
                label = f"{float(line[0]['rtt_ms']):g} ms"
                parts.append(text(left - 10, top + CELL_HEIGHT / 2 + 4, label, "end"))
            for row in line:
                column = left + lengths.index(int(row["tokens"])) * CELL_WIDTH
                parts += _cell(column, top, row, kind)
    below = TOP + len(lines) * CELL_HEIGHT
    parts.append(text(LEFT, TOP - 28, "tokens of the prompt", "start"))
    parts.append(text(LEFT - 10, TOP - 10, "round trip", "end"))
    parts += _legend(LEFT, below + 22)
    size = LEFT + 2 * width + BETWEEN + 10, below + BOTTOM
    return drawing("What requests take with the cost gate", size, parts)


def _lines(rows: Sequence[Row]) -> list[list[Row]]:
    """Return the rows of each tier and round trip."""
    lines: list[list[Row]] = []
    for row in rows:
        last = lines[-1][-1] if lines else row
        if last["rtt_ms"] == row["rtt_ms"] and float(last["tokens"]) < float(row["tokens"]):
            lines[-1].append(row)
        else:
            lines.append([row])
    return lines


def _cell(left: float, top: float, row: Row, kind: str) -> list[str]:
    computing_ms, took_ms = float(row["computing_ms"]), float(row[f"{kind}_ms"])
    best_ms = min(computing_ms, float(row["loading_ms"])) if kind == "hit" else computing_ms
    ratio = took_ms / best_ms
    fill = next((colour for most, colour in STEPS if ratio <= most), SLOWER)
    frame = "" if holds(took_ms / 1e3, best_ms / 1e3) else ' class="late"'
    middle = left + CELL_WIDTH / 2
    size = f'width="{CELL_WIDTH - GAP}" height="{CELL_HEIGHT - GAP}"'
    return [
        f'<rect x="{left:g}" y="{top:g}" {size} rx="3" fill="{fill}"{frame}/>',
        text(middle, top + 17, f"{ratio:.2f}", "middle", "ratio"),
        text(middle, top + 31, f"{took_ms:,.{took_ms < 10:d}f} ms", "middle", "ms"),
    ]


def _legend(left: float, top: float) -> list[str]:
    parts: list[str] = []
    labels = [f"to {most:g}" for most, _ in STEPS] + ["more"]
    for at, (label, colour) in enumerate(
        zip(labels, [*(each for _, each in STEPS), SLOWER], strict=True)
    ):
        x = left + at * 84
        parts.append(f'<rect x="{x:g}" y="{top:g}" width="18" height="14" rx="2" fill="{colour}"/>')
        parts.append(text(x + 24, top + 11, label, "start"))
    bound = f"a frame: beyond both {SLACK_SHARE:.0%} and {SLACK_S * 1e3:g} ms more"
    return [*parts, text(left + len(labels) * 84, top + 11, bound, "start")]
