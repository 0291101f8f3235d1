"""Passages in `PrefixCache`: what is exact stays exact, and what is approximate never passes for it."""

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from passages_help import GATES, MOVED, REFUSED, made, prompt

import quire
from quire.core import Scope
from quire.engines.hf import PrefixCache
from quire.errors import ConfigError, NotRelocatable, TokensError
from quire.ops import check
from quire_passages import AllRows, CacheCraft, Epic, KVDeviation, NoRows, Passages, Segments
from turns import by_turns, drawn

SIZES = (16, 48, 40, 64, 56, 9)
FREE = {"target": None, "worth": 10.0, "min_tokens": 2, "gates": GATES, "capture": "isolated"}
"""Passages are reused unmeasured, whatever they cost: the prompts are short."""


@pytest.fixture(scope="module")
def model():
    return made("Llama", {})


def cache_of(model, **given):
    return PrefixCache(model, "16MiB", debug=True, passages=Passages("64MiB", **{**FREE, **given}))


def turned(segments, order):
    """Return the same prompt with its passages in another order."""
    passages = tuple(segments.passages[index] for index in order)
    return Segments(segments.head, passages, segments.question)


def asked(cache, segments, **given):
    """Ask a cache, check all that it holds, and return the new tokens and the report."""
    output = cache.generate(
        segments=segments, max_new_tokens=4, do_sample=False, pad_token_id=0, **given
    )
    check(cache.manager)
    cache.passages.store.check()
    report = cache.last.passages
    parts = report.exact_tokens, report.moved_tokens, report.recomputed_rows, report.computed_tokens
    assert sum(parts) == segments.tokens.size == cache.last.prompt_tokens
    return output[0, segments.tokens.size :].tolist(), report


def plain(model, segments):
    ids = torch.from_numpy(segments.tokens.astype(np.int64))[None]
    output = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=4, do_sample=False, pad_token_id=0
    )
    return output[0, ids.shape[1] :].tolist()


def test_the_first_call_is_exact_and_captures_its_passages(model):
    cache, segments = cache_of(model), prompt(sizes=SIZES)
    answer, report = asked(cache, segments)
    assert answer == plain(model, segments)
    assert report.exactness == "exact"
    assert "no passage" in report.fallback
    assert report.captured == 4
    assert cache.passages.store.stats.variants == 4


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    ("name", "selector"),
    by_turns(
        ["llama", "mistral with windows", "gemma3", "deepseek v3", "phi"],
        [AllRows(), KVDeviation(1.0)],
    ),
)
def test_all_rows_give_the_answer_of_the_model(name, selector):
    own = made(*MOVED[name])
    cache, segments = cache_of(own), prompt(sizes=SIZES)
    asked(cache, segments)
    other = turned(segments, [2, 0, 3, 1])
    answer, report = asked(cache, other, selector=selector)
    assert answer == plain(own, other)
    assert report.exactness == "approximate"
    assert report.moved_tokens == 0
    assert report.recomputed_rows == 48 + 40 + 56
    assert [each.kind for each in report.details] == ["isolated"] * 4


def test_passages_in_another_order_are_moved(model):
    cache, segments = cache_of(model, selector=Epic(4)), prompt(sizes=SIZES)
    asked(cache, segments)
    _, report = asked(cache, turned(segments, [3, 1, 0, 2]))
    assert report.fallback is None
    assert report.details[0].is_exact  # captured behind this very head
    assert [each.shift for each in report.details] == [0, 56, 96, 144]
    assert [each.recomputed for each in report.details] == [0, 4, 4, 4]
    assert report.exact_tokens == 16 + 56
    assert report.moved_tokens == 40 + 48 + 64 - 12
    assert report.computed_tokens == 9
    assert cache.last.computed_tokens == 9 + 12


