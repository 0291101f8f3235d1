"""A picture of policies on one model: agreement against the time to the first token."""

from __future__ import annotations

from collections.abc import Sequence

from quire.bench.drawing import drawing, text
from quire.bench.timing import Row

WIDTH, HEIGHT, LEFT, TOP = 560, 340, 60, 44
ENDS, POLICY, EARLIER, BOUND = "#7a7f86", "#3d8fc7", "#4f9d69", "#c0341d"
LEGEND = (
    ("full prefill and exact prefix", ENDS),
    ("isolated captures", POLICY),
    ("contextual captures", EARLIER),
    ("oracles: no policy", BOUND),
)
_STEPS = (0.0, 0.25, 0.5, 0.75, 1.0)


def frontier_picture(rows: Sequence[Row]) -> str:
    """Return rows of `frontier.summary` as SVG: a point for each, with the bounds of its agreement."""
    least = min(0.95, *(float(row["agree_low"]) for row in rows))
    most = max(1.0, *(float(row["ratio_to_full"]) for row in rows))

    def place(ratio: float, agreement: float) -> tuple[float, float]:
        return LEFT + WIDTH * ratio / most, TOP + HEIGHT * (1 - agreement) / (1 - least)

    parts = [text(LEFT, 20, str(rows[0]["workload"]), "start", "head")]
    for step in _STEPS:
        agreement = least + (1 - least) * step
        _, y = place(0, agreement)
        parts += [
            _line((LEFT, y), (LEFT + WIDTH, y), "#7a7f8640"),
            text(LEFT - 6, y + 4, f"{agreement:.1%}", "end"),
        ]
        x, _ = place(step, 1)
        parts.append(text(x, TOP + HEIGHT + 18, f"{step:.0%}", "middle"))
    half, _ = place(0.5, 1)
    parts.append(_line((half, TOP), (half, TOP + HEIGHT), "#7a7f86"))
    parts.append(
        text(
            LEFT + WIDTH / 2,
            TOP + HEIGHT + 38,
            "CPU time to the first token, of a full prefill",
            "middle",
        )
    )
    for row in rows:
        name, ratio = str(row["name"]), float(row["ratio_to_full"])
        low, high = (place(ratio, float(row[key])) for key in ("agree_low", "agree_high"))
        x, y = place(ratio, float(row["agree_rate"]))
        colour = _colour(name)
        parts.append(_line(low, high, colour))
        parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{colour}"/>')
        side, anchor = (-8, "end") if ratio > 0.8 * most else (8, "start")
        parts.append(text(x + side, y + 4, name.replace("_", " "), anchor))
    for number, (label, colour) in enumerate(LEGEND):
        y = TOP + HEIGHT + 62 + 18 * number
        parts.append(f'<circle cx="{LEFT + 5}" cy="{y}" r="5" fill="{colour}"/>')
        parts.append(text(LEFT + 16, y + 4, label, "start"))
    size = LEFT + WIDTH + 40, TOP + HEIGHT + 62 + 18 * len(LEGEND)
    return drawing("Agreement with the full forward, by time to the first token", size, parts)


def _colour(name: str) -> str:
    if name in ("full", "prefix"):
        return ENDS
    if name.startswith(("oracle", "exact")):
        return BOUND
    return EARLIER if name.startswith("earlier") else POLICY


def _line(start: tuple[float, float], end: tuple[float, float], colour: str) -> str:
    ends = f'x1="{start[0]:.1f}" y1="{start[1]:.1f}" x2="{end[0]:.1f}" y2="{end[1]:.1f}"'
    return f'<line {ends} stroke="{colour}"/>'
