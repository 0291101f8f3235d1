"""README.md and the test modules beside this one say the same."""

import re
from pathlib import Path

import pytest

HERE = Path(__file__).parent
DOCUMENT = (HERE / "README.md").read_text(encoding="utf-8")
SECTIONS = dict(re.findall(r"`tests/ancestors/(\w+)\.py`\n(.*?)(?=\n## |\Z)", DOCUMENT, re.DOTALL))
MODULES = sorted({path.stem for path in HERE.glob("test_*.py")} - {Path(__file__).stem})


def test_every_module_has_a_table():
    assert sorted(SECTIONS) == MODULES
    assert len(MODULES) == 5


@pytest.mark.parametrize("module", MODULES)
def test_every_row_names_a_test_and_every_test_has_a_row(module):
    tests = re.findall(r"^def (test_\w+)", (HERE / f"{module}.py").read_text("utf-8"), re.MULTILINE)
    rows = re.findall(r"^\|.*\|.*\| `(test_\w+)` \|$", SECTIONS[module], re.MULTILINE)
    assert rows == tests
