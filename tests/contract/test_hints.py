"""A caller's forecasts under three policies: blocks are found until the forecast is over, then go first."""

import pytest
from core_help import found, generate, prefill, run, serve
from hints_help import BLOCK, NEVER, A, B, blocks, clock, forecast, foreseen, make, turn

from quire import ops
from quire.core import Hint, Scope

__all__ = ["clock", "forecast", "make"]


class TestWhatGoesFirst:
    def test_blocks_past_their_forecast_are_evicted_one_by_one_before_all_others(
        self, make, forecast
    ):
        manager = make()
        serve(manager, blocks(1000, 3), priority=-100)
        forecast.serve(manager, blocks(0, 3))
        serve(manager, blocks(2000, 3), priority=-100)
        for left in (2, 1, 0):
            assert ops.reclaim(manager, 1) == 1
            ops.check(manager)
            assert found(manager, blocks(0, 3)) == left * BLOCK
        assert found(manager, blocks(1000, 3)) == found(manager, blocks(2000, 3)) == 3 * BLOCK

    def test_blocks_past_their_forecast_are_found_until_their_eviction(self, make, forecast):
        manager = make()
        forecast.serve(manager, blocks(0, 3))
        assert manager.open([*blocks(0, 3), 7]).num_cached == 3 * BLOCK

    @pytest.mark.parametrize("used", [1, 2, 3])
    def test_hinted_blocks_that_another_request_uses_become_ordinary(self, make, forecast, used):
        manager = make()
        forecast.serve(manager, blocks(0, 3))
        turn(manager, blocks(0, used))
        assert foreseen(manager) == 3 - used
        assert found(manager, blocks(0, 3)) == used * BLOCK

    def test_a_lookup_is_no_use(self, make, forecast):
        manager = make()
        forecast.serve(manager, blocks(0, 3))
        manager.probe([*blocks(0, 3), 7])
        ops.explain(manager, [*blocks(0, 3), 7])
        assert foreseen(manager) == 3

    def test_copying_a_part_of_a_hinted_block_is_no_use_of_it(self, make, forecast):
        manager = make(sub_block=True)
        forecast.serve(manager, blocks(0, 3))
        seq = prefill(manager, [*run(0, 2 * BLOCK + 2), *run(1000, 6)])
        assert seq.num_cached == 2 * BLOCK + 2
        manager.close(seq)
        assert foreseen(manager) == 1
        assert found(manager, [*run(0, 2 * BLOCK + 2), *run(1000, 6)]) == 4 * BLOCK

    def test_among_hinted_blocks_the_lower_priority_goes_first(self, make, forecast):
        manager = make()
        for start, priority in ((0, 1), (1000, 0), (2000, 2)):
            forecast.serve(manager, blocks(start, 1), priority=priority)
        for start in (1000, 0, 2000):
            assert found(manager, blocks(start, 1))
            ops.reclaim(manager, 1)
            assert not found(manager, blocks(start, 1))

    def test_tokens_beyond_store_until_have_no_forecast(self, make, forecast):
        manager = make()
        forecast.serve(manager, blocks(0, 4), store_until=2 * BLOCK)
        assert foreseen(manager) == 2

    def test_a_hint_holds_in_its_scope_only(self, make):
        manager = make()
        serve(manager, blocks(0, 3), Scope(salt="a"), hint=NEVER)
        serve(manager, blocks(0, 3), Scope(salt="b"))
        assert foreseen(manager) == 3
        assert found(manager, blocks(0, 3), Scope(salt="b")) == 3 * BLOCK

    def test_pinned_hinted_blocks_stay_and_go_first_after_the_pin(self, make, forecast):
        manager = make()
        forecast.serve(manager, blocks(0, 4))
        pin = ops.pin(manager, blocks(0, 2))
        assert foreseen(manager) == 2
        assert found(manager, blocks(0, 4)) == 2 * BLOCK
        pin.close()
        assert foreseen(manager) == 2

    def test_a_resized_manager_still_knows(self, make, forecast):
        manager = make()
        forecast.serve(manager, blocks(0, 5))
        ops.resize(manager, {"full": 24})
        manager.take_copies()
        ops.check(manager)
        assert foreseen(manager) == 5

    def test_both_parts_of_a_cut_hinted_run_go_first(self, make):
        manager = make()
        serve(manager, blocks(0, 4), hint=A)
        ops.pin(manager, blocks(0, 2)).close()
        assert ops.reclaim(manager, 2) == 2
        assert manager.end_session("a") == 2
        assert foreseen(manager) == 2


