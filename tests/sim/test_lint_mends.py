"""Mends: what rewrites keep, what they promise, and the log that they write."""

import copy
import json
import random
import unicodedata
from collections import Counter

import planted
import pytest
from log_help import TOOLS, chat, lines
from test_lint import run

from quire_sim.lint import lint_log
from quire_sim.lint.mends import MENDS, mended, mends_for
from quire_sim.lint.rewrites import ChangingParts
from quire_sim.logs import open_log

KINDS = [kind for kind in planted.LINE_KINDS if kind != "header-line"]


def logs(api, seed):
    yield from planted.alone(api, seed)
    yield planted.of_lines(random.Random(seed).sample(KINDS, 3), api, seed)
    yield planted.clean(api, seed)


def words(request):
    """Return the words of a prompt, whatever their order, blanks and Unicode form; of JSON its values and keys."""
    found = Counter()
    for section in request.sections:
        text = unicodedata.normalize("NFC", section.text)
        if section.kind in {"tool", "call"}:
            found.update(leaves(json.loads(text)))
        else:
            for word in text.replace("\u200b", " ").split():
                found[word] += 1
        found[section.media] += bool(section.media)
    return found


def leaves(value):
    if isinstance(value, dict):
        return [each for key, inner in value.items() for each in (key, *leaves(inner))]
    if isinstance(value, list):
        return [each for inner in value for each in leaves(inner)]
    return [str(value)]


