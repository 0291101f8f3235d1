"""Errors, and other calls, while blocks from tiers are on their way: nobody reads what has not come.

The side stream is as late as a device may be, see `test_transfers_late.py`; where a step fails, as early.
"""

import pytest
import torch
from hf_help import check_stored, make_cache, same, tiny_model
from late_lane import lend, prompt, settled, tier_tokens, warm_cache

from quire.engines.hf.request import Request
from quire.exchange import residency
from quire.exchange.export import all_blocks
from quire.exchange.restore import Restore
from quire.tensors.copy import scatter
from quire.tensors.pool import KVPool
from quire.tensors.records import BlockCodec
from turns import by_turns, few

FAMILIES = ["llama", "gemma3_text", "mistral+window", "deepseek_v3", "qwen3_next", "falcon_h1"]
EVEN, ODD = few(FAMILIES, *FAMILIES[::3]), few(FAMILIES, *FAMILIES[1::3])
"""Half of the families, which take turns from test to test; the long run has all of them in each."""


@pytest.fixture
def _late(monkeypatch):
    lend(monkeypatch)


class FailedError(Exception):
    pass


WANTED = []


def fail_if_wanted(*_):
    if WANTED:
        raise FailedError


@pytest.mark.cases(2)
@pytest.mark.usefixtures("_late")
@pytest.mark.parametrize(
    ("family", "where"), by_turns(FAMILIES, ["before", "first layer", "last layer"])
)
def test_an_error_leaves_blocks_that_others_can_read(family, where, host):
    model, ids = tiny_model(family), prompt(1)
    layers = next(each for each in model.modules() if isinstance(each, torch.nn.ModuleList))
    module = {"before": model, "first layer": layers[0], "last layer": layers[-1]}[where]
    handle = module.register_forward_pre_hook(fail_if_wanted)  # a model with a hook is another one
    try:
        cache = warm_cache(model, host, ids)
        WANTED.append(True)
        with pytest.raises(FailedError):
            cache.generate(ids, max_new_tokens=4)
        WANTED.clear()
        assert settled(cache)
        text = same(model, cache, ids)
        assert tier_tokens(cache) == 0, "it is in the pools"
        assert cache.last.cached_tokens == 80
        check_stored(model, cache, text[0])
    finally:
        WANTED.clear()
        handle.remove()


@pytest.mark.usefixtures("_late")
@pytest.mark.parametrize("family", EVEN)
def test_an_error_before_the_working_cache_leaves_blocks_that_others_can_read(
    family, host, monkeypatch
):
    model, ids = tiny_model(family), prompt(1)
    cache = warm_cache(model, host, ids)

    def fail(*_):
        raise FailedError

    with monkeypatch.context() as patched:
        patched.setattr("quire.engines.hf.request.Request.start", fail)
        with pytest.raises(FailedError):
            cache.generate(ids, max_new_tokens=4)
    assert settled(cache)
    same(model, cache, ids)
    assert tier_tokens(cache) == 0
    assert cache.last.cached_tokens == 80


@pytest.mark.cases(1)
@pytest.mark.parametrize("family", ODD)
def test_blocks_whose_transfer_fails_are_found_by_no_request(family, host, monkeypatch):
    lend(monkeypatch, "early")
    model, ids = tiny_model(family), prompt(1)
    cache = warm_cache(model, host, ids)

    decode = BlockCodec.decode

    def full(codec, buffers, pool, blocks, layer=None):
        if layer is not None and isinstance(pool, KVPool):
            raise MemoryError("no room on the device")
        decode(codec, buffers, pool, blocks, layer)

    with monkeypatch.context() as patched:
        patched.setattr(BlockCodec, "decode", full)
        with pytest.raises(MemoryError):
            cache.generate(ids, max_new_tokens=4)
    assert cache.kept.store.transfers.is_idle
    assert not cache.kept.store.transfers._then, "buffers have gone back"
    assert cache.manager.num_active == 0
    held = residency(cache.manager, ids[0].numpy(), cache.kept.identity.scope(None))
    assert held.matched == 0
    same(model, cache, ids)
    assert tier_tokens(cache) == 80, "and it comes again"


@pytest.mark.parametrize("family", EVEN)
def test_a_step_that_fails_once_fails_a_call_and_spoils_nothing(family, host, monkeypatch):
    lend(monkeypatch, "early")
    model, ids = tiny_model(family), prompt(1)
    cache = warm_cache(model, host, ids)
    decode, failures = BlockCodec.decode, [MemoryError("no room on the device")]

    def full(codec, buffers, pool, blocks, layer=None):
        if layer is not None and layer == codec.num_layers - 1 and failures:
            raise failures.pop()
        decode(codec, buffers, pool, blocks, layer)

    with monkeypatch.context() as patched:
        patched.setattr(BlockCodec, "decode", full)
        with pytest.raises(MemoryError):
            cache.generate(ids, max_new_tokens=4)
    assert settled(cache)
    text = same(model, cache, ids)
    assert tier_tokens(cache) == 0, "it was written when the call closed"
    check_stored(model, cache, text[0])


