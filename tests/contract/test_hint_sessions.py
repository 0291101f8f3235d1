"""Sessions that end: exactly the blocks that one session alone has used go first, under three policies."""

import pytest
from core_help import found, generate, prefill, run, serve
from hints_help import BLOCK, NEVER, blocks, foreseen, make, turn

from quire import ops
from quire.core import Hint, Scope

SYSTEM = blocks(0, 2)
A, B, C = (Hint("session", session_id=name) for name in "abc")


@pytest.fixture(params=["lru", "lfu", "learned"])
def policy(request):
    return request.param


def talk(manager, session, start, turns, *, system=SYSTEM):
    """Serve the turns of a session, each a block longer than the one before; return the last prompt."""
    prompt = list(system)
    for number in range(turns):
        prompt += blocks(start + 100 * number, 1).tolist()
        turn(manager, prompt, hint=session)
        ops.check(manager)
    return prompt


class TestTheEnd:
    def test_its_own_blocks_go_first_and_the_shared_prompt_stays(self, policy):
        manager = make(policy)
        turn(manager, SYSTEM)
        talk(manager, A, 1000, 3)
        other = talk(manager, B, 2000, 3)
        assert manager.end_session("a") == 3
        ops.check(manager)
        assert foreseen(manager) == 3
        assert found(manager, other) == 5 * BLOCK

    def test_a_session_of_another_scope_by_the_same_name_goes_on(self, policy):
        manager = make(policy)
        tenants = [None, Scope(salt="x"), Scope(salt="x", lora="y")]
        for scope in tenants:
            turn(manager, blocks(0, 3), scope=scope, hint=A)
        assert manager.end_session("a", Scope(salt="nobody")) == 0
        for scope in tenants:
            assert manager.end_session("a", scope) == 3
            assert manager.end_session("a", scope) == 0

    def test_they_are_found_until_they_are_evicted(self, policy):
        manager = make(policy)
        prompt = talk(manager, A, 1000, 3)
        manager.end_session("a")
        assert found(manager, prompt) == 5 * BLOCK

    def test_of_branching_sessions_each_loses_its_branch_only(self, policy):
        manager = make(policy)
        shared = [*SYSTEM, *blocks(500, 1)]
        talk(manager, A, 1000, 2, system=shared)
        talk(manager, B, 2000, 2, system=shared)
        talk(manager, C, 3000, 2)
        assert manager.end_session("b") == 2
        assert foreseen(manager) == 2
        assert manager.end_session("c") == 2
        assert foreseen(manager) == 2
        assert manager.end_session("a") == 2
        assert foreseen(manager) == 2
        assert found(manager, shared) == 3 * BLOCK

    def test_a_session_may_be_long(self, policy):
        manager = make(policy, num_blocks=400)
        for number in range(150):
            turn(manager, [*SYSTEM, *blocks(1000 * (number + 1), 1)], hint=A)
        ops.check(manager)
        assert manager.end_session("a") == 152
        ops.check(manager)
        assert foreseen(manager) == 152

    def test_a_block_in_the_middle_of_its_run_that_another_request_found_stays(self, policy):
        manager = make(policy)
        serve(manager, blocks(0, 5), hint=A)
        turn(manager, blocks(0, 3))
        assert manager.end_session("a") == 2
        assert foreseen(manager) == 2

    def test_blocks_that_are_gone_already_do_not_count(self, policy):
        manager = make(policy)
        talk(manager, A, 1000, 4)
        manager.reclaim(2)
        assert manager.end_session("a") == 4
        assert foreseen(manager) == 4


class TestNames:
    def test_the_second_end_finds_nothing(self, policy):
        manager = make(policy)
        talk(manager, A, 1000, 2)
        assert manager.end_session("a") == 4
        assert manager.end_session("a") == 0
        assert foreseen(manager) == 4

    def test_the_name_begins_a_new_session_after_the_end(self, policy):
        manager = make(policy)
        turn(manager, blocks(1000, 2), hint=A)
        assert manager.end_session("a") == 2
        turn(manager, blocks(2000, 3), hint=A)
        assert foreseen(manager) == 2
        assert found(manager, blocks(2000, 3)) == 3 * BLOCK
        assert manager.end_session("a") == 3


