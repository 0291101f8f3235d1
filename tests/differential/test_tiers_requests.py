"""Tiers under requests of every sort: media, batches, adapters, saved caches, explanations, faults."""

import copy
import sys
from pathlib import Path

import pytest
import torch
from hf_help import left_padded, make_cache, random_ids, same
from hf_media_help import equal, media_model, picture, request, words

from quire.core import Scope
from quire.errors import ConfigError
from quire.exchange import residency
from quire.tiers.disk import Disk
from quire.tiers.faults import FaultPlan, Faulty
from quire.tiers.host import Host
from quire.tiers.stack.settings import StackSettings
from quire.tiers.stack.stack import TierStack

OPEN = StackSettings(gate=False)
sys.path.append(str(Path(__file__).parents[1] / "tiers"))


@pytest.fixture
def ids():
    return random_ids(torch.Generator().manual_seed(3), 90)


def tier_tokens(cache):
    return sum(cache.last.tier_tokens.values())


# -- requests ------------------------------------------------------------------------------


@pytest.mark.cases(1)
@pytest.mark.parametrize("name", ["llava", "qwen2_5_vl"])
def test_images_come_back_with_their_own_content_only(name, host):
    model = media_model(name)
    first = make_cache(model, tiers=host, block_size=4)
    one, two = picture(name, 1), picture(name, 2)
    inputs = request(name, words(1, 21), one, words(2, 30))
    other = request(name, words(1, 21), two, words(2, 30))
    equal(model, first, inputs)
    again = make_cache(model, tiers=host, block_size=4)
    equal(model, again, other)
    before = again.last.cached_tokens
    size = again.manager.block_size
    assert before <= 21 // size * size + size - 1, "text before the image"
    equal(model, again, inputs)
    assert tier_tokens(again)
    assert again.last.cached_tokens > before


def test_rows_of_a_batch_come_back_each_by_itself(model, host):
    generator = torch.Generator().manual_seed(5)
    texts = [random_ids(generator, n)[0] for n in (90, 70, 33)]
    ids, mask = left_padded(texts)
    first = make_cache(model, tiers=host)
    same(model, first, ids, attention_mask=mask)
    again = make_cache(model, tiers=host)
    same(model, again, ids, attention_mask=mask)
    assert again.last.tier_tokens == {"host": 80 + 64 + 32}


@pytest.mark.parametrize("dtype", [torch.bfloat16, None])
def test_pools_of_another_dtype_do_not_find_each_others_records(model, ids, host, dtype):
    first = make_cache(model, tiers=host, dtype=torch.float16)
    first.generate(ids, max_new_tokens=4)
    again = make_cache(model, tiers=host, dtype=dtype)
    again.generate(ids, max_new_tokens=4)
    assert tier_tokens(again) == 0
    same_dtype = make_cache(model, tiers=host, dtype=torch.float16)
    same_dtype.generate(ids, max_new_tokens=4)
    assert tier_tokens(same_dtype) == 80


def test_blocks_of_another_size_do_not_find_each_others_records(model, ids, host):
    same(model, make_cache(model, tiers=host), ids)
    again = make_cache(model, tiers=host, block_size=8)
    same(model, again, ids)
    assert tier_tokens(again) == 0


def test_tokens_beyond_store_until_reach_no_tier(model, ids, host):
    first = make_cache(model, tiers=host)
    same(model, first, ids, store_until=40)
    again = make_cache(model, tiers=host)
    same(model, again, ids)
    assert again.last.tier_tokens == {"host": 32}


def test_a_prefix_that_does_not_fit_the_pool_is_cut(model, ids, host):
    same(model, make_cache(model, tiers=host), ids)
    for num_blocks in (1, 2, 4):
        small = make_cache(model, num_blocks=num_blocks, tiers=host)
        same(model, small, ids)
        assert small.last.tier_tokens in (
            {},
            {"host": 16 * num_blocks},
            {"host": 16 * (num_blocks - 1)},
        )


def test_records_in_fewer_bits_come_back_close_and_apart_from_exact_ones(model, ids, host):
    first = make_cache(model, tiers=host, tier_dtype="int8")
    first.generate(ids, max_new_tokens=4)
    exact = make_cache(model, tiers=host)
    same(model, exact, ids)
    assert tier_tokens(exact) == 0
    again = make_cache(model, tiers=host, tier_dtype="int8")
    again.generate(ids, max_new_tokens=4)
    assert tier_tokens(again) == 80
    for one, two in zip(first.kept.pools, again.kept.pools, strict=True):
        held = residency(first.manager, ids[0].numpy(), first.kept.identity.scope(None))
        assert held.matched == 5
        assert one.k.shape == two.k.shape


# -- weights -------------------------------------------------------------------------------


def test_other_weights_never_find_it_whatever_the_sample_of_values_says(model, ids, host):
    changed = copy.deepcopy(model)
    with torch.no_grad():
        weight = changed.model.layers[0].self_attn.k_proj.weight
        weight.view(-1)[1] += 1.0  # a value that the sample of 32 does not see
    same(model, make_cache(model, tiers=host), ids)
    again = make_cache(changed, tiers=host)
    same(changed, again, ids)
    assert tier_tokens(again) == 0
    with torch.no_grad():
        weight.view(-1)[1] -= 1.0
    again.clear()
    same(changed, again, ids, scope=Scope(salt="new"))
    assert tier_tokens(again) == 0


