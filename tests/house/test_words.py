"""Counts of tools/words.py that stay at 0: first lines of docstrings, and the prose of pages."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import words  # noqa: E402


@pytest.fixture(scope="module")
def places():
    """The places of each kind, read once."""
    return words.found()


def test_first_lines_of_docstrings_name_their_subject(places):
    assert not places["headless"], "run: python tools/words.py headless"


def test_first_lines_of_public_docstrings_have_20_words_at_most(places):
    assert not places["long"], "run: python tools/words.py long"


def test_lines_of_prose_have_120_characters_at_most(places):
    assert not places["wide"], "run: python tools/words.py wide"


def test_sentences_of_prose_have_30_words_at_most(places):
    assert not places["sentences"], "run: python tools/words.py sentences"


def test_a_relative_clause_in_place_of_a_noun_is_headless():
    assert words.HEADLESS.match("What a request takes beside its prompt.")
    assert words.HEADLESS.match("Whoever asks for a key.")
    assert not words.HEADLESS.match("The options of a request.")
    assert not words.HEADLESS.match("Whether a tier has what is asked for.")


def test_a_text_that_is_reused_at_any_position_is_a_passage_and_no_chunk():
    pages = [ROOT / "docs" / "passages.md", *(ROOT / "passages" / "src").rglob("*.py")]
    chunks = {
        line.strip()
        for page in pages
        for line in page.read_text("utf-8").splitlines()
        if "chunk" in line.lower()
    }
    others = "how.chunk)", "chunked attention", '"chunked"'  # of a prompt's prefill, and of Llama 4
    assert [line for line in chunks if not any(each in line for each in others)] == []
