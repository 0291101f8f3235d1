"""Tiers under requests of every sort: media, batches, adapters, saved caches, explanations, faults."""

import copy
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from hf_help import left_padded, make_cache, random_ids, same, tiny_model
from hf_media_help import equal, media_cache, media_model, picture, request, words

from quire.core import Scope, TokenRange
from quire.engines.hf import PrefixCache
from quire.errors import ConfigError
from quire.tiers.base import Outcome, Tier
from quire.tiers.disk import Disk
from quire.tiers.faults import FaultPlan, Faulty
from quire.tiers.host import Host
from quire.tiers.settings import StackSettings
from quire.tiers.stack import TierStack

OPEN = StackSettings(gate=False)
sys.path.append(str(Path(__file__).parents[1] / "tiers"))


@pytest.fixture
def model():
    return tiny_model("llama")


@pytest.fixture
def ids():
    return random_ids(torch.Generator().manual_seed(3), 90)


@pytest.fixture
def host():
    with TierStack([Host("64MiB")], OPEN) as tiers:
        yield tiers


def tier_tokens(cache):
    return sum(cache.last.tier_tokens.values())


# -- requests ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llava", "qwen2_5_vl"])
def test_images_come_back_with_their_own_content_only(name, host):
    model = media_model(name)
    first = media_cache(model, tiers=host)
    one, two = picture(name, 1), picture(name, 2)
    inputs = request(name, words(1, 21), one, words(2, 30))
    other = request(name, words(1, 21), two, words(2, 30))
    equal(model, first, inputs)
    again = media_cache(model, tiers=host)
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


def test_what_is_not_to_be_stored_goes_down_nowhere(model, ids, host):
    first = make_cache(model, tiers=host)
    same(model, first, ids, ranges=[TokenRange(40, store=False)])
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
    for one, two in zip(first.pools, again.pools, strict=True):
        held = first.manager.residency(ids[0].numpy(), first._weights.scope(None))
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


# -- saved caches --------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "qwen3_next"])
def test_a_saved_cache_is_loaded_warm(family, tmp_path):
    model = tiny_model(family)
    cache = make_cache(model)
    generator = torch.Generator().manual_seed(8)
    shared = random_ids(generator, 50)
    prompts = [torch.cat([shared, random_ids(generator, 40)], dim=1) for _ in range(3)]
    scope = Scope(salt=b"tenant")
    texts = [same(model, cache, ids, scope=scope) for ids in prompts]
    assert cache.save(tmp_path / "saved") > 10
    assert cache.save(tmp_path / "saved") > 10, "again, in its place"
    fresh = make_cache(model)
    came = fresh.load(tmp_path / "saved")
    assert came.causes == {}
    assert 0 < came.num_tokens <= came.num_saved_tokens
    fresh.manager.check()
    for ids, text in zip(prompts, texts, strict=True):
        assert torch.equal(same(model, fresh, ids, scope=scope), text)
        assert fresh.last.cached_tokens >= 80
    same(model, fresh, prompts[0])
    assert fresh.last.cached_tokens == 0, "the salt came along"
    small = make_cache(model, num_blocks=8)
    small.load(tmp_path / "saved")
    same(model, small, prompts[-1], scope=scope)
    assert small.last.cached_tokens >= 64, "what was used last has stayed"


def test_a_saved_cache_of_another_model_or_layout_is_refused(model, ids, tmp_path):
    cache = make_cache(model)
    same(model, cache, ids)
    cache.save(tmp_path / "saved")
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.model.layers[0].mlp.up_proj.weight.view(-1)[1] += 1
    for name, wrong in (
        ("another model", make_cache(other)),
        ("another model", make_cache(model, block_size=8)),
        ("another model", make_cache(model, dtype=torch.bfloat16)),
    ):
        with pytest.raises(ConfigError, match=name):
            wrong.load(tmp_path / "saved")
        assert wrong.manager.num_cached == 0
    (tmp_path / "else").mkdir()
    (tmp_path / "else" / "file").write_text("mine")
    for path in ("nowhere", "else"):
        with pytest.raises(ConfigError, match="no saved cache"):
            make_cache(model).load(tmp_path / path)
    with pytest.raises(ConfigError, match="no saved cache"):
        cache.save(tmp_path / "else")
    (tmp_path / "saved" / "prefixes").write_bytes(b"\x93\x00\x01")
    with pytest.raises(ConfigError, match="no saved cache"):
        make_cache(model).load(tmp_path / "saved")


