"""Sessions, times to live and retention, under three policies: when what is foreseen comes true."""

import gc

import numpy as np
import pytest
from core_help import found, generate, prefill, serve
from hints_help import BLOCK, NEVER, A, B, C, blocks, clock, foreseen, make, talk, turn

from clocks import Clock
from quire import ops
from quire.core import CacheManager, Hint, Scope
from quire.core.node import Owner
from quire.errors import ConfigError

__all__ = ["clock", "make"]


class TestSessions:
    def test_ending_a_session_releases_its_own_branch_only(self, make):
        manager = make()
        system = blocks(0, 2)
        shared = [*system, *blocks(500, 1)]
        talk(manager, A, 1000, 2, shared)
        talk(manager, B, 2000, 2, shared)
        talk(manager, C, 3000, 2, system)
        for name in "bca":
            assert manager.end_session(name) == 2
            assert foreseen(manager) == 2
        assert found(manager, shared) == 3 * BLOCK

    @pytest.mark.cases(1)
    def test_all_runs_of_a_long_session_are_released_at_its_end(self, make):
        manager = make(num_blocks=400)
        for number in range(150):
            turn(manager, [*blocks(0, 2), *blocks(1000 * (number + 1), 1)], hint=A)
        ops.check(manager)
        assert manager.end_session("a") == 152
        assert foreseen(manager) == 152

    def test_a_session_of_the_same_name_in_another_scope_stays_open(self, make):
        manager = make()
        tenants = [None, Scope(salt="x"), Scope(salt="x", lora="y")]
        for scope in tenants:
            turn(manager, blocks(0, 3), scope=scope, hint=A)
        assert manager.end_session("a", Scope(salt="nobody")) == 0
        for scope in tenants:
            assert manager.end_session("a", scope) == 3
            assert manager.end_session("a", scope) == 0

    def test_blocks_that_are_gone_already_do_not_count(self, make):
        manager = make()
        talk(manager, A, 1000, 4, blocks(0, 2))
        ops.reclaim(manager, 2)
        assert manager.end_session("a") == 4
        assert foreseen(manager) == 4

    def test_after_the_end_the_name_begins_another_one(self, make):
        manager = make()
        turn(manager, blocks(1000, 2), hint=A)
        assert manager.end_session("a") == 2
        turn(manager, blocks(2000, 3), hint=A)
        assert foreseen(manager) == 2
        assert found(manager, blocks(2000, 3)) == 3 * BLOCK
        assert manager.end_session("a") == 3

    def test_blocks_that_two_sessions_compute_at_once_belong_to_neither(self, make):
        manager = make()
        seqs = [manager.open(blocks(0, 3), hint=hint) for hint in (A, B)]
        for seq in seqs:
            generate(manager, seq, blocks(0, 3))
        for seq in seqs:
            manager.close(seq)
        assert [manager.end_session(name) for name in "ab"] == [0, 0]
        assert foreseen(manager) == 0

    def test_earlier_turns_in_use_go_first_after_the_request_that_uses_them(self, make):
        manager = make()
        turn(manager, blocks(0, 3), hint=A)
        seq = prefill(manager, [*blocks(0, 3), *blocks(1000, 1)], hint=A)
        manager.end_session("a")
        assert foreseen(manager) == 0
        manager.close(seq)
        assert foreseen(manager) == 4

    def test_beyond_max_sessions_the_oldest_session_is_forgotten(self, make, monkeypatch):
        monkeypatch.setattr("quire.core.owners.MAX_SESSIONS", 3)
        manager = make()
        for number in range(4):
            serve(manager, blocks(1000 * number, 2), hint=Hint(session_id=str(number)))
        assert [manager.end_session(str(number)) for number in range(4)] == [0, 2, 2, 2]


class TestTimeToLive:
    @pytest.mark.parametrize(("waited", "gone"), [(0, 0), (9.5, 0), (10.5, 3), (1000, 3)])
    def test_blocks_go_first_once_it_is_over(self, make, clock, waited, gone):
        manager = make(clock=clock)
        seq = prefill(manager, blocks(0, 3), hint=Hint(ttl_s=10))
        serve(manager, blocks(1000, 3))
        clock.now += 50
        manager.close(seq)
        clock.now += waited
        assert foreseen(manager) == gone
        assert found(manager, blocks(1000, 3)) == 3 * BLOCK

    def test_a_later_turn_of_a_session_renews_its_time_to_live(self, make, clock):
        manager, hint = make(clock=clock), Hint(ttl_s=10, session_id="a")
        turn(manager, blocks(0, 2), hint=hint)
        clock.now += 6
        turn(manager, [*blocks(0, 2), *blocks(1000, 1)], hint=hint)
        clock.now += 6
        assert foreseen(manager) == 0
        clock.now += 6
        assert foreseen(manager) == 3

    @pytest.mark.parametrize("hint", [Hint(), Hint(ttl_s=10)])
    def test_somebody_elses_use_cancels_it_whatever_time_that_names(self, make, clock, hint):
        manager = make(clock=clock)
        turn(manager, blocks(0, 3), hint=Hint(ttl_s=10))
        turn(manager, blocks(0, 2), hint=hint)
        clock.now += 100
        assert foreseen(manager) == 1
        assert found(manager, blocks(0, 3)) == 2 * BLOCK

    def test_that_of_a_session_waits_for_the_end_of_its_last_request(self, make, clock):
        manager, hint = make(clock=clock), Hint(ttl_s=10, session_id="a")
        turn(manager, blocks(0, 3), hint=hint)
        seq = prefill(manager, [*blocks(0, 3), 7], hint=hint)
        clock.now += 20
        assert foreseen(manager) == 0
        manager.close(seq)
        clock.now += 11
        assert foreseen(manager) == 3


