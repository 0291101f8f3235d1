"""Forwards of chosen rows: identities that hold exactly, on models with every kind of mask."""

import numpy as np
import pytest
import torch
from passages_help import MOVED, made, passage_model_of, prompt

from quire.errors import ConfigError, TokensError
from quire.tensors.kinds import layer_kinds
from quire_passages import (
    AllRows,
    CacheCraft,
    Epic,
    KVDeviation,
    NoRows,
    PassagePlace,
    PassagePlan,
    QuestionRows,
    RandomRows,
)
from quire_passages.bench.published import mean_of_all
from quire_passages.hf import PassageModel
from quire_passages.hf.rows import RowForward
from quire_passages.hf.runs import Runs
from quire_passages.hf.weighing import largest_early
from turns import by_turns

MASKS = [
    "llama",
    "mistral with windows",
    "gemma3",
    "gptneox",
    "deepseek v3",
    "cohere2",
    "phi",
    "smollm3",
]
LIMIT = 1e-4
ATTENTIONS = ["eager", "sdpa"]
by_masks = pytest.mark.parametrize(("name", "attention"), by_turns(MASKS, ATTENTIONS))


def far(one, two):
    return float((one - two).abs().max())


@pytest.mark.cases(2)
@by_masks
def test_all_rows_and_a_ratio_of_one_equal_a_plain_forward(name, attention):
    passage_model, segments = passage_model_of(name, attn_implementation=attention), prompt()
    alone = passage_model.capture_alone(segments.passages, segments.head)
    full = passage_model.full(segments).logits
    for selector in (AllRows(), KVDeviation(1.0), KVDeviation(1.0, check=2), QuestionRows(1.0)):
        blended = passage_model.blend(segments, alone, selector, exact_first=False)
        assert blended.share == 1
        assert far(blended.logits, full) <= LIMIT


@pytest.mark.cases(2)
@by_masks
def test_any_rows_over_exact_kv_equal_a_plain_forward(name, attention):
    passage_model, segments = passage_model_of(name, attn_implementation=attention), prompt()
    there = passage_model.capture_all(segments)
    full = passage_model.full(segments).logits
    others = RandomRows(0.7, seed=2), KVDeviation(0.2), QuestionRows(0.2)
    for selector in (NoRows(), Epic(4), RandomRows(0.3), *others):
        blended = passage_model.blend(segments, there, selector, exact_first=False)
        assert far(blended.logits, full) <= LIMIT


def test_an_exact_passage_is_placed_without_a_row():
    passage_model, segments = passage_model_of("llama"), prompt()
    blended = passage_model.blend(segments, passage_model.capture_all(segments), AllRows())
    assert blended.moved == blended.rows.size == 0
    assert far(blended.logits, passage_model.full(segments).logits) <= LIMIT


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_what_follows_the_blended_columns_is_computed_over_them(attention):
    passage_model, segments = passage_model_of("llama", attn_implementation=attention), prompt()
    blended = passage_model.blend(
        segments, passage_model.capture_alone(segments.passages), AllRows()
    )
    full = passage_model.full(segments)
    following = torch.tensor([[7, 9]])
    with torch.no_grad():
        got, wanted = (
            passage_model.runs.model(following, past_key_values=each.past).logits
            for each in (blended, full)
        )
    assert far(got, wanted) <= LIMIT


def test_moved_keys_are_those_that_the_model_computes_there():
    """One layer has no context below it, so that K and V of a passage depend on its position alone."""
    model = made("Llama", {"num_hidden_layers": 1})
    passage_model, segments = PassageModel(model), prompt()
    alone = passage_model.capture_alone(segments.passages, segments.head)
    full = passage_model.full(segments).logits
    assert far(passage_model.blend(segments, alone, NoRows()).logits, full) <= LIMIT
    assert (
        far(passage_model.blend(segments, alone, NoRows(), reposition=False).logits, full)
        > 50 * LIMIT
    )


