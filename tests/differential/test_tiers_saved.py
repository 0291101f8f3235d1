"""Saved caches: loaded warm, by the same model and layout only, damaged records left out."""

import copy

import pytest
import torch
from hf_help import make_cache, random_ids, same, tiny_model

from quire import ops
from quire.core import Scope
from quire.errors import ConfigError
from turns import by_turns


@pytest.fixture
def ids():
    return random_ids(torch.Generator().manual_seed(3), 90)


@pytest.mark.cases(1)
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "qwen3_next"])
def test_a_saved_cache_is_loaded_warm(family, tmp_path):
    model = tiny_model(family)
    cache = make_cache(model)
    generator = torch.Generator().manual_seed(8)
    shared = random_ids(generator, 50)
    prompts = [torch.cat([shared, random_ids(generator, 40)], dim=1) for _ in range(3)]
    scope = Scope(salt=b"session", tenant="owner")
    texts = [same(model, cache, ids, scope=scope, max_new_tokens=8) for ids in prompts]
    assert cache.save(tmp_path / "saved") > 10
    assert cache.save(tmp_path / "saved") > 10, "again, in its place"
    fresh = make_cache(model)
    came = fresh.load(tmp_path / "saved")
    assert came.causes == {}
    assert 0 < came.num_tokens <= came.num_saved_tokens
    ops.check(fresh.manager)
    for ids, text in zip(prompts, texts, strict=True):
        assert torch.equal(same(model, fresh, ids, scope=scope, max_new_tokens=8), text)
        assert fresh.last.cached_tokens >= 80
    same(model, fresh, prompts[0])
    assert fresh.last.cached_tokens == 0, "the salt came along"
    small = make_cache(model, num_blocks=8)
    small.load(tmp_path / "saved")
    same(model, small, prompts[-1], scope=scope)
    assert small.last.cached_tokens >= 64, "what was used last has stayed"


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("family", "block_size"),
    by_turns(["gemma3_text", "llama4_text", "qwen3_next"], [16, 32, 64]),
)
def test_blocks_longer_than_a_window_are_saved_and_loaded(family, block_size, tmp_path):
    model = tiny_model(family)
    cache = make_cache(model, block_size=block_size)
    generator = torch.Generator().manual_seed(9)
    prompts = [
        random_ids(generator, length) for length in (block_size + 5, 3 * block_size + 1, 150)
    ]
    for ids in prompts:
        same(model, cache, ids)
    cache.save(tmp_path / "saved")
    fresh = make_cache(model, block_size=block_size)
    assert fresh.load(tmp_path / "saved").causes == {}
    for ids in prompts:
        same(model, fresh, ids)
    assert fresh.last.cached_tokens >= 128


def other_eps(model):
    other = copy.deepcopy(model)
    other.config.rms_norm_eps = 0.5
    return other


def hooked(model):
    other = copy.deepcopy(model)
    other.model.layers[0].register_forward_pre_hook(lambda _m, args: None)
    return other


def test_a_saved_cache_of_another_model_or_layout_is_refused(model, ids, tmp_path):
    cache = make_cache(model)
    same(model, cache, ids)
    cache.save(tmp_path / "saved")
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.model.layers[0].mlp.up_proj.weight.view(-1)[1] += 1
    for name, wrong in (
        (
            r"another model \(1 of \d+ weights differ, the first is model.layers.0.mlp.up_proj.weight\)",
            make_cache(other),
        ),
        (r"another model \(.*config.rms_norm_eps is .*, here 0.5", make_cache(other_eps(model))),
        (
            r"another model \(code and settings of modules is \w+, here \w+\)",
            make_cache(hooked(model)),
        ),
        (r"another layout \(blocks of 16 tokens, here 8\)", make_cache(model, block_size=8)),
        (
            r"another layout \(dtype of full layers is .*float32, here .*16",
            make_cache(model, dtype=torch.bfloat16),
        ),
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
        same(model, one, ids, max_new_tokens=8)
        one.save(tmp_path / "saved")
        two.clear()
        assert two.load(tmp_path / "saved").num_tokens == 96
        same(model, two, ids)
        assert two.last.cached_tokens == 89