class TestRunningRequests:
    def test_what_a_running_request_stores_counts_from_its_end(self, policy):
        manager = make(policy)
        seq = prefill(manager, blocks(0, 3), hint=A)
        manager.end_session("a")
        ops.check(manager)
        assert foreseen(manager) == 0
        generate(manager, seq, blocks(1000, 1))
        manager.close(seq)
        ops.check(manager)
        assert foreseen(manager) == 4

    def test_blocks_of_earlier_turns_in_use_go_first_after_the_request(self, policy):
        manager = make(policy)
        turn(manager, blocks(0, 3), hint=A)
        seq = prefill(manager, [*blocks(0, 3), *blocks(1000, 1)], hint=A)
        manager.end_session("a")
        assert foreseen(manager) == 0
        for token in range(BLOCK):
            manager.reserve_step([seq])
            manager.commit_step([seq], [token])
            ops.check(manager)
        manager.close(seq)
        assert foreseen(manager) == 5

    def test_a_request_that_another_session_joins_leaves_what_that_uses(self, policy):
        manager = make(policy)
        seq = prefill(manager, blocks(0, 3), hint=A)
        manager.end_session("a")
        turn(manager, blocks(0, 2), hint=B)
        manager.close(seq)
        assert foreseen(manager) == 1

    def test_what_two_sessions_computed_at_once_is_shared(self, policy):
        manager = make(policy)
        seqs = [manager.open(blocks(0, 3), hint=hint) for hint in (A, B)]
        for seq in seqs:
            generate(manager, seq, blocks(0, 3))
        for seq in seqs:
            manager.close(seq)
        assert [manager.end_session(name) for name in "ab"] == [0, 0]
        assert foreseen(manager) == 0

    def test_forks_are_of_the_same_session(self, policy):
        manager = make(policy)
        seq = prefill(manager, blocks(0, 2), hint=A)
        twin = manager.fork(seq)
        generate(manager, seq, blocks(1000, 1))
        generate(manager, twin, blocks(2000, 2))
        manager.close(seq)
        manager.close(twin)
        assert manager.end_session("a") == 5
        assert foreseen(manager) == 5

    def test_a_request_that_was_resumed_is_still_of_its_session(self, policy):
        manager = make(policy)
        seq = prefill(manager, blocks(0, 3), hint=A)
        manager.suspend(seq)
        manager.reclaim(1)
        manager.resume(seq)
        generate(manager, seq, blocks(0, 3)[2 * BLOCK :])
        manager.close(seq)
        assert manager.end_session("a") == 3

    def test_the_session_may_end_while_its_request_is_suspended(self, policy):
        manager = make(policy)
        seq = prefill(manager, blocks(0, 3), hint=A)
        manager.suspend(seq)
        manager.end_session("a")
        manager.resume(seq)
        ops.check(manager)
        manager.close(seq)
        assert foreseen(manager) == 3

    @pytest.mark.parametrize("length", [0, 5, 8, 12])
    def test_a_truncated_request_owns_what_is_left(self, policy, length):
        manager = make(policy)
        seq = prefill(manager, blocks(0, 3), hint=A)
        manager.truncate(seq, length)
        manager.close(seq)
        assert manager.end_session("a") == length // BLOCK

    def test_pinned_blocks_go_first_after_the_pin(self, policy):
        manager = make(policy)
        turn(manager, blocks(0, 4), hint=A)
        pin = manager.pin(blocks(0, 3))
        assert manager.end_session("a") == 4
        ops.check(manager)
        assert foreseen(manager) == 1
        pin.close()
        assert foreseen(manager) == 3

    def test_a_copied_part_of_a_block_is_no_use_of_it(self, policy):
        manager = make(policy, sub_block=True)
        serve(manager, blocks(0, 3), hint=A)
        serve(manager, [*run(0, 2 * BLOCK + 2), *run(1000, 6)])
        assert manager.end_session("a") == 1
        ops.check(manager)

    def test_a_resized_manager_still_knows(self, policy):
        manager = make(policy)
        prompt = talk(manager, A, 1000, 3)
        serve(manager, blocks(5000, 2), hint=NEVER)
        ops.compact(manager)
        manager.take_copies()
        ops.resize(manager, {"full": 24})
        manager.take_copies()
        ops.check(manager)
        assert found(manager, prompt) == 5 * BLOCK
        assert manager.end_session("a") == 5
        assert foreseen(manager) == 7
