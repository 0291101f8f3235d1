"""quire's storage backend under SGLang's own classes, in the environment that has them; prints the checks that held.

PYTHONPATH=src:tests:benchmarks/peers .venv-peers/bin/python tests/behind_sglang/sglang_run.py
"""

import importlib.util
import itertools
import random
import sys
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import engine_stubs
import msgspec
import torch

engine_stubs.install()

import sglang
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorageConfig,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
)
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost
from sglang.srt.mem_cache.storage import StorageBackendFactory
from sglang.srt.mem_cache.utils import get_storage_hash_str

from peer_checks import run_checks
from quire.errors import ConfigError
from quire.exchange.wire import decode_batch
from quire.observe import Mirror

PAGE, PAGES, LAYERS, HEADS, DIM = 4, 12, 3, 2, 8
LAYOUTS = ("layer_first", "page_first", "page_first_direct")


def loaded(name, file):
    """Return a module of SGLang's from its file."""
    spec = importlib.util.spec_from_file_location(name, file)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


# The package of the cache controller needs a GPU.
CONTROLLER = loaded(
    "sglang_cache_controller", Path(sglang.__path__[0]) / "srt/managers/cache_controller.py"
).HiCacheController


def host_pool(kind, layout, dtype=torch.bfloat16, seed=0, pages=PAGES):
    """Make a host pool of SGLang's with numbers in it; its device pool is left out."""
    pool = object.__new__(kind)
    size = PAGE * pages
    of_layer = (LAYERS, size) if layout == "layer_first" else (size, LAYERS)
    if layout == "page_first_direct":
        of_layer = (pages, LAYERS, PAGE)
    is_mla = kind is MLATokenToKVPoolHost
    shape = (*of_layer, 1, DIM) if is_mla else (2, *of_layer, HEADS, DIM)
    numbers = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
    fields = {
        "layout": layout, "dtype": dtype, "page_size": PAGE, "page_num": pages, "size": size,
        "layer_num": LAYERS, "head_num": HEADS, "head_dim": DIM, "kv_cache_dim": DIM,
        "kv_buffer": numbers, "device": "cpu", "pin_memory": False, "dcp_size": 1, "dcp_rank": 0,
        "kv_lora_rank": DIM // 2, "qk_rope_head_dim": DIM // 2,
    }  # fmt: skip
    for name, value in fields.items():
        with suppress(AttributeError):  # a property follows from the others
            setattr(pool, name, value)
    return pool


def options(place, **extra):
    """Return the options of `--hicache-storage-backend-extra-config`."""
    return {
        "backend_name": "quire", "module_path": "quire.engines.sglang", "class_name": "QuireStorage",
        "interface_v1": 1, "weights": "one", "tiers": [f"disk:{place}/{{rank}}?capacity=32MiB"],
        "settings": {"busy_share": 1.0, "close_timeout_s": 60.0, "lookup_timeout_s": 30.0, "load_timeout_s": 30.0}, **extra,
    }  # fmt: skip


def config_of(pool, **fields):
    """Return SGLang's description of a backend for a pool."""
    return HiCacheStorageConfig(**{
        "tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1, "attn_cp_rank": 0, "attn_cp_size": 1,
        "is_mla_model": isinstance(pool, MLATokenToKVPoolHost), "enable_storage_metrics": False,
        "is_page_first_layout": pool.layout != "layer_first", "model_name": "a model", **fields,
    })  # fmt: skip


def made(config, pool=None):
    """Make the backend as `--hicache-storage-backend dynamic` does."""
    return StorageBackendFactory.create_backend("dynamic", config, pool)


def backend(place, pool, *, config=None, **extra):
    """Make the backend, with a pool."""
    fields = {"extra_config": options(place, **extra), **(config or {})}
    storage = made(config_of(pool, **fields), pool)
    storage.register_mem_pool_host(pool)
    storage.on_host_pools_registered()
    return storage


def refusal(call):
    """Return why a call was refused."""
    try:
        call()
    except ConfigError as error:
        return str(error)
    return ""


def stored(storage, names, pages):
    """Store pages and wait until they are written."""
    done = storage.batch_set_v1(names, slots(pages))
    assert storage._stack._stack.drain(60)
    return all(done)


