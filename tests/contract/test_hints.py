"""What a caller foresees of its blocks, under three policies: they go first, and are found until then."""

import pytest
from core_help import found, generate, prefill, run, serve
from hints_help import BLOCK, NEVER, Clock, blocks, foreseen, hinted, make, turn

from quire import ops
from quire.core import Hint, Scope


@pytest.fixture(params=["lru", "lfu", "learned"])
def policy(request):
    return request.param


class TestNever:
    def test_blocks_that_nobody_comes_back_to_go_before_all_others(self, policy):
        manager = make(policy)
        serve(manager, blocks(1000, 3), priority=-100)
        serve(manager, blocks(0, 3), hint=NEVER)
        serve(manager, blocks(2000, 3), priority=-100)
        for left in (2, 1, 0):
            assert manager.reclaim(1) == 1
            ops.check(manager)
            assert found(manager, blocks(0, 3)) == left * BLOCK
        assert found(manager, blocks(1000, 3)) == found(manager, blocks(2000, 3)) == 3 * BLOCK

    def test_they_are_found_until_then(self, policy):
        manager = make(policy)
        serve(manager, blocks(0, 3), hint=NEVER)
        assert found(manager, blocks(0, 3)) == 3 * BLOCK
        assert manager.open([*blocks(0, 3), 7]).num_cached == 3 * BLOCK

    def test_a_request_that_uses_them_makes_them_ordinary(self, policy):
        manager = make(policy)
        serve(manager, blocks(0, 3), hint=NEVER)
        turn(manager, blocks(0, 3))
        assert foreseen(manager) == 0

    def test_the_part_that_nobody_used_still_goes_first(self, policy):
        manager = make(policy)
        serve(manager, blocks(0, 4), hint=NEVER)
        turn(manager, blocks(0, 2))
        assert foreseen(manager) == 2
        assert found(manager, blocks(0, 4)) == 2 * BLOCK

    def test_a_lookup_is_no_use(self, policy):
        manager = make(policy)
        serve(manager, blocks(0, 3), hint=NEVER)
        manager.probe([*blocks(0, 3), 7])
        ops.explain(manager, [*blocks(0, 3), 7])
        assert foreseen(manager) == 3

    def test_the_hint_is_about_generated_tokens_too(self, policy):
        manager = make(policy)
        seq = prefill(manager, run(0, BLOCK + 1), hint=NEVER)
        generate(manager, seq, run(1000, BLOCK))
        for token in range(BLOCK):
            manager.reserve_step([seq])
            manager.commit_step([seq], [token])
        manager.close(seq)
        assert foreseen(manager) == 3

    def test_a_running_request_keeps_all_it_stored(self, policy):
        manager = make(policy)
        seq = prefill(manager, blocks(0, 3), hint=NEVER)
        assert foreseen(manager) == 0
        assert found(manager, blocks(0, 3)) == 3 * BLOCK
        manager.close(seq)
        assert foreseen(manager) == 3

    def test_among_them_the_lower_priority_goes_first(self, policy):
        manager = make(policy)
        for start, priority in ((0, 1), (1000, 0), (2000, 2)):
            serve(manager, blocks(start, 1), hint=NEVER, priority=priority)
        for start in (1000, 0, 2000):
            assert found(manager, blocks(start, 1))
            manager.reclaim(1)
            assert not found(manager, blocks(start, 1))

    def test_a_part_that_is_not_stored_needs_no_outlook(self, policy):
        manager = make(policy)
        serve(manager, blocks(0, 4), hint=NEVER, store_until=2 * BLOCK)
        assert foreseen(manager) == 2

    def test_the_hint_holds_in_its_scope_only(self, policy):
        manager = make(policy)
        serve(manager, blocks(0, 3), Scope(salt="a"), hint=NEVER)
        serve(manager, blocks(0, 3), Scope(salt="b"))
        assert foreseen(manager) == 3
        assert found(manager, blocks(0, 3), Scope(salt="b")) == 3 * BLOCK

    def test_a_copied_part_of_a_block_is_no_use_of_it(self, policy):
        manager = make(policy, sub_block=True)
        serve(manager, blocks(0, 3), hint=NEVER)
        seq = prefill(manager, [*run(0, 2 * BLOCK + 2), *run(1000, 6)])
        assert seq.num_cached == 2 * BLOCK + 2
        ops.check(manager)
        manager.close(seq)
        assert foreseen(manager) == 1
        assert found(manager, [*run(0, 2 * BLOCK + 2), *run(1000, 6)]) == 4 * BLOCK


