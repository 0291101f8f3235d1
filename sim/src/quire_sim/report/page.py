"""The page around the figures: one HTML file that needs nothing else."""

from __future__ import annotations

from functools import partial
from pathlib import PurePath
from typing import Any

from quire_sim.optimum import BOUNDS
from quire_sim.report import figures
from quire_sim.report.data import Report
from quire_sim.report.figures import MUTED, VARIABLES, colour_of, figure, miss_legend
from quire_sim.report.templates import as_is, rendered


def html(report: Report) -> str:
    """Return a report as one HTML document."""
    draws = {
        "curves": figures.draw_curves,
        "misses": figures.draw_misses,
        "over-time": figures.draw_over_time,
        "distances": figures.draw_distances,
        "reuse-times": figures.draw_reuse_times,
    }
    drawn = {name: figure(partial(draw, report), name) for name, draw in draws.items()}
    return rendered(
        "page.html.j2",
        report=report,
        facts=report.facts,
        title=PurePath(str(report.facts["trace"])).name,
        svg={name: as_is(text) for name, text in drawn.items()},
        policies=[(name, VARIABLES[colour_of(name, report.policies)]) for name in report.policies],
        misses=[(label, VARIABLES[colour]) for _, label, colour in miss_legend(report)],
        best=_best(report),
        groups=[
            [row for row in report.rows if row["capacity_blocks"] == capacity]
            for capacity in report.capacities
        ],
        lines_only=[name for name in ("lru", "optimum") if name not in report.policies],
        muted=VARIABLES[MUTED],
        never_again=1 - report.curves.ceiling,
    )


def _best(report: Report) -> dict[str, Any]:
    """Return the focus row that finds most, the bounds apart where there are others."""
    at = report.focus.capacity_blocks
    rows = [row for row in report.rows if row["capacity_blocks"] == at]
    online = [row for row in rows if row["policy"] not in BOUNDS]
    return max(online or rows, key=lambda row: row["token_hit"])