def test_weights_that_changed_under_one_name_do_not_meet_in_a_tier(model, ids, host):
    changed = copy.deepcopy(model)
    first = make_cache(changed, tiers=host)
    with torch.no_grad():
        changed.model.layers[0].self_attn.k_proj.weight.view(-1)[1] += 1.0
    same(changed, first, ids, scope=Scope(lora="tuned"))
    with torch.no_grad():
        changed.model.layers[0].self_attn.k_proj.weight.view(-1)[1] += 1.0
    again = make_cache(changed, tiers=host)
    same(changed, again, ids, scope=Scope(lora="tuned"))
    assert tier_tokens(again) == 0


def test_each_adapter_finds_in_a_tier_what_it_computed_itself(model, ids, host):
    pytest.importorskip("peft")
    from test_hf_scopes import add_adapter

    came = []
    for name, seed in (("one", 1), ("one", 1), ("one", 2), ("two", 1)):
        adapted = copy.deepcopy(model)
        add_adapter(adapted, name, seed)
        cache = make_cache(adapted, tiers=host)
        same(adapted, cache, ids)
        came.append(tier_tokens(cache))
    assert came == [0, 80, 0, 0], "the same weights under the same name only"
    plain = make_cache(model, tiers=host)
    same(model, plain, ids)
    assert tier_tokens(plain) == 0


# -- what is said --------------------------------------------------------------------------


def test_explanations_reports_and_the_cache_itself_name_the_tiers(model, ids, tmp_path):
    with TierStack([Host("8MiB"), Disk(tmp_path, "64MiB")], OPEN) as tiers:
        same(model, make_cache(model, tiers=tiers), ids)
        assert tiers.drain(20)
        cache = make_cache(model, tiers=tiers)
        told = cache.explain(ids)
        assert told.in_tiers == [("host", 80)]
        assert "tier host has 80 tokens more" in str(told)
        assert cache.explain(ids, Scope(salt="x")).in_tiers == []
        assert "host > disk" in repr(cache)
        before = cache.manager.stats
        assert cache.manager.num_cached == 0
        assert cache.manager.stats == before
    with TierStack([Host("8MiB"), Disk(tmp_path, "64MiB")], OPEN) as tiers:
        cache = make_cache(model, tiers=tiers)
        assert cache.explain(ids).in_tiers == [("disk", 80)]
        (begun,) = cache.prefetch(ids) or [None]
        if begun is not None:
            begun.finish(30.0)
        same(model, cache, ids)
        assert sum(cache.last.tier_tokens.values()) == 80
        assert cache.prefetch(ids, scope=Scope(salt="x")) == []


def test_a_cache_that_opened_its_tiers_closes_them_and_works_without(model, ids, tmp_path):
    specs = ["host:4MiB", {"kind": "disk", "path": str(tmp_path), "capacity": "32MiB"}]
    with make_cache(model, tiers=specs) as cache:
        same(model, cache, ids)
    cache.close()
    same(model, cache, ids)
    with make_cache(model, tiers=specs) as again:
        same(model, again, ids)
        assert again.last.tier_tokens == {"disk": 80}
    for wrong in ([], None):
        assert make_cache(model, tiers=wrong).tiers is None
    for wrong in ("host:4MiB", ["nothing:here"], [Host("1MiB"), "disk"]):
        with pytest.raises(ConfigError):
            make_cache(model, tiers=wrong)
    with pytest.raises(ConfigError, match="fp4"):
        make_cache(model, tiers=specs, tier_dtype="fp4")
    make_cache(model, tiers=specs).close()


def test_tiers_written_back_get_at_the_end_what_was_never_evicted(model, ids, tmp_path):
    back = StackSettings(gate=False, write="back")
    with TierStack([Disk(tmp_path, "64MiB")], back) as tiers:
        cache = make_cache(model, tiers=tiers)
        same(model, cache, ids)
        assert tiers.stats().tiers[0].stored_bytes == 0
        cache.close()
        assert tiers.drain(20)
        again = make_cache(model, tiers=tiers)
        same(model, again, ids)
        assert again.last.tier_tokens == {"disk": 80}


def test_the_second_use_is_what_stores_where_the_stack_says_so(model, ids):
    with TierStack([Host("64MiB")], StackSettings(gate=False, write="second_use")) as tiers:
        for expected in (0, 0, 80):
            cache = make_cache(model, tiers=tiers)
            same(model, cache, ids)
            assert tier_tokens(cache) == expected


def test_the_gate_loads_nothing_that_computing_beats(model, ids):
    settings = StackSettings()
    slow = Faulty(Host("64MiB"), FaultPlan(latency_s=0.3))
    with TierStack([slow], settings) as tiers:
        first = make_cache(model, tiers=tiers)
        same(model, first, ids)
        assert tiers.drain(20)
        again = make_cache(model, tiers=tiers)
        for seed in range(4):  # learn what computing takes
            same(model, again, random_ids(torch.Generator().manual_seed(seed + 50), 90))
        tiers.gate.estimates[0].observe(1 << 16, 0.4)
        tiers.gate.estimates[0].observe(1 << 16, 0.4)
        tiers.gate.estimates[0].observe(1 << 16, 0.4)
        same(model, again, ids)
        assert tier_tokens(again) == 0
