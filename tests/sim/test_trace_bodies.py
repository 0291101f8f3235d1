"""Request logs as traces: each body is one request, and its prompt has tools and all messages."""

import json

import pytest
from log_help import TOOLS, chat, lines
from typer.testing import CliRunner

from quire.cli.app import app
from quire_sim.trace import Findings, open_trace


def test_each_body_is_one_request_however_many_answers_it_has(tmp_path):
    bodies = [chat("a", "b", "c", "d", "e"), chat("f"), chat("a", "b", "c")]
    trace = open_trace(lines(tmp_path / "log", bodies))
    assert trace.format == "requests"
    assert [each.row for each in trace] == [1, 2, 3]


def test_bodies_share_the_blocks_that_they_begin_with_tools_first(tmp_path):
    other = [TOOLS[1], TOOLS[0], TOOLS[2]]
    logged = [chat("a", tools=TOOLS), chat("b", tools=TOOLS), chat("a", tools=other)]
    first, second, third = open_trace(lines(tmp_path / "log", logged))
    shared = len(set(first.blocks.tolist()) & set(second.blocks.tolist()))
    assert shared >= len(json.dumps(TOOLS)) // 16
    assert len(set(first.blocks.tolist()) & set(third.blocks.tolist())) < 3


@pytest.mark.parametrize("field", ["model", "cache_salt"])
def test_another_model_or_salt_shares_nothing(tmp_path, field):
    first, second = open_trace(lines(tmp_path / "log", [chat("a"), chat("a", **{field: "n"})]))
    assert first.prompt_tokens == second.prompt_tokens
    assert not set(first.blocks.tolist()) & set(second.blocks.tolist())


def test_requests_stand_in_order_of_their_times_with_their_lengths(tmp_path):
    usage = {"usage": {"prompt_tokens": 9, "completion_tokens": 7}}
    records = [
        {"request": chat("a"), "time": 1005.0, "response": usage},
        {"request": chat("b"), "time": 1000.0},
    ]
    first, second = open_trace(lines(tmp_path / "log", records))
    assert [(each.row, each.time_s) for each in (first, second)] == [(2, 0.0), (1, 5.0)]
    assert (first.output_tokens, second.output_tokens) == (0, 7)


def test_what_is_not_read_is_noted(tmp_path):
    report = Findings()
    trace = open_trace(lines(tmp_path / "log", [chat("a"), {"event": 1}]))
    assert len(list(trace.read(report))) == 1
    assert any("1 not read, the first in line 2" in note for note in report.notes)
    assert any("no times" in note for note in report.notes)


@pytest.mark.parametrize("command", [["replay"], ["curve"], ["plan", "--model", "llama-3.1-8b", "--gpu", "h100", "--trace"],
                                     ["simulate", "--model", "llama-3.1-8b", "--gpu", "h100", "--trace"]], ids=lambda each: each[0])  # fmt: skip
def test_every_command_reads_bodies_and_prints_what_it_cannot_read(tmp_path, command):
    path = lines(
        tmp_path / "log.jsonl", [chat("a", "b", "c"), {"event": 1}, chat("a", "b", "c", "d", "e")]
    )
    ended = CliRunner().invoke(app, [*command, str(path), "--json"])
    assert ended.exit_code == 0, ended.output
    assert "1 not read, the first in line 2: no body" in ended.stderr.replace("\n", " ")
    assert ended.stderr.count("not read") == 1
