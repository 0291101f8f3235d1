"""Passages are served once their answers were measured: in a cache, in an engine, for each tenant by itself."""

from unittest import mock

import numpy as np
import pytest
import torch
from passages_help import GATES, made, prompt

from quire.core import Scope
from quire.engines.hf import PrefixCache
from quire.engines.loop import Engine, SamplingParams
from quire.errors import ConfigError, NotRelocatable
from quire.ops import check
from quire_passages import AllRows, Epic, NoRows, Passages, Segments
from quire_passages.hf.beside import FullAnswer
from quire_passages.verdict import LEAST_PROMPTS

SIZES = (9, 20, 17, 24, 6)
MEASURED = {"worth": 10.0, "min_tokens": 2, "gates": GATES, "capture": "isolated"}
GREEDY = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)


@pytest.fixture(scope="module")
def model():
    return made("Llama", {})


def prompts(count, seed=0):
    """Yield prompts of passages in changing orders, of a few that come again."""
    pool = prompt(seed=3, sizes=(9, 20, 17, 24, 18, 22, 6))
    rng = np.random.default_rng(seed)
    for _ in range(count):
        chosen = tuple(pool.passages[at] for at in rng.permutation(5)[:4])
        yield Segments(pool.head, chosen, pool.question)


def given(segments):
    return {"segments": [segments.head, *segments.passages, segments.question]}


def plain(model, segments):
    (output,) = Engine(model, num_blocks=100).generate([segments.tokens.tolist()], GREEDY)
    return output.outputs[0].token_ids


def asked(engine, segments, **options):
    (output,) = engine.generate([given(segments)], GREEDY, **options)
    check(engine.manager)
    engine._companions[-1].passages.store.check()
    return output.outputs[0].token_ids, output.passages


@pytest.mark.ci
def test_an_engine_serves_exactly_until_a_policy_was_measured(model):
    """Of all rows nothing is approximate: that policy is chosen after enough prompts, and then served."""
    engine = Engine(model, num_blocks=400, passages=Passages("64MiB", AllRows(), **MEASURED))
    reports = []
    for segments in prompts(LEAST_PROMPTS + 8):
        answer, report = asked(engine, segments)
        reports.append(report)
        assert answer == plain(model, segments)
    assert reports[0].estimate is None
    last = [each for each in reports if each.fallback is None][-1]
    assert all("measured first" in each.fallback for each in reports[:LEAST_PROMPTS])
    assert all(each.exactness == "exact" for each in reports[:LEAST_PROMPTS])
    assert last.moved_tokens == 0
    assert last.recomputed_rows
    assert last.estimate.agreement == 1.0
    assert 0.97 < last.estimate.agreement_low < 1.0
    assert last.estimate.kl_high < 1e-6
    assert engine._companions[-1].passages.verdict_counts["served"] == 1


def test_an_engine_declines_a_policy_that_changes_answers_and_goes_on_watching(model):
    passages = Passages("64MiB", NoRows(), **MEASURED, audit=4)
    engine = Engine(model, num_blocks=400, passages=passages)
    for segments in prompts(LEAST_PROMPTS + 8):
        answer, report = asked(engine, segments)
        assert answer == plain(model, segments)
    assert "no policy agrees in 0.98 of next tokens: none agrees in" in report.fallback
    assert report.exactness == "exact"
    assert report.estimate.policy == "none"
    assert report.estimate.agreement_high < 0.97
    assert report.captured == 0
    seen = engine._companions[-1].passages.verdict_counts
    assert seen == {"served": 0, "declined": 1, "open": 0, "prompts": LEAST_PROMPTS + 2}


