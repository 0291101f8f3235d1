"""Metrics: what a scrape says is what the cache counts, and a real Prometheus draws the dashboard of it."""

import json
import re
import subprocess
import urllib.parse
import urllib.request
from contextlib import contextmanager
from pathlib import Path

import pytest
from processes import end_with_parent, free_port, wait_until
from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families
from stack_help import load, store

import system
from quire.core import CacheManager, LayerGroup, Scope
from quire.core.stats import MISS_REASONS
from quire.errors import ConfigError
from quire.foresight import Trail
from quire.groups import SlidingWindow
from quire.observe.prometheus import METRICS, CacheCollector
from quire.tiers import Host
from quire.tiers.stack.settings import StackSettings
from quire.tiers.stack.stack import TierStack

DOCS = Path(__file__).parents[2] / "docs"
DASHBOARD = json.loads((DOCS / "grafana.json").read_text(encoding="utf-8"))


def make(**settings):
    settings.setdefault("num_blocks", 8)
    return CacheManager(block_size=4, watchers=[Trail()], **settings)


def serve(manager, tokens, **words):
    seq = manager.open(tokens, **words)
    manager.reserve(seq, len(tokens) - seq.num_cached)
    manager.commit(seq, tokens[seq.num_cached :])
    manager.close(seq)


def scraped(collector):
    """The samples of a scrape, as Prometheus reads the text: by name and labels."""
    registry = CollectorRegistry()
    registry.register(collector)
    text = generate_latest(registry).decode()
    samples = [each for family in text_string_to_metric_families(text) for each in family.samples]
    labels = ("cache", *{label: None for metric in METRICS for label in metric.labels})
    keys = [
        (each.name, *(each.labels[label] for label in labels if label in each.labels))
        for each in samples
    ]
    assert len(keys) == len(set(keys)), "a series twice"
    return dict(zip(keys, (each.value for each in samples), strict=True))


@contextmanager
def tiers(*names):
    """A stack that has stored three records and found two of five keys asked for."""
    with TierStack([Host("1MiB", name=name) for name in names], StackSettings(gate=False)) as stack:
        store(stack, range(3))
        stack.flush()
        load(stack, [0, 1, 7, 8, 9])
        yield stack


def test_a_scrape_says_what_the_manager_counts():
    manager = make()
    for start in (0, 100, 0, 200, 300):
        serve(manager, list(range(start, start + 13)))
    held, suspended = manager.open([1, 2, 3]), manager.open([4, 5, 6])
    manager.reserve(held, 1)
    manager.reserve(suspended, 1)
    manager.suspend(suspended)
    seen, stats = scraped(CacheCollector(manager)), manager.stats
    assert stats.evicted_blocks
    for name in ("prompt_tokens", "hit_tokens", "evicted_blocks", "published_blocks"):
        assert seen[f"quire_{name}_total", "main"] == getattr(stats, name)
    assert seen["quire_requests_total", "main"] == 7
    missed = {reason: seen["quire_missed_tokens_total", "main", reason] for reason in MISS_REASONS}
    assert missed == stats.missed
    blocks = [seen["quire_blocks", "main", "full", state] for state in ("free", "active", "cached")]
    assert blocks == [manager.num_free, manager.num_active, manager.num_cached]
    assert (
        seen["quire_sequences", "main", "open"] == seen["quire_sequences", "main", "suspended"] == 1
    )
    assert seen["quire_up", "main"] == 1
    manager.close(held)


def test_each_group_has_its_pool():
    groups = [LayerGroup("a", 8), LayerGroup("c", 4, SlidingWindow(8)), LayerGroup('b"\\\n', 2)]
    seen = scraped(CacheCollector(CacheManager(groups=groups, block_size=4)))
    free = {
        key[2]: value
        for key, value in seen.items()
        if key[0] == "quire_blocks" and key[3] == "free"
    }
    assert free == {"a": 8, "c": 4, 'b"\\\n': 2}


def test_the_tiers_of_a_stack_are_in_it():
    with tiers("host", "cold") as stack:
        seen = scraped(CacheCollector(make(), stack))
        stats = stack.stats()
    assert seen["quire_loads_total", "main", "hit"] == stats.loads["hit"] > 0
    for report in stats.tiers:
        name = report.tier.name
        assert seen["quire_tier_records", "main", name] == report.tier.num_records
        assert seen["quire_tier_called", "main", name, "read"] == 1
        for outcome, count in report.loads.items():
            assert seen["quire_tier_loads_total", "main", name, outcome] == count


def test_two_tiers_of_one_name_are_two_series():
    with tiers("host", "host") as stack:
        seen = scraped(CacheCollector(make(), stack))
        assert [key[2] for key in seen if key[0] == "quire_tier_records"] == list(stack.names)


