"""Parts beside `quire-kv` that files of tests need, and which of them are installed.

A file needs the part whose folder it is in (`tests/sim`), and those that it, or a helper that it imports, imports at its
top. Without them it is skipped by name, so
each part is tested in an environment that has no other: `tools/test_parts`.
"""

import ast
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest

from quire.extras import COMMANDS

PACKAGES = {
    "quire-passages": "quire_passages",
    "quire-router": "quire_router",
    "quire-sim": "quire_sim",
}
TESTS = Path(__file__).parent
_HELPERS = {
    path.stem: path
    for path in (*TESTS.parent.glob("tools/*.py"), *TESTS.rglob("*.py"))
    if path.stem not in {"conftest", "__init__"}
}


@cache
def _imports(path: Path) -> frozenset[str]:
    """Return the first names of the modules that a file, or a helper that it imports, imports at its top."""
    todo, seen, found = [path], set[Path](), set[str]()
    while todo:
        here = todo.pop()
        seen.add(here)
        for node in ast.parse(here.read_text("utf-8")).body:
            names = [each.name for each in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            found |= {name.split(".")[0] for name in names}
        todo += {_HELPERS[name] for name in found if name in _HELPERS} - seen - set(todo)
    return frozenset(found)


def is_installed(part: str) -> bool:
    """Return whether a part can be imported here."""
    return find_spec(PACKAGES[part]) is not None


def needed(path: Path) -> list[str]:
    """Return the parts that a file of tests needs: those that it imports, and the one whose folder it is in."""
    names = _imports(path) | {f"quire_{path.parent.name}"}
    return [part for part, package in PACKAGES.items() if package in names]


def missing(path: Path) -> str | None:
    """Return why a file of tests cannot run here, None where it can."""
    lacking = [part for part in needed(path) if not is_installed(part)]
    return f"needs {', '.join(lacking)}, not installed" if lacking else None


def skip_without(*words: object) -> None:
    """Skip a test of a command whose part is not installed."""
    names = [" ".join(map(str, words[:count])) for count in (1, 2)]
    part = next((COMMANDS[name] for name in names if name in COMMANDS), None)
    if part and not is_installed(part):
        pytest.skip(f"needs {part}, not installed")