def test_a_cached_prefix_wins(model):
    cache, segments = cache_of(model), prompt(sizes=SIZES)
    asked(cache, segments)
    answer, report = asked(cache, segments)
    assert answer == plain(model, segments)
    assert report.exactness == "exact"
    assert [each.variant for each in report.details] == [None] * 4
    _, report = asked(cache, turned(segments, [0, 1, 3, 2]))
    assert [each.reason for each in report.details[:2]] == ["cached prefix"] * 2
    assert report.exact_tokens >= 16 + 48 + 40
    assert [each.variant is None for each in report.details] == [True, True, True, False]
    assert report.details[2].is_exact  # the first behind the prefix: computed


def test_after_an_approximate_call_the_same_prompt_is_found_nowhere(model):
    cache, segments = cache_of(model, selector=NoRows()), prompt(sizes=SIZES)
    asked(cache, segments)
    other = turned(segments, [1, 3, 2, 0])
    held = set(cache.passages.store._order)
    _, report = asked(cache, other)
    assert report.exactness == "approximate"
    assert report.captured == 0
    assert set(cache.passages.store._order) == held
    ids = torch.from_numpy(other.tokens.astype(np.int64))[None]
    exact = cache.generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=0)
    assert cache.last.cached_tokens <= segments.head.size
    assert exact[0, ids.shape[1] :].tolist() == plain(model, other)


@drawn(
    5,
    40,
    data=st.data(),
    within=settings(suppress_health_check=[HealthCheck.function_scoped_fixture]),
)
def test_nothing_approximate_is_ever_found_as_exact(model, data):
    """Calls of any order, exact and not: the prefix cache finds what was computed exactly, and no more.

    Every variant is what the model computes behind that very text.
    """
    pool = prompt(seed=3, sizes=(8, 24, 17, 32, 20, 5))
    heads = [pool.head, pool.head[:4], pool.head[:0]]
    cache = cache_of(model, capture=data.draw(st.sampled_from(["isolated", "contextual"])))
    exact = []
    for _ in range(data.draw(st.integers(2, 6))):
        order = data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=4))
        head = data.draw(st.sampled_from(heads))
        segments = Segments(head, tuple(pool.passages[i] for i in order), pool.question)
        ids = torch.from_numpy(segments.tokens.astype(np.int64))[None]
        if data.draw(st.booleans()):
            given = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
            output = cache.generate(ids, attention_mask=torch.ones_like(ids), **given)
            assert output[0, ids.shape[1] :].tolist() == plain(model, segments)
            exact.append(output[0].tolist())
            continue
        selector = data.draw(st.sampled_from([NoRows(), Epic(3), KVDeviation(0.2), CacheCraft()]))
        answer, report = asked(cache, segments, selector=selector)
        if report.exactness == "exact" and not any(each.variant for each in report.details):
            assert answer == plain(model, segments)
            exact.append([*segments.tokens.tolist(), *answer])
        else:
            own = zip(segments.spans, report.details, strict=True)
            end = min(start for (start, _), each in own if each.variant or not each.is_exact)
            exact.append(segments.tokens[:end].tolist())
        known = max(shared(segments.tokens.tolist(), text) for text in exact)
        assert cache.explain(ids[0]).hit.num_tokens <= known
    runs = cache.passages.runs
    for _, variant in cache.passages.store._order.values():
        text = np.frombuffer(variant.before + variant.ids, np.int32)
        past = runs.past(text.size)
        runs.feed(past, text)
        for layer, (k, v) in enumerate(variant.kv.layers):
            for got, wanted in zip(
                (k, v), past.kv_layers[layer].row(0, variant.start, text.size), strict=True
            ):
                assert (got - wanted).abs().max() <= 1e-4


def shared(one, two):
    """Return how many tokens two texts begin with together."""
    return next(
        (i for i, (a, b) in enumerate(zip(one, two, strict=False)) if a != b),
        min(len(one), len(two)),
    )


