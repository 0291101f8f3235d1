"""docs/errors.md has every error, and each example raises the error that it stands under."""

import re
from pathlib import Path

import pytest

from quire import errors

PAGE = (Path(__file__).parents[2] / "docs" / "errors.md").read_text("utf-8")
BEGINNING, *SECTIONS = re.split(r"^### ", PAGE, flags=re.MULTILINE)
EXAMPLES = {
    section.split("`")[1]: re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    for section in SECTIONS
}
SHOWN = [name for name, snippets in EXAMPLES.items() if snippets]


def code_in(text):
    return "".join(re.findall(r"```python\n(.*?)```", text, re.DOTALL))


def test_every_error_has_a_section_on_the_page():
    known = [name for name, each in vars(errors).items() if isinstance(each, type)]
    assert set(EXAMPLES) == set(known) - {"QuireError"}


@pytest.mark.parametrize("name", SHOWN)
def test_an_example_raises_the_error_it_stands_under(name, tmp_path, monkeypatch):
    if name in ("NotRelocatable", "UnsupportedModel"):
        pytest.importorskip("transformers", reason="install it with: make setup")
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "page"}
    exec(compile(code_in(BEGINNING), "errors.md", "exec"), names)
    with pytest.raises(errors.QuireError) as raised:
        exec(compile(*EXAMPLES[name], "errors.md", "exec"), names)
    assert type(raised.value).__name__ == name
