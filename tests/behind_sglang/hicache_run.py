"""SGLang's own test of a storage backend, and its controller's threads, with quire's backend; prints the checks that held.

PYTHONPATH=src:tests:benchmarks/peers .venv-peers/bin/python tests/behind_sglang/hicache_run.py

`mooncake_store/test_mooncake_store.py` of SGLang's wheel is run as it is: in the module that it imports, the name of the
store stands for quire's.
"""

import sys
import threading
import types
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import sglang_run
import torch
from sglang.srt.mem_cache.hicache_storage import STORAGE_BATCH_SIZE, HiCacheStorageConfig
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
from sglang.srt.runtime_context import get_parallel

from peer_checks import run_checks

STORE = "sglang.srt.mem_cache.storage.mooncake_store"
PAGE, PAGES = sglang_run.PAGE, 2 * STORAGE_BATCH_SIZE + 3
"""Tokens of a page, and pages: three batches, as the controller divides them."""

WAIT_S = 60.0


@contextmanager
def their_test(place):
    """Yield SGLang's test of a store, where the store is quire's, and close at the end what it leaves open."""
    made = []

    def store(config):
        options = {"extra_config": sglang_run.options(place / str(len(made)))}
        made.append(sglang_run.made(HiCacheStorageConfig(**(vars(config) | options))))
        return made[-1]

    module = types.ModuleType(f"{STORE}.mooncake_store")
    module.MooncakeStore = store
    sys.modules[module.__name__] = module
    file = Path(sglang_run.sglang.__path__[0], *STORE.split(".")[1:], "test_mooncake_store.py")
    try:
        yield sglang_run.loaded("their_test", file)
    finally:
        for each in made:
            each.close()


def check_their_test_of_batches_holds_in_each_of_its_configurations(place):
    """Ranks of models with and without MLA, as the test itself lists them."""
    for number, ranks in enumerate(((False, 0, 1), (True, 0, 1), (False, 1, 4), (True, 3, 8))):
        config = dict(zip(("is_mla_model", "tp_rank", "tp_size"), ranks, strict=True))
        with their_test(place / str(number)) as test:
            test.test_batch_operation(test.make_hicache_storage_config(**config))


def check_their_test_of_single_addresses_is_refused_by_name(place):
    """`set` and `get` of an address, which the controller does not call with `interface_v1`."""
    said = ""
    with their_test(place) as test:
        try:
            test.test_single_operation()
        except NotImplementedError as error:
            said = str(error)
    assert "pages of host pools" in said


def controller(place, pool):
    """Return SGLang's controller with quire attached as a server attaches it, and its threads running."""
    made = object.__new__(sglang_run.CONTROLLER)
    fields = {
        "enable_storage": False, "storage_stop_event": threading.Event(), "storage_host_pool": pool, "mem_pool_host": pool,
        "host_memory_mode": "cache", "page_size": PAGE, "storage_backend": None, "prefetch_hits_sync_groups": [],
        "prefetch_completion_sync_groups": [], "_create_sync_groups": list,
    }  # fmt: skip
    vars(made).update(fields)
    made._generate_storage_config = lambda name, extra: SimpleNamespace(
        **vars(sglang_run.config_of(pool, model_name=name)) | {"extra_config": extra},
        is_storage_writer=True,
    )
    attach(made, place)
    return made


def attach(made, place, **options):
    """Attach quire, in a server of one rank."""
    extra = sglang_run.options(place, **options)
    with get_parallel().override(attn_dcp_size=1):
        made.attach_storage_backend(
            "dynamic", model_name="a model", storage_backend_extra_config=extra
        )


def large_pool(seed):
    """Return a host pool with room for a prompt of several batches."""
    return sglang_run.host_pool(MHATokenToKVPoolHost, "page_first", seed=seed, pages=PAGES)


def backed_up(made, names, pages):
    """Back pages up by the controller's thread; return the tokens that it counted."""
    slots = sglang_run.slots(pages)
    made.write_storage(slots, list(range(len(slots))), hash_value=list(names))
    return made.ack_backup_queue.get(timeout=WAIT_S).completed_tokens