@pytest.mark.ci
def test_the_master_is_never_changed_and_a_hundred_moves_leave_no_error():
    model = made("Llama", {"num_hidden_layers": 1})
    passage_model = PassageModel(model)
    first = prompt(sizes=(3, 24, 5))
    (master,) = passage_model.capture_alone(first.passages)
    kept = [(k.clone(), v.clone()) for k, v in master.kv.layers]
    errors = []
    for seed in range(100):
        size = int(np.random.default_rng(seed).integers(1, 400))
        moved = prompt(seed, sizes=(size, 1, 5))
        segments = type(moved)(moved.head, first.passages, moved.question)
        errors.append(
            far(
                passage_model.blend(segments, [master], NoRows()).logits,
                passage_model.full(segments).logits,
            )
        )
    assert max(errors) <= LIMIT
    assert max(errors[50:]) <= 2 * max(errors[:50])
    for (k, v), (k_kept, v_kept) in zip(master.kv.layers, kept, strict=True):
        assert torch.equal(k, k_kept)
        assert torch.equal(v, v_kept)


def test_rows_without_a_mask_of_their_own_would_be_far_off(monkeypatch):
    """The explicit mask is needed: without one, transformers takes chosen rows for the first ones."""
    model = made("Llama", {}, attn_implementation="sdpa")
    runs, segments = Runs(model, layer_kinds(model.config)), prompt()
    rows = np.array([2, 30, 31, 70, segments.tokens.size - 1])
    logits = []
    for masked in (True, False):
        past = runs.past()
        full = runs.feed(past, segments.tokens)
        if not masked:
            monkeypatch.setattr("quire_passages.hf.rows._RowsForward.mask", lambda *_: None)
        logits.append(RowForward(model, runs.kinds)(past, segments.tokens, rows))
    assert far(logits[0], full) <= LIMIT
    assert far(logits[1], full) > 50 * LIMIT


def test_the_model_is_left_as_it_was():
    model = made("Llama", {})
    layers, forwards = list(model.model.layers), [dict(each.__dict__) for each in model.modules()]
    passage_model, segments = PassageModel(model), prompt()
    passage_model.blend(
        segments, passage_model.capture_all(segments, count=largest_early), KVDeviation(0.2)
    )
    assert list(model.model.layers) == layers
    assert [dict(each.__dict__) for each in model.modules()] == forwards
    assert model.config._attn_implementation == "sdpa"


def test_rows_that_deviate_most_go_on():
    """Half of the passages are exact already: none of their rows is chosen."""
    passage_model, segments = passage_model_of("llama"), prompt()
    exact, alone = (
        passage_model.capture_all(segments),
        passage_model.capture_alone(segments.passages),
    )
    mixed = [alone[0], exact[1], alone[2], exact[3]]
    blended = passage_model.blend(segments, mixed, KVDeviation(0.3, check=1), exact_first=False)
    starts = [segments.spans[index] for index in (1, 3)]
    assert blended.rows.size == np.ceil(0.3 * 90)
    assert not any(((blended.rows >= a) & (blended.rows < b)).any() for a, b in starts)


