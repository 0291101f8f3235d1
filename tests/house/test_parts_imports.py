"""The parts beside `quire` import the modules of it that ARCHITECTURE.md lists, and no private names."""

import ast
import re
import tomllib
from pathlib import Path

import pytest

import quire_passages
import quire_router
import quire_sim

ROOT = Path(__file__).parents[2]
PARTS = {
    part.__name__: Path(part.__file__).parent for part in (quire_sim, quire_router, quire_passages)
}


def listed():
    """Return the modules of `quire` that each part may import, as the table in ARCHITECTURE.md has them."""
    text = (ROOT / "ARCHITECTURE.md").read_text("utf-8")
    head, *rows = re.search(r"^\| package \|.*\n\|[-|]+\n(?:\|.*\n)+", text, re.MULTILINE)[
        0
    ].splitlines()
    parts = [each.strip(" `") for each in head.strip("|").split("|")][1:]
    found = {part: set() for part in parts}
    for row in rows[1:]:
        package, *cells = [re.findall(r"`([\w.]+)`", each) for each in row.strip("|").split("|")]
        for part, names in zip(parts, cells, strict=True):
            found[part] |= {f"{package[0]}.{name}".removesuffix(".__init__") for name in names}
    return found


def contract():
    """Return the same list as import-linter has it, and the modules whose own import of `quire` it names."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    (found,) = [
        each
        for each in settings["tool"]["importlinter"]["contracts"]
        if each["type"] == "protected"
    ]
    assert found["protected_modules"] == found["allowed_importers"] == ["quire", "quire.**"]
    pairs = [each.split(" -> ") for each in found["ignore_imports"]]
    known = {part: {to for who, to in pairs if who == f"{part}.**"} for part in PARTS}
    return known, {(who, to) for who, to in pairs if who in PARTS}


def private_names(text):
    """Return the names with an underscore that a module imports from `quire`; dunder names are public."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and re.match(r"quire(\.|$)", node.module or ""):
            found += [f"{node.module}.{each.name}" for each in node.names]
        elif isinstance(node, ast.Import):
            found += [each.name for each in node.names if re.match(r"quire(\.|$)", each.name)]
    return [name for name in found if re.search(r"(^|\.)_(?!_)", name)]


def test_architecture_and_import_linter_list_the_same_modules():
    known, own = contract()
    assert known == listed()
    assert all(to in known[who] for who, to in own)


@pytest.mark.parametrize("part", PARTS)
def test_a_part_imports_no_private_name_of_quire(part):
    found = {
        str(path): names
        for path in PARTS[part].rglob("*.py")
        if (names := private_names(path.read_text("utf-8")))
    }
    assert not found


@pytest.mark.parametrize(
    ("line", "is_private"),
    [
        ("from quire.core import _x", True),
        ("from quire._core import x", True),
        ("import quire._core", True),
        ("def f():\n    from quire.core import _x", True),
        ("from quire import __version__", False),
        ("from quire_sim import _x", False),
        ("from quire.core import x", False),
    ],
)
def test_a_private_name_is_found_wherever_it_is_imported(line, is_private):
    assert bool(private_names(line)) is is_private
