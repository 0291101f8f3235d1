"""A cache as plain data for a page, and its engine's requests as Prometheus reads them."""

import json
from types import SimpleNamespace

import pytest

from quire.core import CacheManager
from quire.engines.loop import EngineStats, RequestMetrics
from quire.foresight import LiveCurve
from quire.observe.overview import Heat, Overview

PROMPT = list(range(100, 164))

ENDS = ("stop", "length", "abort")


def served(manager, prompt):
    seq = manager.open(prompt)
    manager.reserve(seq, len(prompt) - seq.num_cached)
    manager.commit(seq, prompt[seq.num_cached :])
    manager.close(seq)


def test_the_state_is_data_and_tells_no_token():
    manager = CacheManager(32, 4, watchers=[LiveCurve(), Heat()])
    overview = Overview(manager)
    for last in (1, 2, 3):
        served(manager, [*PROMPT, last])
        overview.sample()
    state = json.loads(json.dumps(overview.state()))
    (group,) = state["groups"]
    assert group["free"] + group["active"] + group["cached"] == group["num_blocks"] == 32
    assert state["stats"]["hit_tokens"] == 2 * len(PROMPT)
    assert [each["hit_tokens"] for each in state["samples"]] == [0, 64, 128]
    (branch,) = state["branches"]
    assert branch == {"start": 0, "end": 64, "uses": 2, "branches": 0, "running": 0}
    assert "100, 101" not in json.dumps(state)
    assert state["tiers"] == []


def test_a_branch_that_is_cut_keeps_its_uses_on_both_sides():
    manager = CacheManager(64, 4, watchers=[Heat()])
    for prompt in ([*PROMPT, 1], [*PROMPT, 1], [*PROMPT[:32], *range(50)]):
        served(manager, prompt)
    uses = {(b["start"], b["end"]): b["uses"] for b in Overview(manager).state()["branches"]}
    assert uses == {(0, 32): 2, (32, 64): 1}


def test_the_overview_answers_what_if_only_with_a_live_curve():
    assert Overview(CacheManager(32, 4)).what_if([2]) is None
    manager = CacheManager(8, 4, watchers=[LiveCurve()])
    overview = Overview(manager)
    for _ in range(2):
        for base in (0, 1000):
            served(manager, [base + at for at in range(29)])
    points = overview.what_if([1, 4])["points"]
    assert [each["factor"] for each in points] == [1, 4]
    assert points[0]["hit_rate"] < points[1]["hit_rate"]


def test_the_curve_is_not_made_anew_at_once(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("quire.observe.overview.time.monotonic", lambda: now[0])
    manager = CacheManager(32, 4, watchers=[LiveCurve()])
    overview, made = Overview(manager), []

    def what_if(factors):
        now[0] += 1.0
        made.append(factors)
        return {"points": len(made)}

    monkeypatch.setattr(overview, "what_if", what_if)
    assert [overview.latest_what_if((2,))["points"] for _ in range(3)] == [1, 1, 1]
    now[0] += 20.0
    assert overview.latest_what_if((2,))["points"] == 2


def test_times_of_requests_are_counted_once():
    prometheus = pytest.importorskip("prometheus_client")
    from quire.observe.prometheus import RequestTimes

    registry = prometheus.CollectorRegistry()
    stats = EngineStats(prompt_tokens=30, generated_tokens=3, preemptions=2, running=1, waiting=5)
    manager = CacheManager(8, 4)
    served(manager, [*range(9)])  # two whole blocks are found by the next one
    manager.reserve(manager.open([*range(9)]), 1)
    engine = SimpleNamespace(manager=manager, stats=lambda: stats)
    told = RequestTimes(registry, engine, "tiny").begin()

    def output(num_tokens, reason=None):
        made = SimpleNamespace(num_tokens=num_tokens, finish_reason=reason)
        times = RequestMetrics(1.0, 3.5 if num_tokens else None)
        return SimpleNamespace(
            request_id="a", outputs=[made], finished=reason is not None, metrics=times
        )

    for each in (output(0), output(1), output(1), output(3), output(3, "stop")):
        told(each)
    value = registry.get_sample_value
    assert value("quire_ttft_seconds_count") == 1
    assert value("quire_itl_seconds_count") == 1
    assert value("quire_generation_tokens_total") == 3
    assert value("quire_finished_total", {"reason": "stop"}) == 1
    own = {"model_name": "tiny", "engine": "0"}
    as_vllm = {
        "num_requests_running": 1,
        "num_requests_waiting": 5,
        "kv_cache_usage_perc": 3 / 8,
        "num_preemptions_total": 2,
        "prompt_tokens_total": 30,
        "generation_tokens_total": 3,
        "prefix_cache_queries_total": 18,
        "prefix_cache_hits_total": 8,
        "time_to_first_token_seconds_count": 1,
        "inter_token_latency_seconds_count": 1,
        "request_queue_time_seconds_count": 1,
        "request_queue_time_seconds_sum": 2.5,
        "e2e_request_latency_seconds_count": 1,
    }
    assert {name: value(f"vllm:{name}", own) for name in as_vllm} == as_vllm
    ends = {
        why: value("vllm:request_success_total", own | {"finished_reason": why}) for why in ENDS
    }
    assert ends == {"stop": 1, "length": 0, "abort": 0}