def test_scopes_share_nothing_unless_isolated_captures_are_to_be_shared(model):
    segments = prompt(sizes=SIZES)
    for shares in (False, True):
        cache = cache_of(model, share_isolated=shares)
        asked(cache, segments, scope=Scope(salt="one"))
        _, report = asked(cache, turned(segments, [1, 0, 2, 3]), scope=Scope(salt="two"))
        assert (report.fallback is None) is shares
    cache = cache_of(model, share_isolated=True, capture="contextual")
    asked(cache, segments, scope=Scope(salt="one"))
    _, report = asked(cache, turned(segments, [1, 0, 2, 3]), scope=Scope(salt="two"))
    moved = [each.variant for each in report.details]
    assert (
        moved[0] is moved[2] is moved[3] is None
    )  # the first of that prompt stood behind the head alone


def test_contextual_captures_cost_no_forward_and_are_weighed_where_that_is_needed(model):
    cache = cache_of(model, capture="contextual", selector=CacheCraft())
    segments = prompt(sizes=SIZES)
    asked(cache, segments)
    kinds = {each.kind for _, each in cache.passages.store._order.values()}
    assert kinds == {"isolated", "contextual"}
    assert all(each.masses is not None for _, each in cache.passages.store._order.values())
    _, report = asked(cache, turned(segments, [1, 0, 2, 3]))
    assert report.exactness == "approximate"
    assert 0 < report.recomputed_rows < report.moved_tokens


def test_weights_that_change_find_nothing_and_are_tried_again():
    own = made("Llama", {})
    cache, segments = cache_of(own), prompt(sizes=SIZES)
    asked(cache, segments)
    with torch.no_grad():
        own.model.layers[0].self_attn.k_proj.weight.mul_(1.5)
    other = turned(segments, [2, 0, 3, 1])
    answer, report = asked(cache, other)
    assert "no passage" in report.fallback
    assert answer == plain(own, other)
    assert len(cache.passages._tried) == 2


def test_passages_are_captured_ahead_of_time(model):
    cache, segments = cache_of(model, capture="none"), prompt(sizes=SIZES)
    assert cache.passages.capture(segments.passages, segments.head) == 4
    assert cache.passages.capture(segments.passages, segments.head) == 0
    _, report = asked(cache, segments)
    assert report.fallback is None
    assert report.captured == 0
    assert report.exact_tokens == 48  # of the head nothing was cached


@pytest.mark.cases(2)
@pytest.mark.parametrize("gone", [[1], [0, 2], [0, 1, 2, 3]])
def test_variants_that_go_between_plan_and_assembly_are_computed(model, monkeypatch, gone):
    cache, segments = cache_of(model, selector=AllRows()), prompt(sizes=SIZES)
    asked(cache, segments)
    other = turned(segments, [2, 0, 3, 1])
    pin = cache.passages.store.pin

    def dropping(variants):
        pins = pin(variants)
        for at in gone:
            cache.passages.store.drop(variants[at])
        assert len(variants) == 4
        return pins

    monkeypatch.setattr(cache.passages.store, "pin", dropping)
    answer, report = asked(cache, other)
    assert answer == plain(model, other)
    if len(gone) == 4:
        assert report.fallback == "all variants have gone since they were planned"
        assert asked(cache, turned(segments, [1, 3, 0, 2]))[0]
    else:
        reasons = [report.details[at].reason for at in gone]
        assert set(reasons) == {"its variant has gone since it was planned"}
    cache.passages.store.check()


def test_the_same_passage_twice_and_short_ones(model):
    cache, segments = cache_of(model, min_tokens=16), prompt(sizes=(16, 48, 40, 1, 9))
    asked(cache, segments)
    twice = turned(segments, [1, 0, 2, 0, 2])
    answer, report = asked(cache, twice, selector=AllRows())
    assert answer == plain(model, twice)
    assert [each.reason for each in report.details] == [
        None,
        None,
        "shorter than 16 tokens",
        None,
        "shorter than 16 tokens",
    ]


