"""Ragged batches: what they compute and what they leave is what each row alone computes."""

import random

import pytest
import torch
from hf_help import left_padded, make_cache, random_ids, same, tiny_model
from hf_ragged import Batch, Ragged, any_batch

from quire.errors import ConfigError
from turns import by_turns

SAMPLED = [
    "mistral+window",
    "gemma3_text",
    "gpt_oss",
    "cohere2",
    "llama4_text",
    "qwen3_next",
    "lfm2",
    "falcon_h1",
    "llama",
]
REST = ["gemma2", "olmo3", "exaone4", "lfm3", "bamba", "gemma3n_text", "gemma4_text"]


def text(num_tokens, seed):
    return random_ids(torch.Generator().manual_seed(seed), num_tokens)[0].tolist()


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    ("lengths", "how"),
    by_turns([(20, 60), (60, 20), (5, 60, 20)], ["generate", "session", "loop"]),
    ids=str,
)
@pytest.mark.parametrize("family", ["mistral+window", "gemma2", "llama4_text"])
def test_a_row_whose_padding_reaches_beyond_what_another_has_cached(family, lengths, how):
    rows = [text(n, n) for n in lengths]
    cached = [32 if n == 60 else 0 for n in lengths]
    Ragged(family, 8, 4).run(Batch(rows, cached, how=how, new=[5]))


def check(family, seeds):
    for seed in seeds:
        rng = random.Random(f"{family} {seed}")
        window, block = rng.choice([4, 8, 12]), rng.choice([1, 3, 4, 8])
        batch = any_batch(rng, window, block)
        try:
            Ragged(family, window, block).run(batch)
        except BaseException as error:
            error.add_note(f"seed {seed}: window {window}, block {block}, {batch}")
            raise


@pytest.mark.cases(2)
@pytest.mark.parametrize("family", SAMPLED)
def test_a_ragged_batch_computes_and_leaves_what_each_row_alone_does(family):
    check(family, range(1))


@pytest.mark.long
@pytest.mark.parametrize("family", [*SAMPLED, *REST])
def test_any_ragged_batch_computes_and_leaves_what_each_row_alone_does(family):
    check(family, range(1, 200))


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    ("cropped", "lengths"), by_turns([1, 3, 5, 9, 17, 24], [(15, 26), (26, 15), (40, 26, 61)])
)
@pytest.mark.parametrize("family", ["gemma3_text", "mistral+window", "llama4_text"])
def test_a_batch_that_is_cropped_sees_what_it_held_or_is_refused(family, lengths, cropped):
    """Rows begin with windows of their own: before the last of these a row lacks K and V."""
    model, generator = tiny_model(family), torch.Generator().manual_seed(4)
    cache = make_cache(model, block_size=5)
    texts = [random_ids(generator, n + 1)[0] for n in lengths]
    for text in texts:
        cache.generate(text[None], max_new_tokens=1)
    ids, mask = left_padded(texts)
    positions = (mask.cumsum(-1) - 1).clamp_min(0)
    with cache.session(ids, attention_mask=mask) as past, torch.no_grad():
        start = past.get_seq_length() - cropped
        assert start >= 0
        try:
            past.crop(-cropped)
        except ConfigError:
            assert past.get_seq_length() == start + cropped
            return
        logits = model(
            ids[:, start:],
            attention_mask=mask,
            position_ids=positions[:, start:],
            past_key_values=past,
        ).logits[:, -1]
        whole = model(ids, attention_mask=mask, position_ids=positions).logits[:, -1]
        torch.testing.assert_close(logits, whole, atol=1e-4, rtol=1e-4)
    for text in texts:
        same(model, cache, text[None])
