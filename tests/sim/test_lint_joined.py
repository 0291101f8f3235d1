"""Losses of content and of a server's cache: each request has one cause, and shares add up."""

import itertools
import json

import planted
import planted_caches
import pytest
from log_help import chat, lines
from planted_caches import EPHEMERAL, OF_ALL, SERVERS, scene
from test_lint_caches import run

from quire_sim.caches import TextPieces, cache_of, predictions
from quire_sim.lint import lint_log
from quire_sim.lint.joined import JoinedLosses, least_of
from quire_sim.logs import open_log


def joined(path, made):
    """Return the report of a scene's records in its cache, and the sum of the cache's figures."""
    from quire_sim.caches import cache_report

    log, losses = open_log(lines(path, made.records)), JoinedLosses()
    report = lint_log(log, keep=lambda _: True, watchers=[losses.add])
    found = list(predictions(log, cache_of(made.server, made.options), TextPieces().prompt))
    for each in found:
        losses.find(each.hit, least_of(report))
    cache = cache_report(made.server, found)
    losses.join(report, cache)
    assert sum(each.tokens for each in report.causes) == pytest.approx(report.lost_tokens)
    whole = report.hit_tokens + report.lost_tokens + report.rounding_tokens
    assert cache.seen_tokens <= whole + 1 <= report.prompt_tokens + 1
    return report


def check(path, made):
    """Check causes, shares and costs of a scene against what was planted."""
    report = joined(path, made)
    kinds = [kind for kind, _ in made.plants]
    told = [each for loss in report.losses for each in (loss, *loss.behind)]
    right = [loss for loss in report.losses if loss.cause == kinds[0]]
    false = [each for each in told if each.cause not in kinds]
    assert len(right) >= 0.95 * len(report.losses) > 0, [each.cause for each in report.losses]
    assert len(false) <= 0.02 * len(told), [each.cause for each in false]
    costs = {kind: sum(each.tokens for each in told if each.cause == kind) for kind in kinds}
    for kind, truth in made.plants:
        assert costs[kind] * report.chars_per_token == pytest.approx(truth, rel=0.01), kind


@pytest.mark.parametrize("cause", SERVERS)
def test_a_cause_of_a_cache_alone_is_found_with_its_cost(tmp_path, cause):
    for seed in range(4):
        check(tmp_path / "log", scene(cause, seed))


@pytest.mark.parametrize("cause", SERVERS)
def test_without_a_cause_of_a_cache_it_is_not_told(tmp_path, cause):
    for seed in range(4):
        report = joined(tmp_path / "log", scene(cause, seed, has=False))
        assert report.losses == []
        assert report.hit_tokens > 0


@pytest.mark.parametrize("cause", OF_ALL)
def test_words_that_differ_behind_a_loss_of_the_cache_are_told_with_what_they_cost_then(tmp_path, cause):  # fmt: skip
    for seed, kind in enumerate(("time", "identifier", "counter", "user-data")):
        check(tmp_path / "log", scene(cause, seed, [kind]))


@pytest.mark.ci
@pytest.mark.parametrize("cause", OF_ALL)
def test_many_logs_with_a_cause_of_a_cache_and_two_of_words(tmp_path, cause):
    kinds = ("time", "identifier", "counter", "user-data")
    for seed, pair in enumerate(itertools.permutations(kinds, 2)):
        check(tmp_path / "log", scene(cause, seed, pair))


def test_words_before_a_breakpoint_have_the_whole_loss_as_mending_them_ends_it(tmp_path):
    for seed in range(3):
        made = scene("no-breakpoint", seed, ["time"], has=False)
        total = sum(planted_caches.shared_of([each["request"] for each in made.records]))
        (kind, lost), *_ = made.plants
        check(tmp_path / "log", made._replace(plants=[(kind, lost + total)]))


def test_a_breakpoint_behind_the_question_is_the_cause_whatever_differs_before_it(tmp_path):
    report = joined(tmp_path / "log", scene("behind-breakpoint", 1, ["time"]))
    assert {each.cause for each in report.losses} == {"behind-breakpoint"}
    assert {each.cause for loss in report.losses for each in loss.behind} == {"time"}


def test_words_at_the_front_have_the_loss_of_a_prefix_that_is_too_short(tmp_path):
    rest = "Rule: name the shelf, the row and the branch. " * 200
    bodies = [
        chat(f"Which {n * 7}?", system=f"Now: 2026-11-{n + 1:02}T08:00:00Z\n{rest}", model="gpt-5")
        for n in range(9)
    ]
    made = planted_caches.Scene(bodies, "openai", planted_caches.CacheOptions(), [])
    report = joined(tmp_path / "log", made)
    assert {each.cause for each in report.losses} == {"time"}
    short = [each | {"messages": [{"role": "user", "content": "Hello. " * 30}]} for each in bodies]
    report = joined(tmp_path / "log", made._replace(records=short))
    assert {each.cause for each in report.losses} == {"minimum"}


