"""Names of the house: each class has its own."""

import ast
from collections import defaultdict
from pathlib import Path

import pytest

import quire
import quire_passages
import quire_router
import quire_sim

PARTS = [Path(part.__file__).parent for part in (quire, quire_sim, quire_router, quire_passages)]


def classes():
    """Return the places of every class by its name, nested and private ones included."""
    places = defaultdict(list)
    for file in (file for part in PARTS for file in sorted(part.rglob("*.py"))):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(f"{file.name}:{node.lineno}")
    return places


@pytest.mark.ci
def test_no_two_classes_have_the_same_name():
    assert {name: places for name, places in classes().items() if len(places) > 1} == {}
