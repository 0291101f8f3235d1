"""quire's attention in llama.cpp, against transformers in float64 and beside llama.cpp's own."""

import itertools
from contextlib import closing

import numpy as np
import pytest
import torch

pytest.importorskip("gguf")
from gguf_engine_help import TOKENS, tiny_file
from transformers import LlamaConfig, LlamaForCausalLM

from gguf_help import write_llama
from quire.engines.gguf import GgufModel, library
from quire.engines.gguf.context import Chunk
from quire.errors import ConfigError

pytestmark = pytest.mark.system("llama.cpp")

SHAPES = [  # heads, heads of K, dimensions of a head, type of K and V
    (3, 3, 16, "f16"),
    (3, 1, 64, "f16"),
    (4, 4, 24, "f32"),
    (5, 1, 80, "f16"),
    (8, 1, 32, "q8_0"),
    (8, 2, 128, "f16"),
    (17, 1, 8, "bf16"),
    (60, 1, 16, "f16"),
    (6, 2, 256, "q4_0"),
]


def without_attention():
    return library.missing() or not library.load().has_attention


@pytest.fixture(autouse=True)
def built():
    if without_attention():
        pytest.skip("the library is not of `quire gguf build` on Linux")


def drawn_model(folder, heads, kv_heads, width, seed):
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=97, hidden_size=4 * heads, intermediate_size=48, num_hidden_layers=2, num_attention_heads=heads,
        num_key_value_heads=kv_heads, head_dim=width, max_position_embeddings=1024, bos_token_id=1, eos_token_id=2,
        initializer_range=0.3,
    )  # fmt: skip
    model = LlamaForCausalLM(config).double().eval()
    return model, write_llama(folder / "drawn.gguf", model, TOKENS)


def traffic(context, random, branches):
    """Decode branches behind a common prompt, in batches of random pieces, among holes; return logits by branch."""
    head, tails = branches
    context.decode(
        [whole((9,), 0, random.integers(3, 97, 150))]
    )  # an idle one, whose cells come first
    context.decode([whole((8,), 0, random.integers(3, 97, 40))])
    context.decode([whole((1,), 0, head)])
    context.cut((9,), 31)
    context.cut((8,))
    ids = range(1, len(tails) + 1)
    for each in ids[1:]:
        context.share(1, (each,), 0, len(head))
    found = {each: [] for each in ids}
    done = dict.fromkeys(ids, 0)
    while left := [each for each in ids if done[each] < len(tails[each - 1])]:
        chosen = sorted(random.permutation(left)[: random.integers(1, len(left) + 1)].tolist())
        chunks = []
        for each in chosen:
            begin = done[each]
            tokens = tails[each - 1][begin : begin + int(random.choice((1, 1, 2, 7, 40)))]
            chunks.append(whole((each,), len(head) + begin, tokens))
            done[each] += len(tokens)
        logits = iter(context.decode(chunks))
        for each, part in zip(chosen, chunks, strict=True):
            found[each] += itertools.islice(logits, len(part.tokens))
    return [np.array(found[each]) for each in ids]


def whole(ids, start, tokens):
    return Chunk(ids, start, np.asarray(tokens, np.int32), np.ones(len(tokens), np.int8))


@pytest.mark.ci
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "-".join(map(str, shape)))
@pytest.mark.parametrize("threads", [1, 2])
def test_logits_are_as_close_to_float64_as_those_of_llama_cpp(tmp_path, shape, threads):
    *sizes, kind = shape
    random = np.random.default_rng(shape[0] * threads)
    reference, file = drawn_model(tmp_path, *sizes, seed=threads)
    head = random.integers(3, 97, 90)
    tails = [random.integers(3, 97, random.integers(1, 120)) for _ in range(6)]
    right = []
    for tail in tails:
        with torch.no_grad():
            ids = torch.tensor(np.concatenate([head, tail]))[None]
            right.append(reference(ids).logits[0, len(head) :].numpy())
    far = {}
    for attention in ("quire", "llama.cpp"):
        settings = {"type_k": kind, "type_v": kind, "n_ctx": 1280, "n_threads": threads}
        model = GgufModel(file, attention=attention, **settings)
        context = model.context()
        found = traffic(context, np.random.default_rng(7), (head, tails))
        far[attention] = [np.abs(a - b).mean() for a, b in zip(found, right, strict=True)]
        context.close()
        model.close()
    assert np.mean(far["quire"]) <= 1.1 * np.mean(far["llama.cpp"]) + 1e-3
    assert max(far["quire"]) <= 1.5 * max(far["llama.cpp"]) + 1e-3


def test_another_sequence_does_not_show_in_logits_and_each_is_computed_by_the_code_asked_for():
    tokens = np.random.default_rng(0).integers(3, 97, 70)
    other = np.random.default_rng(1).integers(3, 97, 500)
    found = {}
    for attention in ("quire", "llama.cpp"):
        with closing(GgufModel(tiny_file(), n_ctx=1024, attention=attention)) as model:
            assert model.about.endswith(f"attention by {attention}")
            context = model.context()
            alone = context.decode([whole((1,), 0, tokens)])
            context.clear()
            context.decode([whole((2,), 0, other)])
            beside = context.decode([whole((1,), 0, tokens)])
            np.testing.assert_allclose(beside, alone, atol=0.02)
            found[attention] = alone
            context.close()
    assert not np.array_equal(found["quire"], found["llama.cpp"])


def test_kv_of_one_attention_is_none_of_the_other():
    names = set()
    for attention in (None, "quire", "llama.cpp"):
        model = GgufModel(tiny_file(), attention=attention)
        names.add(model.identity("", outlives=True))
        model.close()
    assert len(names) == 2


def test_an_attention_that_is_none_is_refused():
    with pytest.raises(ConfigError, match=r"attention is 'flash'; give 'quire' or 'llama\.cpp'"):
        GgufModel(tiny_file(), attention="flash")
