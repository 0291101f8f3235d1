"""Pictures of rows: SVG that is read on light pages and on dark ones."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

INSIDE, OUTSIDE = "#16202a", "#7a7f86"
"""Of text: in cells, which are light wherever the picture stands, and around them, where it may be light or dark."""


def text(x: float, y: float, words: str, anchor: str, kind: str = "") -> str:
    """Return words at a place; `kind` is `head`, or in a cell `ratio` or `ms`."""
    kind = f' class="{kind}"' if kind else ""
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}"{kind}>{escape(words)}</text>'


def drawing(label: str, size: tuple[float, float], parts: Iterable[str]) -> str:
    """Return parts as a document of this size, in pixels."""
    return _SVG.format(*size, escape(label), "\n".join(parts), INSIDE=INSIDE, OUTSIDE=OUTSIDE)


_SVG = """\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {0:g} {1:g}" role="img" aria-label="{2}">
<style>
text {{ font: 12px system-ui, sans-serif; fill: {OUTSIDE}; }}
.head {{ font-size: 14px; font-weight: 600; }}
.ratio {{ font-weight: 600; fill: {INSIDE}; }}
.ms {{ font-size: 10.5px; fill: {INSIDE}; }}
.late {{ stroke: #c0341d; stroke-width: 3; }}
</style>
{3}
</svg>
"""
