"""Contextual captures of an engine: copied from the blocks of prompts that were computed exactly, at no forward."""

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "differential"))

from passages_help import GATES, made, prompt

from quire import ops
from quire.core import Scope
from quire.engines.loop import Engine, SamplingParams
from quire_passages import AllRows, CacheCraft, Epic, KVDeviation, NoRows, Passages, Segments
from quire_passages.verdict import LEAST_PROMPTS

SIZES = (21, 48, 40, 64, 56, 9)
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
GIVEN = {"worth": 10.0, "min_tokens": 2, "gates": GATES, "capture": "contextual"}


@pytest.fixture(scope="module")
def model():
    return made("Llama", {})


def engine_of(model, selector, *, num_blocks=400, max_running=64, **given):
    passages = Passages("64MiB", selector, **{"target": None, **GIVEN, **given})
    options = {"num_blocks": num_blocks, "max_running": max_running}
    return Engine(model, passages=passages, debug_nan=True, **options)


def own(engine):
    return engine._companions[-1]


def turned(segments, order):
    return Segments(segments.head, tuple(segments.passages[at] for at in order), segments.question)


def given(segments):
    return {"segments": [segments.head, *segments.passages, segments.question]}


def asked(engine, *prompts, params=GREEDY, **options):
    outputs = engine.generate([given(each) for each in prompts], params, **options)
    while engine.has_unfinished():  # prompts that are compared
        engine.step()
    ops.check(engine.manager)
    assert engine.manager.num_active == 0
    is_right(engine)
    return [(each.outputs[0].token_ids, each.passages) for each in outputs]


def is_right(engine):
    """Check that each capture has K and V that the model computes behind the text that it names."""
    store, runs = own(engine).passages.store, own(engine)._runs
    store.check()
    for _, variant in store._order.values():
        text = np.frombuffer(variant.before + variant.ids, np.int32)
        past = runs.past(text.size)
        runs.feed(past, text)
        for layer, (k, v) in enumerate(variant.kv.layers):
            right = past.kv_layers[layer].row(0, variant.start, text.size)
            torch.testing.assert_close((k, v), tuple(right), atol=1e-4, rtol=1e-3)


def plain(model, segments):
    (output,) = Engine(model, num_blocks=400).generate([segments.tokens.tolist()], GREEDY)
    return output.outputs[0].token_ids


def held(engine, segments):
    store, scope = own(engine).passages.store, engine.scope()
    return [store.variants(scope, ids, segments.head.tobytes()) for ids in segments.passage_texts]


def test_passages_of_an_exact_prompt_are_captured_without_a_forward(model, monkeypatch):
    engine, segments = engine_of(model, AllRows()), prompt(sizes=SIZES)
    fed, logits = [], own(engine)._runs.logits

    def counted(*args, **named):
        fed.append(args)
        return logits(*args, **named)

    own(engine).passages.relocation()
    monkeypatch.setattr(own(engine)._runs, "logits", counted)
    engine.add_request(given(segments), GREEDY)
    outputs = [output for _ in range(9) for output in engine.step() if output.finished]
    assert not fed
    assert not engine.has_unfinished()
    assert outputs[0].passages.captured == 4
    kinds = [[each.kind for each in there] for there in held(engine, segments)]
    assert kinds == [["isolated"], ["contextual"], ["contextual"], ["contextual"]]
    is_right(engine)


def test_captures_are_placed_in_another_order_and_what_follows_them_is_not_captured(model):
    engine, segments = engine_of(model, AllRows()), prompt(sizes=SIZES)
    asked(engine, segments)
    other = turned(segments, [2, 0, 3, 1])
    ((answer, report),) = asked(engine, other)
    assert answer == plain(model, other)
    assert report.exactness == "approximate"
    assert [each.kind for each in report.details] == [None, "isolated", "contextual", "contextual"]
    assert report.captured == 1  # the first passage, which was computed exactly
    assert [len(each) for each in held(engine, segments)] == [1, 1, 2, 1]


@pytest.mark.parametrize("selector", [NoRows(), Epic(3), KVDeviation(0.2, 1), CacheCraft()])
def test_captures_stay_exact_whatever_is_reused_between_them(model, selector):
    engine, segments = engine_of(model, selector), prompt(sizes=SIZES)
    rng = np.random.default_rng(7)
    for _ in range(6):
        order = rng.permutation(4)[: int(rng.integers(2, 5))]
        asked(engine, turned(segments, order))
    plainly = turned(segments, [3, 2, 1, 0])
    (output,) = engine.generate([plainly.tokens.tolist()], GREEDY)
    assert output.outputs[0].token_ids == plain(model, plainly)


