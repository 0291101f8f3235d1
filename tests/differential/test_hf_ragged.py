"""Ragged batches: what they compute and what they leave is what each row alone computes."""

import random

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from hf_help import random_ids  # noqa: E402
from hf_ragged import Batch, Ragged, any_batch  # noqa: E402

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


@pytest.mark.parametrize("how", ["generate", "session", "loop"])
@pytest.mark.parametrize("lengths", [(20, 60), (60, 20), (5, 60, 20)], ids=str)
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


@pytest.mark.parametrize("family", SAMPLED)
def test_a_ragged_batch_computes_and_leaves_what_each_row_alone_does(family):
    check(family, range(10))


@pytest.mark.long
@pytest.mark.parametrize("family", [*SAMPLED, *REST])
def test_any_ragged_batch_computes_and_leaves_what_each_row_alone_does(family):
    check(family, range(10, 200))