@pytest.mark.ci
def test_tenants_are_not_served_by_the_texts_of_others(model):
    engine = Engine(model, num_blocks=400, passages=Passages("64MiB", AllRows(), **MEASURED))
    for segments in prompts(LEAST_PROMPTS + 2):
        asked(engine, segments, scope=Scope(tenant="one"))
    assert asked(engine, segments, scope=Scope(tenant="one"))[1].estimate.prompts == LEAST_PROMPTS
    _, report = asked(engine, segments, scope=Scope(tenant="two"))
    assert report.estimate is None
    assert "0 prompts so far" in report.fallback
    assert engine.purge(Scope(tenant="one")).passages
    assert engine._companions[-1].passages.verdict_counts["served"] == 0


def test_comparing_takes_its_share_while_requests_wait(model):
    passages = Passages("64MiB", AllRows(), **MEASURED, share=0.5)
    engine = Engine(model, num_blocks=400, passages=passages, max_running=1)
    own, ended = engine._companions[-1], 0
    source = iter(prompts(1000))
    for _ in range(3):
        engine.add_request(given(next(source)), GREEDY)
    while ended < 40:
        for output in engine.step():
            if output.finished:
                ended += 1
                engine.add_request(given(next(source)), GREEDY)
        assert engine.scheduler.queues.num_waiting
        assert len(own._to_compare) <= 64
    assert 3 < own.passages.verdict_counts["prompts"] < 40


def test_a_comparison_that_fails_costs_no_answer(model, monkeypatch):
    def failing(*_, **__):
        raise RuntimeError("no memory")

    monkeypatch.setattr("quire_passages.hf.audit.FullAnswer", failing)
    passages = Passages("64MiB", AllRows(), **{**MEASURED, "share": 1.0})
    engine, cache = (
        Engine(model, num_blocks=400, passages=passages),
        PrefixCache(model, passages=passages),
    )
    (segments,) = prompts(1)
    assert asked(engine, segments)[0] == plain(model, segments)
    cache.generate(segments=segments, max_new_tokens=4, do_sample=False, pad_token_id=0)
    for holder in (engine._companions[-1].passages, cache.passages):
        assert holder.verdict_counts["prompts"] == 0


def test_a_purge_takes_a_comparison_that_is_under_way(model):
    engine = Engine(model, num_blocks=400, passages=Passages("64MiB", AllRows(), **MEASURED))
    own = engine._companions[-1]
    for tenant in ("one", "two"):
        segments = next(prompts(1))
        engine.add_request(given(segments), GREEDY, scope=Scope(tenant=tenant))
    while own._audit is None or own._audit._full is None:
        engine.step()
    past = own._audit._full.past
    engine.purge(Scope(tenant=own._audit.bound.tenant))
    assert own._audit is None
    assert not any(float(each.abs().max()) for each in past.kv_layers[0].row(0, 0, 20))
    while engine.has_unfinished():
        engine.step()
    assert own.passages.verdict_counts["prompts"] == 1


@pytest.mark.ci
def test_an_operators_prompts_are_compared_first_and_serve_tenants_at_once(model, tmp_path):
    given = {**MEASURED, "prompts": tuple(prompts(LEAST_PROMPTS + 8)), "verdicts": tmp_path}
    segments, other = prompts(2, seed=9)
    for num_known in (0, LEAST_PROMPTS):  # the second engine goes on with what the first has found
        engine = Engine(model, num_blocks=400, passages=Passages("64MiB", AllRows(), **given))
        own = engine._companions[-1].passages
        engine._companions[-1].passages.advance = mock.Mock(side_effect=own.advance)
        while engine.has_unfinished():
            engine.step()
        assert own.verdict_counts["prompts"] == LEAST_PROMPTS
        assert own.advance.called is not bool(num_known)
        del own.advance
        for each in (segments, other):
            answer, report = asked(engine, each, scope=Scope(tenant="one"))
            assert answer == plain(model, each)
            assert report.estimate.prompts == LEAST_PROMPTS
        assert report.exactness == "approximate"


def test_a_cache_is_given_prompts_by_judge(model):
    passages = Passages("1MiB", prompts=tuple(prompts(1)))
    with pytest.raises(ConfigError, match="judge"):
        PrefixCache(model, "1MiB", passages=passages)