class TestRequestsAtTheSameTime:
    @pytest.mark.parametrize("first", ["hinted", "plain"])
    @pytest.mark.parametrize("closed_first", ["hinted", "plain"])
    def test_what_a_plain_request_computed_as_well_is_ordinary(self, policy, first, closed_first):
        manager = make(policy)
        seqs = {
            "hinted": manager.open(blocks(0, 3), hint=NEVER),
            "plain": manager.open(blocks(0, 3)),
        }
        for name in sorted(seqs, key=first.__ne__):
            generate(manager, seqs[name], blocks(0, 3))
            ops.check(manager)
        for name in sorted(seqs, key=closed_first.__ne__):
            manager.close(seqs[name])
            ops.check(manager)
        assert foreseen(manager) == 0
        assert found(manager, blocks(0, 3)) == 3 * BLOCK

    def test_what_a_plain_request_found_while_it_was_computed_is_ordinary(self, policy):
        manager = make(policy)
        writer = prefill(manager, blocks(0, 3), hint=NEVER)
        turn(manager, blocks(0, 2))
        manager.close(writer)
        assert foreseen(manager) == 1

    def test_a_fork_is_of_the_same_hint(self, policy):
        manager = make(policy)
        seq = prefill(manager, blocks(0, 2), hint=NEVER)
        twin = manager.fork(seq)
        generate(manager, seq, blocks(1000, 1))
        generate(manager, twin, blocks(2000, 2))
        manager.close(seq)
        assert foreseen(manager) == 0, "the fork still runs"
        manager.close(twin)
        assert foreseen(manager) == 5

    def test_what_a_suspended_request_stored_is_ordinary_until_it_ends(self, policy):
        manager = make(policy)
        seq = prefill(manager, blocks(0, 3), hint=NEVER)
        manager.suspend(seq)
        assert foreseen(manager) == 0
        manager.resume(seq)
        ops.check(manager)
        manager.close(seq)
        assert foreseen(manager) == 3

    @pytest.mark.parametrize("paused", [Hint(), NEVER])
    def test_what_a_suspended_request_continues_stays_when_its_writer_ends(self, policy, paused):
        manager = make(policy)
        writer = prefill(manager, blocks(0, 2), hint=NEVER)
        seq = prefill(manager, [*blocks(0, 2), *blocks(1000, 1)], hint=paused)
        manager.suspend(seq)
        manager.close(writer)
        ops.check(manager)
        assert foreseen(manager) == 0
        assert found(manager, blocks(0, 2)) == 2 * BLOCK

    def test_what_it_computed_again_goes_first_too(self, policy):
        manager = make(policy)
        seq = prefill(manager, blocks(0, 4), hint=NEVER)
        manager.suspend(seq)
        manager.reclaim(2)
        assert manager.resume(seq) == 2 * BLOCK
        generate(manager, seq, blocks(0, 4)[2 * BLOCK :])
        manager.close(seq)
        assert foreseen(manager) == 4

    @pytest.mark.parametrize("length", [0, 3, 4, 9, 12])
    def test_a_truncated_request_says_it_of_what_is_left(self, policy, length):
        manager = make(policy)
        seq = prefill(manager, blocks(0, 3), hint=NEVER)
        manager.truncate(seq, length)
        ops.check(manager)
        manager.close(seq)
        assert foreseen(manager) == length // BLOCK

    def test_what_is_pinned_stays_and_goes_first_afterwards(self, policy):
        manager = make(policy)
        serve(manager, blocks(0, 4), hint=NEVER)
        pin = manager.pin(blocks(0, 2))
        assert foreseen(manager) == 2
        assert found(manager, blocks(0, 4)) == 2 * BLOCK
        pin.close()
        assert foreseen(manager) == 2

    def test_a_pin_on_what_is_being_stored_changes_nothing(self, policy):
        manager = make(policy)
        seq = prefill(manager, blocks(0, 4), hint=NEVER)
        pin = manager.pin(blocks(0, 2))
        manager.close(seq)
        pin.close()
        assert foreseen(manager) == 4


