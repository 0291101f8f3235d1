"""Whatever comes from tiers comes late: what is read too early is NaN, or bytes of nothing.

On CUDA, blocks get into pools and working caches on a stream of their own. Here the stream is
simulated: its work is done when an event behind it is waited for, and no moment before, so that
each wait that is missing shows in the tokens.
"""

import pytest
import torch
from hf_help import check_stored, left_padded, make_cache, random_ids, same, tiny_model
from late_lane import lane_of, lend

from quire.engines.hf.request import Request
from quire.tensors.pool import KVPool
from quire.tensors.records import BlockCodec
from quire.tiers.host import Host
from quire.tiers.stack import StackSettings, TierStack

OPEN = StackSettings(gate=False)
FAMILIES = ["llama", "gemma3_text", "mistral+window", "deepseek_v3", "qwen3_next", "falcon_h1"]
PURE = ["llama", "gemma3_text", "deepseek_v3"]


@pytest.fixture(params=["late", "early"])
def kind(request):
    return request.param


@pytest.fixture
def _late(monkeypatch):
    lend(monkeypatch)


@pytest.fixture
def host():
    with TierStack([Host("64MiB")], OPEN) as tiers:
        yield tiers


def prompt(seed, num_tokens=90):
    return random_ids(torch.Generator().manual_seed(seed), num_tokens)


def tier_tokens(cache):
    return sum(cache.last.tier_tokens.values())


def warm_cache(model, tiers, *texts, **options):
    """A cache with empty pools above tiers that hold these texts."""
    first = make_cache(model, tiers=tiers)
    for text in texts:
        first.generate(text, max_new_tokens=2)
    return make_cache(model, tiers=tiers, **options)


def settled(cache):
    """Nothing is on its way any more, and every buffer has gone back."""
    transfers = cache._store.transfers
    return transfers.is_idle and not transfers._then and not lane_of(cache).waiting


@pytest.mark.parametrize("family", FAMILIES)
def test_a_prompt_gives_the_same_tokens_and_layers_come_one_by_one(family, kind, host, monkeypatch):
    lend(monkeypatch, kind)
    model = tiny_model(family)
    cache = warm_cache(model, host, prompt(1))
    text = same(model, cache, prompt(1))
    assert cache.last.tier_tokens == {"host": 80}
    assert settled(cache)
    assert lane_of(cache).num_sent
    assert lane_of(cache).most_behind <= 4, "two layers, each a record and a gather"
    check_stored(model, cache, text[0])
    same(model, cache, torch.cat([text, prompt(2, 20)], dim=1))
    check_stored(model, cache, text[0])


@pytest.mark.usefixtures("_late")
@pytest.mark.parametrize("family", FAMILIES)
def test_rows_of_a_batch_come_late_each_by_itself(family, host):
    model = tiny_model(family)
    texts = [prompt(seed, n)[0] for seed, n in ((1, 90), (2, 70), (3, 33), (1, 60))]
    cache = warm_cache(model, host, *(text[None] for text in texts[:3]))
    ids, mask = left_padded(texts)
    out = same(model, cache, ids, attention_mask=mask)
    assert tier_tokens(cache) >= 80 + 64 + 32
    assert settled(cache)
    for row in out:
        check_stored(model, cache, row[row != 0])


@pytest.mark.usefixtures("_late")
@pytest.mark.parametrize("family", FAMILIES)
def test_beams_and_samples_read_what_has_come(family, host):
    model = tiny_model(family)
    arguments = ({"num_beams": 3}, {"do_sample": True, "num_return_sequences": 3})
    for seed, each in enumerate(arguments):
        cache = warm_cache(model, host, prompt(seed))
        same(model, cache, prompt(seed), **each)
        assert tier_tokens(cache)
        assert settled(cache)


@pytest.mark.usefixtures("_late")
@pytest.mark.parametrize("family", PURE)
def test_pools_that_evict_what_came_hand_down_what_was_there(family):
    model = tiny_model(family)
    for write in ("through", "back"):
        with TierStack([Host("64MiB")], StackSettings(gate=False, write=write)) as tiers:
            cache = make_cache(model, num_blocks=9, tiers=tiers)
            prompts = [prompt(seed, 70 + 5 * seed) for seed in range(4)]
            came = 0
            for _ in range(2):
                for ids in prompts:
                    text = same(model, cache, ids)
                    came += tier_tokens(cache)
                    check_stored(model, cache, text[0])
            assert came >= 64