def test_damaged_records_of_a_saved_cache_are_left_out(model, ids, tmp_path):
    cache = make_cache(model)
    same(model, cache, ids)
    cache.save(tmp_path / "saved")
    for record in (tmp_path / "saved" / "records").rglob("*.quire"):
        data = bytearray(record.read_bytes())
        data[len(data) // 2] ^= 1
        record.write_bytes(data)
    fresh = make_cache(model)
    came = fresh.load(tmp_path / "saved")
    assert came.num_tokens == 0
    assert came.causes
    same(model, fresh, ids)


def test_a_cache_with_tiers_and_one_without_read_each_others_files(model, ids, host, tmp_path):
    plain, tiered = make_cache(model), make_cache(model, tiers=host)
    for one, two in ((plain, tiered), (tiered, plain)):
        same(model, one, ids)
        one.save(tmp_path / "saved")
        two.clear()
        assert two.load(tmp_path / "saved").num_tokens == 96
        same(model, two, ids)
        assert two.last.cached_tokens == 89


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
        (begun,) = cache.prefetch(ids, mode="complete") or [None]
        if begun is not None:
            begun.finish()
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


# -- tiers that fail -----------------------------------------------------------------------

FAULTS = {
    "flipped bits": FaultPlan(corruption=0.5),
    "short reads": FaultPlan(short_reads=0.5),
    "losses": FaultPlan(losses=0.5),
    "full": FaultPlan(full=0.5),
    "errors": FaultPlan(errors=0.5),
    "false hits": FaultPlan(false_hits=0.5),
    "all": FaultPlan(corruption=0.2, errors=0.2, losses=0.2, full=0.2, false_hits=0.2),
}


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "qwen3_next"])
@pytest.mark.parametrize("fault", FAULTS)
def test_tiers_that_fail_are_misses_with_causes_and_the_tokens_stay_right(family, fault):
    model = tiny_model(family)
    faulty = Faulty(Host("64MiB"), FAULTS[fault], seed=3)
    settings = StackSettings(gate=False, failures=10**6)
    prompts = [random_ids(torch.Generator().manual_seed(seed), 60) for seed in range(3)]
    with TierStack([faulty], settings) as tiers:
        cache = make_cache(model, num_blocks=5, tiers=tiers)
        plain = {}
        for turn in range(2):
            for at, ids in enumerate(prompts):
                text = cache.generate(ids, max_new_tokens=4)
                if at not in plain:
                    plain[at] = model.generate(ids, max_new_tokens=4)
                assert torch.equal(text, plain[at]), turn
                cache.manager.check()
        assert sum(faulty.met.values()), "the fault has happened"


def test_a_tier_that_hangs_costs_no_more_than_the_deadline(model, ids):
    faulty = Faulty(Host("64MiB"), FaultPlan(), seed=1)
    settings = StackSettings(
        gate=False, lookup_timeout_s=0.05, load_timeout_s=0.1, close_timeout_s=0.1
    )
    tiers = TierStack([faulty], settings)
    try:
        same(model, make_cache(model, tiers=tiers), ids)
        assert tiers.drain(20)
        faulty.plan = FaultPlan(hangs=1.0, hang_s=2.0)
        cache = make_cache(model, tiers=tiers)
        began = time.monotonic()
        cache.generate(ids, max_new_tokens=1)
        plain = time.monotonic()
        model.generate(ids, max_new_tokens=1)
        bound = 2 * (time.monotonic() - plain) + 0.05 + 0.1 + 0.5
        assert plain - began < bound
        same(model, cache, ids)
    finally:
        tiers.close()


class Raising(Tier):
    """A tier with bugs: each call raises what no tier should."""

    name = "raising"

    def _get(self, keys, buffers, timeout_s, found):
        raise KeyError("a bug")

    def _put(self, keys, records, timeout_s, done):
        raise RuntimeError("a bug")

    def _contains(self, keys, timeout_s):
        return [True] * len(keys)

    def _delete(self, keys, timeout_s):
        raise ValueError("a bug")

    def _size(self):
        return -1, -1, -1


def test_even_a_tier_with_bugs_fails_no_request(model, ids):
    with TierStack([Raising()], OPEN) as tiers:
        cache = make_cache(model, tiers=tiers)
        same(model, cache, ids)
        assert cache.last.tier_tokens == {}
        assert cache.last.tier_misses.get(Outcome.ERROR, 0) > 0


# -- another process -----------------------------------------------------------------------

WRITER = """
import sys
sys.path[:0] = [{here!r}]
import torch
from hf_help import make_cache, random_ids, tiny_model
ids = random_ids(torch.Generator().manual_seed(3), 90)
cache = make_cache(tiny_model("llama"), tiers=[{url!r}])
cache.generate(ids, max_new_tokens=8)
assert cache.tiers.drain(30)
cache.close()
"""


def test_another_process_has_left_it_in_redis(model, ids, tmp_path):
    from servers import running

    with running(tmp_path) as server:
        code = WRITER.format(here=str(Path(__file__).parent), url=server.url)
        subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
        with make_cache(model, tiers=[server.url]) as cache:
            same(model, cache, ids)
            assert cache.last.tier_tokens == {"redis": 80}
            server.stop()
            cache.manager.clear()
            same(model, cache, ids)
            assert cache.last.tier_tokens == {}


def test_a_prefix_cache_without_tiers_asks_for_nothing_of_them(model):
    assert PrefixCache(model, "1MiB").tiers is None
