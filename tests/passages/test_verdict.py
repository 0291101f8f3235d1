"""The verdict on a tenant's texts: bounds that hold, and the cheapest policy that keeps answers, or none."""

import json
from pathlib import Path

import numpy as np
import pytest

from quire.core import Scope
from quire.errors import ConfigError
from quire_passages import NoRows, Passages
from quire_passages.bounds import agreement_bounds, mean_bounds
from quire_passages.verdict import (
    LEAST_PROMPTS,
    PolicyOutcome,
    Verdict,
    Verdicts,
    candidates,
    estimate,
)

COMPUTED = Path(__file__).parents[1] / "data" / "passages_quotes.json"
"""400 prompts of documentation, computed once on quire-quotes: tokens, those that agree, and nats of each, by policy."""

WORK = {"none": 0.2, "epic 16": 0.4, "deep": 0.6}


class NamedPolicy(NoRows):
    def __init__(self, name):
        self.name = name


def verdict_of(target=0.98):
    return Verdict([NamedPolicy(name) for name in WORK], target)


def told(verdict, count, wrong, seed=0):
    """Add prompts of 32 tokens, each of which is wrong by chance with a policy's probability."""
    rng = np.random.default_rng(seed)
    for _ in range(count):
        asked = {each.name for each in verdict.wanted}
        agreed = {name: 32 - rng.binomial(32, share) for name, share in wrong.items()}
        verdict.add(
            {
                name: PolicyOutcome(32, int(agreed[name]), 0.1, WORK[name])
                for name in wrong
                if name in asked
            }
        )


def test_nothing_is_chosen_before_enough_prompts_were_seen():
    verdict = verdict_of()
    told(verdict, LEAST_PROMPTS - 1, dict.fromkeys(WORK, 0.0))
    assert verdict.chosen is None
    assert not verdict.is_decided
    assert f"{LEAST_PROMPTS - 1} prompts so far" in verdict.reason
    told(verdict, 1, dict.fromkeys(WORK, 0.0))
    assert verdict.chosen.name == "none"


def test_the_cheapest_policy_whose_lower_bound_is_near_the_target_is_chosen():
    verdict = verdict_of()
    told(verdict, 200, {"none": 0.1, "epic 16": 0.002, "deep": 0.0})
    assert verdict.chosen.name == "epic 16"
    assert verdict.chosen_estimate.agreement_low >= 0.97
    assert [each.name for each in verdict.wanted] == ["epic 16"]  # a cheaper one is ruled out
    first = verdict.estimates()[0]
    assert first.policy == "none"
    assert first.prompts < 100  # and was not tried since


def test_where_none_is_good_enough_it_declines_with_the_figures_of_the_best():
    verdict = verdict_of()
    told(verdict, 64, {"none": 0.2, "epic 16": 0.15, "deep": 0.1})
    assert verdict.chosen is None
    assert verdict.is_decided
    assert "deep agrees in" in verdict.reason
    assert [each.name for each in verdict.wanted] == ["deep"]
    lower = verdict_of(0.85)
    told(lower, 64, {"none": 0.2, "epic 16": 0.15, "deep": 0.1})
    assert lower.chosen.name == "deep"


def test_a_chosen_policy_that_gets_worse_is_given_up():
    verdict = verdict_of()
    told(verdict, 64, dict.fromkeys(WORK, 0.0))
    assert verdict.chosen.name == "none"
    told(verdict, 200, {"none": 0.2, "epic 16": 0.001, "deep": 0.001}, seed=1)
    assert verdict.chosen.name == "epic 16"


def test_a_policy_that_is_barely_below_the_target_is_seldom_chosen():
    chosen = 0
    for seed in range(12):
        verdict = verdict_of()
        told(verdict, 64, dict.fromkeys(WORK, 0.04), seed)
        chosen += verdict.chosen is not None
    assert chosen <= 2


