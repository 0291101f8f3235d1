"""The parts of the repository: each distribution with its files and lines.

python tools/parts.py
"""

import ast
import sys
import tomllib
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]


class Part(NamedTuple):
    """A distribution: its name, the package that is imported, and where that lies."""

    distribution: str
    package: str
    folder: Path


def parts() -> list[Part]:
    """Return the distributions, the cache first."""
    found: list[Part] = []
    for project in sorted([ROOT / "pyproject.toml", *ROOT.glob("*/pyproject.toml")]):
        content = tomllib.loads(project.read_text("utf-8"))
        (package,) = content["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
        folder = project.parent / package
        found.append(Part(content["project"]["name"], folder.name, folder))
    return sorted(found, key=lambda part: part.package != "quire")


def code_lines(text: str) -> int:
    """Count the lines that are neither blank, comment nor docstring."""
    told: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        value = node.value if isinstance(node, ast.Expr) else None
        if isinstance(value, ast.Constant) and isinstance(value.value, str):
            told.update(range(value.lineno, (value.end_lineno or value.lineno) + 1))
    return sum(
        line.strip() != "" and not line.strip().startswith("#") and number not in told
        for number, line in enumerate(text.splitlines(), 1)
    )


def main() -> None:
    """Print a table of all parts, and of the rooms of the cache."""
    rows = [(part.distribution, part.package, part.folder) for part in parts()]
    for part in parts():
        rooms = sorted(each for each in part.folder.iterdir() if (each / "__init__.py").is_file())
        rows += [
            ("", f"{part.package}.{room.name}", room) for room in rooms if part.package == "quire"
        ]
    sys.stdout.write(f"{'distribution':14} {'import':20} {'files':>6} {'lines':>7} {'code':>7}\n")
    for distribution, package, folder in rows:
        texts = [path.read_text("utf-8") for path in folder.rglob("*.py")]
        lines = sum(len(text.splitlines()) for text in texts)
        code = sum(map(code_lines, texts))
        sys.stdout.write(f"{distribution:14} {package:20} {len(texts):6} {lines:7,} {code:7,}\n")


if __name__ == "__main__":
    main()
