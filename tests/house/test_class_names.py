"""Names of the house: each class of the packages has its own, and each helper of the tests."""

import ast
from collections import defaultdict
from operator import attrgetter
from pathlib import Path

import pytest

import quire
import quire_passages
import quire_router
import quire_sim

PARTS = [Path(part.__file__).parent for part in (quire, quire_sim, quire_router, quire_passages)]
TESTS = [Path(__file__).parents[1]]


def classes(folders, nodes_of):
    """Return the places of every class among the nodes of the files' trees by its name."""
    places = defaultdict(list)
    for file in (file for folder in folders for file in sorted(folder.rglob("*.py"))):
        for node in nodes_of(ast.parse(file.read_text())):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(f"{file.name}:{node.lineno}")
    return places


@pytest.mark.ci
@pytest.mark.parametrize(
    ("folders", "nodes_of"),
    [(PARTS, ast.walk), (TESTS, attrgetter("body"))],  # classes inside a test are its own
    ids=["packages", "tests"],
)
def test_no_two_classes_have_the_same_name(folders, nodes_of):
    places = classes(folders, nodes_of)
    assert {name: found for name, found in places.items() if len(found) > 1} == {}
