"""Ragged batches: what they compute and what they leave is what each row alone computes."""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from hf_help import random_ids  # noqa: E402
from hf_ragged import Batch, Ragged, batches  # noqa: E402
from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

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


def check(data, family):
    window, block = data.draw(st.sampled_from([4, 8, 12])), data.draw(st.sampled_from([1, 3, 4, 8]))
    ragged = Ragged(family, window, block)
    ragged.run(data.draw(batches(window, block)))


@pytest.mark.parametrize("family", SAMPLED)
@settings(max_examples=6, deadline=None, derandomize=True, database=None)
@given(data=st.data())
def test_a_ragged_batch_computes_and_leaves_what_each_row_alone_does(family, data):
    check(data, family)


@pytest.mark.long
@pytest.mark.parametrize("family", [*SAMPLED, *REST])
@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_any_ragged_batch_computes_and_leaves_what_each_row_alone_does(family, data):
    check(data, family)
