"""Models with windows, chunks and states: the tokens are those of the plain model."""

import pytest
import torch
from hf_help import (
    HYBRID_FAMILIES,
    MORE_HYBRID_FAMILIES,
    RECURRENT_FAMILIES,
    WINDOWED_FAMILIES,
    check_stored,
    left_padded,
    make_cache,
    prompt,
    same,
    tiny_model,
)

from quire import ops
from quire.engines.hf import PrefixCache, pools
from quire.engines.hf import request as requests
from quire.errors import ConfigError, UnsupportedModel
from quire.tensors import KVLayout
from turns import by_turns, few

OF_A_KIND = "gemma2", "gpt_oss", "llama4_text", "qwen3_next", "bamba", "lfm3"
"""A family with each kind of layers; the long run has the others too."""
MORE = list(MORE_HYBRID_FAMILIES)
BOTH = [*HYBRID_FAMILIES, *MORE]


@pytest.mark.cases(1)
@pytest.mark.parametrize("family", few(MORE, *MORE[::3]))
def test_every_family_reuses_a_ragged_batch_over_three_turns(family):
    model = tiny_model(family)
    cache = make_cache(model, block_size=4)
    texts = [prompt(n, n)[0] for n in (31, 44)]
    for turn in range(3):
        padded, mask = left_padded(texts)
        out = same(model, cache, padded, attention_mask=mask, max_new_tokens=9)
        texts = [torch.cat([row[row != 0], prompt(4, turn)[0]]) for row in out]
    assert cache.last.cached_tokens > cache.last.computed_tokens
    for one in texts:
        assert check_stored(model, cache, one) > 40


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    ("family", "arguments"),
    by_turns(BOTH, [{"num_beams": 3}, {"do_sample": True}], default=[*HYBRID_FAMILIES][::3]),
)
def test_rows_of_a_ragged_batch_multiply_over_two_turns(family, arguments):
    model = tiny_model(family)
    cache = make_cache(model, block_size=4)
    texts = [prompt(n, n)[0] for n in (31, 44)]
    for turn in range(2):
        ids, mask = left_padded(texts)
        arguments = {"num_return_sequences": 3, "max_new_tokens": 6, **arguments}
        out = same(model, cache, ids, attention_mask=mask, **arguments)
        texts = [torch.cat([out[row][out[row] != 0], prompt(3, turn)[0]]) for row in (1, 3)]
    assert cache.last.cached_tokens > 40


@pytest.mark.cases(1)
@pytest.mark.parametrize("family", few(MORE, *MORE[1::3]))
def test_every_family_branches_anywhere_and_finds_its_head(family):
    model = tiny_model(family)
    cache = make_cache(model, block_size=4)
    trunk = prompt(40)
    for at in (11, 33, 33):
        for seed in (1, 2):
            branch = torch.cat([trunk[:, :at], prompt(13, 10 * at + seed)], dim=1)
            same(model, cache, branch, max_new_tokens=3, num_return_sequences=2, do_sample=True)
    assert cache.last.cached_tokens >= 44


def test_layers_of_two_shapes_have_a_pool_each():
    cache = make_cache(tiny_model("gemma4_text"))
    assert [(g.name, g.layers, g.memory.k_width) for g in cache.layout.groups] == [
        ("full", (1, 3), 16),
        ("sliding", (0, 2), 8),
    ]


def test_layers_that_share_the_kv_of_others_keep_none():
    cache = make_cache(tiny_model("gemma3n_text"))
    assert [(g.name, g.layers) for g in cache.layout.groups] == [("full", (1,)), ("sliding", (0,))]


def test_a_hybrid_layer_has_a_pool_for_its_columns_and_one_for_its_states():
    cache = make_cache(tiny_model("falcon_h1"))
    assert [(g.name, g.layers) for g in cache.layout.groups] == [
        ("full", (0, 1, 2)),
        ("recurrent", (0, 1, 2)),
    ]


@pytest.mark.cases(2)
@pytest.mark.parametrize("family", few(HYBRID_FAMILIES, *OF_A_KIND))
def test_a_next_turn_computes_what_is_new(family):
    model = tiny_model(family)
    cache = make_cache(model, block_size=4)
    first = same(model, cache, prompt(50), max_new_tokens=15, min_new_tokens=15)
    assert cache.last.cached_tokens == 0
    same(model, cache, torch.cat([first, prompt(6, 1)], dim=1))
    assert cache.last.cached_tokens == 64  # the last new token has no KV, and 64 ends a block