def slots(pages):
    """Return the slots of pages, one page after the other."""
    return torch.tensor([page * PAGE + at for page in pages for at in range(PAGE)])


def hashes(tokens, salt=None):
    """Return SGLang's names of the pages of a prompt."""
    key = list(tokens) if salt is None else Named(tokens, salt)
    return get_storage_hash_str(key, None, page_size=PAGE)


class Named(list):
    """Tokens in a namespace, as a radix key has it."""

    def __init__(self, tokens, extra_key):
        super().__init__(tokens)
        self.extra_key, self.cache_salt = extra_key, None


def pages_of(pool, pages):
    return [pool.get_data_page(page * PAGE, flat=True).clone() for page in pages]


def under_controller(storage, pool):
    """Return what SGLang's controller looks at when it reads and writes pages."""
    double = SimpleNamespace(storage_backend=storage, storage_host_pool=pool, page_size=PAGE)
    bound = {
        name: getattr(CONTROLLER, name).__get__(double)
        for name in ("_page_get_zero_copy", "_page_set_zero_copy")
    }
    double.page_get_func = bound["_page_get_zero_copy"]
    double.page_set_func = bound["_page_set_zero_copy"]
    return double


def check_pages_come_back_after_a_restart(place):
    """Stored pages are found by the next process, in other pages, in every layout."""
    kinds = (MHATokenToKVPoolHost, MLATokenToKVPoolHost)
    for number, (kind, layout) in enumerate(itertools.product(kinds, LAYOUTS)):
        chance = random.Random(number)
        folder = place / f"{number}"
        names = hashes(chance.choices(range(1000), k=6 * PAGE))
        pool = host_pool(kind, layout, seed=number)
        here = chance.sample(range(PAGES), 6)
        expected = pages_of(pool, here)
        storage = backend(folder, pool)
        assert storage.batch_exists(names) == 0
        assert under_controller(storage, pool).page_set_func(names, slots(here))
        storage.close()

        other = host_pool(kind, layout, seed=100 + number)
        there = chance.sample(range(PAGES), 6)
        rest = [page for page in range(PAGES) if page not in there]
        before = pages_of(other, rest)
        storage = backend(folder, other)
        assert storage.batch_exists(names) == 6
        assert storage.batch_exists([*names, "another"]) == 6
        assert storage.batch_exists(["another", *names]) == 0
        operation = SimpleNamespace(request_id="r", is_terminated=lambda: False)
        got = under_controller(storage, other).page_get_func(operation, names, slots(there))
        assert got == 6, (kind, layout, got)
        assert all(map(torch.equal, pages_of(other, there), expected)), (kind, layout)
        assert all(map(torch.equal, pages_of(other, rest), before)), (kind, layout)
        storage.close()


def check_a_hole_ends_a_hit(place):
    """A page that is not there is not said to be, and leaves its place as it was."""
    pool = host_pool(MHATokenToKVPoolHost, "page_first")
    names = hashes(range(5 * PAGE))
    storage = backend(place, pool)
    assert stored(storage, [names[at] for at in (0, 1, 3)], [0, 1, 3])
    assert storage.batch_exists(names) == 2
    pool.kv_buffer.zero_()
    assert storage.batch_get_v1(names, slots(range(5))) == [True, True, False, True, False]
    assert not pages_of(pool, [2])[0].any()
    assert pages_of(pool, [3])[0].any()
    assert storage.batch_get_v1(names, slots(range(3))) == [False] * 5  # indices that do not fit
    storage.close()


def check_names_tell_apart_what_is_not_the_same(place):
    """Other weights, ranks, layouts, types or salts find nothing; a name of the model is none of them."""
    names = hashes(range(3 * PAGE))
    mine = host_pool(MHATokenToKVPoolHost, "page_first")
    storage = backend(place, mine)
    assert stored(storage, names, range(3))
    assert storage.batch_exists(hashes(range(3 * PAGE), "a tenant")) == 0
    storage.close()
    tiers = [f"disk:{place}/0-0-0-0?capacity=32MiB"]  # one directory, whatever the rank
    others = [
        (mine, {"weights": "two"}, {}),
        (mine, {}, {"tp_size": 2}),
        (mine, {}, {"tp_size": 2, "tp_rank": 1}),
        (mine, {}, {"pp_size": 2}),
        (host_pool(MHATokenToKVPoolHost, "layer_first"), {}, {}),
        (host_pool(MHATokenToKVPoolHost, "page_first", torch.float16), {}, {}),
        (host_pool(MLATokenToKVPoolHost, "page_first"), {}, {}),
    ]
    for pool, extra, config in others:
        storage = backend(place, pool, config=config, tiers=tiers, **extra)
        assert storage.batch_exists(names) == 0, (extra, config)
        assert not any(storage.batch_get_v1(names, slots(range(3)))), (extra, config)
        storage.close()
    storage = backend(place, mine, config={"model_name": "another name"}, tiers=tiers)
    assert storage.batch_exists(names) == 3
    storage.clear()
    assert storage.batch_exists(names) == 0
    storage.close()


