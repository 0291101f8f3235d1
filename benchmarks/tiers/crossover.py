"""The crossover as a picture: first tokens from tiers and computed, by length of the prefix."""

from __future__ import annotations

import io
from typing import Any

import matplotlib as mpl

mpl.use("svg")
from matplotlib import pyplot as plt

COLOURS = ("#3b6fb6", "#c8553d", "#3d8f5f", "#8a5fb0", "#b8892d")
INK = "#333333"


def crossover(rows: list[dict[str, Any]]) -> str:
    """Return the `ttft` rows as SVG: left each tier's hits as they are, right as the gate decides.

    Computing is the dark line, and the dashed one behind it 10 % more.
    """
    found = [row for row in rows if "recompute_ms" in row]
    names = list(dict.fromkeys(str(row["tier"]) for row in found))
    with plt.rc_context({"svg.hashsalt": "quire", "font.size": 9, "svg.fonttype": "none"}):
        figure, both = plt.subplots(1, 2, figsize=(9, 3.6), sharey=True, layout="constrained")
        for axes, way, title in zip(
            both, ("hit", "gated"), ("without the gate", "with the cost gate"), strict=True
        ):
            _draw(axes, found, names, way)
            axes.set_title(title, loc="left", color=INK)
        both[0].set_ylabel("milliseconds to the first token")
        both[0].legend(frameon=False)
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
        plt.close(figure)
    return text.getvalue()


def _draw(axes: Any, rows: list[dict[str, Any]], names: list[str], way: str) -> None:
    lengths = sorted({int(row["prefix"]) for row in rows})
    computed = [
        min(float(row["recompute_ms"]) for row in rows if row["prefix"] == length)
        for length in lengths
    ]
    axes.plot(lengths, computed, color=INK, linewidth=1.8, label="computed")
    axes.plot(
        lengths, [1.1 * ms for ms in computed], color=INK, linewidth=0.8, linestyle=(0, (4, 3))
    )
    for number, name in enumerate(names):
        own = [row for row in rows if row["tier"] == name]
        axes.plot(
            [row["prefix"] for row in own],
            [row[f"{way}_ms"] for row in own],
            color=COLOURS[number % len(COLOURS)],
            marker="o",
            markersize=3.5,
            linewidth=1.2,
            label=name,
        )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(lengths, [f"{length:,}" for length in lengths], rotation=45)
    axes.set_xlabel("tokens of the prefix")
    axes.grid(visible=True, color="#dddddd", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
