"""Causes of lost prefixes in logs where they were planted: cause, place and size."""

import copy
import json
import random
import re

import pytest
from lint_help import INTRO, PLANTED, REST, TOOLS, clean, planted, question, talk
from log_help import chat, lines
from typer.testing import CliRunner

from quire_sim.lint import lint_log
from quire_sim.logs import open_log


def linted(path, records):
    return lint_log(open_log(lines(path, records)), keep=lambda _: True)


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_cause_is_found_at_its_place_in_95_of_100_requests(tmp_path, name):
    report = linted(tmp_path / "log", planted(name))
    place = PLANTED[name][0]
    right = [
        each for each in report.losses if each.cause == name.strip() and each.path.startswith(place)
    ]
    assert report.losses, "nothing is lost"
    assert len(right) >= 0.95 * len(report.losses)


def test_a_log_without_a_cause_has_none(tmp_path):
    report = linted(tmp_path / "log", clean())
    assert [(each.cause, each.path, each.old, each.new) for each in report.losses] == []
    assert report.hit_tokens / report.prompt_tokens > 0.9


def test_what_is_lost_is_what_stands_equal_behind_the_first_difference(tmp_path):
    report = linted(tmp_path / "log", planted("header-line", 20))
    expected = 19 * len(INTRO + REST)
    assert report.lost_tokens * report.chars_per_token == pytest.approx(expected, rel=0.01)
    assert sum(each.share for each in report.causes) == pytest.approx(
        report.lost_tokens / report.prompt_tokens
    )


def test_of_two_causes_the_first_has_the_loss(tmp_path):
    rng = random.Random(1)
    records = []
    for n in range(40):
        body = PLANTED["tool-order"][1](n, rng)
        system = f"Now: 2026-11-{1 + n % 28:02}T08:{n % 60:02}Z"
        records.append(chat(question(n), tools=body["tools"], system=INTRO + system + REST))
    report = linted(tmp_path / "log", records)
    assert {each.cause for each in report.losses} <= {"tool-order", "time"}
    for loss in report.losses:
        assert loss.path.startswith("tools[") == (loss.cause == "tool-order")


def plain(turn, said):
    for message in said[:-1]:
        message["content"] = re.sub("<think>.*</think>", "", message["content"])
    return said


def with_thoughts(turn, said):
    return said


def stripped_later(turn, said):
    if turn % 2:
        return said
    return plain(turn, said)


def cut(turn, said):
    plain(turn, said)
    return said[max(0, len(said) - 5) :] if turn > 2 else said


def summarised(turn, said):
    plain(turn, said)
    return (
        [{"role": "user", "content": f"Summary of {turn}: they asked for the shelf."}, *said[-3:]]
        if turn > 3
        else said
    )


def reminded(turn, said):
    plain(turn, said)
    said[max(len(said) - 3, 0)]["content"] += (
        "\n<reminder>Tests live in the folder tests; run them with make test, and be brief.</reminder>"
    )
    return said


@pytest.mark.parametrize(
    ("change", "cause"),
    [(plain, None), (with_thoughts, None), (stripped_later, "thinking"), (cut, "history-cut"), (summarised, "summary"), (reminded, "moved-block")],
)  # fmt: skip
def test_changes_to_a_conversation_are_told_apart(tmp_path, change, cause):
    records = [each for n in range(4) for each in talk(n, 8, change)]
    report = linted(tmp_path / "log", records)
    found = [each.cause for each in report.losses]
    assert set(found) == ({cause} if cause else set())


@pytest.mark.parametrize("field", ["model", "cache_salt"])
def test_another_model_or_salt_is_its_own_cause(tmp_path, field):
    records = [
        chat(question(n), system=INTRO + REST, tools=TOOLS, **{field: f"m{n}"}) for n in range(6)
    ]
    report = linted(tmp_path / "log", records)
    assert {each.cause for each in report.losses} == {field.replace("_", "-")}


def test_an_image_that_is_encoded_again_is_found(tmp_path):
    import base64

    def body(n):
        png = b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR" + (64).to_bytes(4, "big") * 2 + bytes([n])
        image = {
            "type": "image_url",
            "image_url": {"url": "data:image/png;base64," + base64.b64encode(png).decode()},
        }
        said = {"role": "user", "content": [image, {"type": "text", "text": REST}]}
        return {"model": "m", "messages": [said]}

    report = linted(tmp_path / "log", [body(n) for n in range(5)])
    assert {each.cause for each in report.losses} == {"image"}
    assert {each.path for each in report.losses} == {"messages[0].content[0]"}


def run(*words):
    import typer

    from quire_sim.cli import lint as command

    alone = typer.Typer()
    alone.command()(command.lint)
    return CliRunner().invoke(alone, [str(each) for each in words])


def test_the_command_shows_the_cause_the_words_and_the_advice(tmp_path):
    path = lines(tmp_path / "log.jsonl", [*planted("header-line", 9), {"event": 1}])
    ended = run(path)
    assert ended.exit_code == 0, ended.output
    for words in (
        "9 requests",
        "a client's header line",
        "cch=",
        "messages[0].content",
        "CLAUDE_CODE_ATTRIBUTION_HEADER=0",
        "about",
    ):
        assert words in ended.output
    assert "1 not read, the first in line 10" in ended.stderr
    assert "cch=" not in run(path, "--private").stdout


def test_the_exit_code_is_1_from_the_given_share_on(tmp_path):
    path = lines(tmp_path / "log.jsonl", planted("time", 9))
    assert run(path, "--fail-on", "5%").exit_code == 1
    assert run(path, "--fail-on", "100%").exit_code == 0
    assert run(lines(tmp_path / "clean", clean(9)), "--fail-on", "0.1%").exit_code == 0


def test_one_request_is_shown_with_its_sections_and_its_difference(tmp_path):
    path = lines(tmp_path / "log.jsonl", planted("time", 9))
    output = run(path, "--request", 4).output
    assert "tools[2]" in output
    assert "line 4 after line" in output
    assert run(path, "--request", 99).exit_code


def test_the_document_has_all_losses_and_no_words_if_private(tmp_path):
    path = lines(tmp_path / "log.jsonl", planted("time", 9))
    found = json.loads(run(path, "--json", "--private").stdout)
    assert (found["requests"], len(found["losses"])) == (9, 8)
    assert not any(each["old"] or each["new"] for each in found["losses"])


def test_the_log_is_not_changed(tmp_path):
    records = planted("tool-order", 6)
    before = copy.deepcopy(records)
    linted(tmp_path / "log", records)
    assert records == before