def test_several_caches_are_told_apart_and_a_name_is_taken_once():
    collector = CacheCollector(make(), name="one")
    collector.add(make(num_blocks=5), name="other")
    seen = scraped(collector)
    assert (
        seen["quire_blocks", "one", "full", "free"],
        seen["quire_blocks", "other", "full", "free"],
    ) == (8, 5)
    with pytest.raises(ConfigError, match="'other' is shown already"):
        collector.add(make(), name="other")
    assert scraped(collector) == seen


@pytest.mark.parametrize("given", [(None,), ("path",), (make(), "path")])
def test_a_collector_of_something_else_than_caches_is_refused(given):
    with pytest.raises(ConfigError, match=r"cache\.(manager|tiers)"):
        CacheCollector(*given)


def test_a_cache_that_was_cut_off_is_down_until_its_reset():
    manager, other = make(), make()
    collector = CacheCollector(manager, name="one")
    collector.add(other, name="other")
    manager.give_up("open was cut off half-way by KeyboardInterrupt")
    seen = scraped(collector)
    assert (seen["quire_up", "one"], seen["quire_up", "other"]) == (0, 1)
    assert [key for key in seen if key[1] == "one"] == [("quire_up", "one")]
    manager.reset()
    assert scraped(collector)["quire_up", "one"] == 1


def test_a_tier_that_cannot_be_counted_leaves_the_rest_to_be_seen():
    class Broken:
        def stats(self):
            raise RuntimeError("gone")

    seen = scraped(CacheCollector(make(), Broken()))
    assert seen["quire_up", "main"] == 1
    assert not any("tier" in key[0] for key in seen)


def test_nothing_of_a_prompt_or_a_tenant_is_shown():
    manager = make()
    serve(manager, list(range(70_001, 70_014)), scope=Scope(salt="tenant-77"))
    registry = CollectorRegistry()
    registry.register(CacheCollector(manager))
    text = generate_latest(registry).decode()
    assert "70001" not in text
    assert "tenant-77" not in text


def shown_name(metric):
    """The name of a metric as Prometheus shows it."""
    family = metric.family()
    return f"{family.name}_total" if family.type == "counter" else family.name


def test_the_documentation_has_every_metric():
    rows = re.findall(
        r"^\| `(quire_\w+)` \| (.*?) \| (.*) \|$",
        (DOCS / "metrics.md").read_text("utf-8"),
        re.MULTILINE,
    )
    assert rows == [
        (shown_name(each), ", ".join(f"`{label}`" for label in each.labels), each.says)
        for each in METRICS
    ]


def test_the_dashboard_asks_for_metrics_that_exist():
    known = set(map(shown_name, METRICS))
    for panel in DASHBOARD["panels"]:
        for target in panel["targets"]:
            assert set(re.findall(r"quire_\w+", target["expr"])) <= known
            assert panel["description"]


@pytest.mark.ci
@pytest.mark.system("prometheus")
def test_a_real_prometheus_has_data_for_every_panel(tmp_path):
    manager = make()
    with tiers("host", "disk") as stack:
        registry = CollectorRegistry()
        registry.register(CacheCollector(manager, stack))
        exporter, _ = start_http_server(0, addr="127.0.0.1", registry=registry)
        port = free_port()
        target = f"127.0.0.1:{exporter.server_port}"
        job = {"job_name": "quire", "static_configs": [{"targets": [target]}]}
        config = {"global": {"scrape_interval": "250ms"}, "scrape_configs": [job]}
        (tmp_path / "config.json").write_text(json.dumps(config))  # JSON is YAML
        words = [
            *end_with_parent(), system.need("prometheus"), f"--config.file={tmp_path}/config.json",
            f"--storage.tsdb.path={tmp_path}/data", f"--web.listen-address=127.0.0.1:{port}",
        ]  # fmt: skip
        log = (tmp_path / "log").open("wb")
        server = subprocess.Popen(words, stdout=log, stderr=log)

        def asked(expression):
            words = urllib.parse.urlencode({"query": expression})
            url = f"http://127.0.0.1:{port}/api/v1/query?{words}"
            with urllib.request.urlopen(url, timeout=5) as answer:
                return json.load(answer)["data"]["result"]

        def has(expression):
            try:
                return bool(asked(expression))
            except OSError:
                return False

        try:
            wait_until(lambda: has("quire_up == 1"), "prometheus has scraped once")
            starts = iter(range(0, 1 << 20, 9))

            def goes_on():
                start = next(starts)
                serve(manager, list(range(start, start + 13)))
                return has("rate(quire_requests_total[2s]) > 0")

            wait_until(goes_on, "two scrapes")
            for panel in DASHBOARD["panels"]:
                for target in panel["targets"]:
                    query = (
                        target["expr"].replace("$__rate_interval", "20s").replace("$cache", ".*")
                    )
                    assert asked(query), (panel["title"], query)
            (hit_rate,) = asked("quire_hit_tokens_total / quire_prompt_tokens_total")
            assert float(hit_rate["value"][1]) == pytest.approx(manager.stats.hit_rate, abs=0.3)
        finally:
            server.kill()
            server.wait()
            log.close()
            exporter.shutdown()
