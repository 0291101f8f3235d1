"""The table of all flags of all commands in docs/command-line.md: names, values, meanings, commands.

python tools/flag_table.py --write
"""

import argparse
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import typer

from quire.cli.app import app

PAGE = Path(__file__).parents[1] / "docs" / "command-line.md"
VALUES = {"int": "N", "float": "X", "Path": "FILE", "list[Path]": "FILE"}
BEGIN, END = "<!-- flags:begin -->\n", "<!-- flags:end -->"


class Flag(NamedTuple):
    """One flag of one command."""

    command: str
    name: str
    value: str
    meaning: str


def commands(group: Any = None, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every command that does something, by the words that call it."""
    group = group or typer.main.get_command(app)
    for name, command in sorted(group.commands.items()):
        if hasattr(command, "commands"):
            yield from commands(command, f"{path}{name} ")
        else:
            yield f"{path}{name}", command


def flags() -> list[Flag]:
    """Return every flag of every command."""
    return [
        Flag(path, name, _value(parameter), re.sub(r"\[/?bold\]", "`", parameter.help or ""))
        for path, command in commands()
        for parameter in command.params
        for name in parameter.opts
        if name.startswith("--") and name != "--help"
    ]


def table() -> str:
    """Return the table as Markdown: a row per flag."""
    rows = ["| flag | meaning | commands |\n|---|---|---|\n"]
    every = flags()
    for name in sorted({flag.name for flag in every}):
        own = [flag for flag in every if flag.name == name]
        said = f"`{name}{' ' + own[0].value if own[0].value else ''}`"
        meaning = own[0].meaning.replace("\\[", "[")
        rows.append(f"| {said} | {meaning} | {', '.join(flag.command for flag in own)} |\n")
    return "".join(rows)


def section(page: str) -> str:
    """Return what stands between the marks of a page."""
    return page.partition(BEGIN)[2].partition(END)[0]


def _value(parameter: Any) -> str:
    if parameter.is_flag:
        return ""
    name = VALUES.get(parameter.bare_type(), "TEXT")
    return name + (" ..." if parameter.multiple else "")


def main() -> None:
    """Print the table, or write it into the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="write it into the page")
    if not parser.parse_args().write:
        sys.stdout.write(table())
        return
    page = PAGE.read_text("utf-8")
    PAGE.write_text(page.replace(section(page), table(), 1), "utf-8")


if __name__ == "__main__":
    main()
