"""Slots under real models: the tokens are those of `model.generate`, whatever slots held before.

Static attention reads every position of a slot and gives those that are masked the weight 0, so
memory that nobody computed is filled with a large finite number here: read with any weight, it
would change the tokens.
"""

import pytest

pytest.importorskip("transformers", reason="install it with: make setup")

import torch
from hf_help import FAMILIES, MORE_FAMILIES, TRAINED, VOCAB, random_ids, tiny_model, trained_model
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, LogitsProcessor

from quire import errors
from quire.core import Scope
from quire.engines.hf.static import SlotLayer, SlotPrefixCache
from quire.slots import check, snapshot
from turns import few

POISON = 1e6
FULL = sorted((set(FAMILIES) | set(MORE_FAMILIES)) - {"gpt_neo"})


def make(model, num_slots=4, max_tokens=192, **options):
    return SlotPrefixCache(model, num_slots, max_tokens, poison=POISON, **options)


def plain(model, ids, **arguments):
    return model.generate(ids, attention_mask=torch.ones_like(ids), **arguments)


def same(model, cache, ids, *, scope=None, **arguments):
    """Generate with and without slots; the tokens are equal. Return them."""
    arguments = {"max_new_tokens": 8, **arguments}
    expected = plain(model, ids, **arguments)
    output = cache.generate(ids, attention_mask=torch.ones_like(ids), scope=scope, **arguments)
    assert output.tolist() == expected.tolist()
    check(cache.slots)
    assert cache.slots.num_busy == 0
    return output


def seeded(number=0):
    return torch.Generator().manual_seed(number)


def longer(text, num_tokens, generator):
    return torch.cat([text, random_ids(generator, num_tokens)], dim=1)


@pytest.mark.cases(2)
@pytest.mark.parametrize("family", few(FULL, *FULL[::4]))
def test_turns_and_branches_give_the_tokens_of_generate(family):
    model, generator = tiny_model(family), seeded()
    cache = make(model)
    first = same(model, cache, random_ids(generator, 30))
    second = same(model, cache, longer(first, 9, generator))
    same(model, cache, longer(first[:, :20], 12, generator))
    same(model, cache, longer(second, 5, generator))
    hits = cache.stats.hit_tokens
    assert hits >= (first.shape[1] - 1) + 20 + (second.shape[1] - 1)


@pytest.mark.ci
@pytest.mark.parametrize("num_turns", few([14, 60], 14))
def test_random_conversations_over_few_slots_give_the_tokens_of_generate(num_turns):
    model, generator = trained_model(), seeded(3)
    vocab = model.config.vocab_size
    cache = make(model, num_slots=3)
    texts = [torch.randint(3, vocab, (1, 40), generator=generator)]
    for _ in range(num_turns):
        text = texts[int(torch.randint(len(texts), (), generator=generator))]
        keep = int(torch.randint(1, text.shape[1] + 1, (), generator=generator))
        tail = torch.randint(3, vocab, (1, 7), generator=generator)
        prompt = torch.cat([text[:, :keep], tail], dim=1)[:, :160]
        texts.append(same(model, cache, prompt))
    assert 0 < cache.stats.copied_tokens < cache.stats.hit_tokens  # some by a copy, some without


def test_requests_that_run_at_the_same_time_copy_what_they_share():
    model, generator = tiny_model("llama"), seeded(1)
    cache = make(model)
    trunk = random_ids(generator, 40)
    prompts = [longer(trunk, 5, generator) for _ in range(3)]

    def decode(session, prompt):
        logits = session.feed(prompt[:, session.computed :])
        new = [int(logits[0, -1].argmax())]
        while len(new) < 8:
            logits = session.feed(torch.tensor([new[-1:]]))
            new.append(int(logits[0, -1].argmax()))
        return [*prompt[0].tolist(), *new]

    expected = [plain(model, ids, max_new_tokens=8, eos_token_id=None)[0] for ids in prompts]
    with cache.session(prompts[0]) as one:
        texts = [decode(one, prompts[0])]
        with cache.session(prompts[1]) as two, cache.session(prompts[2]) as three:
            assert two.computed == three.computed == 40
            texts += [decode(two, prompts[1]), decode(three, prompts[2])]
            logits = one.feed(torch.tensor([texts[0][-1:]]))
            assert int(logits[0, -1].argmax()) == int(
                plain(model, torch.tensor([texts[0]]), max_new_tokens=1, eos_token_id=None)[0, -1]
            )
    assert texts == [text.tolist() for text in expected]
    assert cache.stats.copied_tokens == 80
    check(cache.slots)