def test_a_model_that_cannot_be_moved_answers_exactly_and_says_why():
    own = made(*REFUSED["gpt2"])
    cache, segments = cache_of(own), prompt(sizes=SIZES)
    for _ in range(2):
        answer, report = asked(cache, segments)
        assert answer == plain(own, segments)
        assert "layer 0" in report.fallback
        assert report.captured == 0
    with pytest.raises(NotRelocatable):
        cache.passages.relocation()
    with pytest.raises(NotRelocatable):
        cache.passages.capture(segments.passages)


@pytest.mark.ci
def test_a_prompt_beyond_what_the_gate_vouches_for_is_computed():
    own = made("Llama", {"max_position_embeddings": 100})
    cache, segments = cache_of(own), prompt(sizes=(5, 40, 40, 40, 5))
    asked(cache, segments)
    _, report = asked(cache, turned(segments, [2, 1, 0]))
    assert "positions below 100" in report.fallback


def test_what_hardly_pays_is_not_done(model):
    cache = PrefixCache(model, "16MiB", passages=Passages("64MiB", target=None, gates=GATES))
    segments = prompt(sizes=(16, 17, 17, 60))
    asked(cache, segments)
    _, report = asked(cache, turned(segments, [1, 0]), selector=AllRows())
    assert "plain prefill" in report.fallback


def test_several_answers_and_beams_of_one_prompt(model):
    cache, segments = cache_of(model), prompt(sizes=SIZES)
    asked(cache, segments)
    other = turned(segments, [2, 0, 3, 1])
    ids = torch.from_numpy(other.tokens.astype(np.int64))[None]
    given = {"max_new_tokens": 5, "num_beams": 3, "do_sample": False, "pad_token_id": 0}
    got = cache.generate(segments=other, selector=AllRows(), **given)
    assert cache.last.passages.exactness == "approximate"
    assert torch.equal(got, model.generate(ids, attention_mask=torch.ones_like(ids), **given))


def test_assisted_decoding_falls_back(model):
    cache, segments = cache_of(model), prompt(sizes=SIZES)
    asked(cache, segments)
    other = turned(segments, [2, 0, 3, 1])
    answer, report = asked(cache, other, prompt_lookup_num_tokens=2)
    assert "assisted" in report.fallback
    assert answer == plain(model, other)


def test_a_clear_takes_the_passages_along(model):
    cache, segments = cache_of(model), prompt(sizes=SIZES)
    asked(cache, segments)
    cache.clear()
    assert cache.passages.store.stats.variants == 0


@pytest.mark.cases(4)
@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        ({"segments": [[5], [], [6]]}, TokensError, "passage 1 of 3 segments is empty"),
        ({"segments": [[5], [7], [999]]}, TokensError, "999 is not in the vocabulary"),
        ({"segments": [[5], [6]], "input_ids": [[1]]}, ConfigError, "input_ids is given beside"),
        ({"segments": [[5], [6]], "selector": "epic"}, ConfigError, "selector='epic'"),
        ({"input_ids": [[1]], "selector": Epic()}, ConfigError, "without segments"),
        (
            {"segments": [[5], [7] * 20, [6]], "attention_mask": [[1]]},
            ConfigError,
            "attention_mask",
        ),
    ],
)
def test_bad_requests_are_refused_and_change_nothing(model, given, error, words):
    cache = cache_of(model)
    with pytest.raises(error, match=words):
        cache.generate(**given, max_new_tokens=1)
    assert cache.passages.store.stats.put == 0
    assert cache.stats.prompt_tokens == 0


def test_a_cache_without_passages_refuses_segments(model):
    with pytest.raises(ConfigError, match="reuses no passages"):
        PrefixCache(model, "1MiB").generate(segments=[[5], [6]])
    with pytest.raises(ConfigError, match="passages='1GiB'"):
        quire.PrefixCache(model, "1MiB", passages="1GiB")
