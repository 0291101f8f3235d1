"""Pages: HTML that a server of quire has with it, which loads nothing from elsewhere."""

import re
from functools import cache
from importlib.resources import files

from starlette.responses import HTMLResponse

CSP = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; img-src data:"


def page(package: str, file: str) -> HTMLResponse:
    """Return a page that lies in a package, with the files that it names, {{page.css}} for instance, in it."""
    return HTMLResponse(_text(package, file), headers={"Content-Security-Policy": CSP})


@cache
def _text(package: str, file: str) -> str:
    text = files(package).joinpath(file).read_text("utf-8")
    return re.sub(r"\{\{([\w.]+)\}\}", lambda named: _text(package, named[1]), text)
