"""`quire lint --server`: a log in a server's cache, beside what its usage tells."""

import json

import pytest
from lint_help import clean
from log_help import chat, lines
from typer.testing import CliRunner

from quire_sim.caches import TextPieces, cache_of, cache_report, predictions
from quire_sim.logs import open_log


def run(path, *words):
    from quire.cli.app import app

    return CliRunner().invoke(app, ["lint", str(path), *words])


def answered(prompt, cached, **more):
    usage = {"prompt_tokens": len(prompt), "prompt_tokens_details": {"cached_tokens": cached}}
    return {"request": {"model": "m", "prompt": prompt}, "response": {"usage": usage}, **more}


def report_of(path, server):
    found = predictions(
        open_log(path), cache_of(server), TextPieces(has_schema=server == "openai").prompt
    )
    return cache_report(server, found)


def test_prompts_of_token_ids_are_exact_and_differences_are_explained(tmp_path):
    ids = list(range(64))
    told = [
        answered(ids, 0),
        answered(ids, 48),
        answered(ids, 0),
        answered(ids, 16),
        answered(ids, 64),
    ]
    report = report_of(lines(tmp_path / "log.jsonl", told), "vllm")
    assert not report.is_estimated
    assert (report.prompt_tokens, report.hit_tokens, report.told, report.equal) == (320, 192, 5, 2)
    assert report.differences == {"nothing": 1, "less": 1, "more": 1}
    assert report.points_off == pytest.approx((192 - 128) / 3.2)
    assert [each.hit.row for each in report.shown] == [3, 4, 5]


def test_a_hit_that_the_log_cannot_explain_came_before_it(tmp_path):
    report = report_of(lines(tmp_path / "log.jsonl", [answered([1, 2, 3, 4] * 20, 64)]), "vllm")
    assert report.differences == {"before": 1}


def test_answers_are_the_beginning_of_the_next_turn(tmp_path):
    first = {"model": "m", "messages": [{"role": "user", "content": "Where is it? " * 20}]}
    said = {"role": "assistant", "content": "On the shelf behind the door. " * 20}
    next_turn = {
        **first,
        "messages": [*first["messages"], said, {"role": "user", "content": "Which?"}],
    }
    response = {"choices": [{"message": said}]}
    log = [{"request": first, "response": response}, {"request": next_turn, "response": response}]
    report = report_of(lines(tmp_path / "log.jsonl", log), "sglang")
    assert report.hit_tokens > 0.97 * report.seen_tokens > 200


def test_a_body_wide_cache_control_is_a_breakpoint_behind_the_last_block(tmp_path):
    body = {"model": "claude-sonnet-4-5", "max_tokens": 9, "system": "Rules of the house. " * 400}
    body["messages"] = [{"role": "user", "content": "Hello there."}]
    for control, found in (({}, False), ({"cache_control": {"type": "ephemeral"}}, True)):
        report = report_of(lines(tmp_path / "log.jsonl", [body | control] * 2), "anthropic")
        assert (report.hit_tokens > 1500) is found
        assert list(report.lost) == ([] if found else ["no-breakpoint"])


def test_a_schema_stands_before_the_prompt_of_openai(tmp_path):
    body = chat("Which one?", system="Rules of the house. " * 400, model="gpt-5")
    other = {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {}}}}
    same = report_of(lines(tmp_path / "a.jsonl", [body, body]), "openai")
    changed = report_of(lines(tmp_path / "b.jsonl", [body, body | other]), "openai")
    assert same.hit_tokens > 1500
    assert changed.hit_tokens == 0


def test_the_screen_and_the_document_show_the_cache(tmp_path):
    path = lines(tmp_path / "log.jsonl", clean(12))
    output = run(path, "--server", "vllm", "--kv-tokens", "100000").output
    assert "the cache of vllm finds" in output
    document = json.loads(run(path, "--server", "vllm", "--json").stdout)
    assert document["cache"]["server"] == "vllm"
    assert document["cache"]["hit_tokens"] > 0
    assert "cache" not in json.loads(run(path, "--json").stdout)


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["--kv-tokens", "4096"], "belong to --server"),
        (["--server", "vllm", "--kv-memory", "1GiB"], "needs --model"),
        (["--server", "vllm", "--kv-memory", "1GiB", "--kv-tokens", "9"], "one of them"),
        (["--server", "vllm", "--kv-memory", "1B", "--model", "llama-3.1-8b"], "holds no token"),
        (["--server", "openai", "--kv-tokens", "4096"], "no option"),
        (["--server", "gpu"], "unknown server"),
    ],
)
def test_wrong_flags_are_named(tmp_path, words, error):
    path = lines(tmp_path / "log.jsonl", clean(3))
    ended = run(path, *words)
    assert ended.exit_code
    assert error in " ".join((ended.output + ended.stderr + str(ended.exception)).split())


def test_a_line_and_a_curve_are_shown(tmp_path):
    ids = [list(range(n * 100, n * 100 + 64)) for n in (1, 2, 3)]
    told = [answered(each, 0) for each in (*ids, *ids)]
    path = lines(tmp_path / "log.jsonl", told)
    words = ("--server", "sglang", "--kv-tokens", "150")
    output = " ".join(run(path, *words, "--request", "4").output.split())
    assert "finds 0 of 64 tokens, and earlier prompts have 64: evicted for lack of room" in output
    assert "Give the cache more memory" in run(path, *words).output
    assert "a capacity of 300 tokens finds 49.2%" in run(path, *words, "--curve").output
    ended = run(path, "--server", "vllm", "--curve")
    assert "is by capacity" in " ".join((ended.output + str(ended.exception)).split())


def test_memory_is_tokens_of_the_model(tmp_path):
    from quire_sim.cli.lint_caches import capacity_of

    assert capacity_of(None, "1GiB", "llama-3.1-8b") == 8192
    assert capacity_of(None, None, None) is None
