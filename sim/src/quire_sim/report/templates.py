"""Templates of pages: one HTML file each, in one style, that needs nothing else."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from quire import __version__
from quire_sim.report.figures import short

FOLDER = Path(__file__).parent


def rendered(name: str, **values: Any) -> str:
    """Return a template of this folder as a page; all values are escaped, but for those that are `as_is`."""
    import jinja2  # noqa: PLC0415 - 0.3 s

    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {
        "percent": _percent,
        "count": "{:,}".format,
        "large": partial(short, space="\N{NO-BREAK SPACE}"),
    }
    template = environment.from_string((FOLDER / name).read_text("utf-8"))
    style = as_is((FOLDER / "style.css").read_text("utf-8"))
    return template.render(style=style, version=__version__, **values)


def as_is(text: str) -> Any:
    """Return HTML that a template takes as it is."""
    from markupsafe import Markup  # noqa: PLC0415 - jinja2's

    return Markup(text)  # noqa: S704 - made here


def _percent(share: float, digits: int = 2) -> str:
    return f"{100 * share:.{digits}f}\N{NO-BREAK SPACE}%"