def check_weights_replaced_under_their_path_are_others(place):
    """The digest of the files decides, and a path without weights is refused."""
    model = place / "model"
    model.mkdir()
    pool = host_pool(MHATokenToKVPoolHost, "page_first")
    names = hashes(range(2 * PAGE))

    def opened():
        return backend(place / "kv", pool, weights=None, config={"model_name": str(model)})

    assert "no weights in" in refusal(opened)
    (model / "model.safetensors").write_bytes(b"one")
    storage = opened()
    assert stored(storage, names, range(2))
    storage.close()
    storage = opened()
    assert storage.batch_exists(names) == 2
    storage.close()
    (model / "model.safetensors").write_bytes(b"two")
    storage = opened()
    assert storage.batch_exists(names) == 0
    storage.close()


def check_sidecar_pools_follow_their_policies(place):
    """`batch_*_v2`: every pool by itself, all pages or the last ones."""
    pool = host_pool(MHATokenToKVPoolHost, "page_first", seed=1)
    window = host_pool(MHATokenToKVPoolHost, "page_first", seed=2)
    names = hashes(range(6 * PAGE))
    storage = backend(place, pool)
    storage.register_mem_host_pool_v2(window, PoolName.SWA)
    assert stored(storage, names, range(6))
    tail = PoolTransfer(PoolName.SWA, host_indices=slots([2, 3]), keys=names[2:4])
    assert storage.batch_set_v2([tail]) == {PoolName.SWA: [True, True]}
    assert storage._stack._stack.drain(60)

    def asked(policy, keys):
        transfer = PoolTransfer(PoolName.SWA, keys=keys, hit_policy=policy)
        result = storage.batch_exists_v2(names, [transfer])
        return result.kv_hit_pages, result.restorable_prefix_pages

    assert asked(PoolHitPolicy.TRAILING_PAGES, names[:2]) == (4, [4])
    assert asked(PoolHitPolicy.TRAILING_PAGES, names[:1]) == (4, [3, 4])
    assert asked(PoolHitPolicy.ALL_PAGES, None) == (0, [])
    expected = pages_of(window, [2, 3])
    window.kv_buffer.zero_()
    back = PoolTransfer(PoolName.SWA, host_indices=slots([7, 8]), keys=names[2:4])
    assert storage.batch_get_v2([back]) == {PoolName.SWA: [True, True]}
    assert all(map(torch.equal, pages_of(window, [7, 8]), expected))
    storage.close()


def check_block_groups_report_what_whole_groups_cover_and_limit_nobody(place):
    """A second form of the pages, in groups of keys: leading whole groups count, and the KV hit stays."""
    pool = host_pool(MHATokenToKVPoolHost, "page_first", seed=1)
    packed = host_pool(MHATokenToKVPoolHost, "page_first", seed=2)
    names, others = hashes(range(6 * PAGE)), hashes(range(100, 100 + 6 * PAGE))
    storage = backend(place, pool)
    storage.register_mem_host_pool_v2(packed, PoolName.INDEXER)
    assert stored(storage, names[:4], range(4))
    kept = PoolTransfer(PoolName.INDEXER, host_indices=slots(range(5)), keys=others[:5])
    assert storage.batch_set_v2([kept]) == {PoolName.INDEXER: [True] * 5}
    assert storage._stack._stack.drain(60)

    def asked(keys, group_pages):
        transfer = PoolTransfer(
            PoolName.INDEXER, keys=keys, hit_policy=PoolHitPolicy.BLOCK_GROUPS,
            block_pages=8, group_pages=group_pages,
        )  # fmt: skip
        result = storage.batch_exists_v2(names, [transfer])
        assert result.kv_hit_pages == 4
        return result.extra_pool_hit_pages.get(PoolName.INDEXER, 0)

    assert asked(others, 2) == 16  # two whole groups of three, the third lacks a key
    assert asked(others, 1) == 40
    assert asked([others[5], *others], 1) == 0
    assert asked(None, 2) == asked(others, 0) == 0
    storage.close()