@pytest.mark.parametrize("api", planted.APIS)
@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.ci)])
def test_no_mend_loses_a_word_that_the_model_sees(tmp_path, api, seed):
    changed = set()
    for log in logs(api, seed):
        learned = ChangingParts()
        opened = open_log(lines(tmp_path / "log", log.records))
        lint_log(opened, learned=learned)
        for request in list(opened)[:: 1 + len(log.records) // 3]:
            before = copy.deepcopy(request.body)
            for mend in MENDS:
                found = mended(request, [mend], learned)
                assert words(found) == words(request), mend.name
                assert mended(found, [mend], learned).sections == found.sections, mend.name
                changed |= {mend.name} if found is not request else set()
            together = mended(request, MENDS, learned)
            assert words(together) == words(request)
            assert request.body == before
    assert {"move-lines", "sort-passages", "nfc", "blanks", "line-ends"} <= changed


@pytest.mark.parametrize(
    ("kind", "mend"),
    [("time", "move-lines"), ("identifier", "move-lines"), ("counter", "move-lines"), ("user-data", "move-lines"),
     ("header-line", "move-lines"), ("whitespace", "blanks"), ("line-ends", "line-ends"), ("unicode", "nfc")],
)  # fmt: skip
@pytest.mark.parametrize("api", planted.APIS)
def test_a_mended_log_loses_nothing_and_finds_what_was_promised(tmp_path, kind, mend, api):
    path = lines(tmp_path / "log.jsonl", planted.of_lines([kind], api, 1).records)
    told = json.loads(run(path, "--json", "--apply", tmp_path / "mended.jsonl").stdout)
    assert [each["name"] for each in told["mending"]["mends"]] == [mend]
    again = lint_log(open_log(tmp_path / "mended.jsonl"))
    assert again.lost_tokens <= 0.02 * told["lost_tokens"]
    assert again.hit_tokens == pytest.approx(told["mending"]["together"]["hit_tokens"])
    assert again.hit_tokens - told["hit_tokens"] >= 0.9 * told["lost_tokens"]


@pytest.mark.parametrize("kind", ["tool-order", "key-order"])
def test_sorted_tools_and_keys_are_found(tmp_path, kind):
    path = lines(tmp_path / "log.jsonl", planted.of_tools(kind, "messages", 1).records)
    told = json.loads(run(path, "--json").stdout)["mending"]
    assert [each["name"] for each in told["mends"]] == [kind.replace("tool-order", "sort-tools").replace("key-order", "sort-keys")]  # fmt: skip
    assert told["together"]["hit_tokens"] > 1.2 * told["before"]["hit_tokens"]


def test_a_mend_that_may_change_answers_has_to_be_named(tmp_path):
    path = lines(tmp_path / "log.jsonl", planted.of_passages("chat", 1).records)
    plain = run(path, "--apply", tmp_path / "mended.jsonl")
    assert "sort-passages may change answers" in plain.stderr
    assert (tmp_path / "mended.jsonl").read_text() == json_lines(path)
    run(path, "--apply", tmp_path / "mended.jsonl", "--mend", "sort-passages")
    lost = lint_log(open_log(path)).lost_tokens
    assert lint_log(open_log(tmp_path / "mended.jsonl")).lost_tokens < 0.05 * lost


def json_lines(path):
    return "".join(
        json.dumps(json.loads(line), separators=(",", ":"), ensure_ascii=False) + "\n"
        for line in path.read_text().splitlines()
    )


def test_records_keep_their_form_around_the_body(tmp_path):
    bodies = planted.of_lines(["time"], "chat", 1).records
    bodies = [each.get("request", each) for each in bodies]
    records = [
        {"id": n, "request": json.dumps(body), "response": {"x": 1}, "time": 1_780_000_000 + n}
        for n, body in enumerate(bodies)
    ]
    run(lines(tmp_path / "log.jsonl", records), "--apply", tmp_path / "mended.jsonl")
    found = [json.loads(line) for line in (tmp_path / "mended.jsonl").read_text().splitlines()]
    assert [each["time"] for each in found] == [each["time"] for each in records]
    assert {*found[3]} == {*records[3]}
    assert isinstance(found[3]["request"], str)
    assert found[3]["request"] != records[3]["request"]
    (tmp_path / "list.json").write_text(json.dumps(records))
    run(tmp_path / "list.json", "--apply", tmp_path / "mended.json")
    assert json.loads((tmp_path / "mended.json").read_text()) == found


def test_lines_that_change_go_behind_the_last_message(tmp_path):
    records = [
        chat("Hello?", "Hi.", f"What of {n * 31 % 97}?", system=f"Now: 2026-11-{1 + n:02}T08:00Z\n" + "Be brief and kind to them. " * 20)
        for n in range(9)
    ]  # fmt: skip
    tool_end = copy.deepcopy(records[-1])
    tool_end["messages"].append({"role": "tool", "tool_call_id": "1", "content": "42"})
    path = lines(tmp_path / "log.jsonl", [*records, tool_end])
    run(path, "--apply", tmp_path / "mended.jsonl")
    found = [json.loads(line) for line in (tmp_path / "mended.jsonl").read_text().splitlines()]
    assert found[0]["messages"][-1]["content"] == "What of 0?\n\nNow: 2026-11-01T08:00Z"
    assert found[0]["messages"][0]["content"].startswith("Be brief")
    assert found[-1]["messages"][-2:] == [tool_end["messages"][-1], {"role": "user", "content": "Now: 2026-11-09T08:00Z"}]  # fmt: skip


def test_a_breakpoint_stays_behind_the_last_tool():
    tools = [{"name": each["function"]["name"], "description": "d", "input_schema": {}} for each in TOOLS]  # fmt: skip
    tools[0]["cache_control"] = {"type": "ephemeral"}
    body = {"model": "claude-opus-5", "max_tokens": 1, "tools": tools, "messages": []}
    (mend,) = mends_for({"tool-order"})
    found = mend.rewrite(body, "messages", ChangingParts())["tools"]
    assert [each["name"] for each in found] == ["orders", "prices", "stock"]
    assert ["cache_control" in each for each in found] == [False, False, True]


def test_breakpoints_are_placed_where_a_provider_needs_them(tmp_path):
    log = planted.of_tools("tool-order", "messages", 1)
    path = lines(tmp_path / "log.jsonl", log.records)
    told = json.loads(run(path, "--json", "--server", "anthropic", "--price", "5").stdout)["mending"]  # fmt: skip
    names = {each["name"]: each for each in told["mends"]}
    assert set(names) == {"sort-tools", "breakpoints"}
    assert told["before"]["hit_tokens"] == names["sort-tools"]["after"]["hit_tokens"] == 0
    alone = names["breakpoints"]["after"]["hit_tokens"]
    assert 0 < alone < told["together"]["hit_tokens"]
    assert told["cost"][1] < names["breakpoints"]["cost"] < told["cost"][0]


@pytest.mark.parametrize(
    ("words", "reason"),
    [(("--apply", "log.jsonl"), "is the log itself"), (("--mend", "magic"), "--mend 'magic' is no mend"),
     (("--gpu", "h100"), "--gpu needs --model")],
)  # fmt: skip
def test_wrong_options_are_refused(tmp_path, monkeypatch, words, reason):
    monkeypatch.chdir(tmp_path)
    lines(tmp_path / "log.jsonl", planted.of_lines(["time"], "chat", 1).records)
    ended = run("log.jsonl", *words)
    assert ended.exit_code
    assert reason in str(ended.exception)


def test_a_log_without_bodies_is_not_written(tmp_path):
    said = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]
    path = lines(tmp_path / "log.jsonl", [{"id": "a", "conversations": said}])
    ended = run(path, "--apply", tmp_path / "mended.jsonl")
    assert "is a log of conversations" in str(ended.exception)
    assert not (tmp_path / "mended.jsonl").exists()