class TestRetention:
    @pytest.mark.parametrize("hint", [NEVER, Hint(ttl_s=5)])
    def test_a_retention_outranks_a_hint_until_it_runs_out(self, make, clock, hint):
        manager = make(clock=clock)
        serve(manager, blocks(0, 3), hint=hint, retain_s=10)
        serve(manager, blocks(1000, 2), priority=100)
        clock.now += 9
        assert ops.reclaim(manager, 2) == 2
        ops.check(manager)
        assert found(manager, blocks(0, 3)) == 3 * BLOCK
        clock.now += 2
        assert foreseen(manager) == 3

    def test_a_retention_ends_in_time_after_a_longer_time_to_live_was_cancelled(self, make, clock):
        manager = make(clock=clock)
        turn(manager, blocks(0, 2), hint=Hint(ttl_s=100))
        turn(manager, blocks(0, 2), retain_s=10)
        serve(manager, blocks(1000, 2), priority=50)
        clock.now += 11
        assert ops.reclaim(manager, 2) == 2
        assert not found(manager, blocks(0, 2))
        assert found(manager, blocks(1000, 2)) == 2 * BLOCK

    def test_an_ended_session_goes_first_when_it_ends_whatever_its_time_to_live(self, make, clock):
        manager = make(clock=clock)
        turn(manager, blocks(0, 2), hint=Hint(ttl_s=100, session_id="a"))
        turn(manager, blocks(0, 2), hint=A, retain_s=10)
        manager.end_session("a")
        clock.now += 11
        assert foreseen(manager) == 2

    def test_a_run_cut_after_its_retention_ended_is_ordinary_in_both_parts(self, make, clock):
        manager = make(clock=clock)
        serve(manager, blocks(0, 4), retain_s=10)
        clock.now += 11
        ops.pin(manager, blocks(0, 2)).close()
        serve(manager, blocks(1000, 2), priority=100)
        assert ops.reclaim(manager, 4) == 4
        assert found(manager, blocks(1000, 2)) == 2 * BLOCK


class TestMemoryOfSessions:
    def alive(self):
        gc.collect()
        return sum(type(each) is Owner for each in gc.get_objects())

    def test_a_manager_that_is_dropped_leaves_no_session_behind(self, make):
        before = self.alive()
        for _ in range(5):
            serve(make(), blocks(0, 3), hint=A)
        assert self.alive() == before

    def test_a_forgotten_session_does_not_live_on_in_evicted_blocks(self, make, monkeypatch):
        monkeypatch.setattr("quire.core.owners.MAX_SESSIONS", 3)
        manager = make()
        before = self.alive()
        for number in range(20):
            serve(manager, blocks(1000 * number, 2), hint=Hint(session_id=str(number)))
        ops.reclaim(manager, 10**6)
        assert self.alive() - before <= 3


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"reuse": "sometimes"}, "one of unknown, session, never, got 'sometimes'"),
        ({"reuse": np.array([1, 2])}, "a hint's reuse is one of"),
        ({"reuse": ["never"]}, "a hint's reuse is one of"),
        ({"reuse": "session"}, "needs a session_id"),
        ({"session_id": np.array([1, 2])}, "session_id is a text"),
        ({"session_id": ""}, "session_id is a text"),
    ],
)
def test_an_invalid_hint_is_refused_with_the_value(said, message):
    with pytest.raises(ConfigError, match=message):
        Hint(**said)


@pytest.mark.parametrize("ttl_s", [0, -1, float("nan"), "10", np.array([1, 2])])
def test_a_time_to_live_that_is_none_is_refused_at_open(ttl_s):
    with pytest.raises(ConfigError, match="a hint's ttl_s must be a number of seconds"):
        CacheManager(4, BLOCK, clock=Clock()).open([1], hint=Hint(ttl_s=ttl_s))
