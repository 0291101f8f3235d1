"""A log without text: lint and traces read it with the figures of the log itself."""

import json

import msgspec
import pytest
from lint_help import planted, talk
from log_help import chat, lines

from quire.errors import ConfigError
from quire_sim.lint import lint_log
from quire_sim.lint.hashing import HashedRows
from quire_sim.lint.picture import LintPicture
from quire_sim.logs import open_log
from quire_sim.trace import open_trace


def both(tmp_path, records):
    """Return the reports of a log and of the same without text, and the path of each."""
    path, target = lines(tmp_path / "log.jsonl", records), tmp_path / "hashed.jsonl"
    rows = HashedRows()
    report = lint_log(open_log(path), keep=lambda _: True, watchers=[rows.add])
    assert rows.save(report, target) == report.requests
    return report, lint_log(open_log(target), keep=lambda _: True), path, target


RECORDS = [*planted("time", 9), *planted("tool-order", 9)]
USED = {"usage": {"prompt_tokens": 900, "prompt_tokens_details": {"cached_tokens": 128}}}


@pytest.mark.parametrize(
    "records", [RECORDS, [{"request": each, "response": USED} for each in RECORDS]]
)
def test_lint_finds_the_same_in_a_log_without_text(tmp_path, records):
    report, again, *_ = both(tmp_path, records)
    names = ("requests", "prompt_tokens", "hit_tokens", "lost_tokens", "chars_per_token", "is_estimated",
             "told_prompt_tokens", "told_cached_tokens")  # fmt: skip
    for name in names:
        assert getattr(again, name) == pytest.approx(getattr(report, name)), name
    facts = [(each.cause, each.requests, each.paths) for each in report.causes]
    assert [(each.cause, each.requests, each.paths) for each in again.causes] == facts
    places = [(each.row, each.earlier_row, each.path, each.at) for each in report.losses]
    assert [(each.row, each.earlier_row, each.path, each.at) for each in again.losses] == places


def test_traces_are_the_same_with_and_without_text(tmp_path):
    timed = [
        each | {"time": 1e9 + n * 2} for n, each in enumerate(talk(1, 8, lambda _, said: said))
    ]
    *_, path, target = both(tmp_path, timed)
    first, second = (
        [(each.time_s, each.prompt_tokens, each.runs.tolist()) for each in open_trace(file)]
        for file in (path, target)
    )
    assert first == second


def test_no_word_of_a_prompt_and_no_name_of_a_session_is_in_it(tmp_path):
    records = [
        {"request": chat(f"secret {n}", system=f"Now: {n}0:00 hidden " + "rules " * 60), "session_id": "ann@example.org"}
        for n in range(5)
    ]  # fmt: skip
    report, _, _, target = both(tmp_path, records)
    assert report.causes
    text = target.read_text()
    for word in ("secret", "hidden", "rules", "Now", "ann@"):
        assert word not in text


def test_the_sections_of_a_request_have_their_lengths(tmp_path):
    _, _, path, target = both(tmp_path, RECORDS)
    pairs = zip(open_log(path), open_log(target), strict=True)
    for one, other in pairs:
        assert [(each.path, each.role, each.kind, len(each.text)) for each in other.sections] == [
            (each.path, each.role, each.kind, max(len(each.text), 1)) for each in one.sections
        ]


def test_a_page_is_made_of_a_log_without_text(tmp_path):
    *_, path, target = both(tmp_path, RECORDS)
    first, second = LintPicture(4.0), LintPicture(4.0)
    for picture, file in ((first, path), (second, target)):
        lint_log(open_log(file), watchers=[picture.add])
    assert msgspec.to_builtins(list(first.cells.values())) == msgspec.to_builtins(
        list(second.cells.values())
    )
    assert {name: each.hit for name, each in first.roles.items()} == {
        name: each.hit for name, each in second.roles.items()
    }


def test_a_row_without_what_lint_found_is_counted(tmp_path):
    *_, target = both(tmp_path, RECORDS)
    with target.open("a") as file:
        file.write(json.dumps({"t": 99.0, "in": 16, "out": 0, "runs": [[9999, 1]]}) + "\n")
    (sentence,) = lint_log(open_log(target)).unread
    assert "without what quire lint found" in sentence


def test_a_model_is_refused_for_a_log_without_text(tmp_path):
    class Renderer:
        line_ends = ""

    *_, target = both(tmp_path, RECORDS)
    with pytest.raises(ConfigError, match="no text"):
        lint_log(open_log(target), renderer=Renderer())
