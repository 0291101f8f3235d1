"""A cache as plain data for a page."""

import json

import pytest
from test_request_log import engine, output

from quire.core import CacheManager
from quire.errors import ConfigError
from quire.foresight import LiveCurve
from quire.observe.heat import Heat
from quire.observe.overview import Overview, read_numbers
from quire.observe.requests import RequestLog

PROMPT = list(range(100, 164))


def served(manager, prompt):
    seq = manager.open(prompt)
    manager.reserve(seq, len(prompt) - seq.num_cached)
    manager.commit(seq, prompt[seq.num_cached :])
    manager.close(seq)


def test_the_state_is_data_and_tells_no_token():
    manager = CacheManager(32, 4, watchers=[LiveCurve(), Heat()])
    log = RequestLog(["a", "b"])
    overview = Overview(manager, log=log)
    of = engine(manager, running=["a"], waiting=["b", "b"], generated_tokens=7)
    for last in (1, 2, 3):
        served(manager, [*PROMPT, last])
        with log.following("a", [65]) as told:
            told(0, output(3, "stop", cached=64))
        overview.keep(overview.seen(of))
    state = json.loads(json.dumps(overview.state(overview.seen(of))))
    (group,) = state["groups"]
    assert group["free"] + group["active"] + group["cached"] == group["num_blocks"] == 32
    assert state["stats"]["hit_tokens"] == 2 * len(PROMPT)
    assert [each["hit_tokens"] for each in state["samples"]] == [0, 64, 128]
    assert [each["groups"] for each in state["samples"]] == [
        [[32 - n, 0, 0, n]] for n in (16, 16, 16)
    ]
    assert [each["ended"] for each in state["samples"]] == [1, 1, 1]
    assert {(each["running"], each["waiting"]) for each in state["samples"]} == {(1, 2)}
    assert (state["engine"]["preemptions"], state["engine"]["generated_tokens"]) == (3, 7)
    tenants = {each["tenant"]: each for each in state["tenants"]}
    assert (tenants["a"]["running"], tenants["b"]["waiting"]) == (1, 2)
    assert (tenants["a"]["prompt_tokens"], tenants["a"]["cached_tokens"]) == (3 * 65, 3 * 64)
    assert len(state["recent"]) == 3
    assert "100, 101" not in json.dumps(state)
    assert state["tiers"] == []
    assert overview.tree()[0]["children"][0]["end"] == 64


def test_samples_after_a_time_are_the_new_ones():
    overview = Overview(CacheManager(32, 4))
    for _ in range(3):
        overview.keep(overview.seen())
    samples = overview.state(overview.seen())["samples"]
    later = overview.state(overview.seen(), since=samples[1]["at"])["samples"]
    assert later == [each for each in samples if each["at"] > samples[1]["at"]]


def alternating(num_blocks):
    """A manager in which two prompts evict each other, or not."""
    manager = CacheManager(num_blocks, 4, watchers=[LiveCurve()])
    for _ in range(4):
        for base in (0, 1000):
            served(manager, [base + at for at in range(29)])
    return manager


def test_the_overview_answers_what_if_only_with_a_live_curve():
    assert Overview(CacheManager(32, 4)).what_if([2]) is None
    overview = Overview(alternating(8))
    points = overview.what_if([1, 4])["points"]
    assert [each["factor"] for each in points] == [1, 4]
    assert points[0]["hit_rate"] < points[1]["hit_rate"]


@pytest.mark.parametrize("policy", ["lru", "lfu", "fifo"])
@pytest.mark.parametrize("num_blocks", [8, 10, 12, 20])
def test_the_hit_rate_of_the_memory_there_is_is_the_measured_one(policy, num_blocks):
    manager = CacheManager(num_blocks, 4, watchers=[LiveCurve()], policy=policy)
    for at in range(60):
        served(manager, [at * at % 7 * 100 + n for n in range(13 + at % 3 * 4)])
    overview = Overview(manager)
    state = overview.state(overview.seen(), overview.latest_gains((0.5, 1, 2)))
    half, same, twice = (each["hit_rate"] for each in state["what_if"]["points"])
    assert same == state["stats"]["hit_rate"] > 0
    assert 0 <= half <= same <= twice <= state["what_if"]["ceiling"] <= 1


def test_the_curve_is_not_made_anew_at_once(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("quire.observe.overview.time.monotonic", lambda: now[0])
    manager = CacheManager(32, 4, watchers=[LiveCurve()])
    overview, made = Overview(manager), []

    def gains(factors):
        now[0] += 1.0
        made.append(factors)
        return len(made)

    monkeypatch.setattr(overview, "gains", gains)
    assert [overview.latest_gains((2,)) for _ in range(3)] == [1, 1, 1]
    now[0] += 100.0
    assert overview.latest_gains((2,)) == 2


@pytest.mark.parametrize("text", ["", "x", "-1", "1,,2", "nan", "inf", "1e999"])
def test_numbers_that_are_none_are_refused_by_the_name_of_their_field(text):
    with pytest.raises(ConfigError, match=r"^since is one or more numbers"):
        read_numbers("since", text)
    assert read_numbers("since", "0.5,2") == [0.5, 2.0]