def test_samples_are_those_of_generate_with_the_same_seed():
    model, generator = tiny_model("qwen3"), seeded(2)
    cache = make(model)
    ids = random_ids(generator, 30)
    same(model, cache, ids)
    torch.manual_seed(5)
    expected = plain(model, ids, max_new_tokens=12, do_sample=True)
    torch.manual_seed(5)
    assert cache.generate(ids, max_new_tokens=12, do_sample=True).tolist() == expected.tolist()
    assert cache.stats.hit_tokens == 29


def test_scopes_do_not_share_slots():
    model = tiny_model("llama")
    cache = make(model)
    ids = random_ids(seeded(), 30)
    for salt in ("anna", "ben"):
        same(model, cache, ids, scope=Scope(salt=salt))
    assert cache.stats.hit_tokens == 0


def test_memory_that_nobody_computed_would_show_in_the_tokens():
    model = tiny_model("llama")
    cache = make(model)
    ids = random_ids(seeded(), 30)
    expected = plain(model, ids, max_new_tokens=8, eos_token_id=None)
    cache.generate(ids[:, :20], max_new_tokens=1)
    with cache.session(ids) as session, torch.no_grad():
        for layer in session.past.layers:
            layer.cumulative_length.fill_(25)  # as if 25 tokens were there; 20 are
        logits = model(ids[:, 25:], past_key_values=session.past, use_cache=True).logits
    assert int(logits[0, -1].argmax()) != int(expected[0, 30])


def test_a_generate_that_raises_keeps_nothing_and_leaves_the_cache_usable():
    class Broken(LogitsProcessor):
        def __call__(self, input_ids, scores):
            if input_ids.shape[1] > 33:
                raise RuntimeError("broken")
            return scores

    model = tiny_model("llama")
    cache = make(model, num_slots=1)
    ids = random_ids(seeded(), 30)
    with pytest.raises(RuntimeError, match="broken"):
        cache.generate(ids, max_new_tokens=8, eos_token_id=None, logits_processor=[Broken()])
    assert cache.slots.find(ids[0].numpy(), Scope(model=cache.fingerprint)) is None
    same(model, cache, ids)


def test_a_forward_that_raises_leaves_the_session_where_it_was():
    model = tiny_model("llama")
    calls = []

    def forward(**arguments):
        output = model(**arguments)
        calls.append(1)
        if len(calls) == 2:
            raise RuntimeError("broken")
        return output

    cache = make(model, forward=forward)
    ids = random_ids(seeded(), 30)
    expected = plain(model, ids, max_new_tokens=1, eos_token_id=None)
    with cache.session(ids) as session:
        session.feed(ids[:, :10])
        with pytest.raises(RuntimeError, match="broken"):
            session.feed(ids[:, 10:20])
        assert session.computed == int(session.past.get_seq_length()) == 10
        logits = session.feed(ids[:, 10:])
    assert int(logits[0, -1].argmax()) == int(expected[0, -1])


def test_generation_ends_when_the_slot_is_full():
    model = tiny_model("llama")
    cache = make(model, max_tokens=40)
    ids = random_ids(seeded(), 30)
    output = cache.generate(ids, max_new_tokens=50, eos_token_id=None)
    assert output.shape[1] == 41
    assert output.tolist() == plain(model, ids, max_new_tokens=11, eos_token_id=None).tolist()


def test_a_request_longer_than_a_slot_is_refused_before_a_forward():
    model = tiny_model("llama")
    cache = make(model, max_tokens=40)
    ids = random_ids(seeded(), 30)
    padded = torch.cat([torch.zeros(1, 3, dtype=torch.long), ids], dim=1)
    before = snapshot(cache.slots)
    for error, words, call in (
        (errors.TokensError, "41 tokens", lambda: cache.generate(random_ids(seeded(), 41))),
        (errors.ConfigError, "2 rows", lambda: cache.generate(ids.repeat(2, 1))),
        (errors.ConfigError, "3 columns of padding", lambda: cache.generate(padded)),
        (errors.ConfigError, "num_beams", lambda: cache.generate(ids, num_beams=2)),
        (errors.ConfigError, "assisted", lambda: cache.generate(ids, prompt_lookup_num_tokens=2)),
        (errors.TokensError, "vocabulary", lambda: cache.generate(ids + VOCAB)),
        (errors.ScopeError, "anna", lambda: cache.generate(ids, scope="anna")),
        (errors.ScopeError, "model", lambda: cache.generate(ids, scope=Scope(model="m"))),
    ):
        with pytest.raises(error, match=words):
            call()
    assert snapshot(cache.slots) == before


