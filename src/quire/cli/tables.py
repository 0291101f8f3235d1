"""Tables that keep their numbers in narrow terminals."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from rich import box
from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.table import Column, Table

UNBOUNDED = 10_000
"""Columns of a terminal in which every table fits."""


class FittedTable(Table):
    """A table whose cells are never cut.

    Where it is too wide, its columns go on below, the first `num_keys` of them again each time.
    Text wraps between words; numbers (what is right-justified) and `no_wrap` do not.
    """

    def __init__(self, *columns: Column, num_keys: int, **options: Any) -> None:
        super().__init__(*columns, **options)
        self._num_keys, self._options = num_keys, options

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        unbounded = options.update(width=UNBOUNDED)
        columns = [replace(each, min_width=_needed(each)) for each in self.columns]
        heads, chunk = columns[: self._num_keys], list[Column]()
        parts: list[Table] = []
        for column in columns[self._num_keys :]:
            wider = self._part([*heads, *chunk, column])
            if chunk and console.measure(wider, options=unbounded).minimum > options.max_width:
                parts.append(self._part([*heads, *chunk]))
                chunk = []
            chunk.append(column)
        parts.append(self._part([*heads, *chunk]))
        for part in parts:
            if console.measure(part, options=unbounded).maximum > options.max_width:
                for column in part.columns:
                    if _is_whole(column):
                        column.width = column.min_width  # text alone gives way
            part.title = self.title if part is parts[0] else None
            part.caption = self.caption if part is parts[-1] else None
            yield part

    def _part(self, columns: list[Column]) -> Table:
        part = Table(*(replace(each) for each in columns), **self._options)
        part.rows = self.rows
        return part


def _needed(column: Column) -> int:
    console = Console(width=UNBOUNDED)
    sizes = [console.measure(cell) for cell in column._cells]  # noqa: SLF001  # pyright: ignore[reportPrivateUsage] - Column.cells adds the head where rows are sections
    cells = [size.maximum if _is_whole(column) else size.minimum for size in sizes]
    head = console.measure(column.header)
    return max(head.maximum if column.no_wrap else head.minimum, column.min_width or 0, *cells)


def _is_whole(column: Column) -> bool:
    return column.no_wrap or column.justify == "right"


def plain_table(*heads: str | Column, num_keys: int = 1, **options: Any) -> Table:
    """Return a table with one line under its head and no frame; columns headed by text are of numbers."""
    columns = (Column(head, justify="right") if isinstance(head, str) else head for head in heads)
    options |= {"box": box.SIMPLE_HEAD, "pad_edge": False, "header_style": "bold"}
    return FittedTable(*columns, num_keys=num_keys, **options)


class FactsTable(Table):
    """Names and values in two columns, or below each other where there is no room for both."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        names, values = ([*column.cells] for column in self.columns)
        room = options.max_width - max((console.measure(name).maximum for name in names), default=0)
        if room - 2 >= max((console.measure(value).minimum for value in values), default=0):
            yield from super().__rich_console__(console, options)
            return
        below = Table(box=None, show_header=False, pad_edge=False)
        below.add_column(overflow="fold")
        for name, value in zip(names, values, strict=True):
            if name:
                below.add_row(name, style="bold")
            below.add_row(value)
        yield below

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(1, options.max_width)


def facts_table(facts: Iterable[tuple[str, Any]]) -> Table:
    """Return names and values in two columns."""
    table = FactsTable(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in facts:
        table.add_row(name, value)
    return table