@pytest.mark.cases(2)
@pytest.mark.parametrize("name", ["llama", "gemma3", "deepseek v3", "gptneox"])
@pytest.mark.parametrize(
    "num_columns", [122, 118, 115]
)  # the prompt, a part of its question, its passages
def test_the_rows_that_a_question_looks_at_most_are_computed(name, num_columns):
    passage_model, segments = passage_model_of(name), prompt(sizes=(5, 20, 17, 30, 43, 7))
    held = passage_model.capture_alone(segments.passages, segments.head)
    held[1] = None
    places = [PassagePlace(*span, each) for span, each in zip(segments.spans, held, strict=True)]
    plan = PassagePlan(segments, QuestionRows(0.1), 0, 5, tuple(places))
    past = passage_model.runs.past(segments.num_tokens)
    passage_model.runs.feed(past, segments.head)
    looked = past_of(passage_model, plan, segments.num_tokens)
    passage_model.blending.rows(looked, segments.tokens, np.arange(25, 42))
    weights = np.zeros(segments.num_tokens, np.float32)

    def look(index, given):
        if index:
            weights[looked.kv_layers[index].first :] += given[0].sum((0, 1)).numpy()

    passage_model.blending.rows(looked, segments.tokens, np.arange(115, 122), look=look)
    moved = [at for each in plan.moved for at in range(each.start, each.start + each.num_tokens)]
    best = sorted(moved, key=lambda at: -weights[at])[:10]
    rows, _ = passage_model.blending.fill(past, plan, num_columns)
    assert rows.tolist() == sorted(best)
    assert past.get_seq_length() == num_columns
    assert plan.asked == 7


def past_of(passage_model, plan, num_columns):
    """Return a working cache with a plan's passages placed, and no row computed."""
    past = passage_model.runs.past(num_columns)
    passage_model.runs.feed(past, plan.segments.head)
    passage_model.blending._place(past, plan, num_columns, rotate=True)
    return past


@pytest.mark.cases(2)
@pytest.mark.parametrize("name", ["llama", "gemma3", "deepseek v3", "gptneox"])
def test_attention_masses_are_those_of_eager_attention(name):
    passage_model, segments = passage_model_of(name), prompt()
    found = passage_model.capture_all(segments, count=mean_of_all)
    eager = made(*MOVED[name], attn_implementation="eager")
    with torch.no_grad():
        ids = torch.from_numpy(segments.tokens.astype(np.int64))[None]
        attention = torch.stack(eager(ids, output_attentions=True).attentions)[:, 0]
    by_row = attention.mean(1).sum(0).numpy()
    (a, b), (c, d), (e, f) = segments.spans[:3]
    assert np.allclose(
        found[2].masses.inter, [by_row[e:f, a:b].sum(), by_row[e:f, c:d].sum()], atol=1e-3
    )
    assert np.isclose(found[2].masses.intra, by_row[e:f, e:f].sum(), atol=1e-3)
    assert np.allclose(found[1].masses.tokens, by_row[c:d, a:b].sum(1), atol=1e-3)
    early = attention[:2, :, c:d, a:b].sum(-1).amax(1).sum(0).numpy()
    by_early = passage_model.capture_all(segments, count=largest_early)
    assert np.allclose(by_early[1].masses.tokens, early, atol=1e-3)
    assert found[0].kind == "isolated"
    assert found[0].masses.inter.size == 0


def test_a_variant_of_another_passage_is_refused():
    passage_model, segments = passage_model_of("llama"), prompt()
    alone = passage_model.capture_alone(segments.passages)
    with pytest.raises(TokensError, match="another passage"):
        passage_model.blend(segments, alone[::-1], NoRows())
    with pytest.raises(TokensError, match="3 variants for 4"):
        passage_model.blend(segments, alone[:3], NoRows())


def test_a_check_layer_that_the_model_has_not_is_refused():
    passage_model, segments = passage_model_of("llama"), prompt()
    with pytest.raises(ConfigError, match="layers 0 to 2"):
        passage_model.blend(
            segments, passage_model.capture_alone(segments.passages), KVDeviation(0.2, check=3)
        )


def test_cache_craft_computes_less_where_its_context_is_the_same():
    passage_model, segments = passage_model_of("llama"), prompt()
    there = passage_model.capture_all(segments, count=largest_early)
    turned = type(segments)(segments.head, segments.passages[::-1], segments.question)
    same = passage_model.blend(segments, there, CacheCraft(1.0), exact_first=False)
    other = passage_model.blend(turned, there[::-1], CacheCraft(1.0), exact_first=False)
    assert same.share == 0
    assert other.share > 0.3
