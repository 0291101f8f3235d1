"""The README's support table says what the tests test."""

import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="install it with: make setup")

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import support_matrix  # noqa: E402


def test_the_support_table_is_that_of_the_tests():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert support_matrix.section(readme) == support_matrix.table(), (
        "run: python tools/support_matrix.py --write"
    )


def test_every_family_that_is_tested_stands_in_the_table():
    table = support_matrix.table()
    for family in support_matrix.hf_help.ALL_FAMILIES:
        assert f"`{family.replace('+', ' with a ')}`" in table