def conversations(rate, key=None, count=12, turns=4):
    """Conversations over one system prompt, so many requests a minute in all."""
    rng = random.Random(rate)
    rules = "Name the shelf, the row and the branch in each answer. " * 120
    talks = [[f"Question {n}: " + "why is it so? " * 40] for n in range(count)]
    log = []
    for turn in range(turns):
        for number, said in enumerate(talks):
            fields = {} if key is None else {"prompt_cache_key": key(number)}
            body = chat(*said, system=rules, model="gpt-5", **fields)
            sent = 1_780_000_000 + 60 / rate * len(log)
            log.append({"time": sent, "duration_s": 0.1, "request": body})
            said += [f"It is {rng.random()}. " * 30, f"And {turn}, {rng.random()}?"]
    return log


def lost_by_machine(path, log):
    document = json.loads(run(lines(path, log), "--server", "openai", "--json").stdout)
    found = {each["cause"]: each["tokens"] for each in document["causes"]}
    return found.get("other-machine", 0), document


def test_a_cache_key_holds_conversations_at_their_machines(tmp_path):
    lost, document = lost_by_machine(tmp_path / "log", conversations(rate=90))
    assert lost > 0.05 * document["prompt_tokens"]
    (gain,) = [each for each in document["mending"]["mends"] if each["name"] == "cache-key"]
    assert gain["after"]["hit_tokens"] > document["cache"]["hit_tokens"] + 0.5 * lost
    path, mended = tmp_path / "log", tmp_path / "mended.jsonl"
    run(path, "--server", "openai", "--apply", str(mended))
    keys = [each.cache_key for each in open_log(mended)]
    assert len(set(keys)) > 1
    assert all(keys)
    assert keys[:12] == keys[12:24]  # of the same conversations


def test_a_rate_that_one_machine_takes_has_no_other_machine(tmp_path):
    assert lost_by_machine(tmp_path / "log", conversations(rate=12))[0] == 0
    by_two = conversations(rate=24, key=lambda number: f"k{number % 2}")
    lost, document = lost_by_machine(tmp_path / "log", by_two)
    assert (
        0 < lost < 1.1 * document["cache"]["prompt_tokens"] / 48
    )  # the first one of the second key


def test_requests_of_another_key_find_nothing_of_each_other(tmp_path):
    log = conversations(rate=6, key=str, turns=1)
    lost, document = lost_by_machine(tmp_path / "log", log)
    assert document["cache"]["hit_tokens"] == 0
    assert lost == document["lost_tokens"] > 0.7 * document["prompt_tokens"]
