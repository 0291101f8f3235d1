"""Hints where a request pauses, where runs are cut, where times change: under three policies."""

import gc

import pytest
from core_help import found, prefill, serve
from hints_help import BLOCK, NEVER, Clock, blocks, foreseen, hinted, make, turn

from quire import ops
from quire.core import Hint
from quire.core.node import Owner

A = hinted("a")


@pytest.fixture(params=["lru", "lfu", "learned"])
def policy(request):
    return request.param


class TestClosedWhileSuspended:
    def test_what_it_stored_goes_first(self, policy):
        manager = make(policy)
        seq = prefill(manager, blocks(0, 3), hint=NEVER)
        manager.suspend(seq)
        manager.close(seq)
        ops.check(manager)
        assert foreseen(manager) == 3

    def test_its_time_to_live_counts_from_its_end(self, policy):
        clock = Clock()
        manager = make(policy, clock=clock)
        seq = prefill(manager, blocks(0, 3), hint=Hint(ttl_s=10))
        manager.suspend(seq)
        manager.close(seq)
        assert foreseen(manager) == 0
        clock.now += 11
        assert foreseen(manager) == 3

    def test_what_it_stored_belongs_to_its_session(self, policy):
        manager = make(policy)
        seq = prefill(manager, blocks(0, 3), hint=A)
        manager.suspend(seq)
        manager.close(seq)
        assert manager.end_session("a") == 3
        assert foreseen(manager) == 3

    def test_the_session_may_have_ended_before(self, policy):
        manager = make(policy)
        seq = prefill(manager, blocks(0, 3), hint=A)
        manager.suspend(seq)
        manager.end_session("a")
        manager.close(seq)
        assert foreseen(manager) == 3


class TestCutRuns:
    def test_the_head_of_a_run_that_was_cut_belongs_to_the_session_without_its_tail(self, policy):
        manager = make(policy)
        serve(manager, blocks(0, 4), hint=A)
        manager.pin(blocks(0, 2)).close()
        assert manager.reclaim(2) == 2
        assert manager.end_session("a") == 2
        assert foreseen(manager) == 2


class TestTimesThatChange:
    def setup_method(self):
        self.clock = Clock()

    def test_retention_ends_in_time_after_a_longer_time_to_live_was_cancelled(self, policy):
        manager = make(policy, clock=self.clock)
        turn(manager, blocks(0, 2), hint=Hint(ttl_s=100))
        turn(manager, blocks(0, 2), retain_s=10)
        serve(manager, blocks(1000, 2), priority=50)
        self.clock.now += 11
        assert manager.reclaim(2) == 2
        assert not found(manager, blocks(0, 2))
        assert found(manager, blocks(1000, 2)) == 2 * BLOCK

    def test_an_ended_session_goes_first_when_its_retention_ends_whatever_its_time_to_live(
        self, policy
    ):
        manager = make(policy, clock=self.clock)
        turn(manager, blocks(0, 2), hint=hinted("a", ttl_s=100))
        turn(manager, blocks(0, 2), hint=A, retain_s=10)
        manager.end_session("a")
        self.clock.now += 11
        assert foreseen(manager) == 2


class TestMemory:
    def alive(self):
        gc.collect()
        return sum(type(each) is Owner for each in gc.get_objects())

    def test_a_manager_that_is_dropped_leaves_no_session_behind(self, policy):
        before = self.alive()
        for _ in range(5):
            serve(make(policy), blocks(0, 3), hint=A)
        assert self.alive() == before

    def test_a_forgotten_session_does_not_live_on_in_evicted_blocks(self, policy, monkeypatch):
        monkeypatch.setattr("quire.core.owners.MAX_SESSIONS", 3)
        manager = make(policy)
        before = self.alive()
        for number in range(20):
            serve(manager, blocks(1000 * number, 2), hint=hinted(str(number)))
        manager.reclaim(10**6)
        assert self.alive() - before <= 3

    def test_the_oldest_session_is_forgotten_and_the_others_are_known(self, policy, monkeypatch):
        monkeypatch.setattr("quire.core.owners.MAX_SESSIONS", 3)
        manager = make(policy)
        for number in range(4):
            serve(manager, blocks(1000 * number, 2), hint=hinted(str(number)))
        assert [manager.end_session(str(number)) for number in range(4)] == [0, 2, 2, 2]