@pytest.mark.cases(2)
@pytest.mark.usefixtures("_late")
@pytest.mark.parametrize("between", ["save", "load", "clear", "session", "close"])
def test_calls_during_a_transfer_wait_for_its_blocks(between, host, monkeypatch, tmp_path):
    model, ids = tiny_model("gemma3_text"), prompt(1)
    cache = warm_cache(model, host, ids)
    other = make_cache(model)
    same(model, other, prompt(4))
    other.save(tmp_path / "other")
    start = Request.start
    calls = []

    def begun(request, factory, feed):
        if not calls:
            calls.append(cache.kept.store.transfers.is_idle)
            if between == "save":
                cache.save(tmp_path / "saved")
            elif between == "load":
                cache.load(tmp_path / "other")
            elif between == "clear":
                cache.clear()
            elif between == "session":
                with cache.session(prompt(4)) as past, torch.no_grad():
                    model(prompt(4)[:, past.get_seq_length() :], past_key_values=past)
            else:
                cache.close()
            calls.append(cache.kept.store.transfers.is_idle)
        return start(request, factory, feed)

    monkeypatch.setattr(Request, "start", begun)
    text = same(model, cache, ids)
    assert calls == [False, between != "close"]
    assert settled(cache)
    check_stored(model, cache, text[0])
    if between == "save":
        again = make_cache(model)
        again.load(tmp_path / "saved")
        same(model, again, ids)
        assert again.last.cached_tokens == 80
    same(model, cache, prompt(4))


@pytest.mark.usefixtures("_late")
def test_a_refused_restore_ends_its_transfers(host, monkeypatch):
    model = tiny_model("llama")
    cache = warm_cache(model, host, prompt(1))
    tiers, scope = cache.kept.store.tiers, cache.kept.identity.scope(None)

    def fail(_):
        raise FailedError

    with monkeypatch.context() as patched:
        patched.setattr(Restore, "commit", fail)
        with pytest.raises(FailedError):
            tiers.onboard(prompt(1)[0].numpy(), scope)
    assert settled(cache), "its blocks are somebody else's from now on"
    same(model, cache, prompt(1))
    assert tier_tokens(cache) == 80


@pytest.mark.usefixtures("_late")
def test_a_forward_that_waits_for_tiers_does_not_tell_what_computing_takes(host):
    model = tiny_model("llama")
    cache = warm_cache(model, host, prompt(1))
    cost = cache.kept.store.tiers.cost
    cache.generate(prompt(1), max_new_tokens=2)
    assert tier_tokens(cache) == 80
    assert cost.num_observed == 0
    cache.generate(prompt(2), max_new_tokens=2)
    assert cost.num_observed == 1


@pytest.mark.usefixtures("_late")
def test_nothing_is_kept_while_blocks_are_on_their_way(host, monkeypatch):
    model, ids = tiny_model("bloom"), prompt(1)
    cache = warm_cache(model, host, ids)
    idle = []

    def spied(*arguments):
        idle.append(cache.kept.store.transfers.is_idle)
        scatter(*arguments)

    monkeypatch.setattr("quire.engines.hf.pools.scatter", spied)
    # Its loop feeds the whole prompt: what came is in the pools, and nobody gathers it.
    same(model, cache, ids, prompt_lookup_num_tokens=3, max_new_tokens=30)
    assert tier_tokens(cache) == 80
    assert idle
    assert all(idle)


def test_a_transfer_that_fails_in_a_nested_request_leaves_the_outer_one_its_blocks(
    host, monkeypatch
):
    lend(monkeypatch, "early")
    model, ids = tiny_model("llama"), prompt(1)
    cache = warm_cache(model, host, ids)
    decode, start = BlockCodec.decode, Request.start
    failing, inside = [], []

    def full(codec, buffers, pool, blocks, layer=None):
        if failing:
            raise MemoryError("no room on the device")
        decode(codec, buffers, pool, blocks, layer)

    def begun(request, factory, feed):
        if not inside:
            inside.append(request)
            failing.append("now")
            with pytest.raises(MemoryError):
                cache.generate(prompt(4), max_new_tokens=2)
            failing.clear()
        return start(request, factory, feed)

    monkeypatch.setattr(BlockCodec, "decode", full)
    monkeypatch.setattr(Request, "start", begun)
    text = same(model, cache, ids)
    assert settled(cache)
    check_stored(model, cache, text[0])


@pytest.mark.usefixtures("_late")
def test_records_are_made_of_blocks_that_have_come(host, monkeypatch):
    model, ids = tiny_model("gemma3_text"), prompt(1)
    cache = warm_cache(model, host, ids)
    tiers, start, made = cache.kept.store.tiers, Request.start, []

    def begun(request, factory, feed):
        blocks = list(all_blocks(cache.manager))
        _, records = tiers.encode(blocks)
        made.append((len(blocks), [bytes(record) for record in records]))
        return start(request, factory, feed)

    monkeypatch.setattr(Request, "start", begun)
    cache.generate(ids, max_new_tokens=1)
    cache.generate(ids, max_new_tokens=1)
    assert made[0] == made[1]
    assert made[0][0] >= 5
