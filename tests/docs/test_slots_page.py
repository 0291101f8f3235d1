"""What docs/slots.md shows runs as it stands."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SNIPPETS = re.findall(
    r"```python\n(.*?)```", (ROOT / "docs" / "slots.md").read_text(encoding="utf-8"), re.DOTALL
)


@pytest.mark.parametrize("snippet", SNIPPETS, ids=range(len(SNIPPETS)))
def test_snippets_of_the_slots_page_run(snippet, monkeypatch):
    pytest.importorskip("transformers", reason="install it with: make setup")
    monkeypatch.chdir(ROOT)
    exec(compile(snippet, "slots.md", "exec"), {"__name__": "slots"})


def test_the_slots_page_has_snippets():
    assert len(SNIPPETS) == 2
