"""The page of a linted log: its figures, its words, and nothing from elsewhere."""

import re

import pytest
from lint_help import clean, planted
from log_help import chat, lines

from quire_sim.lint import lint_log
from quire_sim.lint.mends import MENDS, MendedHits, MendGain, MendReport
from quire_sim.lint.picture import LintPicture
from quire_sim.logs import open_log
from quire_sim.report.linted import lint_html


def page(path, records, *, private=False):
    picture = LintPicture(4.0)
    report = lint_log(open_log(lines(path, records)), watchers=[picture.add])
    return report, picture, lint_html(report, picture, private=private)


def test_the_page_has_figures_causes_words_and_advice(tmp_path):
    report, _, text = page(tmp_path / "log", planted("header-line", 9))
    share = 100 * report.hit_tokens / report.prompt_tokens
    for words in (
        f"{share:.1f}\N{NO-BREAK SPACE}%",
        "header line",
        "cch=",
        "CLAUDE_CODE_ATTRIBUTION_HEADER=0",
        "about",
    ):
        assert words in text


def test_the_page_loads_nothing_and_has_no_words_of_prompts_if_private(tmp_path):
    records = [chat("secret words", system="unshown rules " * 30 + str(n)) for n in range(4)]
    _, _, text = page(tmp_path / "log", records, private=True)
    assert not re.search(r"(?:src|href)=|url\(|@import|<script", text)
    assert "secret" not in text
    assert "unshown" not in text


def test_the_page_has_what_each_mend_is_worth(tmp_path):
    report, picture, _ = page(tmp_path / "log", planted("time", 9))
    gain = MendGain("move-lines", "move lines; answers may change", True, 9, MendedHits(100, 90))
    mending = MendReport(MendedHits(100, 20), MendedHits(100, 95), mends=[gain])
    text = lint_html(report, picture, mending, private=False)
    for words in ("20.0", "move lines; answers may change", "90.0", "95.0"):
        assert words in text


def test_words_of_prompts_are_text_and_nothing_else(tmp_path):
    records = [
        chat("<script>alert(1)</script>", system=f"<u>{n}</u>" + "rules " * 40) for n in range(4)
    ]
    _, _, text = page(tmp_path / "log", records)
    assert "<script" not in text
    assert "<u>" not in text


@pytest.mark.parametrize("records", [clean(9), planted("tool-order", 12), [chat("alone")]])
def test_all_tokens_are_in_the_sections_and_each_later_request_in_the_map(tmp_path, records):
    report, picture, _ = page(tmp_path / "log", records)
    whole = sum(each.size for each in picture.roles.values())
    assert whole / report.chars_per_token == pytest.approx(report.prompt_tokens)
    assert sum(each.hit for each in picture.roles.values()) / 4 == pytest.approx(report.hit_tokens)
    assert sum(each.requests for each in picture.cells.values()) == len(records) - 1
    lost = sum(each.lost for each in picture.cells.values())
    assert lost / report.chars_per_token == pytest.approx(report.lost_tokens)


def test_titles_of_mends_say_that_answers_may_change():
    assert all(("answers may change" in each.title) == each.changes_meaning for each in MENDS)


def test_blanks_that_print_nothing_are_shown_by_their_codes_and_a_missing_side_as_nothing(tmp_path):
    rules = " Name the shelf, the row and the branch." * 9
    for old, new, shown in (
        ("be brief", "be\u00a0brief", "\\xa0brief"),
        ("so.\n", "so.\r\n", "\\r↵"),
    ):
        records = [chat("Which?", system=f"Please {each}{rules}") for each in (old, new)]
        assert f"<ins>{shown}" in page(tmp_path / "log", records)[2]
    records = [chat("Which?", system=rules) | salt for salt in ({"cache_salt": "a"}, {})]
    assert "<del>a</del>" in page(tmp_path / "log", records)[2]
    assert "<i>nothing</i>" in page(tmp_path / "log", records)[2]
