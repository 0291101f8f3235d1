"""Logs with planted causes, of all kinds and forms of bodies: cause, place, and what each difference costs."""

from typing import NamedTuple

import planted
import pytest
from log_help import lines

from quire_sim.lint import lint_log
from quire_sim.logs import open_log


class Score(NamedTuple):
    """Losses whose first cause and place are those planted, all losses, and causes told that were not planted."""

    right: int = 0
    losses: int = 0
    false: int = 0
    told: int = 0


def linted(path, log):
    return lint_log(open_log(lines(path, log.records)), keep=lambda _: True)


def score(report, log):
    kinds = [kind for kind, _, _ in log.plants]
    first, place = log.plants[0][:2] if log.plants else ("", "")
    told = [each for loss in report.losses for each in (loss, *loss.behind)]
    right = [loss for loss in report.losses if loss.cause == first and loss.path.startswith(place)]
    false = [each for each in told if each.cause not in kinds]
    return Score(len(right), len(report.losses), len(false), len(told))


def costs(report, log):
    """Yield the characters that each plant loses, as they are told and as they were planted."""
    for number, (kind, _, planted_chars) in enumerate(log.plants):
        if planted_chars is None:
            continue
        told = report.lost_tokens
        if number:
            behind = [each for loss in report.losses for each in loss.behind if each.cause == kind]
            told = sum(each.tokens for each in behind)
        yield kind, told * report.chars_per_token, planted_chars


def check(path, logs):
    total = Score()
    wrong = []
    for log in logs:
        report = linted(path, log)
        total = Score(*(sum(pair) for pair in zip(total, score(report, log), strict=True)))
        for kind, told, truth in costs(report, log):
            if abs(told - truth) > 0.01 * truth + log.slack:
                wrong.append((kind, told, truth))
    assert total.losses
    assert total.right >= 0.95 * total.losses, total
    assert total.false <= 0.02 * total.told, total
    assert not wrong


@pytest.mark.parametrize("api", planted.APIS)
def test_a_cause_alone_is_found_at_its_place_with_its_cost(tmp_path, api):
    check(tmp_path / "log", planted.alone(api, 3))


def test_of_two_causes_the_second_is_told_with_what_it_costs_once_the_first_is_mended(tmp_path):
    logs = planted.pairs("chat", 4)
    check(tmp_path / "log", [log for n, log in enumerate(logs) if n % 3 == 0])


@pytest.mark.parametrize("api", planted.APIS)
def test_requests_and_conversations_over_one_prefix_lose_nothing(tmp_path, api):
    for seed in range(3):
        report = linted(tmp_path / "log", planted.clean(api, seed))
        assert report.losses == []


@pytest.mark.ci
@pytest.mark.parametrize("api", planted.APIS)
def test_many_logs_with_one_cause_or_two(tmp_path, api):
    check(tmp_path / "log", [log for seed in range(12) for log in planted.alone(api, seed)])
    check(tmp_path / "log", [log for seed in range(3) for log in planted.pairs(api, seed)])


def test_all_differences_of_two_prompts_are_told_in_order(tmp_path):
    report = linted(
        tmp_path / "log",
        planted.of_lines(["time", "identifier", "user-data", "counter"], "chat", 2),
    )
    for loss in report.losses:
        told = [loss.cause, *(each.cause for each in loss.behind)]
        assert told == ["time", "identifier", "user-data", "counter"]
        costs = [loss.tokens, *(each.tokens for each in loss.behind)]
        assert costs == sorted(costs, reverse=True)
    by_name = {each.cause: each for each in report.causes}
    assert by_name["counter"].requests == 0
    assert by_name["counter"].later_requests == len(report.losses)
    assert sum(each.tokens for each in report.causes) == pytest.approx(report.lost_tokens)
