"""The page around the figures: one HTML file that needs nothing else."""

from __future__ import annotations

from functools import partial
from pathlib import Path, PurePath
from typing import Any

from quire._version import __version__
from quire.errors import ConfigError
from quire.extras import lacking
from quire.sim.report import figures
from quire.sim.report.data import Report
from quire.sim.report.figures import MUTED, VARIABLES, colour_of, figure, miss_legend

TEMPLATE = Path(__file__).with_name("page.html.j2")


def html(report: Report) -> str:
    """Return a report as one HTML document. Raises `ConfigError` without matplotlib or jinja2."""
    draws = {
        "curves": figures.draw_curves,
        "misses": figures.draw_misses,
        "over-time": figures.draw_over_time,
        "distances": figures.draw_distances,
        "reuse-times": figures.draw_reuse_times,
    }
    environment = _environment()
    drawn = {name: figure(partial(draw, report), name) for name, draw in draws.items()}
    return environment.from_string(TEMPLATE.read_text("utf-8")).render(
        report=report,
        facts=report.facts,
        title=PurePath(str(report.facts["trace"])).name,
        svg={name: environment.filters["safe"](text) for name, text in drawn.items()},
        policies=[(name, _variable(colour_of(name, report.policies))) for name in report.policies],
        misses=[(label, _variable(colour)) for _, label, colour in miss_legend(report)],
        best=_best(report),
        groups=[
            [row for row in report.rows if row["capacity_blocks"] == capacity]
            for capacity in report.capacities
        ],
        lines_only=[name for name in ("lru", "optimum") if name not in report.policies],
        muted=_variable(MUTED),
        never_again=_never_again(report),
        version=__version__,
    )


def _best(report: Report) -> dict[str, Any]:
    """Return the focus row that finds most, the optimum apart where there are others."""
    rows = report.focus_rows
    online = [row for row in rows if row["policy"] != "optimum"]
    return max(online or rows, key=lambda row: row["token_hit"])


def _never_again(report: Report) -> float:
    """Return the share of prompt tokens that no cache can find."""
    return 1 - report.curves.ceiling


def _variable(placeholder: str) -> str:
    return VARIABLES[placeholder]


def _environment() -> Any:
    try:
        import jinja2  # noqa: PLC0415 - optional
    except ImportError as error:
        raise ConfigError(lacking("a report", "jinja2", "report")) from error
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {
        "percent": _percent,
        "count": _count,
        "large": _large,
    }
    return environment


def _percent(share: float, digits: int = 2) -> str:
    return f"{100 * share:.{digits}f}\N{NO-BREAK SPACE}%"


def _count(number: int) -> str:
    return f"{number:,}"


def _large(number: float) -> str:
    for limit, letter in (
        (1e18, "E"),
        (1e15, "P"),
        (1e12, "T"),
        (1e9, "G"),
        (1e6, "M"),
        (1e3, "k"),
    ):
        if number >= limit:
            return f"{number / limit:.3g}\N{NO-BREAK SPACE}{letter}"
    return f"{number:.3g}"
