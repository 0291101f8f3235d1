"""Hints that a trace could have given, and what they are worth in a replay."""

import pytest
from replay_help import random_chains, trace_of

from quire.core.terms import NO_HINT, Hint
from quire.errors import ConfigError
from quire_sim.foresight import ALL, KINDS, MAX_TURNS, foresee
from quire_sim.replay import replay
from quire_sim.reuse import reuses
from quire_sim.workload import Workload, parts_named


def advice(trace, kind):
    """The hint of every request."""
    said = foresee(trace, kind)
    return [said(number) for number in range(len(trace.requests))]


def ends(trace):
    """Whether each request is the last of its session."""
    return [each.ends is not None for each in advice(trace, "session-end")]


# -- what is said --------------------------------------------------------------------------


def test_a_replay_without_hints_gives_no_hint():
    (said,) = advice(trace_of([[1]]), "none")
    assert (said.hint, said.stored_blocks, said.ends) == (NO_HINT, ALL, None)


def test_recorded_hints_are_those_of_the_trace():
    hint = Hint("never")
    said = advice(trace_of([[1], [2]], hint=[hint, None]), "recorded")
    assert [each.hint for each in said] == [hint, NO_HINT]


def test_never_is_said_where_no_new_block_comes_back():
    trace = trace_of([[1, 2], [1, 3], [1, 3, 4], [1], []])
    reuse = [each.hint.reuse for each in advice(trace, "never")]
    assert reuse == ["unknown", "unknown", "never", "unknown", "unknown"]


def test_blocks_that_one_request_alone_uses_are_not_stored():
    trace = trace_of([[1, 2], [1, 3], [1, 3, 4], [9, 8], [1]])
    assert [each.stored_blocks for each in advice(trace, "no-store")] == [1, 2, 2, 0, 1]


def test_a_recorded_session_ends_with_its_last_request():
    trace = trace_of([[1], [2], [1, 3], [2, 4]], session=["a", "b", "a", "a"])
    said = advice(trace, "session-end")
    assert [each.hint.session_id for each in said] == ["a", "b", "a", "a"]
    assert [each.ends for each in said] == [None, "b", None, "a"]


def test_sessions_without_names_continue_with_the_requests_that_extend_their_blocks():
    trace = trace_of([[1, 2], [5], [1, 2, 3], [5, 6], [1, 2, 7], [8]])
    assert ends(trace) == [False, False, False, True, True, True]


def test_a_system_prompt_makes_no_session():
    chains = [[0, number] for number in range(MAX_TURNS + 1)]
    trace = trace_of([*chains, [0, 0, 9]])
    assert ends(trace) == [False, *[True] * MAX_TURNS, True]


def test_last_use_is_both_in_one():
    trace = trace_of(random_chains(1))
    parts = zip(*(advice(trace, kind) for kind in ("no-store", "session-end")), strict=True)
    said = [(a.stored_blocks, b.hint, b.ends) for a, b in parts]
    assert [(e.stored_blocks, e.hint, e.ends) for e in advice(trace, "last-use")] == said


def test_an_unknown_kind_names_the_nearest():
    with pytest.raises(ConfigError, match="did you mean no-store"):
        replay(trace_of([[1]]), 4, hints="nostore")


# -- what it is worth ----------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_hints_change_nothing_where_everything_fits(kind):
    trace = trace_of(random_chains(4))
    result = replay(trace, 1000, hints=kind)
    assert result.hit_tokens == replay(trace, 1000).hit_tokens
    assert result.hit_tokens + sum(result.missed.values()) == result.prompt_tokens


def test_a_session_that_is_over_gives_its_room_to_one_that_goes_on():
    trace = trace_of([[1, 1], [2, 2], [2, 2, 2], [3, 3], [1, 1]], session=["a", "b", "b", "c", "a"])
    found = {kind: replay(trace, 5, hints=kind).hit_blocks for kind in ("none", "session-end")}
    assert found == {"none": 2, "session-end": 4}


def test_blocks_hinted_as_unused_give_their_room_to_others():
    trace = trace_of([[1, 1], [2, 2, 2], [3, 3, 3], [1, 1]])
    found = {kind: replay(trace, 5, hints=kind).hit_blocks for kind in KINDS}
    assert (found["none"], found["session-end"], found["recorded"]) == (0, 2, 0)
    assert (found["never"], found["no-store"], found["last-use"]) == (2, 2, 2)


# -- times and sessions --------------------------------------------------------------------

LIKE_CHATS = {"turns": 1.6, "systems": 300, "system.mean": 1500, "skew": 0.8}


def test_times_of_named_sessions_come_with_their_names_and_end_with_the_session():
    trace = trace_of([[1], [2], [1, 3], [1, 4], [2, 5]], session=["a", "b", "a", "a", "b"])
    said = advice(trace, "return-time")
    assert [each.hint.session_id for each in said] == ["a", "b", "a", "a", "b"]
    assert [each.ends for each in said] == [None, None, None, "a", "b"]
    assert {each.hint.reuse for each in said} == {"unknown"}
    assert [each.hint.returns_in_s is not None for each in said] == [True, True, True, False, False]


def test_times_without_named_sessions_say_never():
    said = advice(trace_of([[1], [2], [1, 3]]), "return-time")
    assert [each.hint.reuse for each in said] == ["unknown", "never", "never"]
    assert all(each.hint.session_id is None and each.ends is None for each in said)


@pytest.mark.ci
@pytest.mark.parametrize("policy", ["lru", "learned"])
def test_times_of_sessions_are_worth_no_less_than_their_ends(policy):
    trace = Workload(parts_named("chat", LIKE_CHATS), 1000, 3)
    capacity = reuses(trace, trace.block_size).num_unique // 5
    ends, times = (
        replay(trace, capacity, policy=policy, hints=kind).token_hit
        for kind in ("session-end", "return-time")
    )
    assert times >= ends
