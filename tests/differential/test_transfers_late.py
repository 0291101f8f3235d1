"""Data from tiers comes late: a read that is too early finds NaN, or bytes of nothing.

On CUDA, blocks get into pools and working caches on a stream of their own. Here the stream is
simulated: its work is done when an event behind it is waited for, and no moment before, so that
each wait that is missing shows in the tokens.
"""

import pytest
import torch
from hf_help import check_stored, left_padded, make_cache, same, tiny_model
from late_lane import lane_of, lend, prompt, settled, tier_tokens, warm_cache

from quire.tiers.host import Host
from quire.tiers.stack import StackSettings, TierStack
from turns import by_turns, few

FAMILIES = ["llama", "gemma3_text", "mistral+window", "deepseek_v3", "qwen3_next", "falcon_h1"]
EVEN, ODD = few(FAMILIES, *FAMILIES[::3]), few(FAMILIES, *FAMILIES[1::3])
"""Half of the families, which take turns from test to test; the long run has all of them in each."""
PURE = ["llama", "gemma3_text", "deepseek_v3"]


@pytest.fixture
def _late(monkeypatch):
    lend(monkeypatch)


@pytest.mark.cases(2)
@pytest.mark.parametrize(("family", "kind"), by_turns(FAMILIES, ["late", "early"]))
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


@pytest.mark.cases(1)
@pytest.mark.usefixtures("_late")
@pytest.mark.parametrize("family", EVEN)
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


@pytest.mark.cases(1)
@pytest.mark.usefixtures("_late")
@pytest.mark.parametrize("family", ODD)
def test_beams_and_samples_read_what_has_come(family, host):
    model = tiny_model(family)
    arguments = ({"num_beams": 3}, {"do_sample": True, "num_return_sequences": 3})
    for seed, each in enumerate(arguments):
        cache = warm_cache(model, host, prompt(seed))
        same(model, cache, prompt(seed), **each)
        assert tier_tokens(cache)
        assert settled(cache)


@pytest.mark.cases(1)
@pytest.mark.usefixtures("_late")
@pytest.mark.parametrize(("family", "write"), by_turns(PURE, ["through", "back"]))
def test_blocks_restored_and_evicted_again_reach_the_tier_unchanged(family, write):
    model = tiny_model(family)
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


@pytest.mark.cases(1)
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
@pytest.mark.parametrize("family", EVEN)
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


@pytest.mark.cases(1)
@pytest.mark.usefixtures("_late")
@pytest.mark.parametrize("family", ODD)
def test_rows_are_joined_and_repeated_before_anything_computes(family, host):
    model = tiny_model(family)
    ids = torch.cat([prompt(1, 81), prompt(2, 81)])  # all but the last token is in tiers
    cache = warm_cache(model, host, ids[:1], ids[1:])
    same(model, cache, ids[:1], num_beams=3)
    assert tier_tokens(cache) == 80
    assert settled(cache)
    cache = make_cache(model, tiers=host)
    for row in same(model, cache, ids):
        check_stored(model, cache, row)
    assert tier_tokens(cache) == 160
    assert settled(cache)
