"""Requests as a server counts them: by tenant class, in bounded metrics that never fall, and as bars of their phases."""

import json
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clocks import Clock
from quire.core import CacheManager, Scope
from quire.core.stats import MISS_REASONS, Missed
from quire.engines.loop import EngineStats, RequestMetrics
from quire.errors import QueueTimeout
from quire.observe.requests import MAX_CLASSES, MAX_RECENT, OTHER, RequestLog, misses
from quire.scheduling import Job, Scheduler

ENDS = ("stop", "length", "abort")


def output(num_tokens, reason=None, cached=0, **times):
    """An engine's output of one answer."""
    times = {"scheduled_ts": 3.5, "first_token_ts": 5.0} | times if num_tokens else times
    return SimpleNamespace(
        outputs=[SimpleNamespace(num_tokens=num_tokens, finish_reason=reason)],
        finished=reason is not None,
        num_cached_tokens=cached,
        metrics=RequestMetrics(1.0, **times),
    )


def engine(manager=None, running=(), waiting=(), **counts):
    """An engine as metrics see it, with jobs of these tenants in a real scheduler, each preempted once."""
    scheduler = Scheduler(CacheManager(256, 4))
    for at, tenant in enumerate([*running, *waiting]):
        scope = None if tenant is None else Scope(tenant=tenant)
        scheduler.add(job := Job([at] * 3, 1, scope=scope))
        job.num_preempted = 1
        if at + 1 == len(running):
            scheduler.plan()
    stats = EngineStats(running=len(running), waiting=len(waiting), **counts)
    return SimpleNamespace(
        manager=manager or CacheManager(8, 4),
        tiers=None,
        scheduler=scheduler,
        stats=lambda: stats,
        figures={},
    )


def scraped(log, of=None):
    """The samples of a scrape, by name and labels."""
    pytest.importorskip("prometheus_client")
    from prometheus_client.parser import text_string_to_metric_families

    from quire.observe.request_metrics import ServerMetrics

    of = of or engine()
    metrics = ServerMetrics(of, log, "tiny")
    text = metrics.text(metrics.seen(of)).decode()
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def value(samples, name, **labels):
    return samples[name, tuple(sorted(labels.items()))]


def test_times_of_requests_are_counted_once():
    manager = CacheManager(8, 4)
    for _ in range(2):  # two whole blocks are found by the second one
        seq = manager.open([*range(9)])
        manager.reserve(seq, 9 - seq.num_cached)
        if not manager.stats.hit_tokens:
            manager.commit(seq, [*range(9)][seq.num_cached :])
            manager.close(seq)
    log = RequestLog()
    with log.following(None, [20]) as told:
        for each in (output(0), output(1), output(1), output(3), output(3, "stop", cached=8)):
            told(0, each)
    of = engine(manager, [None], [None] * 5, prompt_tokens=30, generated_tokens=3, preemptions=2)
    samples = scraped(log, of)
    for name, wanted in {
        "quire_ttft_seconds_count": 1,
        "quire_itl_seconds_count": 1,
        "quire_queue_seconds_sum": 2.5,
        "quire_generation_tokens_total": 3,
        "quire_tenant_prompt_tokens_total": 20,
        "quire_requests_running": 1,
        "quire_requests_waiting": 5,
    }.items():
        assert value(samples, name, tenant="") == wanted, name
    assert value(samples, "quire_finished_total", tenant="", reason="stop") == 1
    own = {"model_name": "tiny", "engine": "0"}
    for name, wanted in {
        "num_requests_running": 1,
        "num_requests_waiting": 5,
        "kv_cache_usage_perc": 3 / 8,
        "num_preemptions_total": 2 + 6,  # of those that ended, and of those that have not
        "prompt_tokens_total": 30,
        "generation_tokens_total": 3,
        "prefix_cache_queries_total": 18,
        "prefix_cache_hits_total": 8,
        "time_to_first_token_seconds_count": 1,
        "inter_token_latency_seconds_count": 1,
        "request_queue_time_seconds_count": 1,
        "request_queue_time_seconds_sum": 2.5,
        "e2e_request_latency_seconds_count": 1,
    }.items():
        assert value(samples, f"vllm:{name}", **own) == wanted, name
    ends = {why: value(samples, "vllm:request_success_total", finished_reason=why, **own) for why in ENDS}  # fmt: skip
    assert ends == {"stop": 1, "length": 0, "abort": 0}


NAMES = [f"team-{at}" for at in range(MAX_CLASSES + 8)]


@settings(max_examples=25)
@given(
    num_named=st.integers(0, 6),
    most=st.integers(1, 4),
    asked=st.lists(st.tuples(st.integers(0, 7), st.integers(0, 3)), max_size=8),
)
def test_series_are_bounded_and_no_counter_falls_whoever_asks(num_named, most, asked):
    log = RequestLog(NAMES[:num_named], max_classes=most)
    allowed = {*NAMES[: min(num_named, most)], OTHER, ""}
    before = scraped(log)
    for at, num_tokens in asked:
        tenant = NAMES[at] if at < num_named or at % 2 else None
        with log.following(tenant, [10]) as told:
            if num_tokens:
                told(0, output(num_tokens, "stop"))
        now = scraped(log, engine(running=[tenant]))
        labels = {dict(label).get("tenant", "") for _, label in now}
        assert labels <= allowed
        counters = [key for key in before if key[0].endswith(("_total", "_count", "_bucket"))]
        assert all(now[key] >= before[key] for key in counters), "a counter fell, or is gone"
        before = now
    for whole, part in (
        ("vllm:time_to_first_token_seconds_count", "quire_ttft_seconds_count"),
        ("vllm:request_queue_time_seconds_count", "quire_queue_seconds_count"),
    ):
        parts = [each for (name, _), each in before.items() if name == part]
        assert sum(parts) == value(before, whole, model_name="tiny", engine="0")
    ended = [each for (name, _), each in before.items() if name == "quire_finished_total"]
    assert sum(ended) == len(asked)