def test_a_session_refuses_other_tokens_before_it_computes():
    model = tiny_model("llama")
    cache = make(model)
    ids = random_ids(seeded(), 30)
    with cache.session(ids) as session:
        for error, fed in (
            (errors.CommitError, (ids + 1) % VOCAB),
            (errors.TokensError, ids[:, :0]),
            (errors.TokensError, ids.repeat(2, 1)),
        ):
            with pytest.raises(error):
                session.feed(fed)
        assert session.computed == int(session.past.get_seq_length()) == 0
        with pytest.raises(errors.ConfigError, match="not reset"):
            session.past.reset()


@pytest.mark.parametrize(
    ("family", "values"),
    [
        ("mistral", {"sliding_window": 16}),
        ("gemma3_text", {"sliding_window": 16, "head_dim": 8}),
        ("qwen3_next", {"num_hidden_layers": 4, "linear_num_value_heads": 2,
                        "linear_num_key_heads": 2, "linear_key_head_dim": 8,
                        "linear_value_head_dim": 8, "num_experts": 0, "head_dim": 8}),
    ],
)  # fmt: skip
def test_models_with_other_than_full_attention_are_refused(family, values):
    config = CONFIG_MAPPING[family](
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_attention_heads=4,
        num_key_value_heads=2, **{"num_hidden_layers": 2, **values},
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config).eval()
    with pytest.raises(errors.UnsupportedModel, match="full attention"):
        SlotPrefixCache(model, 2, 64)


def test_a_model_that_takes_keys_for_tokens_is_refused():
    with pytest.raises(errors.UnsupportedModel, match="cache of fixed shape"):
        SlotPrefixCache(tiny_model("gpt_neo"), 2, 64)


def test_a_model_in_training_mode_is_refused():
    model = AutoModelForCausalLM.from_pretrained(TRAINED)
    with pytest.raises(errors.ConfigError, match="training mode"):
        SlotPrefixCache(model.train(), 2, 64)


def test_the_cache_is_what_transformers_calls_compileable():
    cache = make(tiny_model("llama"))
    with cache.session(random_ids(seeded(), 30)) as session:
        assert session.past.is_compileable
        assert session.past.get_max_length() == 192
        shapes = {(layer.keys.shape, layer.values.shape) for layer in session.past.layers}
        assert shapes == {((1, 2, 192, 8), (1, 2, 192, 8))}
        assert all(isinstance(layer, SlotLayer) for layer in session.past.layers)


def decoded(model, cache, forward):
    """Decode a few tokens in each of three slots with a compiled step; they are generate's."""
    for number in range(3):
        ids = random_ids(seeded(number), 12)
        expected = plain(model, ids, max_new_tokens=6, eos_token_id=None)
        with cache.session(ids) as session:
            logits = session.feed(ids)
            session._forward = forward
            new = [int(logits[0, -1].argmax())]
            for _ in range(5):
                logits = session.feed(torch.tensor([new[-1:]]))
                new.append(int(logits[0, -1].argmax()))
        assert new == expected[0, 12:].tolist()
    assert len({cache.slots.contents.length(slot) for slot in range(3)}) == 1


@pytest.mark.ci
def test_decoding_in_every_slot_uses_one_compiled_graph():
    from torch._dynamo.testing import CompileCounter

    model = tiny_model("llama")
    torch.compiler.reset()
    graphs = CompileCounter()
    decoded(model, make(model), torch.compile(model, backend=graphs, fullgraph=True))
    assert graphs.frame_count == 1


@pytest.mark.long
@pytest.mark.system("g++")
def test_a_compiled_decode_step_gives_the_tokens_of_generate():
    import torch._inductor.config as inductor

    model = tiny_model("llama")
    torch.compiler.reset()
    with inductor.patch(compile_threads=1):
        decoded(model, make(model), torch.compile(model, fullgraph=True))