def test_a_passage_has_a_bounded_number_of_captures_of_far_companies(model):
    engine, segments = engine_of(model, NoRows(), variants=2, worth=0.01), prompt(sizes=SIZES)
    for order in ([0, 3], [1, 3], [2, 3], [0, 1, 3], [2, 0, 3], [0, 3]):
        ((_, report),) = asked(engine, turned(segments, order))
        assert report.exactness == "exact"  # nothing pays at that worth
    last = held(engine, segments)[3]
    assert len(last) == 2
    assert {each.kind for each in last} == {"contextual"}
    assert own(engine).passages.store.stats.replaced


def test_the_nearest_company_is_placed(model):
    engine, segments = engine_of(model, NoRows(), worth=0.01), prompt(sizes=SIZES)
    for order in ([0, 3], [1, 3]):
        asked(engine, turned(segments, order))
    by_company = {each.predecessors: each.name for each in held(engine, segments)[3]}
    assert len(by_company) == 2
    own(engine)._settings = replace(own(engine)._settings, worth=10.0)
    ((_, report),) = asked(engine, turned(segments, [2, 1, 3]))
    assert report.details[2].variant == by_company[(segments.passage_texts[1],)]


def test_an_engine_whose_queue_is_never_empty_captures_all_the_same(model):
    engine = engine_of(model, NoRows(), max_running=1, share=0.0)
    pool, rng = prompt(sizes=SIZES), np.random.default_rng(3)
    for _ in range(3):
        engine.add_request(given(turned(pool, rng.permutation(4))), GREEDY)
    ended = 0
    while ended < 12:
        for output in engine.step():
            if output.finished:
                ended += 1
                engine.add_request(given(turned(pool, rng.permutation(4))), GREEDY)
        assert engine.scheduler.queues.num_waiting
    assert all(held(engine, pool))
    is_right(engine)


def test_several_answers_and_preempted_ones_leave_exact_captures(model):
    engine, segments = engine_of(model, AllRows(), num_blocks=40), prompt(sizes=(16, 60, 60, 60, 9))
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True, n=2)
    orders = ([0, 1, 2], [2, 0, 1], [1, 2, 0])
    asked(engine, *(turned(segments, order) for order in orders), params=params)
    assert engine.stats().preemptions
    assert all(held(engine, segments))


def test_tenants_share_no_contextual_captures_and_a_purge_takes_them(model):
    engine, segments = engine_of(model, Epic(4)), prompt(sizes=SIZES)
    asked(engine, segments, scope=Scope(tenant="one"))
    ((_, report),) = asked(engine, turned(segments, [1, 0]), scope=Scope(tenant="two"))
    assert "no passage" in report.fallback
    before = own(engine).passages.store.stats.variants
    gone = engine.purge(Scope(tenant="one")).passages
    assert gone == 4
    assert own(engine).passages.store.stats.variants == before - 4


def test_a_prompt_is_compared_once_half_of_its_passages_were_captured_among_others(model):
    """What was captured from the prompt itself does not count, nor is it placed: it says nothing of others."""
    engine = engine_of(model, NoRows(), target=0.98)
    pool, scope = prompt(sizes=SIZES), engine.scope()
    passages = own(engine).passages

    def estimates():
        return passages.verdict(scope, passages.tried(scope)).estimates()

    for _ in range(3):
        asked(engine, turned(pool, [0, 1, 2, 3]))
        assert not estimates()
    asked(engine, turned(pool, [2, 3, 0, 1]))
    (estimate,) = estimates()
    assert estimate.prompts == 1
    assert estimate.kl > 1e-3


@pytest.mark.ci
def test_what_contextual_captures_do_to_answers_is_measured_before_they_are_placed(model):
    """Random weights: nothing agrees in 98 % of tokens without all rows, which do."""
    pool, rng = prompt(sizes=SIZES), np.random.default_rng(5)
    orders = [rng.permutation(4) for _ in range(LEAST_PROMPTS + 8)]
    for selector, is_served in ((NoRows(), False), (AllRows(), True)):
        engine = engine_of(model, selector, target=0.98)
        for order in orders:
            outputs = engine.generate([given(turned(pool, order))], GREEDY)
            assert outputs[0].outputs[0].token_ids == plain(model, turned(pool, order))
        counts = own(engine).passages.verdict_counts
        assert counts["served" if is_served else "declined"] == 1
        is_right(engine)


def test_a_comparison_leaves_the_captures_of_its_full_forward(model):
    """While passages are reused, prompts are exact in their first passage alone, but for those that are compared."""
    engine = engine_of(model, AllRows(), target=0.98, audit=1)
    pool, scope = prompt(sizes=SIZES), engine.scope()
    passages = own(engine).passages
    asked(engine, turned(pool, [0, 1, 2]))
    verdict = passages.verdict(scope, passages.tried(scope))
    verdict.chosen = verdict.policies[0]
    ((_, report),) = asked(engine, turned(pool, [1, 0, 3]))
    assert report.exactness == "approximate"
    assert report.captured == 1
    assert [each.predecessors for each in held(engine, pool)[3]] == [pool.passage_texts[1::-1]]
