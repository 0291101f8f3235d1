"""A router that knows from events which server has what."""

import numpy as np
import pytest
from upstream_help import FakeUpstream, routed, served, wait_for

from quire import CacheManager, Scope
from quire.errors import ConfigError
from quire.exchange import EventLog
from quire.exchange.wire import StoredEvent
from quire.web.keys import ApiKeys, scope_of
from quire_router.index import ClusterIndex
from quire_router.prefixes import ToldPrefixes
from quire_router.relay import MADE_BY

zmq = pytest.importorskip("quire.observe.zmq", reason="install it with: pip install pyzmq")

TEXT = "What servers tell of their caches is known before any request came by this router. " * 2


def compute(manager, text, scope=None):
    seq = manager.open(list(text.encode()), scope=scope)
    manager.reserve(seq, len(text) - seq.num_cached)
    manager.commit(seq, list(text.encode())[seq.num_cached :])
    manager.close(seq)


def test_a_request_goes_to_the_server_that_tells_of_its_prefix_until_it_tells_of_its_end():
    managers = [CacheManager(100, 16, watchers=[EventLog()]) for _ in range(2)]
    fakes = FakeUpstream("one"), FakeUpstream("two")
    with (
        zmq.Publisher(managers[0], "tcp://127.0.0.1:0", replay="tcp://127.0.0.1:0") as first,
        zmq.Publisher(managers[1], "tcp://127.0.0.1:0", replay="tcp://127.0.0.1:0") as second,
        served(fakes[0].app()) as one,
        served(fakes[1].app()) as two,
    ):
        compute(managers[1], TEXT)  # before anybody listens
        endpoints = {
            url: f"{each.endpoint},{each.replay}" for url, each in ((one, first), (two, second))
        }
        prefixes = ToldPrefixes(1 << 10, endpoints)
        with routed([one, two], prefixes=prefixes) as router:
            router.well(True, True)
            wait_for(lambda: prefixes.index.num_blocks == len(TEXT) // 16)
            wait_for(lambda: prefixes.index.replicas == {one: False, two: False})
            for more in ("", "?", " And so on."):
                assert router.ask(TEXT + more).headers[MADE_BY] == "1"
            assert router.ask(list(TEXT.encode())).headers[MADE_BY] == "1"
            message = {"messages": [{"role": "user", "content": TEXT}]}
            for _ in range(3):
                told = router.ask(message, "/v1/messages", headers={"x-api-key": "mine"})
                assert told.headers[MADE_BY] == "1"
            read = [each for fake in fakes for each in fake.asked if "tokenize" in each[0]]
            assert read[-1][0] == "/v1/messages/tokenize"
            assert read[-1][2]["x-api-key"] == "mine"
            compute(managers[0], "!" + TEXT)
            wait_for(lambda: prefixes.index.num_blocks > len(TEXT) // 16)
            assert router.ask("!" + TEXT).headers[MADE_BY] == "0"
            managers[1].reset()
            wait_for(lambda: two not in prefixes.index.lookup(list(TEXT.encode())).held)
            fakes[0].mood = fakes[1].mood = "refusing"
            assert router.ask({"prompt": {"no": "prompt"}}).status_code == 400
        prefixes.index.check()


def test_prefixes_of_tenants_are_found_with_the_api_keys_of_the_servers():
    keys = ApiKeys([("ann", "key-of-ann"), ("ann", "other-of-ann"), ("bob", "key-of-bob")])
    managers = [CacheManager(100, 16, watchers=[EventLog()]) for _ in range(2)]
    with (
        zmq.Publisher(managers[0], "tcp://127.0.0.1:0", replay="tcp://127.0.0.1:0") as first,
        zmq.Publisher(managers[1], "tcp://127.0.0.1:0", replay="tcp://127.0.0.1:0") as second,
        served(FakeUpstream("one").app()) as one,
        served(FakeUpstream("two").app()) as two,
    ):
        owners = [("ann", None), ("bob", None), ("bob", "s"), ("ann", "s")]
        for at, owner in enumerate(owners):
            compute(managers[at % 2], TEXT, scope_of(*owner))
        endpoints = {
            url: f"{each.endpoint},{each.replay}" for url, each in ((one, first), (two, second))
        }
        prefixes = ToldPrefixes(1 << 10, endpoints)
        with routed([one, two], prefixes=prefixes, keys=keys) as router:
            router.well(True, True)
            wait_for(lambda: prefixes.index.num_blocks == 4 * (len(TEXT) // 16))

            def home(key, **more):
                asked = {"authorization": f"Bearer {key}"}
                return {router.ask(TEXT, headers=asked, **more).headers[MADE_BY] for _ in range(3)}

            assert home("key-of-ann") == home("other-of-ann") == {"0"}
            assert home("key-of-bob") == {"1"}
            assert home("key-of-bob", cache_salt="s") == {"0"}
            assert home("key-of-ann", cache_salt="s") == {"1"}


def test_a_salt_in_clear_in_an_engines_event_is_found():
    prefixes = ToldPrefixes(64, {})
    tokens = [*range(32)]
    plain = StoredEvent([1, 2], None, tokens, 16, None, "GPU", None)
    salted = StoredEvent([3, 4], None, tokens, 16, None, "GPU", None, [["mine"], None])
    prefixes.index.apply("one", [plain])
    prefixes.index.apply("two", [salted])

    def held(salt, tenant=None):
        return prefixes.found(tokens, salt, tenant)

    assert held(None) == held(None, "ann") == {"one": (32, 0, 0)}
    assert held("mine") == held("mine", "ann") == {"two": (32, 0, 0)}
    assert held("other") == {}


def test_an_adapter_that_events_name_is_found_by_the_model_that_is_asked_for():
    managers = [CacheManager(100, 16, watchers=[EventLog()]) for _ in range(2)]
    with (
        zmq.Publisher(managers[0], "tcp://127.0.0.1:0", replay="tcp://127.0.0.1:0") as first,
        zmq.Publisher(managers[1], "tcp://127.0.0.1:0", replay="tcp://127.0.0.1:0") as second,
        served(FakeUpstream("one").app()) as one,
        served(FakeUpstream("two").app()) as two,
    ):
        compute(managers[0], TEXT)
        compute(managers[1], TEXT, Scope(lora="writer"))
        endpoints = {
            url: f"{each.endpoint},{each.replay}" for url, each in ((one, first), (two, second))
        }
        prefixes = ToldPrefixes(1 << 10, endpoints)
        with routed([one, two], prefixes=prefixes) as router:
            router.well(True, True)
            wait_for(lambda: prefixes.index.num_blocks == 2 * (len(TEXT) // 16))
            for model, home in (("base", "0"), ("writer", "1"), (None, "0"), (["writer"], "0")):
                assert {router.ask(TEXT, model=model).headers[MADE_BY] for _ in range(3)} == {home}


def test_vllms_blocks_of_an_adapter_are_found_by_its_name():
    index, tokens = ClusterIndex(64), [*range(48)]
    extra = [["writer", "mine"], ["writer"], ["writer", ["picture", 0]]]
    told = StoredEvent([1, 2, 3], None, tokens, 16, 7, "GPU", "writer", extra)
    index.apply("one", [told])
    assert index.lookup(tokens, [["mine"]], "writer").held == {"one": (32, 0, 0)}
    assert index.lookup(tokens, [], "writer").held == {}
    assert index.lookup(tokens, [["mine"]]).held == {}


def test_an_endpoint_that_is_none_is_refused():
    with pytest.raises(ConfigError, match="endpoint"):
        ToldPrefixes(16, {"http://one": "nowhere"})


def test_a_new_server_is_followed_and_a_removed_one_leaves_no_block():
    managers = [CacheManager(100, 16, watchers=[EventLog()]) for _ in range(2)]
    with (
        zmq.Publisher(managers[0], "tcp://127.0.0.1:0", replay="tcp://127.0.0.1:0") as first,
        zmq.Publisher(managers[1], "tcp://127.0.0.1:0", replay="tcp://127.0.0.1:0") as second,
    ):
        prefixes = ToldPrefixes(1 << 10, {"one": f"{first.endpoint},{first.replay}"})
        compute(managers[0], TEXT)
        compute(managers[1], "!" + TEXT)
        whole = len(TEXT) // 16 * 16

        def held(text=TEXT):
            return prefixes.found(np.frombuffer(text.encode(), np.uint8), None, None)

        wait_for(lambda: held() == {"one": (whole, 0, 0)})
        prefixes.follow("two", f"{second.endpoint},{second.replay}")
        assert prefixes.followed == {"one", "two"}
        wait_for(lambda: held("!" + TEXT) == {"two": (whole, 0, 0)})
        prefixes.forget("one")
        wait_for(lambda: held() == {})
        assert set(prefixes.index.replicas) == prefixes.followed == {"two"}
        assert held("!" + TEXT) == {"two": (whole, 0, 0)}
        prefixes.close()
        assert prefixes.followed == set(prefixes.index.replicas) == set()
        prefixes.index.check()