@pytest.mark.cases(1)
@pytest.mark.parametrize("family", few(RECURRENT_FAMILIES, "qwen3_next", "bamba", "lfm3"))
def test_a_prompt_is_found_again_at_its_last_block_and_where_others_left_it(family):
    model = tiny_model(family)
    cache = make_cache(model, block_size=4)
    ids, other = prompt(50), torch.cat([prompt(50)[:, :30], prompt(20, 1)], dim=1)
    same(model, cache, ids)
    same(model, cache, ids)
    assert cache.last.cached_tokens == 48
    same(model, cache, other)
    assert cache.last.cached_tokens == 0  # no state was kept at 28, where the two part
    assert cache.stats.missed["window"] == 28
    third = torch.cat([ids[:, :30], prompt(20, 2)], dim=1)
    same(model, cache, third)
    assert cache.last.cached_tokens == 28


def test_states_are_kept_at_each_multiple_of_the_interval():
    model = tiny_model("qwen3_next")
    cache = make_cache(model, block_size=4, snapshot_interval=16)
    same(model, cache, prompt(70))
    same(model, cache, torch.cat([prompt(70)[:, :40], prompt(5, 1)], dim=1))
    assert cache.last.cached_tokens == 32


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    "family", few(["mistral+window", "llama4_text", "qwen3_next", "lfm3"], "mistral+window", "lfm3")
)
def test_rows_that_end_at_different_columns_are_brought_to_one(family):
    model = tiny_model(family)
    cache = make_cache(model, block_size=4)
    long, short = prompt(61)[0], prompt(33, 1)[0]
    for one in (long, short[:20]):
        same(model, cache, one[None])
    ids, mask = left_padded([long, short, prompt(1, 2)[0], long[:50]])
    same(model, cache, ids, attention_mask=mask)
    assert cache.last.cached_tokens >= 60 + 16
    same(model, cache, ids, attention_mask=mask, num_beams=2)
    assert check_stored(model, cache, short) == 32


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    "family", few(["gemma2", "llama4_text", "qwen3_next", "bamba"], "llama4_text", "qwen3_next")
)
def test_a_session_of_several_rows_and_a_loop_of_its_own(family):
    model = tiny_model(family)
    cache = make_cache(model, block_size=4)
    ids = prompt(40)
    plain = model.generate(ids, max_new_tokens=9)
    for _ in range(2):
        with cache.session(ids) as past, torch.no_grad():
            out = ids
            while out.shape[1] < plain.shape[1]:
                start = past.get_seq_length()
                positions = torch.arange(start, out.shape[1])[None]
                logits = model(out[:, start:], past_key_values=past, position_ids=positions).logits
                out = torch.cat([out, logits[:, -1:].argmax(-1)], dim=1)
            past.check()
        assert torch.equal(out, plain)
    assert cache.last.cached_tokens >= 36


def test_chunked_prefill_keeps_states_at_the_same_places():
    model = tiny_model("qwen3_next")
    cache = make_cache(model, block_size=4)
    for _ in range(2):
        same(model, cache, prompt(50), prefill_chunk_size=7)
    assert cache.last.cached_tokens == 48


@pytest.mark.cases(1)
@pytest.mark.parametrize("family", ["mistral+window", "qwen3_next"])
def test_a_row_that_ends_early_keeps_what_came_before_its_end(family):
    model = tiny_model(family)
    cache = make_cache(model, block_size=4)
    ids, mask = left_padded([prompt(30)[0], prompt(24, 1)[0]])
    probe = model.generate(ids, attention_mask=mask, max_new_tokens=30, eos_token_id=-1)
    end = int(probe[0, 30 + 9])
    out = same(
        model, cache, ids, attention_mask=mask, max_new_tokens=30, eos_token_id=end, pad_token_id=0
    )
    stop = 30 + int((out[0, 30:] == end).nonzero()[0])
    assert check_stored(model, cache, out[0, : stop + 1]) >= stop // 4 * 4
    last = out[0, 30:]
    assert bool((last[stop - 30 + 1 :] == 0).all())


@pytest.mark.parametrize("family", ["qwen3_next", "bamba"])
def test_drafting_for_a_recurrent_model_is_refused_as_transformers_does(family):
    model = tiny_model(family)
    cache = make_cache(model)
    with pytest.raises(ValueError, match="not supported with stateful models"):
        cache.generate(prompt(20), prompt_lookup_num_tokens=3, max_new_tokens=4)
    assert cache.manager.num_active == 0
    same(model, cache, prompt(20))


