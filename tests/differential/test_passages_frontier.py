"""The benchmark of policies on one model: traffic, oracles, bounds, and a file to go on from."""

import json
from itertools import islice

import numpy as np
import pytest
from passages_help import passage_model_of, prompt

from quire.errors import ConfigError
from quire_passages import AllRows, NoRows, Segments
from quire_passages.bench import frontier
from quire_passages.bench.frontier import (
    OutcomeFile,
    PolicyBench,
    best_within,
    facts_of,
    is_policy,
    policies,
    summary,
)
from quire_passages.bench.oracle import ScoredRows, true_errors
from quire_passages.bounds import bootstrap
from quire_passages.hf.capture import captured
from quire_passages.verdict import PolicyOutcome

KINDS = ["llama", "gemma3"]


def prompts(seed=0):
    """Yield prompts of four of six passages, in changing orders."""
    pool = prompt(seed=3, sizes=(9, 20, 17, 24, 18, 22, 19, 6))
    rng = np.random.default_rng(seed)
    while True:
        chosen = tuple(pool.passages[at] for at in rng.permutation(6)[:4])
        yield Segments(pool.head, chosen, pool.question)


def bench_of(kind, monkeypatch, names=None):
    model = passage_model_of(kind)
    monkeypatch.setattr(frontier, "PassageModel", lambda _: model)
    return PolicyBench(None, prompts(), names, history=6)


@pytest.mark.ci
@pytest.mark.parametrize("kind", KINDS)
def test_every_policy_has_an_outcome_and_what_is_exact_agrees(kind, monkeypatch):
    bench = bench_of(kind, monkeypatch)
    assert list(bench.pass_history()) == [1, 2, 3, 4, 5, 6]
    found = list(islice(bench.outcomes(), 3))
    rows = {row["name"]: row for row in summary(found)}
    assert list(rows) == ["full", "prefix", *policies(3)]
    for name in ("full", "prefix"):
        assert (rows[name]["agree_rate"], rows[name]["kl"]) == (1, 0)
    assert rows["full"]["ratio_to_full"] == 1
    assert rows["prefix"]["work_rate"] < rows["moved"]["work_rate"] < 1
    for row in rows.values():
        assert 0 <= row["agree_low"] <= row["agree_rate"] <= row["agree_high"] <= 1
        assert 0 <= row["kl_low"] <= row["kl"] <= row["kl_high"]
        assert row["cpu_s"] > 0
    assert rows["exact_error_33%"]["kl"] < rows["moved"]["kl"]
    assert len({rows[name]["kl"] for name in ("moved", "earlier", "related")}) == 3


@pytest.mark.parametrize("kind", KINDS)
def test_all_rows_of_the_full_forward_or_computed_again_are_the_full_forward(kind):
    model = passage_model_of(kind)
    segments = next(prompts())
    full = model.answer(segments, num_tokens=8)
    held = model.capture_alone(segments.passages, segments.head)
    stale = full.beside(NoRows(), held)
    every = ScoredRows(true_errors(model, full, held), 1.0)
    assert stale.kl > 1e-4
    assert full.beside(NoRows(), held, every.among(segments.spans)).kl < 1e-6
    assert full.beside(every, held).kl < 1e-6
    assert full.beside(every, held).agreed == full.beside(AllRows(), held).agreed == 8
    assert full.beside(NoRows(), held).kl == pytest.approx(stale.kl)  # the full forward stays


@pytest.mark.parametrize("kind", KINDS)
def test_an_oracle_sees_no_error_in_what_is_exact(kind):
    model = passage_model_of(kind)
    segments = next(prompts())
    full = model.answer(segments, num_tokens=8)
    held = model.capture_alone(segments.passages, segments.head)
    errors = true_errors(model, full, held)
    (first, stop), *others = segments.spans
    assert errors.shape == (segments.num_tokens - 1,)
    assert errors[first:stop].max() < 1e-4  # it stands where it was captured
    assert all(errors[a:b].max() > 1e-2 for a, b in others)
    picked = ScoredRows(errors, 0.1).among(segments.spans)
    assert picked.size == 9  # of 83
    assert (np.diff(picked) > 0).all()


def test_passages_of_traffic_are_placed_by_company_and_the_first_one_is_exact(monkeypatch):
    bench = bench_of("llama", monkeypatch, ["earlier"])
    assert [*bench.pass_history()]
    bench._store.check()
    for segments in islice(prompts(seed=1), 20):
        alone = bench._held_alone(segments)
        first, *others = bench._held_earlier(segments, NoRows(), alone)
        assert first is None or first.start == segments.head.size
        assert {each.ids for each in others} <= set(segments.passage_texts)
        assert any(each.kind == "contextual" for each in others)


