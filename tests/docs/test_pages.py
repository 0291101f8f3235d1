"""What pages of the documentation show runs as it stands."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = {"slots.md": 2, "verification.md": 1}
SNIPPETS = [
    pytest.param(snippet, id=f"{page}-{number}")
    for page in PAGES
    for number, snippet in enumerate(
        re.findall(
            r"```python\n(.*?)```", (ROOT / "docs" / page).read_text(encoding="utf-8"), re.DOTALL
        )
    )
]


@pytest.mark.parametrize("snippet", SNIPPETS)
def test_snippets_of_a_page_run(snippet, monkeypatch):
    pytest.importorskip("transformers", reason="install it with: make setup")
    monkeypatch.chdir(ROOT)
    exec(compile(snippet, "page.md", "exec"), {"__name__": "page"})


def test_the_pages_have_snippets():
    assert len(SNIPPETS) == sum(PAGES.values())