def test_kv_from_before_a_failed_forward_is_kept():
    model = tiny_model("qwen3_next")
    cache = make_cache(model, block_size=4)
    with cache.session(prompt(40)) as past:
        assert past.get_seq_length() == 36  # computed up to the last state that is kept
        hook = model.model.layers[1].register_forward_pre_hook(_fail)
        with pytest.raises(RuntimeError, match="in the middle"):
            model(prompt(40)[:, 36:], past_key_values=past)
        hook.remove()
        with pytest.raises(ConfigError, match="open a new session"):
            model(prompt(40)[:, 36:], past_key_values=past)
    ops.check(cache.manager)
    assert cache.manager.num_active == 0
    assert check_stored(model, cache, prompt(40)[0]) == 36
    same(model, cache, prompt(40))


def _fail(*_):
    raise RuntimeError("in the middle")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("family", "words"),
    [
        ("jamba", "two pieces|several tokens at once"),
        ("recurrent_gemma", "did not write 8 columns"),
        ("minimax", "cache of its own"),
    ],
)
def test_a_model_that_does_not_go_on_from_its_states_is_found_out(family, words, dtype):
    with pytest.raises(UnsupportedModel, match=words):
        PrefixCache(tiny_model(family, dtype=dtype), "1MiB")


@pytest.mark.cases(1)
@pytest.mark.parametrize("family", few(BOTH, "gemma2", "bamba", "lfm3"))
def test_a_model_in_half_precision_is_not_refused_for_its_rounding(family):
    PrefixCache(tiny_model(family, dtype=torch.bfloat16), "4MiB")


# -- mistakes must be noticed ---------------------------------------------------------------


@pytest.mark.parametrize("family", few(WINDOWED_FAMILIES, "gemma2", "llama4_text"))
def test_a_window_restored_two_tokens_short_is_noticed(family, monkeypatch):
    model = tiny_model(family)
    cache = make_cache(model, block_size=2)
    same(model, cache, prompt(47))
    right = pools.first_token

    def short(kind, num_tokens):
        first = right(kind, num_tokens)
        return min(first + 2, num_tokens) if first else 0

    monkeypatch.setattr(pools, "first_token", short)
    monkeypatch.setattr(requests, "first_token", short)
    with pytest.raises(AssertionError):
        same(model, cache, prompt(47))
    assert cache.last.cached_tokens == 46


@pytest.mark.cases(1)
@pytest.mark.parametrize("family", few(RECURRENT_FAMILIES, "qwen3_next", "lfm2"))
def test_a_state_of_another_boundary_is_noticed(family, monkeypatch):
    model = tiny_model(family)
    cache = make_cache(model, block_size=4, snapshot_interval=4)
    right, states = pools.HfStore._write_states, []

    def late(self, seq, new):
        states.append(new)
        right(self, seq, states[max(len(states) - 2, 0)])

    monkeypatch.setattr(pools.HfStore, "_write_states", late)
    same(model, cache, prompt(47))
    with pytest.raises(AssertionError):
        same(model, cache, prompt(47))
    assert cache.last.cached_tokens == 44


# -- memory ---------------------------------------------------------------------------------


def test_a_capacity_is_shared_out_and_told():
    model = tiny_model("qwen3_next")
    cache = make_cache(model, num_blocks={"full": 30, "recurrent": 7}, block_size=4)
    same(model, cache, prompt(30))
    full, recurrent = cache.memory()
    assert (full.num_blocks, full.cached, full.num_layers) == (30, 8, 1)
    assert (recurrent.num_blocks, recurrent.cached, recurrent.num_layers) == (7, 2, 2)
    assert full.share + recurrent.share == pytest.approx(1)
    assert cache.kept.num_bytes == sum(g.num_blocks * g.bytes_per_block for g in cache.memory())
    assert "full 8 of 30, recurrent 2 of 7 blocks of 4 tokens used" in repr(cache)


def test_groups_are_named_all_or_not_at_all():
    with pytest.raises(ConfigError, match=r"names the groups \['full'\]; .* \['full', 'sliding'\]"):
        make_cache(tiny_model("gemma2"), num_blocks={"full": 30})


def test_a_recurrent_group_needs_a_state_to_work_on_and_one_to_keep():
    with pytest.raises(ConfigError, match="'recurrent' 1 block; it needs 2"):
        make_cache(tiny_model("qwen3_next"), num_blocks={"full": 30, "recurrent": 1})


def test_a_stored_dtype_rounds_columns_and_no_states():
    cache = make_cache(tiny_model("qwen3_next"), dtype=torch.bfloat16)
    full, recurrent = cache.layout.groups
    assert isinstance(full.memory, KVLayout)
    assert full.memory.dtype == torch.bfloat16
    assert {t.dtype for layer in recurrent.memory.layers for t in layer} == {torch.float32}