class TestTimeToLive:
    def setup_method(self):
        self.clock = Clock()

    def manager(self, policy):
        return make(policy, clock=self.clock)

    @pytest.mark.parametrize(("waited", "gone"), [(0, 0), (9.5, 0), (10.5, 3), (1000, 3)])
    def test_blocks_go_first_once_the_time_is_over(self, policy, waited, gone):
        manager = self.manager(policy)
        serve(manager, blocks(0, 3), hint=Hint(ttl_s=10))
        serve(manager, blocks(1000, 3))
        self.clock.now += waited
        assert foreseen(manager) == gone
        assert found(manager, blocks(1000, 3)) == 3 * BLOCK

    def test_the_time_counts_from_the_end_of_the_request(self, policy):
        manager = self.manager(policy)
        seq = prefill(manager, blocks(0, 3), hint=Hint(ttl_s=10))
        self.clock.now += 50
        manager.close(seq)
        self.clock.now += 9
        assert foreseen(manager) == 0
        self.clock.now += 2
        assert foreseen(manager) == 3

    def test_a_later_turn_of_the_session_renews_it(self, policy):
        manager = self.manager(policy)
        turn(manager, blocks(0, 2), hint=hinted("a", ttl_s=10))
        self.clock.now += 6
        turn(manager, [*blocks(0, 2), *blocks(1000, 1)], hint=hinted("a", ttl_s=10))
        self.clock.now += 6
        assert foreseen(manager) == 0
        self.clock.now += 6
        assert foreseen(manager) == 3

    def test_a_request_without_one_cancels_it(self, policy):
        manager = self.manager(policy)
        turn(manager, blocks(0, 3), hint=Hint(ttl_s=10))
        turn(manager, blocks(0, 2))
        self.clock.now += 100
        assert foreseen(manager) == 1
        assert found(manager, blocks(0, 3)) == 2 * BLOCK

    def test_what_another_request_uses_is_ordinary_whatever_time_it_names(self, policy):
        manager = self.manager(policy)
        turn(manager, blocks(0, 3), hint=Hint(ttl_s=10))
        turn(manager, blocks(0, 3), hint=Hint(ttl_s=10))
        self.clock.now += 11
        assert foreseen(manager) == 0

    def test_the_time_of_a_session_waits_for_the_end_of_its_last_request(self, policy):
        manager = self.manager(policy)
        turn(manager, blocks(0, 3), hint=hinted("a", ttl_s=10))
        seq = prefill(manager, [*blocks(0, 3), 7], hint=hinted("a", ttl_s=10))
        self.clock.now += 20
        assert foreseen(manager) == 0
        manager.close(seq)
        self.clock.now += 11
        assert foreseen(manager) == 3

    def test_suspended_time_does_not_count(self, policy):
        manager = self.manager(policy)
        seq = prefill(manager, blocks(0, 3), hint=Hint(ttl_s=10))
        manager.suspend(seq)
        self.clock.now += 50
        assert foreseen(manager) == 0
        manager.resume(seq)
        manager.close(seq)
        self.clock.now += 9
        assert foreseen(manager) == 0
        self.clock.now += 2
        assert foreseen(manager) == 3


class TestRetention:
    def setup_method(self):
        self.clock = Clock()

    @pytest.mark.parametrize("hint", [NEVER, Hint(ttl_s=5)])
    def test_it_wins_until_it_runs_out(self, policy, hint):
        manager = make(policy, clock=self.clock)
        serve(manager, blocks(0, 3), hint=hint, retain_s=10)
        serve(manager, blocks(1000, 2), priority=100)
        self.clock.now += 9
        assert manager.reclaim(2) == 2
        ops.check(manager)
        assert found(manager, blocks(0, 3)) == 3 * BLOCK
        self.clock.now += 2
        assert foreseen(manager) == 3