def test_the_first_tenants_have_a_class_whether_they_ask_or_not_and_the_rest_share_one():
    log = RequestLog(NAMES)
    assert [*log.classes] == NAMES[:MAX_CLASSES]
    assert [log.class_of(each) for each in NAMES[-2:]] == [OTHER, OTHER]
    assert len(log.classes) == MAX_CLASSES + 1
    assert log.by_class({NAMES[0]: 2, NAMES[-1]: 3, NAMES[-2]: 4}) == {
        **dict.fromkeys(NAMES[:MAX_CLASSES], 0), NAMES[0]: 2, OTHER: 7,
    }  # fmt: skip


def test_requests_that_are_left_count_as_aborted_and_those_that_fail_as_errors():
    log = RequestLog()
    with log.following(None, [5, 6], 2) as told:
        told(0, output(1))
    with pytest.raises(QueueTimeout), log.following(None, [7]):
        raise QueueTimeout("it waited")
    assert log.classes[""].ended == {"abort": 4, "error": 1}
    assert [each["reason"] for each in log.state()["recent"]] == ["error", "abort", "abort"]
    assert log.classes[""].whole.counts != [0] * 14
    assert not log._live


def test_a_bar_has_the_phases_of_a_request_and_its_misses():
    clock = Clock()
    log = RequestLog(["a"], clock)
    loaded = {"load_s": 0.5, "loaded_tokens": {"disk": 16}}
    with log.following("a", [100, 40]) as told:
        clock.now += 3.0
        (first, second) = log.state()["recent"]
        assert (first["pending_s"], first["reason"], second["prompt_tokens"]) == (3.0, None, 40)
        clock.now += 1.0
        times = loaded | {"missed": Missed("evicted", 20)}
        told(0, output(1, cached=48, **times))
        clock.now += 2.0
        told(0, output(9, "length", cached=48, num_preemptions=2, **times))
        bar = log.state()["recent"][-1]
    assert bar == {
        "tenant": "a", "reason": "length", "ended_at": bar["ended_at"], "prompt_tokens": 100, "generated_tokens": 9,
        "queued_s": 2.5, "loaded_s": 0.5, "computed_s": 1.0, "decoded_s": 2.0, "cached_tokens": 48,
        "loaded_tokens": {"disk": 16}, "missed": {"last_token": 1, "evicted": 20, "cold": 31}, "preemptions": 2,
    }  # fmt: skip
    assert json.loads(json.dumps(log.state()))["recent"][-1] == bar


@given(
    num_tokens=st.integers(1, 50), data=st.data(), reason=st.sampled_from([*MISS_REASONS, "suspended"])
)  # fmt: skip
def test_cached_and_missed_tokens_are_the_whole_prompt(num_tokens, data, reason):
    num_cached = data.draw(st.integers(0, num_tokens - 1))
    missed = data.draw(st.sampled_from([None, Missed(reason, data.draw(st.integers(0, 60)))]))
    counts = misses(num_tokens, num_cached, missed)
    assert num_cached + sum(counts.values()) == num_tokens
    assert min(counts.values()) > 0
    assert counts["last_token"] >= 1


def test_percentiles_are_of_the_latest_intervals_and_none_where_nothing_was_measured():
    clock = Clock()
    begun, log = clock.now, RequestLog(clock=clock)
    assert log.state()["latency"]["ttft_s"] is None
    for at in range(100):
        with log.following(None, [5]) as told:
            clock.now += 0.001 if at < 60 else 0.01 if at < 98 else 1.0
            told(0, output(1, "stop"))
    sample = log.sample()
    assert sample["ended"] == 100
    assert sample["ttft_s"]["p50"] == pytest.approx(0.001, rel=0.05)
    assert sample["ttft_s"]["p99"] == pytest.approx(1.0, rel=0.05)
    assert sample["itl_s"] is None
    latency = log.state()["latency"]
    assert latency["ttft_s"] == sample["ttft_s"]
    assert latency["requests_per_s"] == pytest.approx(100 / (clock.now - begun))
    clock.now += 2
    assert log.sample() == {"ended": 0, "ttft_s": None, "itl_s": None, "queue_s": None}


def test_a_log_keeps_a_bounded_number_of_requests_and_no_output():
    log = RequestLog()
    for at in range(3 * MAX_RECENT):
        with log.following(None, [at + 1]) as told:
            told(0, output(1, "stop"))
    recent = log.state()["recent"]
    assert len(recent) == MAX_RECENT
    assert recent[0]["prompt_tokens"] == 3 * MAX_RECENT
    assert not any(hasattr(each, "output") for each in log._recent)


def test_every_metric_of_a_server_is_in_the_documentation():
    from pathlib import Path

    page = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text("utf-8")
    names = {name for name, _ in scraped(RequestLog())}
    for name in names:
        plain = name
        for end in ("_bucket", "_count", "_sum"):
            plain = plain.removesuffix(end)
        assert f"`{plain}`" in page or plain.endswith("_created"), plain