def test_related_passages_stand_behind_others_of_the_pool():
    model, segments = passage_model_of("llama"), prompt(seed=3, sizes=(9, 20, 17, 24, 18, 22, 6))
    alone = model.capture_alone(segments.passages, segments.head)
    found = list(model.runs.among(alone, 2))
    assert [each.ids for each in found] == [*segments.passage_texts]
    for each in found:
        assert each.kind == "contextual"
        assert each.head == segments.head.tobytes()
        assert len({*each.predecessors} - {each.ids}) == 2
        past = model.runs.past(each.start + each.num_tokens)
        model.runs.feed(past, np.frombuffer(each.before + each.ids, np.int32))
        right = captured(past, each.start, each.start + each.num_tokens)
        for got, wanted in zip(each.kv.layers, right.layers, strict=True):
            for one, other in zip(got, wanted, strict=True):
                assert (one - other).abs().max() < 1e-5


def test_no_traffic_is_computed_where_no_row_needs_any_and_prompts_stay_the_same(monkeypatch):
    few = bench_of("llama", monkeypatch, ["moved"])
    all_of_them = bench_of("llama", monkeypatch, ["moved", "earlier"])
    assert not [*few.pass_history()]
    assert [*all_of_them.pass_history()]
    one, two = (next(each.outcomes()) for each in (few, all_of_them))
    assert one["moved"].kl == pytest.approx(two["moved"].kl)
    with pytest.raises(ValueError, match="epic_16"):
        PolicyBench(None, prompts(), ["epic_17"])


def outcome(agreed, seconds=1.0, tokens=10):
    return PolicyOutcome(tokens, agreed, float(tokens - agreed), 0.5, seconds)


def of_two(agreed, seconds):
    return {"full": outcome(10, 2.0), "prefix": outcome(10, 0.1), "moved": outcome(agreed, seconds)}


def test_the_best_policy_in_half_the_time_is_no_oracle():
    rows = [
        {"name": name, "agree_rate": agree, "ratio_to_full": ratio}
        for name, agree, ratio in [
            ("full", 1.0, 1.0),
            ("prefix", 1.0, 0.02),
            ("moved", 0.9, 0.1),
            ("epic_16", 0.93, 0.2),
            ("kv_deviation_15%_at_22", 0.96, 0.8),
            ("oracle_error_15%", 0.98, 0.3),
            ("exact_error_15%", 0.99, 0.3),
        ]
    ]
    assert best_within(rows)["name"] == "epic_16"
    assert best_within(rows, 0.9)["name"] == "kv_deviation_15%_at_22"
    assert best_within(rows, 0.05) is None
    assert next(name for name in policies(30) if not is_policy(name)).startswith("oracle")


def test_bounds_are_those_of_prompts_drawn_anew():
    rng = np.random.default_rng(0)
    tokens = np.full(200, 32.0)
    agreed = np.minimum(rng.binomial(32, 0.93, 200), 32).astype(float)
    share, low, high = bootstrap(tokens, agreed)
    assert abs(share - 0.93) < 0.01
    assert low < share < high
    assert 0.01 < high - low < 0.03
    assert bootstrap(tokens, agreed) == (share, low, high)
    assert bootstrap(tokens, tokens) == (1, 1, 1)
    assert bootstrap(tokens[:1], agreed[:1])[0] == agreed[0] / 32
    apart = np.where(np.arange(200) % 20, 32.0, 0.0)  # whole prompts that differ
    _, low, high = bootstrap(tokens, apart)
    assert high - low > 0.05


def test_a_measurement_goes_on_behind_the_prompts_that_a_file_has(tmp_path):
    path, facts = tmp_path / "outcomes.jsonl", {"model": "m", "seed": 1, "tokens": (150, 400)}
    first = OutcomeFile(path, facts)
    first.add(of_two(8, 1.0))
    first.add(of_two(9, 0.5))
    path.write_text(path.read_text("utf-8") + '{"full": {"tok', "utf-8")  # it was killed here
    second = OutcomeFile(path, facts)
    assert second.outcomes == first.outcomes
    second.add(of_two(10, 0.5))
    assert OutcomeFile(path, facts).outcomes == second.outcomes
    row = summary(second.outcomes)[-1]
    assert row["agree_rate"] == pytest.approx(0.9)
    assert row["ratio_to_full"] == pytest.approx(2 / 6)
    assert summary([]) == []
    assert OutcomeFile(None, facts).outcomes == []


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"form": "quire passages 1", "model": "m", "seed": 2}\n', "seed is 2 there, 1 here"),
        ('{"form": "quire passages 0", "seed": 1}\n', "does not say 'quire passages 1'"),
        ("not json\n", "no line of facts"),
        ("no line", "no line of facts"),
        (json.dumps({"form": "quire passages 1", "model": "m", "seed": 1}) + "\n{}x\n", "line 2"),
    ],
)
def test_a_file_of_something_else_is_refused(tmp_path, text, said):
    path = tmp_path / "outcomes.jsonl"
    path.write_text(text, "utf-8")
    with pytest.raises(ConfigError, match=said):
        OutcomeFile(path, {"model": "m", "seed": 1})


def test_facts_tell_models_and_texts_apart():
    one, other = passage_model_of("llama"), passage_model_of("qwen2")
    models = [each.runs.model for each in (one, other)]
    first = facts_of(models[0], None, seed=1)
    assert first == facts_of(models[0], None, seed=1)
    assert first["model"] != facts_of(models[1], None, seed=1)["model"]
    assert first["texts"] != facts_of(models[0], ["a text"], seed=1)["texts"]
