"""Consoles, numbers and bars: how every command speaks.

Results go to standard output, everything else (progress, errors) to standard error. With
`--json`, standard output holds one JSON document and nothing else.
"""

import json
import sys
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, cast

from rich.console import Console
from rich.text import Text

from quire.cli.files import write_text

if TYPE_CHECKING:
    from quire.observe import Recorder

BAR_WIDTH = 40
HEIGHTS = " ▁▂▃▄▅▆▇█"
_IN_ASCII = str.maketrans("▁▂▃▄▅▆▇█▓▒░", ".:-=+*##+=.")
ACTIVE, CACHED, FREE = "green", "cyan", "bright_black"


class _Console(Console):
    """A console that raises `BrokenPipeError` where its reader is gone, as other streams do."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


class _Ascii:
    """A stream that writes bars in ASCII, where block characters cannot be printed."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        return self._stream.write(text.translate(_IN_ASCII))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def stdout() -> Console:
    """Return a console for results."""
    console = _Console(highlight=False)
    if not is_utf8(console):
        console.file = cast("TextIO", _Ascii(sys.stdout))
    return console


def stderr() -> Console:
    """Return a console for progress and errors; long lines are left to the terminal."""
    return _Console(stderr=True, soft_wrap=True)


def print_json(document: object) -> None:
    """Print a JSON document to standard output."""
    sys.stdout.write(json.dumps(document, indent=2, ensure_ascii=False) + "\n")


def answer(document: Any, show: Callable[[Any], object], *, as_json: bool) -> None:
    """Print a document as JSON, or have it shown to people."""
    (print_json if as_json else show)(document)


def save_snapshot(path: Path, snapshot: dict[str, Any], *, text_is_bytes: bool) -> None:
    """Write a manager's snapshot for `quire inspect`. Raises `ConfigError`."""
    write_text(path, json.dumps(snapshot | {"text_is_bytes": text_is_bytes}))


def recording(path: Path | None, block_size: int) -> "Recorder | None":
    """Return a recorder to a path; None without one. Raises `ConfigError`."""
    from quire.observe import Recorder

    return None if path is None else Recorder(path, block_size)


@contextmanager
def progress(what: str, total: int | None = None) -> Generator[Callable[[str], None]]:
    """Show progress on a terminal's standard error; nothing where there is none.

    Yields a function that says what is done now, and counts one of `total` as begun.
    """
    if not sys.stderr.isatty():
        yield lambda _what: None
        return
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (
        SpinnerColumn(),
        BarColumn(bar_width=24),
        TimeElapsedColumn(),
        TextColumn("{task.description}", markup=False),
    )
    with Progress(
        *columns, console=Console(stderr=True), transient=True, refresh_per_second=4
    ) as bar:
        task = bar.add_task(what, total=total)
        begun = 0

        def begin(what: str) -> None:
            nonlocal begun
            bar.update(task, description=what, completed=begun)
            begun += 1

        yield begin


def bar(widths: Iterable[int], marks: str, styles: Iterable[str]) -> Text:
    """Draw a bar of parts, each so many of its mark."""
    parts = zip(marks, widths, styles, strict=True)
    return Text.assemble(*((mark * width, style) for mark, width, style in parts))


def pool_bar(group: dict[str, Any]) -> Text:
    """Draw the blocks of one pool of a snapshot: active, cached, free."""
    total = group["num_blocks"]
    active = min(BAR_WIDTH, -(-BAR_WIDTH * group["active"] // total))
    cached = min(BAR_WIDTH - active, -(-BAR_WIDTH * group["cached"] // total))
    widths = active, cached, BAR_WIDTH - active - cached
    return bar(widths, "█▓░", (ACTIVE, CACHED, FREE))


def pool_counts(group: dict[str, Any]) -> Text:
    """Return the active, cached and free blocks of one pool of a snapshot in words."""
    return Text.assemble(
        (f"{group['active']:,} active", ACTIVE),
        " + ",
        (f"{group['cached']:,} cached", CACHED),
        " + ",
        (f"{group['free']:,} free", FREE),
        f" = {group['num_blocks']:,} blocks",
    )


def is_utf8(console: Console) -> bool:
    """Whether block characters can be printed."""
    return console.encoding.lower().replace("-", "").startswith("utf")


def milliseconds(seconds: float) -> str:
    """Return a duration in ms with three digits that say something: 4.21, 42.1, 421."""
    ms = seconds * 1000
    return f"{ms:,.{2 if ms < 10 else 1 if ms < 100 else 0}f}"


def times(factor: float) -> str:
    """Return a ratio for people: 1.04x, 9.3x, 24x."""
    return f"{factor:,.{2 if factor < 2 else 1 if factor < 10 else 0}f}x"


def in_units(value: float, units: Iterable[tuple[float, str]], form: str = ".3g") -> str:
    """Return a number in the first of the units (the largest first) that it is at least one of."""
    size, name = next(((size, name) for size, name in units if value >= size), (1, ""))
    return f"{value / size:{form}}{name}" if name else f"{value:,.0f}"
