"""The table on memory in docs/transformers.md: a full cache, long prompts, and hits in tiers."""

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from quire import PrefixCache, demo_model  # noqa: E402

LONG, OTHER = torch.arange(300)[None] % 250, torch.arange(249, 185, -1)[None]


@pytest.fixture(scope="module")
def model():
    return transformers.AutoModelForCausalLM.from_pretrained(demo_model()).eval()


def test_a_prompt_longer_than_the_capacity_is_answered_and_its_head_cached(model):
    cache = PrefixCache(model, "300KiB")  # 7 blocks of 16 tokens
    given = {"input_ids": LONG, "max_new_tokens": 4, "do_sample": False}
    answers = [cache.generate(**given) for _ in range(2)]
    assert all(torch.equal(answer, model.generate(**given)) for answer in answers)
    assert 6 * 16 <= cache.last.cached_tokens <= 7 * 16
    cache.generate(input_ids=OTHER, max_new_tokens=1)
    assert cache.stats.evicted_blocks > 0
    cache.generate(input_ids=LONG, max_new_tokens=1)
    assert 0 < cache.last.cached_tokens < 6 * 16  # the tail went first


def test_a_hit_in_a_tier_counts_as_a_hit(model, tmp_path):
    for _ in range(2):
        with PrefixCache(model, "64MiB", tiers=[f"disk:{tmp_path}?capacity=64MiB"]) as cache:
            cache.generate(input_ids=LONG, max_new_tokens=1)
            assert cache.tiers.drain(60)
            tokens = cache.last.cached_tokens
            assert cache.stats.hit_tokens == tokens
            assert sum(cache.last.tier_tokens.values()) == tokens
            assert cache.stats.restored_blocks * 16 == tokens
    assert tokens == 288
