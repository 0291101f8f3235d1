"""docs/models.md says what the families suite has found."""

import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import support_matrix  # noqa: E402


def test_the_page_of_models_is_that_of_the_tests():
    assert support_matrix.PAGE.read_text(encoding="utf-8") == support_matrix.page(), (
        "run: python tools/support_matrix.py --write"
    )


def test_every_model_class_is_on_the_page():
    page = support_matrix.page()
    for verdict in support_matrix.KEPT["classes"]:
        assert f"`{verdict['name']}`" in page
