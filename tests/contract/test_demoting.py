"""Demoted blocks have the lowest priority: they are evicted first, and found until then."""

import pytest
from core_help import found, prefill, run, serve

from quire import ops
from quire.core import CacheManager, Hint
from quire.core.policies import policy_names
from quire.exchange import hold

BLOCK = 4


@pytest.fixture(params=policy_names())
def manager(request):
    return CacheManager(num_blocks=16, block_size=BLOCK, policy=request.param)


def why(manager, tokens):
    return [part.why for part in ops.explain(manager, tokens).segments if not part.cached]


def test_demoted_blocks_go_before_older_ones_and_are_found_until_then(manager):
    serve(manager, run(1000, 4 * BLOCK))
    serve(manager, run(0, 6 * BLOCK))
    assert ops.demote(manager, run(0, 6 * BLOCK), 2 * BLOCK) == 4
    ops.check(manager)
    assert found(manager, run(0, 6 * BLOCK)) == 6 * BLOCK
    for left in (5, 4, 3, 2):
        assert ops.reclaim(manager, 1) == 1
        assert found(manager, run(0, 6 * BLOCK)) == left * BLOCK
    assert found(manager, run(1000, 4 * BLOCK)) == 4 * BLOCK
    ops.check(manager)


def test_the_block_that_a_text_leaves_within_stays(manager):
    serve(manager, run(0, 4 * BLOCK))
    assert ops.demote(manager, run(0, 4 * BLOCK), 2 * BLOCK + 1) == 1
    assert ops.demote(manager, run(0, 4 * BLOCK), 2 * BLOCK + 1) == 1, "again changes nothing"
    assert ops.demote(manager, run(0, 4 * BLOCK), 3 * BLOCK + 1) == 0
    assert ops.demote(manager, run(5000, 4 * BLOCK), 0) == 0, "of a text that is not cached"


def test_demoted_blocks_that_a_request_uses_are_ordinary_again(manager):
    serve(manager, run(1000, BLOCK))
    serve(manager, run(0, 4 * BLOCK))
    ops.demote(manager, run(0, 4 * BLOCK), 0)
    serve(manager, [*run(0, 2 * BLOCK), 7])
    assert ops.reclaim(manager, 2) == 2
    assert found(manager, run(0, 4 * BLOCK)) == 2 * BLOCK
    priorities = {node.priority for node in manager.kernel.tree.nodes()}
    assert priorities == {0}


def test_blocks_that_other_texts_go_on_from_stay_until_those_are_demoted_too(manager):
    answers = [[*run(0, 3 * BLOCK), *run(start, 2 * BLOCK)] for start in (1000, 2000)]
    for each in answers:
        serve(manager, each)
    assert ops.demote(manager, answers[0], BLOCK) == 2
    assert ops.demote(manager, answers[1], BLOCK) == 4
    ops.check(manager)


def test_blocks_of_a_running_request_stay(manager):
    seq = prefill(manager, run(0, 3 * BLOCK))
    assert ops.demote(manager, run(0, 3 * BLOCK), 0) == 0
    manager.close(seq)
    assert ops.demote(manager, run(0, 3 * BLOCK), 0) == 3


def test_blocks_that_are_held_for_tiers_are_demoted(manager):
    serve(manager, run(1000, BLOCK))
    seq = prefill(manager, run(0, 4 * BLOCK))
    release = hold(manager, seq)
    manager.close(seq)
    assert ops.demote(manager, run(0, 4 * BLOCK), BLOCK) == 3
    ops.check(manager)
    release()
    ops.check(manager)
    ops.reclaim(manager, 3)
    assert found(manager, run(0, 4 * BLOCK)) == found(manager, run(1000, BLOCK)) == BLOCK


def test_blocks_of_a_session_are_demoted_and_go_first_when_it_ends(manager):
    session = {"hint": Hint("session", session_id="a")}
    serve(manager, run(0, 4 * BLOCK), **session)
    assert ops.demote(manager, run(0, 4 * BLOCK), BLOCK) == 3
    serve(manager, [*run(0, 2 * BLOCK), *run(1000, BLOCK)], **session)
    ops.check(manager)
    manager.end_session("a")
    ops.check(manager)
    assert ops.reclaim(manager, 2) == 2
    assert found(manager, run(0, 4 * BLOCK)) == 2 * BLOCK


@pytest.mark.parametrize("start", [2 * BLOCK, 2 * BLOCK + 1, 3 * BLOCK - 1])
def test_a_prompt_that_goes_on_otherwise_is_told_so(manager, start):
    serve(manager, run(0, 6 * BLOCK))
    asked = [*run(0, start), *run(5000, 2 * BLOCK)]
    assert why(manager, asked) == ["cold", "last_token"]
    ops.demote(manager, run(0, 6 * BLOCK), start)
    assert why(manager, asked) == ["demoted", "last_token"]
    assert why(manager, [*run(0, BLOCK), *run(5000, 2 * BLOCK)]) == ["cold", "last_token"]
    serve(manager, asked)
    assert "demoted" not in why(manager, asked)