class TestRunningRequests:
    def test_all_blocks_of_a_hinted_request_stay_until_its_forecast_ends(self, make, forecast):
        manager = make()
        seq = prefill(manager, run(0, BLOCK + 1), hint=forecast.hint)
        generate(manager, seq, run(1000, BLOCK))
        for token in range(BLOCK):
            manager.reserve_step([seq])
            manager.commit_step([seq], [token])
        assert foreseen(manager) == 0
        forecast.close(manager, seq)
        assert foreseen(manager) == 3

    @pytest.mark.cases(26)
    @pytest.mark.parametrize("first", ["hinted", "plain"])
    @pytest.mark.parametrize("closed_first", ["hinted", "plain"])
    def test_hinted_blocks_that_a_plain_request_computes_too_are_ordinary(
        self, make, forecast, first, closed_first
    ):
        manager = make()
        seqs = {
            "hinted": manager.open(blocks(0, 3), hint=forecast.hint),
            "plain": manager.open(blocks(0, 3)),
        }
        for name in sorted(seqs, key=first.__ne__):
            generate(manager, seqs[name], blocks(0, 3))
            ops.check(manager)
        forecast.close(manager, *(seqs[name] for name in sorted(seqs, key=closed_first.__ne__)))
        assert foreseen(manager) == 0
        assert found(manager, blocks(0, 3)) == 3 * BLOCK

    @pytest.mark.parametrize("other", [Hint(), NEVER, B])
    def test_hinted_blocks_found_while_their_writer_runs_become_ordinary(
        self, make, forecast, other
    ):
        manager = make()
        writer = prefill(manager, blocks(0, 3), hint=forecast.hint)
        turn(manager, blocks(0, 2), hint=other)
        forecast.close(manager, writer)
        assert foreseen(manager) == 1

    def test_forks_are_of_the_same_forecast(self, make, forecast):
        manager = make()
        seq = prefill(manager, blocks(0, 2), hint=forecast.hint)
        twin = manager.fork(seq)
        generate(manager, seq, blocks(1000, 1))
        generate(manager, twin, blocks(2000, 2))
        manager.close(seq)
        assert foreseen(manager) == 0, "the fork still runs"
        forecast.close(manager, twin)
        assert foreseen(manager) == 5

    @pytest.mark.cases(25)
    @pytest.mark.parametrize("length", [0, 3, 4, 9, 12])
    def test_a_truncated_one_owns_what_is_left(self, make, forecast, length):
        manager = make()
        seq = prefill(manager, blocks(0, 3), hint=forecast.hint)
        ops.truncate(manager, seq, length)
        forecast.close(manager, seq)
        assert foreseen(manager) == length // BLOCK

    def test_a_pin_on_what_is_being_stored_changes_nothing(self, make, forecast):
        manager = make()
        seq = prefill(manager, blocks(0, 4), hint=forecast.hint)
        pin = ops.pin(manager, blocks(0, 2))
        forecast.close(manager, seq)
        pin.close()
        assert foreseen(manager) == 4


class TestPauses:
    @pytest.mark.parametrize("resumed", [True, False])
    def test_blocks_of_a_suspended_hinted_request_go_first_once_it_ends(
        self, make, forecast, resumed
    ):
        manager = make()
        seq = prefill(manager, blocks(0, 3), hint=forecast.hint)
        manager.suspend(seq)
        if forecast.kind != "a session that ended before":
            assert foreseen(manager) == 0
        if resumed:
            manager.resume(seq)
        forecast.close(manager, seq)
        assert foreseen(manager) == 3

    def test_a_session_may_end_in_one(self, make):
        manager = make()
        seq = prefill(manager, blocks(0, 3), hint=A)
        manager.suspend(seq)
        manager.end_session("a")
        manager.resume(seq)
        ops.check(manager)
        manager.close(seq)
        assert foreseen(manager) == 3

    def test_blocks_that_a_resumed_hinted_request_computes_again_go_first(self, make, forecast):
        manager = make()
        seq = prefill(manager, blocks(0, 4), hint=forecast.hint)
        manager.suspend(seq)
        ops.reclaim(manager, 2)
        assert manager.resume(seq) == 2 * BLOCK
        generate(manager, seq, blocks(0, 4)[2 * BLOCK :])
        forecast.close(manager, seq)
        assert foreseen(manager) == 4

    @pytest.mark.parametrize("paused", [Hint(), NEVER])
    def test_blocks_that_a_suspended_request_continues_stay_when_their_writer_ends(
        self, make, paused
    ):
        manager = make()
        writer = prefill(manager, blocks(0, 2), hint=NEVER)
        seq = prefill(manager, [*blocks(0, 2), *blocks(1000, 1)], hint=paused)
        manager.suspend(seq)
        manager.close(writer)
        ops.check(manager)
        assert foreseen(manager) == 0
        assert found(manager, blocks(0, 2)) == 2 * BLOCK

    @pytest.mark.parametrize("resumed", [True, False])
    def test_a_time_to_live_counts_from_the_close_of_the_request(self, make, clock, resumed):
        manager = make(clock=clock)
        seq = prefill(manager, blocks(0, 3), hint=Hint(ttl_s=10))
        manager.suspend(seq)
        clock.now += 50
        assert foreseen(manager) == 0
        if resumed:
            manager.resume(seq)
        manager.close(seq)
        clock.now += 9
        assert foreseen(manager) == 0
        clock.now += 2
        assert foreseen(manager) == 3
