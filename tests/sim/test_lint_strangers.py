"""Logs of strangers: words in other forms, records of odd shapes, and names that stay private."""

import json

import pytest
from lint_help import INTRO, REST, question
from log_help import chat, lines, tool
from typer.testing import CliRunner

from quire.errors import TraceError
from quire_sim.lint import lint_log
from quire_sim.lint.hashing import HashedRows
from quire_sim.lint.picture import LintPicture
from quire_sim.lint.reports import LintReport, hide_words
from quire_sim.logs import open_log
from quire_sim.report.linted import lint_html

REMINDER = (
    "<reminder>Tests live in the folder tests; run them with make test, and be brief.</reminder>"
)


def linted(path, records):
    return lint_log(open_log(lines(path, records)), keep=lambda _: True)


def run(*words):
    from quire.cli.app import app

    return CliRunner().invoke(app, ["lint", *map(str, words)])


@pytest.mark.parametrize(
    ("cause", "words"),
    [
        ("time", ("Stand: 30.11.2026, 08.57 Uhr", "Stand: 30.11.2026, 09.34 Uhr")),
        ("time", ("Es ist 9 Uhr.", "Es ist 10 Uhr.")),
        ("time", ("現在時刻: 8時57分", "現在時刻: 9時34分")),
        ("time", ("It is nine o'clock.", "It is ten o'clock.")),
        ("time", ("il est 9 h 30.", "il est 10 h 15.")),
        ("counter", ("Build: v2.3.40+g782ef25", "Build: v2.3.41+g1dad6e7")),
        ("user-data", ("You are speaking to Annika Berg.", "You are speaking to Bob O'Hara.")),
        ("user-data", ("<user_profile>vegan</user_profile>", "<user_profile>pilot</user_profile>")),
        ("user-data", ("Telephone: +49 40 555123", "Telephone: +49 40 778812")),
        ("user-data", ("Folder: /home/ann/shop", "Folder: /home/bob/api")),
    ],
)
def test_words_that_change_are_known_in_other_forms(tmp_path, cause, words):
    records = [chat(question(n), system=INTRO + words[n] + REST) for n in range(2)]
    assert [each.cause for each in linted(tmp_path / "log", records).losses] == [cause]


def reminded(*said):
    """Return a chat whose last message has a reminder in a block of its own."""
    messages = chat(*said)["messages"]
    for message in messages:
        message["content"] = [{"type": "text", "text": message["content"]}]
    messages[-1]["content"].append({"type": "text", "text": REMINDER})
    return {"model": "m", "messages": messages}


def test_a_block_behind_the_last_turn_moves_once_it_is_answered(tmp_path):
    said = ["Where is the ladder?", "In hall nine.", "And who sells it there?"]
    (loss,) = linted(tmp_path / "log", [reminded(said[0]), reminded(*said)]).losses
    assert (loss.cause, loss.path) == ("moved-block", "messages[2].content[0]")


def test_a_reminder_behind_another_question_is_no_summary(tmp_path):
    said = ["Where is the ladder?", "In hall nine.", "And who sells it there?"]
    report = linted(tmp_path / "log", [reminded(*said), reminded("When do you open on Sundays?")])
    assert [each.cause for each in report.losses] == ["other"]


def test_reasoning_is_known_before_an_answer_that_ends_in_a_blank(tmp_path):
    answer = "In hall nine, behind the paint. " * 9
    said = [f"<think>Ladders?</think>\n\n{answer}", "And who sells it there?"]
    records = [chat("Where?", said[0], said[1]), chat("Where?", answer, said[1], "Ann.", "Why?")]
    assert [each.cause for each in linted(tmp_path / "log", records).losses] == ["thinking"]


def test_a_page_is_made_if_a_cause_stands_behind_others_alone(tmp_path):
    records = [
        chat(question(n), system=f"{INTRO}At 0{n}:10 it is.{REST}\nThis is message {n}.{REST[::-1]}")
        for n in range(4)
    ]  # fmt: skip
    picture = LintPicture(4.0)
    report = lint_log(open_log(lines(tmp_path / "log", records)), watchers=[picture.add])
    assert [each.requests for each in report.causes] == [3, 0]
    assert "a time or date" in lint_html(report, picture, private=False)


ODD = (
    {"messages": [{"role": "user", "content": [None, 3, {"type": "text"}]}]},
    {"messages": [{"role": "user", "content": "x", "tool_calls": 5}], "tools": 7},
    {"messages": [1, None, {"role": 5, "content": {}}]},
)


@pytest.mark.parametrize("body", ODD)
def test_a_body_of_an_odd_shape_does_not_end_the_run(tmp_path, body):
    report = linted(tmp_path / "log", [chat("one"), {"model": "m"} | body, chat("two")])
    assert report.requests == 3


def test_schemas_that_are_nested_deep_are_compared_as_text(tmp_path):
    records = []
    for n in range(2):
        schema = value = {}
        for _ in range(300):
            value["p"] = {}
            value = value["p"]
        value["p"] = n
        function = {"name": "deep", "parameters": schema, "description": REST}
        records.append(chat("hi", tools=[{"type": "function", "function": function}]))
    assert len(linted(tmp_path / "log", records).losses) == 1


def test_a_text_before_bodies_is_ambiguous(tmp_path):
    path = tmp_path / "log"
    path.write_text("a plain prompt\n" + json.dumps(chat("hi")) + "\n")
    with pytest.raises(TraceError, match="prompts and requests; name one"):
        open_log(path)
    assert lint_log(open_log(path, format="requests")).requests == 1


def test_names_in_schemas_of_tools_stay_private(tmp_path):
    records = []
    for n in range(3):
        asked = tool("ask", "Asks. " * 30)
        field = {"type": "string", "description": f"of {n}", "enum": [REST]}
        asked["function"]["parameters"]["properties"]["hidden_name"] = field
        records.append(chat("hi", tools=[asked]))
    path, target = lines(tmp_path / "log.jsonl", records), tmp_path / "hashed.jsonl"
    report = lint_log(open_log(path), keep=lambda _: True)
    assert any("hidden_name" in each.path for each in report.losses)
    rows = HashedRows()
    rows.save(lint_log(open_log(path), watchers=[rows.add]), target)
    assert "hidden_name" not in target.read_text()
    page = tmp_path / "page.html"
    told = [run(path, "--private", "--report", page), run(path, "--private", "--json")]
    assert "tools[0].function.parameters" in told[1].stdout
    for text in (*(each.output for each in told), page.read_text()):
        assert "hidden_name" not in text


def test_values_of_refused_bodies_and_unknown_files_stay_private(tmp_path):
    report = LintReport("log", "requests")
    report.unread = ['2 not read, the first in line 3: not rendered: tools[0] got {"name":"hush"}']
    hide_words(report)
    told = "2 not read, the first in line 3: not rendered, the reason has words of it"
    assert report.unread == [told]
    path = tmp_path / "log"
    path.write_text('{"hush": 1}\n')
    with pytest.raises(TraceError, match="no request log") as error:
        open_log(path)
    assert "hush" not in str(error.value)