@pytest.mark.usefixtures("_late")
@pytest.mark.parametrize("write", ["through", "back"])
def test_rows_that_evict_each_other_in_one_batch_read_their_own(write):
    model = tiny_model("llama")
    texts = [prompt(seed, 60)[0] for seed in range(3)]
    with TierStack([Host("64MiB")], StackSettings(gate=False, write=write)) as tiers:
        first = make_cache(model, tiers=tiers)
        for text in texts:
            first.generate(text[None], max_new_tokens=2)
        first.close()
        for num_blocks in (4, 5, 7, 9):
            cache = make_cache(model, num_blocks=num_blocks, tiers=tiers)
            ids = torch.stack(texts)
            for rows in (ids, ids.flip(0)):
                out = same(model, cache, rows)
                for row in out:
                    check_stored(model, cache, row)
            assert settled(cache)


@pytest.mark.usefixtures("_late")
@pytest.mark.parametrize("family", FAMILIES)
def test_a_session_lends_what_has_come(family, host):
    model, ids = tiny_model(family), prompt(1)
    cache = warm_cache(model, host, ids)
    with torch.no_grad(), cache.session(ids) as past:
        assert settled(cache), "others may read the pools while a session is open"
        held = past.get_seq_length()
        assert held
        for layer in past.kv_layers.values():
            assert not layer.keys.isnan().any()
            assert not layer.values.isnan().any()
        got = model(ids[:, held:], past_key_values=past, use_cache=True).logits[:, -1]
        torch.testing.assert_close(got, model(ids).logits[:, -1], atol=1e-4, rtol=1e-4)


@pytest.mark.usefixtures("_late")
@pytest.mark.parametrize("family", ["llama", "deepseek_v3"])
def test_a_prompt_that_parts_inside_a_block_copies_what_has_come(family, host):
    model, ids = tiny_model(family), prompt(1)
    other = ids.clone()
    other[:, 71:] = prompt(2)[:, 71:]
    cache = warm_cache(model, host, ids)
    mixed = torch.cat([ids, other])
    for row in same(model, cache, mixed):
        check_stored(model, cache, row)
    assert tier_tokens(cache) == 80
    assert cache.last.cached_tokens == 2 * 71, "inside a block of the other row"


class FailedError(Exception):
    pass


@pytest.mark.usefixtures("_late")
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("where", ["before", "first layer", "last layer"])
def test_an_error_leaves_blocks_that_others_can_read(family, where, host):
    model, ids = tiny_model(family), prompt(1)
    cache = warm_cache(model, host, ids)
    layers = next(each for each in model.modules() if isinstance(each, torch.nn.ModuleList))
    module = {"before": model, "first layer": layers[0], "last layer": layers[-1]}[where]

    def fail(*_):
        raise FailedError

    handle = module.register_forward_pre_hook(fail)
    try:
        with pytest.raises(FailedError):
            cache.generate(ids, max_new_tokens=4)
    finally:
        handle.remove()
    assert settled(cache)
    text = same(model, cache, ids)
    assert tier_tokens(cache) == 0, "it is in the pools"
    assert cache.last.cached_tokens == 80
    check_stored(model, cache, text[0])


@pytest.mark.usefixtures("_late")
@pytest.mark.parametrize("family", FAMILIES)
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


@pytest.mark.parametrize("family", FAMILIES)
def test_what_cannot_be_written_is_found_by_nobody(family, host, monkeypatch):
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
    assert cache._store.transfers.is_idle
    assert not cache._store.transfers._then, "buffers have gone back"
    assert cache.manager.num_active == 0
    held = cache.manager.residency(ids[0].numpy(), cache._weights.scope(None))
    assert held.matched == 0
    same(model, cache, ids)
    assert tier_tokens(cache) == 80, "and it comes again"


@pytest.mark.parametrize("family", FAMILIES)
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


@pytest.mark.usefixtures("_late")
@pytest.mark.parametrize("between", ["save", "load", "clear", "rebalance", "session", "close"])
def test_what_is_done_while_blocks_are_on_their_way_waits_for_them(
    between, host, monkeypatch, tmp_path
):
    model, ids = tiny_model("gemma3_text"), prompt(1)
    cache = warm_cache(model, host, ids)
    other = make_cache(model)
    same(model, other, prompt(4))
    other.save(tmp_path / "other")
    start = Request.start
    calls = []

    def begun(request, making, feed):
        if not calls:
            calls.append(cache._store.transfers.is_idle)
            if between == "save":
                cache.save(tmp_path / "saved")
            elif between == "load":
                cache.load(tmp_path / "other")
            elif between == "clear":
                cache.clear()
            elif between == "rebalance":
                cache._store.resize({g.name: g.num_blocks - 8 for g in cache.memory()})
            elif between == "session":
                with cache.session(prompt(4)) as past, torch.no_grad():
                    model(prompt(4)[:, past.get_seq_length() :], past_key_values=past)
            else:
                cache.close()
            calls.append(cache._store.transfers.is_idle)
        return start(request, making, feed)

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