def check_stats_tell_pages_and_rates_once(place):
    """Pages and rates of moves since the last question, for SGLang's metrics."""
    pool = host_pool(MHATokenToKVPoolHost, "page_first")
    names = hashes(range(3 * PAGE))
    storage = backend(place, pool)
    assert stored(storage, names, range(3))
    assert storage.batch_get_v1([*names[:2], "another"], slots(range(3))) == [True, True, False]
    stats = storage.get_stats()
    assert (stats.backup_pgs, stats.prefetch_pgs) == ([3], [2])
    assert min(*stats.backup_bandwidth, *stats.prefetch_bandwidth) > 0
    assert storage.get_stats().backup_pgs == []
    storage.close()


def check_a_damaged_disk_is_a_miss(place):
    """A flipped bit is found before a byte reaches a page."""
    pool = host_pool(MHATokenToKVPoolHost, "page_first")
    names = hashes(range(3 * PAGE))
    storage = backend(place, pool)
    assert stored(storage, names, range(3))
    storage.close()
    for file in place.rglob("*"):
        if file.is_file() and file.stat().st_size > 100_000:
            data = bytearray(file.read_bytes())
            for at in range(200, len(data), 64):
                data[at] ^= 1
            file.write_bytes(data)
    pool.kv_buffer.zero_()
    storage = backend(place, pool)
    assert not any(storage.batch_get_v1(names, slots(range(3))))
    assert not pool.kv_buffer.any()
    storage.close()


def check_one_directory_belongs_to_one_process(place):
    """The second one finds and stores nothing, and fails nothing."""
    pool = host_pool(MHATokenToKVPoolHost, "page_first")
    names = hashes(range(2 * PAGE))
    first, second = backend(place, pool), backend(place, pool)
    assert second.batch_set_v1(names, slots(range(2))) == [True, True]
    assert second.batch_exists(names) == 0
    assert second.batch_get_v1(names, slots(range(2))) == [False, False]
    assert first.batch_exists(names) == 0
    second.close()
    first.close()


def check_events_are_read_and_salts_divide_what_they_say_is_cached(_):
    """SGLang's own events, as its publisher writes them."""
    events = importlib.import_module("sglang.srt.disaggregation.kv_events")
    fields = {"token_ids": [1, 2, 3, 4], "block_size": 2, "lora_id": None, "medium": "GPU"}
    stored = [
        events.BlockStored(block_hashes=[5, -6], parent_block_hash=None, cache_salt="mine", **fields),
        events.BlockStored(block_hashes=[7, 8], parent_block_hash=-6, cache_salt="mine", **fields),
        events.BlockStored(block_hashes=[9, 10], parent_block_hash=None, **fields),
        events.BlockRemoved(block_hashes=[10], medium="GPU"),
    ]  # fmt: skip
    mirror, tokens = Mirror(), [1, 2, 3, 4] * 2
    mirror.receive(decode_batch(msgspec.msgpack.encode(events.KVEventBatch(1.0, stored, 0))))
    salts = ([["mine"]], 8), ([], 2), ([["another"]], 0)
    assert all(mirror.lookup(tokens, extra_keys=salt) == found for salt, found in salts)


def check_wrong_options_are_refused(place):
    """With what is wrong, its value, and what to do."""
    pool = host_pool(MHATokenToKVPoolHost, "page_first")
    for extra, said in (
        ({"tiers": []}, 'give "tiers"'),
        ({"tiers": "disk:/kv"}, 'give "tiers"'),
        ({"tires": 1}, "tires"),
        ({"interface_v1": 0}, 'give "interface_v1": 1'),
        ({"tiers": ["floppy:1MiB"]}, "floppy"),
    ):
        assert said in refusal(partial(backend, place, pool, **extra)), extra


if __name__ == "__main__":
    run_checks(globals())
