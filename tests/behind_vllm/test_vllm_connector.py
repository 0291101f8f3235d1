"""`QuireConnector` over stand-ins for vLLM's classes: its registration, roles, ranks, and prompts that load nothing."""

import importlib
import sys
from types import ModuleType, SimpleNamespace

import pytest

BASE = "vllm.distributed.kv_transfer.kv_connector"
OURS = tuple(
    f"quire.engines.vllm.{name}" for name in ("connector", "kv_events", "metrics", "support")
)

EVENTS = {
    f"vllm.{module}": dict.fromkeys(names.split())
    for module, names in {
        "distributed.kv_events": "MEDIUM_STORAGE BlockRemoved BlockStored",
        "v1.core.kv_cache_utils": "generate_block_hash_extra_keys maybe_convert_block_hash to_event_extra_keys",
        "v1.kv_cache_interface": "get_kv_cache_spec_kind get_kv_cache_spec_sliding_window",
    }.items()
}
"""The names that events import from vLLM; no test here publishes any."""


class StandIn:
    """Stand-in for vLLM's base class of connectors."""

    def __init__(self, vllm_config, role, kv_cache_config):
        self._vllm_config, self._kv_cache_config = vllm_config, kv_cache_config
        self._kv_transfer_config = vllm_config.kv_transfer_config


class Factory:
    known: dict = {}  # noqa: RUF012 - one per test

    @classmethod
    def get_connector_class_by_name(cls, name):
        if name not in cls.known:
            raise ValueError(name)

    @classmethod
    def register_connector(cls, *named):
        cls.known[named[0]] = named[1:]


@pytest.fixture
def connector(monkeypatch):
    """Return the module of the connector, imported over the stand-ins."""
    factory = type("KVConnectorFactory", (Factory,), {"known": {}})
    names = ("KVConnectorMetadata", "KVConnectorRole", "KVConnectorWorkerMetadata", "SupportsHMA")
    kinds = {name: type(name, (), {"SCHEDULER": 0, "WORKER": 1}) for name in names}
    stats = {name: type(name, (), {}) for name in ("KVConnectorPromMetrics", "KVConnectorStats")}
    for name, members in {
        "vllm": {"__version__": "0.33.0"},
        "prometheus_client": {"Counter": object},
        f"{BASE}.factory": {"KVConnectorFactory": factory},
        f"{BASE}.v1.base": kinds | {"KVConnectorBase_V1": StandIn},
        f"{BASE}.v1.metrics": stats,
        **EVENTS,
    }.items():
        module = ModuleType(name)
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, name, module)
    for name in OURS:
        monkeypatch.delitem(sys.modules, name, raising=False)
    module = importlib.import_module(OURS[0])
    yield module
    for name in OURS:
        sys.modules.pop(name, None)


def made(module, *tiers, role="kv_both", rank=0):
    spec = type("FullAttentionSpec", (), {"block_size": 4})()
    config = SimpleNamespace(
        kv_transfer_config=SimpleNamespace(
            kv_connector_extra_config={"tiers": tiers, "weights": "w"},
            is_kv_producer=role != "kv_consumer",
            is_kv_consumer=role != "kv_producer",
        ),
        parallel_config=SimpleNamespace(tensor_parallel_size=1, data_parallel_index=rank),
        model_config=SimpleNamespace(
            hf_config=SimpleNamespace(to_dict=dict),
            dtype="float32",
            quantization=None,
            use_mla=False,
            get_total_num_kv_heads=lambda: 1,
        ),
        cache_config=SimpleNamespace(cache_dtype="auto"),
        load_config=SimpleNamespace(load_format="auto"),
        speculative_config=None,
    )
    groups = SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec)])
    return module.QuireConnector(config, module.KVConnectorRole.SCHEDULER, groups)


class AskedSide:
    """A scheduler's side that finds 4 tokens of each request, and notes which are looked up and stored."""

    def __init__(self):
        self.asked, self.stores = [], {}

    def follow(self, request, tokens, scope, media, *, stores):
        self.stores[request] = stores

    def matched(self, request, num_tokens, num_computed):
        self.asked.append(request)
        return 4


def asked(connector, **options):
    """Ask for a request; return the answer, whether it was looked up, and whether it is stored."""
    tokens = list(range(1, 10))
    request = SimpleNamespace(
        request_id="r",
        prompt_token_ids=tokens,
        all_token_ids=tokens,
        num_tokens=len(tokens),
        prompt_embeds=None,
        lora_request=None,
        cache_salt=None,
        mm_features=[],
        skip_reading_prefix_cache=options.get("skips", False),
    )
    side = connector._side = AskedSide()
    told = connector.get_num_new_matched_tokens(request, 0)
    connector._side = None
    connector.shutdown()
    return told, side.asked == ["r"], side.stores["r"]


def test_the_connector_is_registered_by_its_name_once(connector):
    known = connector.KVConnectorFactory.known
    assert known == {"QuireConnector": ("quire.engines.vllm.connector", "QuireConnector")}
    known["QuireConnector"] = "by vLLM's user"
    connector._register()
    assert known == {"QuireConnector": "by vLLM's user"}


def test_requests_are_looked_up_and_stored_as_the_role_says(connector):
    assert asked(made(connector, "host:1MiB")) == ((4, False), True, True)
    assert asked(made(connector, "host:1MiB", role="kv_producer")) == ((0, False), False, True)
    assert asked(made(connector, "host:1MiB", role="kv_consumer")) == ((4, False), True, False)


def test_a_request_for_log_probabilities_of_its_prompt_is_not_looked_up(connector):
    assert asked(made(connector, "host:1MiB"), skips=True) == ((0, False), False, True)


def test_each_data_parallel_rank_has_a_directory_where_the_path_says_rank(connector, tmp_path):
    line = f"disk:{tmp_path}/{{rank}}?capacity=16MiB"
    several = [made(connector, line, rank=rank) for rank in (0, 1)]
    assert sorted(each.name for each in tmp_path.iterdir()) == ["0", "1"]
    assert all(each._stack is not None for each in several)
    for each in several:
        each.shutdown()


def test_a_consumer_reads_a_directory_that_a_producer_has(connector, tmp_path):
    line = f"disk:{tmp_path}/kv?capacity=16MiB"
    producer = made(connector, line, role="kv_producer")
    consumer = made(connector, line, role="kv_consumer")
    assert consumer._stack is not None
    assert made(connector, line)._stack is None
    consumer.shutdown()
    producer.shutdown()
