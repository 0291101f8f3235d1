"""Mends of when and where: one request goes first, and messages that move stand last."""

import json

import pytest
from log_help import chat, lines
from test_lint import run

from quire.errors import ConfigError
from quire_sim.cli.lint_mends import apply_mends
from quire_sim.lint.mends import MENDS
from quire_sim.lint.warming import warm_first
from quire_sim.logs import open_log

RULES = "Rule 7: answer in two short sentences and name the shelf of the book. " * 90
REMINDER = "<system-reminder>\n" + "Keep to the list of todos, and to the rules of the house. " * 3
T = 1_780_000_000.0


def record(number, time_s, system=RULES, **more):
    body = chat(f"Where is shelf {number}?", system=system, stream=True)
    answer = {"choices": [{"message": {"content": "It is the third one on the left."}}]}
    return {"request": body, "response": answer, "time": T + time_s, "duration_s": 2.0, "first_s": 0.5} | more  # fmt: skip


def waits(tmp_path, records):
    """Return when each request of a log is sent then, in seconds behind the first second."""
    opened = open_log(lines(tmp_path / "log.jsonl", records))
    return [round(request.time_s - T, 3) for request, _ in warm_first(opened)]


def test_requests_with_one_beginning_wait_for_the_first_token_of_the_first(tmp_path):
    assert waits(tmp_path, [record(n, 0.01 * n) for n in range(4)]) == [0.0, 0.5, 0.5, 0.5]
    for missing in ("first_s", "response"):  # then the end of the answer is waited for
        assert waits(tmp_path, [record(0, 0, **{missing: None}), record(1, 0.1)]) == [0.0, 2.0]


def test_a_twin_of_a_request_that_waits_waits_for_that_one(tmp_path):
    other = chat("Where?", "There.", "And where is it then? " * 60, system=RULES, stream=True)
    twins = [record(0, 0), record(1, 0.1, request=other), record(2, 0.2, request=other)]
    assert waits(tmp_path, twins) == [0.0, 0.5, 1.0]


def test_others_do_not_wait(tmp_path):
    apart = [record(n, 0.01 * n, system=f"{n}: {RULES}") for n in range(3)]
    assert waits(tmp_path, apart) == [0.0, 0.01, 0.02]
    later = [record(0, 0), record(1, 0.6), record(2, 0.61)]  # the rules are computed
    assert waits(tmp_path, later) == [0.0, 0.6, 0.61]
    salted = [record(0, 0), {**record(1, 0.1), "request": record(1, 0)["request"] | {"cache_salt": "s"}}]  # fmt: skip
    assert waits(tmp_path, salted) == [0.0, 0.1]
    opened = open_log(lines(tmp_path / "log.jsonl", [record(0, 0)["request"]] * 2))
    assert [wait_s for _, wait_s in warm_first(opened)] == [0.0, 0.0]


@pytest.mark.parametrize(("server", "model"), [("openai", "gpt-5"), ("anthropic", "claude-opus-5")])
def test_a_fan_out_is_worth_a_mend_in_caches_that_publish_what_is_computed(tmp_path, server, model):
    records = [record(n, 0.01 * n) for n in range(6)]
    for each in records:
        each["request"] |= {"model": model}
        if server == "anthropic":
            system = [{"type": "text", "text": RULES, "cache_control": {"type": "ephemeral"}}]
            each["request"] |= {"system": system, "messages": each["request"]["messages"][1:]}
    path = lines(tmp_path / "log.jsonl", records)
    told = json.loads(run(path, "--json", "--server", server).stdout)["mending"]
    (mend,) = [each for each in told["mends"] if each["name"] == "warm-first"]
    assert mend["requests"] == 5
    assert mend["after"]["hit_tokens"] > told["before"]["hit_tokens"] + 4 * 1000
    apart = [each | {"time": T + 10 * n} for n, each in enumerate(records)]
    told = json.loads(run(lines(tmp_path / "apart.jsonl", apart), "--json", "--server", server).stdout)  # fmt: skip
    assert "warm-first" not in [each["name"] for each in (told.get("mending") or {"mends": []})["mends"]]  # fmt: skip


def test_when_requests_are_sent_is_not_applied_to_a_log(tmp_path):
    mends = [each for each in MENDS if each.name == "warm-first"]
    path = lines(tmp_path / "log.jsonl", [record(0, 0)])
    with pytest.raises(ConfigError, match="nothing to --apply"):
        apply_mends(open_log(path), tmp_path / "m.jsonl", mends, None, ["warm-first"])


@pytest.mark.parametrize("role", ["user", "system"])
def test_a_reminder_before_each_last_turn_is_offered_a_last_place_with_its_gain(tmp_path, role):
    talk, records = [], []
    for number in range(6):
        talk.append({"role": "user", "content": f"Question {number}: " + "say more of the file. " * 12})  # fmt: skip
        reminder = {"role": role, "content": REMINDER}
        said = [{"role": "system", "content": RULES}, *talk[:-1], reminder, talk[-1]]
        records.append({"model": "m", "messages": said})
        talk.append({"role": "assistant", "content": f"Answer {number}. " + "The file says so. " * 9})  # fmt: skip
    path = lines(tmp_path / "log.jsonl", records)
    told = json.loads(run(path, "--json", "--apply", tmp_path / "mended.jsonl").stdout)["mending"]
    (mend,) = told["mends"]
    assert mend["name"] == "split-off"
    assert mend["after"]["hit_tokens"] > told["before"]["hit_tokens"] + 200
    found = [json.loads(line)["messages"] for line in (tmp_path / "mended.jsonl").read_text().splitlines()]  # fmt: skip
    for before, after in zip(records, found, strict=True):
        assert after[-1] == {"role": role, "content": REMINDER}
        assert after[:-1] == [each for each in before["messages"] if each["content"] != REMINDER]
