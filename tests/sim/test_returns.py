"""Forecasts that a trace could have given, beside a model that looks ahead request by request."""

import math

import pytest
from curves_help import SmallTrace, growing, prompts
from hypothesis import given, settings
from replay_help import random_chains, trace_of

from quire.core.terms import NO_HINT
from quire.errors import ConfigError
from quire_sim.foresight import TIMED, foresee
from quire_sim.replay import replay
from quire_sim.returns import CLAIMED, OFF_BY, SOONEST_S, returns_of
from quire_sim.reuse import reuses


def model(trace):
    """Seconds to the next use of the first stored block, or of the last found one; whether the stored ones are spent."""
    said, seen = [], set()
    for now, chain in enumerate(trace.chains):

        def wait(block, now=now):
            later = range(now + 1, len(trace.chains))
            return next((use - now for use in later if block in trace.chains[use]), math.inf)

        new = [block for block in chain if block not in seen]
        old = [block for block in chain if block in seen]
        seen.update(chain)
        spent = bool(new) and wait(new[0]) == math.inf
        if new and not spent:
            said.append((wait(new[0]), False))
        else:
            said.append((wait(old[-1]) if old else math.inf, spent))
    return said


@given(prompts | growing)
@settings(max_examples=150, deadline=None)
def test_returns_are_the_next_uses_that_follow(texts):
    trace = SmallTrace(texts)
    there = returns_of(reuses(trace, trace.block_size))
    assert list(zip(there.seconds.tolist(), there.spent.tolist(), strict=True)) == model(trace)


def hints(trace, kind):
    said = foresee(trace, kind)
    return [said(number).hint for number in range(len(trace.requests))]


def test_times_are_exact_or_off_by_the_factor_that_they_claim_at_most():
    trace = trace_of(random_chains(3), time_s=[2.0 * n for n in range(60)])
    exact, noisy, wrong = (
        hints(trace, k) for k in ("return-time", "return-time:3", "return-time-wrong")
    )
    assert any(hint.returns_in_s for hint in exact)
    ratios = [
        (b.returns_in_s / a.returns_in_s, c.returns_in_s / a.returns_in_s)
        for a, b, c in zip(exact, noisy, wrong, strict=True)
        if a.returns_in_s is not None
    ]
    assert all(1 / 3 - 1e-9 <= ratio <= 3 + 1e-9 for ratio, _ in ratios)
    assert max(ratio for ratio, _ in ratios) > 2
    assert min(ratio for ratio, _ in ratios) < 0.5
    assert {round(ratio, 6) for _, ratio in ratios} == {OFF_BY, 1 / OFF_BY}
    assert {hint.within for hint in noisy} == {3.0}
    assert {hint.within for hint in wrong} == {CLAIMED}
    assert hints(trace, "return-time:3") == noisy


def test_blind_forecasts_cover_requests_without_a_return():
    trace = trace_of([[1], [1, 2], [3], [4], [1, 2]])
    assert [hint.reuse for hint in hints(trace, "return-time")] == [
        "unknown",
        "unknown",
        "never",
        "never",
        "unknown",
    ]
    blind = hints(trace, "return-time-blind")
    assert {hint.reuse for hint in blind} == {"unknown"}
    assert all(hint.returns_in_s is not None for hint in blind)


def test_a_return_in_the_same_moment_has_the_smallest_return_time():
    trace = trace_of([[1, 2], [1, 2, 3]], time_s=[5.0, 5.0])
    assert hints(trace, "return-time")[0].returns_in_s == SOONEST_S


def test_a_trace_without_blocks_has_forecasts_of_nothing():
    assert hints(trace_of([[], []]), "return-time") == [NO_HINT.__class__(within=1.0)] * 2


@pytest.mark.parametrize(
    "kind",
    [
        "return-time:",
        "return-time:0.5",
        "return-time:x",
        "return-time-blind:nan",
        "return-time:1e9",
    ],
)
def test_noise_that_is_no_factor_is_refused(kind):
    with pytest.raises(ConfigError, match="a factor from 1 to 1000, as in return-time"):
        replay(trace_of([[1]]), 4, hints=kind)


def test_an_unknown_kind_of_times_names_the_nearest():
    with pytest.raises(ConfigError, match="did you mean return-time"):
        replay(trace_of([[1]]), 4, hints="return-times:2")


@pytest.mark.cases(7)
@pytest.mark.parametrize("kind", TIMED)
@pytest.mark.parametrize("policy", ["lru", "lfu", "learned"])
def test_times_change_nothing_where_everything_fits(kind, policy):
    trace = trace_of(random_chains(4))
    assert replay(trace, 1000, policy, hints=kind).hit_tokens == replay(trace, 1000).hit_tokens