def test_each_tenant_has_a_verdict_of_its_own():
    verdicts = Verdicts(0.98, 10)
    one, two = Scope(tenant="one", model="m"), Scope(tenant="two", model="m")
    told(verdicts.of(one, lambda: [NamedPolicy("none")]), 40, {"none": 0.0})
    assert verdicts.of(one, list).chosen is not None
    assert verdicts.of(Scope(tenant="one", salt="s", model="m"), list).chosen is not None
    assert verdicts.of(two, lambda: [NamedPolicy("none")]).chosen is None
    assert verdicts.counts() == {"served": 1, "declined": 0, "open": 1, "prompts": 40}
    assert [verdicts.is_due(two) for _ in range(3)] == [True] * 3
    assert sum(verdicts.is_due(one) for _ in range(100)) == 10
    verdicts.purge(Scope(tenant="one"), lambda scope: scope.tenant == "one")
    assert verdicts.counts()["served"] == 0


def test_candidates_go_as_deep_as_the_model_has_layers():
    deep = [f"kv-deviation 0.15 at layer {at}" for at in (8, 15, 22)]
    asked = ["question 0.15", "question 0.33"]

    def names(num_layers, worth=1.0, drops_rows=True, shows=True):
        given = {"drops_rows": drops_rows, "shows": shows, "worth": worth}
        return [each.name for each in candidates(num_layers, **given)]

    assert names(30) == ["none", "epic 16", *asked, *deep]
    assert names(30, worth=0.5) == ["none", "epic 16", *asked, deep[0]]
    assert names(30, shows=False) == ["none", "epic 16", *deep]
    assert names(1, worth=0.5) == names(30, drops_rows=False) == ["none", "epic 16", *asked]


def test_a_policy_that_takes_more_work_than_it_is_worth_is_not_chosen():
    verdict = Verdict([NamedPolicy(name) for name in WORK], 0.98, worth=0.5)
    told(verdict, 64, {"none": 0.2, "epic 16": 0.15, "deep": 0.0})
    assert verdict.chosen is None
    assert verdict.is_decided
    assert "within 50% of the work: epic 16 agrees in" in verdict.reason
    assert [each.name for each in verdict.wanted] == ["epic 16"]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"target": 1.0}, "target=1.0"),
        ({"target": 0.2}, "target=0.2"),
        ({"audit": 0}, "audit=0"),
        ({"share": 2}, "share=2"),
    ],
)
def test_settings_of_a_verdict_that_cannot_be_are_refused(given, words):
    with pytest.raises(ConfigError, match=words):
        Passages(**given)


def test_bounds_are_exact_where_tokens_are_independent():
    ones = np.ones(100)
    share, low, high = agreement_bounds(ones, np.r_[np.ones(90), np.zeros(10)])
    assert share == 0.9
    assert low == pytest.approx(0.8238, abs=0.003)  # Clopper and Pearson: 0.8238 to 0.9510
    assert high == pytest.approx(0.9510, abs=0.003)
    assert agreement_bounds(ones, ones)[1:] == (pytest.approx(0.964, abs=0.002), 1.0)
    assert agreement_bounds(ones, 0 * ones)[1] == 0.0


def test_tokens_of_one_prompt_widen_the_bounds():
    tokens = np.full(50, 32.0)
    spread = np.full(50, 31.0)
    lumped = np.where(np.arange(50) < 25, 32.0, 30.0)
    clumped = np.where(np.arange(50) < 48, 32.0, 7.0)
    assert spread.sum() == lumped.sum() == clumped.sum() - 0
    lows = [agreement_bounds(tokens, each)[1] for each in (spread, lumped, clumped)]
    assert lows[2] < lows[0] - 0.02
    assert lows[1] <= lows[0]
    assert mean_bounds(tokens, tokens * 0) == (0.0, 0.0, 0.0)
    assert mean_bounds(tokens[:1], tokens[:1])[2] == float("inf")


@pytest.mark.parametrize("size", [50, 100])
def test_bounds_hold_on_prompts_that_they_have_not_seen(size):
    """Of 100 pools that are drawn from all prompts, in 90 the figures of all are within the bounds."""
    rng = np.random.default_rng(7)
    for policy, rows in json.loads(COMPUTED.read_text())["policies"].items():
        samples = [PolicyOutcome(*row, 0.5) for row in rows]
        whole = estimate(policy, samples)
        held = np.zeros(2)
        for _ in range(100):
            pool = [samples[at] for at in rng.integers(0, len(samples), size)]
            found = estimate(policy, pool)
            held += (
                found.agreement_low <= whole.agreement <= found.agreement_high,
                found.kl_low <= whole.kl <= found.kl_high,
            )
        assert min(held) >= 90, (policy, size, held)
