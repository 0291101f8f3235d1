"""Pages: HTML that a server of quire has with it, which loads nothing from elsewhere."""

from importlib.resources import files

from starlette.responses import HTMLResponse

CSP = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; img-src data:"


def page(package: str, file: str) -> HTMLResponse:
    """Return a page that lies in a package."""
    text = files(package).joinpath(file).read_text("utf-8")
    return HTMLResponse(text, headers={"Content-Security-Policy": CSP})
