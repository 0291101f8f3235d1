"""The figures of a report as SVG that takes its colours and fonts from the page around it."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterable
from importlib import import_module
from typing import Any, NamedTuple, TypeAlias

from quire_sim.optimum import BOUNDS
from quire_sim.report.data import Report

Axes: TypeAlias = Any

INK, MUTED, GRID, PLAIN = "#010201", "#010202", "#010203", "#010204"
SERIES = tuple(f"#0103{number:02x}" for number in range(1, 13))
FATES = tuple(f"#0104{number:02x}" for number in range(1, 7))
"""Placeholders: colours that the page replaces by its own, for light and for dark.

`SERIES` are policies, the first one LRU; bounds are `MUTED`. `FATES` are what became of tokens,
in the order of `REASON_LABELS` behind "found". `PLAIN` is for what is of no policy.
"""

VARIABLES = (
    {INK: "--ink", MUTED: "--muted", GRID: "--grid", PLAIN: "--plain"}
    | {colour: f"--series-{number}" for number, colour in enumerate(SERIES)}
    | {colour: f"--fate-{number}" for number, colour in enumerate(FATES)}
)

MARKERS = "osD^vPX*"

REASON_LABELS = {
    "cold": "never seen before",
    "evicted": "evicted",
    "computing": "being computed",
    "oversized": "larger than the cache",
    "partial_block": "last, partial block",
}


class FigureSize(NamedTuple):
    """Of a figure, in pixels."""

    name: str
    width: int
    height: int


WIDE, NARROW = FigureSize("wide", 760, 340), FigureSize("narrow", 360, 300)
"""On screens with room, and on phones: the text of both is as large as that of the page."""


def figure(draw: Callable[[Axes, FigureSize], None], name: str) -> str:
    """Return a figure as SVG for both sizes. Raises `ConfigError` without matplotlib."""
    return "\n".join(_svg(draw, name, size) for size in (WIDE, NARROW))


def colour_of(policy: str, policies: Iterable[str]) -> str:
    """Return the placeholder of a policy: LRU and the bounds have the same ones in every report."""
    if policy in ("lru", *BOUNDS):
        return SERIES[0] if policy == "lru" else MUTED
    others = [each for each in policies if each not in ("lru", *BOUNDS)]
    return SERIES[1 + others.index(policy) % (len(SERIES) - 1)]


def draw_curves(report: Report, axes: Axes, size: FigureSize) -> None:
    """Hit ratio by capacity: exact curves as lines, replays as marks."""
    both, policies = report.curves, report.policies
    first = max(min(report.capacities[0], both.num_unique // 1000), 1)
    last = max(both.num_unique, first + 1)
    for name, curve in (("optimum", both.optimum), ("lru", both.lru)):
        thin = curve.thinned(400, report.capacities)
        keep = (thin.capacities >= first) & (thin.capacities <= last)
        x = [first, *thin.capacities[keep].tolist(), last]
        y = [100 * curve.at(capacity) for capacity in x]
        style = "-" if name == "lru" else (0, (4, 2))
        axes.plot(x, y, color=colour_of(name, policies), linestyle=style, linewidth=1.6)
    for number, policy in enumerate(policies):
        rows = sorted(
            (row["capacity_blocks"], 100 * row["token_hit"])
            for row in report.rows
            if row["policy"] == policy and row["capacity_blocks"] <= last
        )
        if not rows:
            continue
        x, y = zip(*rows, strict=True)
        between = "none" if policy in ("lru", *BOUNDS) else ":"
        axes.plot(
            x, y, linestyle=between, marker=MARKERS[number % len(MARKERS)], markersize=5.5, linewidth=1.2,
            color=colour_of(policy, policies), clip_on=False, zorder=20 - number,
        )  # fmt: skip
    axes.set_xscale("log")
    axes.set_xlim(first, last)
    axes.set_ylim(0, 100 * max(both.ceiling, 0.01) * 1.08)
    _label(axes, f"capacity in blocks of {both.block_size} tokens", "prompt tokens found")
    ticker = _library("ticker")
    axes.xaxis.set_major_locator(ticker.LogLocator(base=10, numticks=8 if size is WIDE else 5))
    _mark(axes.xaxis, lambda value: short(round(value)))
    axes.xaxis.set_minor_locator(ticker.NullLocator())


def draw_distances(report: Report, axes: Axes, size: FigureSize) -> None:
    """Reuses by the size of the cache that finds them."""
    _, shares = report.reuse_distances()
    _draw_bars(axes, [100 * share for share in shares], 9 if size is WIDE else 5, short)
    _label(axes, "different blocks used since, up to", "of all prompt tokens")


def draw_reuse_times(report: Report, axes: Axes, size: FigureSize) -> None:
    """Uses of blocks by the time since the last one."""
    counts = report.reuses.blocks_by_gap()
    used = max((number + 1 for number, count in enumerate(counts) if count), default=1)
    total = max(sum(counts) + report.reuses.num_unique, 1)
    heights = [100 * count / total for count in counts[:used]]
    _draw_bars(axes, heights, 10 if size is WIDE else 5, _duration)
    _label(axes, "time since the last use, up to", "of all block uses")


def draw_over_time(report: Report, axes: Axes, size: FigureSize) -> None:
    """Hit ratio in the course of the trace, for every policy at one capacity."""
    last = 0.0
    for each in report.closer:
        x: list[float] = []
        y: list[float] = []
        for start, stop, share in each.measured["over_time"]:
            x += start, stop
            y += [float("nan") if share is None else 100 * share] * 2
            last = max(last, stop)
        style = (0, (4, 2)) if each.policy in BOUNDS else "-"
        colour = colour_of(each.policy, report.policies)
        axes.plot(x, y, color=colour, linestyle=style, linewidth=1.5)
    unit, name = (3600.0, "hours") if last > 7200 else (60.0, "minutes")
    if last <= 180:
        unit, name = 1.0, "seconds"
    axes.set_xlim(0, last or 1)
    axes.set_ylim(0, None)
    axes.xaxis.set_major_locator(_library("ticker").MultipleLocator(_step(last, unit, size)))
    _mark(axes.xaxis, lambda value: f"{value / unit:g}")
    _label(axes, f"{name} since the first request", "prompt tokens found")


def draw_misses(report: Report, axes: Axes, _size: FigureSize) -> None:
    """Prompt tokens by their fate: found, or missed for a reason."""
    names = [each.policy for each in report.closer]
    left = [0.0] * len(names)
    for key, _, colour in miss_legend(report):
        shares = [
            100 * ({"found": each.hit_tokens} | each.missed)[key] / max(each.prompt_tokens, 1)
            for each in report.closer
        ]
        axes.barh(names, shares, left=left, height=0.66, color=colour)
        left = [a + b for a, b in zip(left, shares, strict=True)]
    axes.invert_yaxis()
    axes.set_xlim(0, 100)
    axes.set_xlabel("of all prompt tokens")
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=False, axis="y")
    _mark(axes.xaxis, "{:g} %".format)


def miss_legend(report: Report) -> list[tuple[str, str, str]]:
    """Return (key, label, placeholder) of each part that `draw_misses` shows, in its order."""
    fates = zip(({"found": "found"} | REASON_LABELS).items(), FATES, strict=True)
    return [
        (key, label, colour)
        for (key, label), colour in fates
        if key == "found" or any(each.missed.get(key) for each in report.closer)
    ]


def _svg(draw: Callable[[Axes, FigureSize], None], name: str, size: FigureSize) -> str:
    """Draw at 100 pixels per inch and strip what a page of its own would need."""
    matplotlib = _library("")
    settings = {
        "svg.fonttype": "none",
        "svg.hashsalt": f"{name}-{size.name}",
        "font.size": 9.5,
        "axes.edgecolor": GRID,
        "axes.labelcolor": MUTED,
        "axes.grid": True,
        "axes.axisbelow": True,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.spines.left": False,
        "grid.color": GRID,
        "grid.linewidth": 0.8,
        "text.color": INK,
        "xtick.color": MUTED,
        "ytick.color": MUTED,
        "ytick.major.size": 0,
    }
    with matplotlib.rc_context(settings):
        canvas_figure = _library("figure").Figure(
            figsize=(size.width / 100, size.height / 100), dpi=100, layout="constrained"
        )
        axes = canvas_figure.add_subplot()
        draw(axes, size)
        file = io.StringIO()
        canvas_figure.savefig(file, format="svg", transparent=True, metadata={"Date": None})
    return _inline(file.getvalue(), name, size)


def _inline(svg: str, name: str, size: FigureSize) -> str:
    """Make a page's SVG part of another one: no namespaces, no fonts, no colours of its own."""
    body = svg[svg.index("<svg") :]
    body = re.sub(r"<metadata>.*?</metadata>", "", body, flags=re.DOTALL)
    body = re.sub(r"<svg[^>]*?viewBox=\"([^\"]*)\"[^>]*>", r'<svg viewBox="\1">', body, count=1)
    body = body.replace("xlink:href", "href")
    body = re.sub(r"( id=\"|href=\"#|url\(#)", rf"\1{name}-{size.name}-", body)
    body = re.sub(r"font: ([0-9.]+)px [^;\"]*", r"font-size: \1px", body)
    body = re.sub(r"font-family: [^;\"]*;?", "", body)
    for colour, variable in VARIABLES.items():
        body = body.replace(colour, f"var({variable})")
    opening = f'<svg class="{size.name}" role="img" aria-labelledby="{name}-title" '
    return body.replace("<svg ", opening, 1).strip()


