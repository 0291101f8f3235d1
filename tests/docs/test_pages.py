"""Snippets and links of the README and of the pages under docs: each runs, or leads somewhere."""

import re
from pathlib import Path

import pytest

import quire

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
TOP = [ROOT / f"{name}.md" for name in ("README", "ARCHITECTURE", "CONTRIBUTING")]
MENU = (ROOT / "mkdocs.yml").read_text("utf-8")
REFERENCE = "".join(page.read_text("utf-8") for page in sorted((DOCS / "api").glob("*.md")))


def snippets(page):
    return re.findall(r"```python\n(.*?)```", page.read_text("utf-8"), re.DOTALL)


def name(page):
    return page.relative_to(ROOT).with_suffix("").as_posix()


SHOWING = [page for page in [TOP[0], *PAGES] if snippets(page) and page.stem != "errors"]
"""The pages with snippets; those of the errors raise, and `test_errors.py` runs them."""


@pytest.mark.cases(2)
@pytest.mark.parametrize("page", SHOWING, ids=name)
def test_the_snippets_of_a_page_run_one_after_the_other(page, tmp_path, monkeypatch):
    pytest.importorskip("transformers", reason="install it with: make setup")
    for folder in ("src", "tests"):  # some read files of the repository, or write beside them
        (tmp_path / folder).symlink_to(ROOT / folder)
    monkeypatch.chdir(tmp_path)
    names = {"__name__": page.stem}
    for snippet in snippets(page):
        exec(compile(snippet, page.name, "exec"), names)


def rows_in_order(page):
    """Return the snippets of a page and the code in the last column of its tables, as they stand."""
    text = page.read_text("utf-8")
    found = re.findall(
        r"```python\n(.*?)```|^\|[^|\n]*\| `([^`\n]+)` \|$", text, re.DOTALL | re.MULTILINE
    )
    return [snippet or row for snippet, row in found]


def test_every_row_for_people_from_another_cache_runs():
    names = {"__name__": "rows"}
    rows = rows_in_order(DOCS / "from-other-caches.md")
    assert len(rows) >= 70
    for row in rows:
        exec(compile(row, row[:60], "exec"), names)


def test_the_readme_is_one_story_of_at_most_90_lines():
    lines = TOP[0].read_text("utf-8").splitlines()
    assert len(lines) <= 90
    assert len(snippets(TOP[0])) == 2


LONGEST = {
    "benchmarks": 140,
    "passages": 120,
    "recorded-runs": 150,
    "serving-simulation": 150,
    "testing": 90,
    "tiers": 140,
    "tiers-how": 210,
}
"""Lines that a page has at most, by its name."""


@pytest.mark.parametrize("page", LONGEST)
def test_a_page_is_no_longer_than_its_limit(page):
    lines = (DOCS / f"{page}.md").read_text("utf-8").splitlines()
    assert len(lines) <= LONGEST[page]


@pytest.mark.parametrize("page", [*TOP, *PAGES], ids=name)
def test_links_and_images_lead_to_files_that_are_there(page):
    text = re.sub(r"```.*?```", "", page.read_text("utf-8"), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", text):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_every_page_is_in_the_menu_of_the_site():
    listed = re.findall(r"([\w/.-]+\.md)$", MENU, re.MULTILINE)
    assert sorted(listed) == sorted(page.relative_to(DOCS).as_posix() for page in PAGES)


def test_the_reference_has_every_package():
    rooms = {init.parent.name for init in (ROOT / "src" / "quire").glob("*/__init__.py")}
    shown = set(re.findall(r"^::: quire\.(\w+)", REFERENCE, re.MULTILINE))
    missing = rooms - shown - {"assets", "bench", "cli"}
    assert not missing, (
        f"say `::: quire.{missing.pop()}` on a page in docs/api, and add it to mkdocs.yml"
    )


def test_the_reference_lists_every_name_of_quire():
    listed = set(
        re.findall(r"^\| \[?`(\w+)`", (DOCS / "api/quire.md").read_text("utf-8"), re.MULTILINE)
    )
    assert listed == set(quire.__all__) - {"__version__"}, "mend the table in docs/api/quire.md"
