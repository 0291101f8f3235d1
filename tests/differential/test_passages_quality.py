"""Answers with reused passages: the small models of `quire bench passages` tell one mistake from another."""

from functools import cache

import numpy as np
import pytest
import torch

from quire_passages import KVDeviation, NoRows, Segments
from quire_passages.bench.measure import measure
from quire_passages.bench.methods import METHODS, Method
from quire_passages.bench.rows import CASES
from quire_passages.bench.workloads import WORKLOADS
from quire_passages.hf import PassageModel
from turns import few_rows

pytestmark = [pytest.mark.slow, pytest.mark.ci]

ASKED = ("naive", "moved", "random_15%", "kv_deviation_15%", "kv_deviation_15%_at_2", "all")
MORE = {f"kv_deviation_{share:.0%}_at_2": Method(KVDeviation(share, 2)) for share in (0.05, 0.5)}
BY_ROWS = ("moved", "kv_deviation_5%_at_2", "kv_deviation_15%_at_2", "kv_deviation_50%_at_2")


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@cache
def opened(name):
    """A workload's model, the same behind its gate, and its prompts; the first few are always the same."""
    workload = next(each for each in WORKLOADS if each.name == name)
    model, tokenizer = workload.load()
    cases = workload.cases(tokenizer, CASES)
    return model, PassageModel(model), cases


def rows_of(name, num_cases, names, **others):
    methods = {each: METHODS[each] for each in names} | others
    model, passage_model, cases = opened(name)
    return {row["name"]: row for row in measure(model, passage_model, cases[:num_cases], methods)}


@pytest.fixture(scope="module", params=[16, pytest.param(24, marks=pytest.mark.long)])
def facts(request):
    return rows_of("facts", request.param, ASKED, **MORE)


def test_the_model_knows_its_task(facts):
    assert facts["full"]["right_rate"] >= 0.99


def test_everything_computed_again_is_the_full_forward(facts):
    assert facts["all"]["agree_rate"] == 1
    assert facts["all"]["kl"] < 1e-8


def test_keys_that_are_not_rotated_answer_with_facts_of_before(facts):
    assert facts["naive"]["update_rate"] <= 0.7
    assert facts["naive"]["local_rate"] >= 0.95


def test_rotating_alone_repairs_updates_and_not_borders(facts):
    assert facts["moved"]["update_rate"] >= 0.95
    assert facts["moved"]["boundary_rate"] <= 0.5


def test_the_default_answers_as_the_full_forward_does(facts):
    assert facts["kv_deviation_15%"]["agree_rate"] >= 0.98
    assert facts["kv_deviation_15%"]["kl"] <= 0.01
    assert facts["kv_deviation_15%"]["rows_rate"] <= 0.16


def test_a_shallower_check_layer_leaves_facts_stale(facts):
    assert opened("facts")[1].relocation.check_layer == 3  # of 4
    assert facts["kv_deviation_15%_at_2"]["agree_rate"] < 0.98


def test_the_default_beats_as_many_rows_by_chance(facts):
    assert facts["random_15%"]["rows_rate"] >= facts["kv_deviation_15%"]["rows_rate"] - 0.005
    assert facts["kv_deviation_15%"]["agree_rate"] >= facts["random_15%"]["agree_rate"] + 0.1


def test_more_rows_never_agree_less(facts):
    agreed = [facts[name]["agree_rate"] for name in BY_ROWS]
    assert agreed == sorted(agreed)
    moved, few, some, half = (facts[name]["kl"] for name in BY_ROWS)
    assert moved > few > max(some, half)


def test_a_hundred_moves_leave_no_trace():
    _, passage_model, (case, other, *_) = opened("facts")
    rng = np.random.default_rng(3)
    head, passage = case.head, case.passages[1]
    worn = passage_model.capture(passage, before=head)
    for _ in range(100):
        before = [other.passages[at] for at in rng.permutation(6)[: rng.integers(1, 6)]]
        segments = Segments.of([head, *before, passage, (*case.opening, *case.asked[0].tokens)])
        held = [None] * len(before)
        moved = passage_model.blend(segments, [*held, worn], NoRows())
        assert moved.moved == len(passage)
    fresh = passage_model.capture(passage, before=head)
    again = passage_model.blend(segments, [*held, fresh], NoRows())
    assert torch.equal(moved.logits, again.logits)


@pytest.mark.parametrize(
    ("name", "num_cases"),
    few_rows(
        [
            ("quotes", 8),
            ("quotes-new", 8),
            ("tiny", 1),
            ("tiny-new", 1),
            ("quotes", 40),
            ("quotes-new", 40),
            ("tiny", 2),
            ("tiny-new", 2),
        ],
        ("quotes-new", 8),
        ("tiny", 1),
    ),
)
def test_a_fifth_of_the_rows_is_enough_on_real_text(name, num_cases):
    rows = rows_of(name, num_cases, ("moved", "kv_deviation_20%"))
    assert rows["kv_deviation_20%"]["agree_rate"] >= 0.98
    assert rows["kv_deviation_20%"]["kl"] <= 0.01
    if name.startswith("quotes"):  # quire-tiny hardly reads what stands before a passage
        assert rows["full"]["right_rate"] >= 0.9
        assert rows["moved"]["border_rate"] <= rows["full"]["border_rate"] - 0.3
