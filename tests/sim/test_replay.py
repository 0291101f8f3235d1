"""Replaying a trace through the manager."""

import re
from pathlib import Path

import pytest
from replay_help import BLOCK, ListTrace, lru_model, random_chains, trace_of

from quire.errors import ConfigError
from quire_sim.replay import REASONS, replay


def hits_of(trace, capacity, **options):
    """Blocks found per request."""
    found = []
    replay(trace, capacity, observers=[lambda _, tokens: found.append(tokens // BLOCK)], **options)
    return found


def test_a_replay_finds_the_blocks_of_earlier_requests_only():
    trace = trace_of([[1, 2, 3], [1, 2, 9], [1, 2, 3, 4]])
    assert hits_of(trace, 100) == [0, 2, 3]
    result = replay(trace, 100)
    assert (result.prompt_tokens, result.hit_tokens) == (13 + 13 + 17, 5 * BLOCK)
    assert (result.prompt_blocks, result.hit_blocks) == (10, 5)
    assert result.token_hit == 20 / 43
    assert result.block_hit == 0.5


@pytest.mark.cases(8)
@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("capacity", [1, 2, 5, 13, 40, 10_000])
def test_lru_finds_and_evicts_what_a_list_of_blocks_says(seed, capacity):
    trace = trace_of(random_chains(seed))
    found, evicted = lru_model(trace, capacity)
    assert hits_of(trace, capacity) == found
    assert replay(trace, capacity).evicted_blocks == evicted


@pytest.mark.parametrize("policy", ["lru", "fifo", "lfu"])
@pytest.mark.parametrize("capacity", [1, 7, 30])
def test_every_token_is_found_or_missed_for_one_reason(policy, capacity):
    result = replay(trace_of(random_chains(3)), capacity, policy)
    assert tuple(result.missed) == REASONS
    assert result.hit_tokens + sum(result.missed.values()) == result.prompt_tokens
    assert min(result.missed.values()) >= 0


def test_misses_are_told_apart_by_what_the_trace_showed_before():
    trace = trace_of([[1, 2, 3], [7, 8, 9], [1, 2, 3, 4]], tail=3)
    result = replay(trace, 3)
    assert result.missed == {
        "cold": 6 * BLOCK,
        "evicted": 3 * BLOCK,
        "computing": 0,
        "oversized": BLOCK,
        "partial_block": 9,
    }


def test_a_prompt_larger_than_the_cache_keeps_its_first_blocks():
    trace = trace_of([[1, 2, 3, 4, 5], [1, 2, 3, 4, 5], [1, 2]])
    assert hits_of(trace, 3) == [0, 3, 2]


def test_a_last_block_that_is_not_full_counts_its_tokens_where_the_trace_names_it():
    trace = trace_of([[1, 2], [1, 2]], tail=-1)
    result = replay(trace, 10)
    assert (result.prompt_tokens, result.hit_tokens, result.hit_blocks) == (14, 7, 2)
    assert result.missed == dict.fromkeys(REASONS, 0) | {"cold": 7}


def test_requests_before_the_first_counted_one_warm_the_cache_up_only():
    trace = trace_of([[1, 2], [3, 4], [1, 2], [3, 9]])
    result = replay(trace, 2, count_from=2)
    assert (result.num_requests, result.prompt_blocks, result.hit_blocks) == (2, 4, 0)
    assert (result.missed["evicted"], result.missed["cold"]) == (3 * BLOCK, BLOCK)
    assert result.evicted_blocks == 4
    assert replay(trace, 9, count_from=2).hit_blocks == 3


def test_a_prompt_without_a_full_block_counts_as_a_request():
    result = replay(trace_of([[], [1], []]), 4)
    assert (result.num_requests, result.prompt_tokens) == (3, 1 + 5 + 1)


def test_an_empty_trace_has_ratios_of_zero():
    result = replay(ListTrace([]), 4)
    assert (result.token_hit, result.block_hit, result.num_requests) == (0.0, 0.0, 0)


def test_two_replays_of_a_trace_are_equal_but_for_the_time_they_took():
    trace = trace_of(random_chains(5))
    first, second = (replay(trace, 9, "lfu").row() for _ in range(2))
    assert first | {"seconds": 0} == second | {"seconds": 0}


def test_a_row_of_a_report_is_plain_data_with_the_ratios():
    row = replay(trace_of([[1], [1]]), 4).row()
    assert list(row)[:5] == ["policy", "capacity_blocks", "token_hit", "block_hit", "evictions"]
    assert (row["token_hit"], row["block_hit"], row["hit_blocks"]) == (0.4, 0.5, 1)


@pytest.mark.parametrize("capacity", [0, -1, 2**31, 1.5, "9", True, None])
def test_a_capacity_that_is_no_number_of_blocks_is_refused(capacity):
    with pytest.raises(
        ConfigError, match=r"a capacity in blocks must be (from 1 to \d+|an integer), got "
    ):
        replay(trace_of([[1]]), capacity)


def test_an_unknown_policy_is_refused():
    with pytest.raises(ConfigError, match="unknown policy 'lur'"):
        replay(trace_of([[1]]), 1, "lur")


# -- the page about it ---------------------------------------------------------------------


def test_the_examples_of_the_page_run(monkeypatch, capsys):
    root = Path(__file__).parents[2]
    monkeypatch.chdir(root)
    page = (root / "docs" / "replay.md").read_text("utf-8")
    examples = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert len(examples) == 2
    for example in examples:
        exec(compile(example, "docs/replay.md", "exec"), {})
    assert "cold" in capsys.readouterr().out
