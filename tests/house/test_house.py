"""The shape of the kernel: how wide its classes and calls are, who knows whom, and who changes a block's state."""

import ast
from pathlib import Path

import pytest

import quire
import quire_passages
import quire_router
import quire_sim
from quire.core import CacheManager
from quire.core.node import Node
from quire.core.sequence import Sequence

SRC = Path(quire.__file__).parent
PARTS = [Path(part.__file__).parent for part in (quire, quire_sim, quire_router, quire_passages)]
"""The packages of all distributions."""
ROOMS = (
    "core",
    "groups",
    "foresight",
    "exchange",
    "ops",
    "slots",
    "scheduling",
    "engines",
    "serve",
    "web",
    "chat",
)


def modules(*rooms):
    """Return the parsed modules of rooms by their dotted names."""
    found = {}
    for room in rooms:
        for path in sorted((SRC / room).rglob("*.py")):
            parts = path.relative_to(SRC.parent).with_suffix("").parts
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            found[name] = ast.parse(path.read_text(encoding="utf-8"))
    return found


def modules_of(part):
    """Return the parsed modules of a distribution by their dotted names."""
    found = {}
    for path in sorted(part.rglob("*.py")):
        parts = path.relative_to(part.parent).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found[name] = ast.parse(path.read_text(encoding="utf-8"))
    return found


def imports(tree, known):
    """Return the modules that one imports, for typing and inside functions too."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            below = {f"{node.module}.{alias.name}" for alias in node.names}
            names |= below & known or {node.module}
    return names & known


def circle(graph):
    """Return a path that comes back to where it began, or an empty one."""
    done = set()

    def follow(name, path):
        if name in path:
            return [*path[path.index(name) :], name]
        if name in done:
            return []
        for other in sorted(graph[name]):
            found = follow(other, [*path, name])
            if found:
                return found
        done.add(name)
        return []

    return next((found for name in graph if (found := follow(name, []))), [])


def test_nodes_and_sequences_have_fourteen_fields_at_most():
    assert len(Node.__struct_fields__) <= 14
    assert len(Sequence.__struct_fields__) <= 14


def test_a_manager_has_seven_attributes_at_most():
    assert len(vars(CacheManager(4))) <= 7


def is_kernel(node):
    """Whether it runs on a GPU, where a function is given each address and number by itself."""
    return any(ast.unparse(each).startswith("triton.jit") for each in node.decorator_list)


@pytest.mark.cases(4)
@pytest.mark.parametrize("room", ROOMS)
def test_no_function_takes_more_than_six_parameters(room):
    wide = []
    for name, tree in modules(room).items():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and not is_kernel(node):
                each = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
                if len([arg for arg in each if arg.arg not in ("self", "cls")]) > 6:
                    wide.append(f"{name}.{node.name}")
    assert not wide


@pytest.mark.parametrize("part", PARTS[1:], ids=lambda part: part.name)
def test_modules_of_a_part_import_each_other_in_no_circle(part):
    trees = modules_of(part)
    known = {name for name in trees if name != part.name}
    found = circle({name: imports(trees[name], known) - {name} for name in known})
    assert not found, " -> ".join(found)


@pytest.mark.cases(4)
@pytest.mark.parametrize("room", [*ROOMS, "cli"])
def test_modules_of_a_package_import_each_other_in_no_circle(room):
    trees = modules(room)
    known = {name for name in trees if name != f"quire.{room}"}
    found = circle({name: imports(trees[name], known) - {name} for name in known})
    assert not found, " -> ".join(found)


AFTERNOON = [
    "tokens",
    "blocks",
    "tree",
    "policy",
    "policies",
    "lookup",
    "room",
    "sequence",
    "take",
    "publish",
    "give",
    "manager",
]
"""The files of the kernel that are read first."""


def test_the_kernels_first_files_can_be_read_in_an_afternoon():
    lengths = {
        name: len((SRC / "core" / f"{name}.py").read_text().splitlines()) for name in AFTERNOON
    }
    assert sum(lengths.values()) <= 2600, lengths


def test_files_have_400_lines_at_most():
    long = {
        str(path.relative_to(part.parent)): num_lines
        for part in PARTS
        for path in part.rglob("*.py")
        if (num_lines := len(path.read_text(encoding="utf-8").splitlines())) > 400
    }
    assert not long


def test_the_kernel_has_4400_lines_at_most_and_2750_of_code():
    texts = [path.read_text(encoding="utf-8") for path in (SRC / "core").rglob("*.py")]
    assert sum(len(text.splitlines()) for text in texts) <= 4400
    assert sum(map(num_code_lines, texts)) <= 2750


def test_the_server_has_2500_lines_of_code_at_most():
    files = (SRC / "serve").rglob("*.py")
    assert sum(num_code_lines(path.read_text(encoding="utf-8")) for path in files) <= 2500


def test_engine_and_scheduler_have_2400_lines_of_code_at_most():
    files = {*(SRC / "scheduling").glob("*.py"), *(SRC / "engines/loop").glob("*.py")}
    assert sum(num_code_lines(path.read_text(encoding="utf-8")) for path in files) <= 2400


def num_code_lines(text):
    """Count the lines that are neither blank, comment nor docstring."""
    told = set()
    for node in ast.walk(ast.parse(text)):
        value = node.value if isinstance(node, ast.Expr) else None
        if isinstance(value, ast.Constant) and isinstance(value.value, str):
            told.update(range(value.lineno, value.end_lineno + 1))
    lines = enumerate(text.splitlines(), 1)
    return sum(
        line.strip() != "" and not line.strip().startswith("#") and number not in told
        for number, line in lines
    )


@pytest.mark.ci
def test_only_a_pool_changes_the_state_of_a_block():
    writers = set()
    for name, tree in modules(*ROOMS).items():
        for node in ast.walk(tree):
            targets = getattr(node, "targets", None) or [getattr(node, "target", None)]
            for target in targets if isinstance(node, ast.Assign | ast.AugAssign) else ():
                if isinstance(target, ast.Attribute) and target.attr in ("num_cached", "_top"):
                    owner = target.value.id if isinstance(target.value, ast.Name) else ""
                    if owner != "seq" and name != "quire.core.blocks":
                        writers.add(f"{name}:{node.lineno}")
    assert not writers