def asked(made, tokens):
    """Have the controller's thread ask for a prompt; return the operation, with what was found."""
    made.prefetch("a request", list(tokens))
    return made.prefetch_hit_queue.get(timeout=WAIT_S)


def fetched(made, operation, pages):
    """Have the controller's thread load what was found into pages; return the tokens that came."""
    operation.host_indices = sglang_run.slots(pages)
    made.prefetch_buffer.put(operation)
    num_tokens = 0
    while not (ack := made.ack_prefetch_queue.get(timeout=WAIT_S)).completed_req:
        num_tokens = ack.completed_tokens
    return num_tokens


def check_a_prompt_of_several_batches_comes_back_by_the_controllers_threads(place):
    """Backed up by one controller, loaded by the next, into other pages."""
    tokens, pool = range(PAGES * PAGE), large_pool(1)
    names, expected = sglang_run.hashes(tokens), sglang_run.pages_of(pool, range(PAGES))
    made = controller(place, pool)
    assert asked(made, tokens).storage_hit_count == 0
    assert backed_up(made, names, range(PAGES)) == len(tokens)
    made.detach_storage_backend()

    pool = large_pool(2)
    made = controller(place, pool)
    operation = asked(made, tokens)
    assert (operation.storage_hit_count, operation.hash_value) == (len(tokens), names)
    there = list(reversed(range(PAGES)))
    assert fetched(made, operation, there) == len(tokens)
    assert all(map(torch.equal, sglang_run.pages_of(pool, there), expected))
    made.detach_storage_backend()


def check_a_hole_ends_what_the_controller_fetches(place):
    """Pages behind it are not asked for, and one that vanishes in between ends the load."""
    tokens, pool = range(PAGES * PAGE), large_pool(1)
    names = sglang_run.hashes(tokens)
    made = controller(place, pool)
    hole = STORAGE_BATCH_SIZE + 5
    rest = [at for at in range(PAGES) if at != hole]
    assert backed_up(made, [names[at] for at in rest], rest) == len(rest) * PAGE
    operation = asked(made, tokens)
    assert operation.storage_hit_count == hole * PAGE, (operation.storage_hit_count, hole)
    operation.hash_value = names  # as if the page had been there a moment ago
    assert fetched(made, operation, range(PAGES)) == hole * PAGE
    made.detach_storage_backend()


def check_a_terminated_prefetch_copies_nothing_and_is_answered(place):
    """A request that goes while its prefetch waits."""
    tokens, pool = range(4 * PAGE), large_pool(1)
    made = controller(place, pool)
    assert backed_up(made, sglang_run.hashes(tokens), range(4)) == len(tokens)
    operation = asked(made, tokens)
    before = pool.kv_buffer.clone()
    pool.kv_buffer.add_(1)
    before.add_(1)
    made.terminate_prefetch(operation)
    assert fetched(made, operation, range(4)) == 0
    assert torch.equal(pool.kv_buffer, before)
    made.detach_storage_backend()


def check_a_backend_is_detached_and_attached_again_while_the_server_runs(place):
    """The directory is free after a detach, and what was stored is found again."""
    tokens, pool = range(4 * PAGE), large_pool(1)
    names = sglang_run.hashes(tokens)
    made = controller(place, pool)
    assert backed_up(made, names, range(4)) == len(tokens)
    made.detach_storage_backend()
    assert (made.enable_storage, made.storage_backend) == (False, None)
    attach(made, place)
    assert asked(made, tokens).storage_hit_count == len(tokens)
    made.detach_storage_backend()


def check_options_that_are_refused_leave_the_controller_without_storage(place):
    """An attach that fails can be repeated."""
    pool = large_pool(1)
    made = controller(place, pool)
    made.detach_storage_backend()
    assert "floppy" in sglang_run.refusal(lambda: attach(made, place, tiers=["floppy:1MiB"]))
    assert (made.enable_storage, made.storage_backend) == (False, None)
    attach(made, place)
    assert asked(made, range(PAGE)).storage_hit_count == 0
    made.detach_storage_backend()


if __name__ == "__main__":
    run_checks(globals())