def test_another_replica_is_named_and_no_cause_where_the_own_one_has_as_much(tmp_path):
    body = chat("Which one?", system="Rules of the house. " * 100)
    path = lines(
        tmp_path / "log", [{"server": name, "request": body} for name in ("a", "a", "b", "b", "a")]
    )
    report = json.loads(run(path, "--server", "vllm", "--json").stdout)
    (loss,) = report["losses"]
    assert (loss["cause"], loss["row"], loss["earlier_row"]) == ("other-replica", 3, 2)
    assert (loss["path"], loss["old"], loss["new"]) == ("replica b", "a", "b")
    assert "other-replica" not in run(path, "--json").stdout


def test_tenants_share_where_the_server_knows_none(tmp_path):
    body = chat("Which one?", system="Rules of the house. " * 400, model="gpt-5")
    log = [{"tenant": name, "request": body} for name in ("a", "b", "b", "a")]
    made = planted_caches.Scene(log, "vllm", planted_caches.CacheOptions(), [])
    assert joined(tmp_path / "log", made).losses == []
    for server in ("quire", "openai"):
        report = joined(tmp_path / "log", made._replace(server=server))
        assert [(each.cause, each.row, each.earlier_row) for each in report.losses] == [
            ("other-tenant", 2, 1)
        ]


def test_users_that_a_body_names_share_the_cache_of_their_key(tmp_path):
    body = chat("Which one?", system="Rules of the house. " * 400, model="gpt-5")
    log = [body | {"user": name, "safety_identifier": name} for name in "abc"]
    made = planted_caches.Scene(log, "openai", planted_caches.CacheOptions(), [])
    report = joined(tmp_path / "log", made)
    assert report.losses == []
    assert report.hit_tokens > 0.5 * report.prompt_tokens


@pytest.mark.parametrize(
    ("fields", "replica"),
    [
        ({"server": "a"}, "a"),
        ({"replica": 3}, "3"),
        ({"model_id": "d1", "api_base": "http://a"}, "d1"),
        ({"hidden_params": {"model_id": "d2", "api_base": "http://b"}}, "d2"),
        ({"server": {"os": "linux"}}, ""),
        ({}, ""),
    ],
)
def test_the_replica_of_a_record_is_read(tmp_path, fields, replica):
    record = fields | {"request": chat("Which one?")}
    (request,) = open_log(lines(tmp_path / "log", [record]))
    assert request.replica == replica


def test_the_server_of_a_span_is_its_replica(tmp_path):
    facts = {
        "gen_ai.request.model": "m",
        "gen_ai.input.messages": json.dumps([{"role": "user", "content": "Which one?"}]),
        "server.address": "10.0.0.7",
        "server.port": 8000,
    }
    (request,) = open_log(lines(tmp_path / "log", [{"name": "chat", "attributes": facts}]))
    assert request.replica == "10.0.0.7:8000"


def test_models_that_change_are_a_cause_of_their_own_in_a_cache_too(tmp_path):
    for kind in ("model", "cache-salt"):
        log = planted.of_fields(kind, "chat", 2)
        made = planted_caches.Scene(log.records, "vllm", planted_caches.CacheOptions(), [])
        ((_, _, truth),) = log.plants
        check(tmp_path / "log", made._replace(plants=[(kind, truth)]))


def test_a_parameter_that_the_cache_does_not_know_loses_nothing_there(tmp_path):
    log = planted.of_fields("parameters", "chat", 2)
    made = planted_caches.Scene(log.records, "vllm", planted_caches.CacheOptions(), [])
    assert joined(tmp_path / "log", made).losses == []


def test_the_screen_has_one_table_of_causes_for_the_cache(tmp_path):
    made = scene("ttl", 1, ["time"])
    path = lines(tmp_path / "log", made.records)
    shown = " ".join(run(path, "--server", "openai").output.split())
    assert "the cache of openai finds" in shown
    assert "the TTL had passed" in shown
    assert "Once that is mended: a time or date in" in shown
    assert "a prefix cache without limits" not in shown
    assert run(path, "--server", "openai", "--fail-on", "50%").exit_code == 1
    assert run(path, "--fail-on", "90%").exit_code == 0


def test_a_log_without_text_asks_no_cache(tmp_path):
    path = lines(tmp_path / "log", [chat("Which one?", system="Rules of the house. " * 50)] * 3)
    run(path, "--hashed", str(tmp_path / "hashed.jsonl"))
    ended = run(tmp_path / "hashed.jsonl", "--server", "vllm")
    assert ended.exit_code
    assert "has no text" in " ".join((ended.output + str(ended.exception)).split())


def test_a_breakpoint_that_earlier_requests_lack_is_told_apart(tmp_path):
    body = {"model": "claude-sonnet-4-5", "max_tokens": 9, "messages": [{"role": "user", "content": "Hi"}]}  # fmt: skip
    text = {"type": "text", "text": "Rules of the house. " * 400}
    log = [body | {"system": [text]}, body | {"system": [text | {"cache_control": EPHEMERAL}]}] * 2
    made = planted_caches.Scene(log, "anthropic", planted_caches.CacheOptions(), [])
    assert [(each.row, each.cause) for each in joined(tmp_path / "log", made).losses] == [
        (2, "unmarked"),
        (3, "no-breakpoint"),
    ]