@pytest.mark.ci
def test_a_cache_judges_prompts_at_once_and_then_serves(model):
    cache = PrefixCache(model, "16MiB", passages=Passages("64MiB", AllRows(), **MEASURED))
    shown = []
    found = cache.passages.judge(prompts(LEAST_PROMPTS), progress=shown.append)
    assert len(shown) == LEAST_PROMPTS
    assert [each.agreement for each in found] == [1.0]
    segments = next(prompts(1, seed=9))
    output = cache.generate(
        segments=segments, max_new_tokens=5, do_sample=False, pad_token_id=0, eos_token_id=-1
    )
    assert cache.last.passages.fallback is None
    assert output[0, segments.num_tokens :].tolist() == plain(model, segments)
    with pytest.raises(ConfigError, match="target=None"):
        cache.generate(segments=segments, selector=Epic(4), max_new_tokens=1)


def test_prompts_of_history_are_captured_and_not_compared(model):
    given = {**MEASURED, "capture": "contextual"}
    cache = PrefixCache(model, "16MiB", passages=Passages("64MiB", AllRows(), **given))
    shown = []
    own = cache.passages
    found = own.judge(prompts(7), progress=lambda told: shown.append([*told]), history=3)
    assert [bool(told) for told in shown] == [False] * 3 + [True] * 4
    assert found[0].prompts == own.verdict_on().num_prompts == 4
    assert own.store.stats.variants > 4
    assert own.judge(prompts(2, seed=5))[0].prompts == 6  # without history each prompt counts


def test_a_cache_compares_calls_within_its_share(model):
    passages = Passages("64MiB", NoRows(), **MEASURED, share=1.0)
    cache = PrefixCache(model, "16MiB", passages=passages)
    for segments in prompts(20):
        cache.generate(segments=segments, max_new_tokens=4, do_sample=False, pad_token_id=0)
        assert cache.last.passages.exactness == "exact"
    assert 3 < cache.passages.verdict_counts["prompts"] < 20


def test_there_is_nothing_to_judge_without_a_target_or_a_model_that_moves(model):
    unmeasured = Passages("1MiB", target=None, gates=GATES)
    own = PrefixCache(model, "1MiB", passages=unmeasured).passages
    with pytest.raises(ConfigError, match="target=None"):
        own.judge(prompts(1))
    other = made("GPT2", {"n_positions": 512, "n_embd": 64, "n_layer": 3, "n_head": 4})
    own = PrefixCache(other, "1MiB", passages=Passages("1MiB")).passages
    with pytest.raises(NotRelocatable):
        own.judge(prompts(1))


@pytest.mark.parametrize("name", ["Llama", "Gemma3"])
def test_logits_are_held_for_a_few_rows_at_a_time(name, monkeypatch):
    """Comparing takes memory by rows, whatever the vocabulary has: no product has the logits of a whole answer."""
    own = made(name, {"head_dim": 16, "sliding_window": 9} if name == "Gemma3" else {})
    cache = PrefixCache(own, "1MiB", passages=Passages("16MiB", **MEASURED))
    blending, largest = cache.passages.tried(cache.kept.identity.scope()), []
    runs, logits = cache.passages.runs, cache.passages.runs.logits

    def counted(*given, **named):
        found = logits(*given, **named)
        largest.append(found.shape[0])
        return found

    monkeypatch.setattr(runs, "logits", counted)
    segments = next(prompts(1))
    full = FullAnswer(runs, blending, segments, num_tokens=40)
    held = runs.isolated(segments.head, segments.passages)
    found = full.beside(AllRows(), held)
    assert max(largest) <= 16
    assert found.agreed == found.tokens == len(full.answer)
    assert found.kl < 1e-6
    ids = torch.tensor([[*segments.tokens.tolist(), *full.answer]])
    with torch.no_grad():
        said = own(ids).logits[0, segments.num_tokens - 1 : -1].argmax(-1)
    assert said.tolist() == full.answer