def _draw_bars(axes: Axes, heights: list[float], most: int, label: Callable[[int], str]) -> None:
    """Draw a bar per power of two, about so many of them labelled."""
    ticks = range(0, len(heights), max(-(-len(heights) // most), 1))
    axes.bar(range(len(heights)), heights, width=0.82, color=PLAIN)
    axes.set_xticks(list(ticks), [label(1 << tick) for tick in ticks])
    axes.set_xlim(-0.7, max(len(heights), 2) - 0.3)


def _label(axes: Axes, across: str, percent_of: str) -> None:
    axes.set_xlabel(across)
    axes.set_ylabel(percent_of)
    _mark(axes.yaxis, "{:g} %".format)


def _mark(axis: Any, label: Callable[[float], str]) -> None:
    def at(value: float, _position: int | None) -> str:
        return label(value)

    axis.set_major_formatter(at)


def _step(last: float, unit: float, size: FigureSize) -> float:
    """Return a step of whole or simple units for about eight marks, or four on a phone."""
    wanted = last / unit / (8 if size is WIDE else 4)
    steps = (0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 20, 30, 60, 120, 240, 480, 1000, 5000, 10**5, 10**7)
    return unit * next((step for step in steps if step >= wanted), 10**7)


def short(number: float, space: str = "") -> str:
    """Return a number in three digits and a letter: 12.3k, 4.56M."""
    for power, letter in zip(range(18, 0, -3), "EPTGMk", strict=True):
        if number >= 10**power:
            return f"{number / 10**power:.3g}{space}{letter}"
    return f"{number:.3g}"


def _duration(seconds: int) -> str:
    for limit, letter in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= limit:
            return f"{seconds / limit:.2g} {letter}"
    return f"{seconds} s"


def _library(module: str) -> Any:
    """Return matplotlib or a module of it, which takes a second to import."""
    return import_module(f"matplotlib.{module}" if module else "matplotlib")
