"""What a policy is told, and in which order: the interface of `policies.base`."""

import pytest
from core_help import generate, prefill, run, serve
from policy_spy import ALL, BLOCK, Spied, SpyingLru, SpyingRanked, ends, names_of

from quire import ops
from quire.core import Hint
from quire.errors import OutOfBlocks


@pytest.fixture(params=[SpyingLru, SpyingRanked])
def spied(request):
    return lambda *args, **options: Spied(request.param, *args, **options)


class TestOrder:
    def test_a_request_is_opened_and_then_what_it_found_is_touched_from_the_deepest_up(self, spied):
        world = spied()
        manager = world.manager
        for length in (2, 3, 5):
            serve(manager, [*run(0, length * BLOCK), 7])
        serve(manager, [*run(0, 3 * BLOCK), *run(1000, BLOCK)])
        world.take()
        manager.open([*run(0, 5 * BLOCK), 7])
        calls = [call for call in world.take() if call[0] in ("opened", "touched")]
        assert names_of(calls)[0] == "opened"
        assert calls[0][1].end == 5
        touched = ends(calls, "touched")
        assert touched == sorted(touched, reverse=True)
        assert touched[0] == 5
        assert sum(call[2] for call in calls[1:]) == 5

    def test_a_request_that_finds_nothing_is_opened_without_an_entry(self, spied):
        world = spied()
        world.manager.open(run(0, 3 * BLOCK))
        assert [(name, entry) for name, entry, *_ in world.take()] == [("opened", None)]

    def test_a_request_is_closing_before_what_it_stored_is_released(self, spied):
        world = spied()
        manager = world.manager
        serve(manager, [*run(0, 2 * BLOCK), 7])
        seq = prefill(manager, [*run(0, 2 * BLOCK), *run(1000, 3 * BLOCK)])
        world.take()
        manager.close(seq)
        calls = world.take()
        names = names_of(calls, "closing", "released")
        assert names[0] == "closing"
        assert names.count("closing") == 1
        assert calls[0][1].end == 5
        released = ends(calls, "released")
        assert released == sorted(released, reverse=True)
        assert sum(call[2] for call in calls if call[0] == "released") == 5

    def test_what_is_found_is_referenced_before_it_is_touched(self, spied):
        world = spied()
        serve(world.manager, [*run(0, 2 * BLOCK), 7])
        world.take()
        world.manager.open([*run(0, 2 * BLOCK), 7])
        assert names_of(world.take(), "referenced", "touched") == ["referenced", "touched"]

    def test_a_parent_is_exposed_when_its_last_child_is_gone(self, spied):
        world = spied()
        manager = world.manager
        serve(manager, run(0, 2 * BLOCK))
        for start in (1000, 2000):
            serve(manager, [*run(0, BLOCK), *run(start, BLOCK)])
        world.take()
        manager.reclaim(2)
        assert "exposed" not in names_of(world.take())
        manager.reclaim(1)
        assert ends(world.take(), "exposed") == [1]

    def test_a_lookup_calls_nothing(self, spied):
        world = spied()
        serve(world.manager, run(0, 3 * BLOCK))
        world.take()
        world.manager.probe(run(0, 2 * BLOCK))
        ops.explain(world.manager, [*run(0, 2 * BLOCK), 1, 2, 3])
        assert world.take() == []

    def test_an_ended_session_takes_its_entries_to_another_policy_object(self, spied):
        world = spied()
        manager = world.manager
        serve(manager, run(0, 3 * BLOCK), hint=Hint(session_id="a"))
        world.take()
        manager.end_session("a")
        calls = world.take()
        assert names_of(calls, "referenced", "returned") == ["referenced", "returned"]
        assert calls[0][1] is calls[1][1]
        assert len(world.policies) == 2
        assert calls[0][1].mark.policy is world.policies[1]
        world.check()


class TestVisits:
    def test_it_counts_the_tokens_of_the_prompt_and_at_the_end_those_generated(self, spied):
        world = spied()
        manager = world.manager
        seq = prefill(manager, run(0, 13))
        generate(manager, seq, run(2000, 6))
        manager.close(seq)
        opened, closing = (call for call in world.take() if call[0] in ("opened", "closing"))
        assert opened[3][1:] == (13, 0)
        assert closing[3][1:] == (13, 6)
        assert opened[4] is closing[4]
        assert opened[4].block_size == BLOCK

    def test_a_policy_finds_its_note_again(self, spied):
        world = spied()
        seq = world.manager.open(run(0, 5))
        world.take()[0][4].note = "mine"
        world.manager.close(seq)
        assert [call[4].note for call in world.take() if call[0] == "closing"] == ["mine"]

    def test_its_time_is_the_clocks(self, spied):
        times = iter(range(100, 10**6, 5))
        world = spied(clock=lambda: next(times))
        for _ in range(3):
            serve(world.manager, run(0, 3 * BLOCK))
        seen = [call[3][0] for call in world.take() if call[0] in ("opened", "closing")]
        assert len(seen) == 6
        assert seen == sorted(seen)
        assert len(set(seen)) == 6
        assert seen[0] >= 100

    def test_without_a_clock_it_counts_requests(self, spied):
        world = spied()
        for _ in range(4):
            serve(world.manager, run(0, 3 * BLOCK))
        seen = [call[3][0] for call in world.take() if call[0] == "opened"]
        assert seen == list(range(seen[0], seen[0] + 4))

    def test_a_fork_is_no_visit(self, spied):
        world = spied()
        manager = world.manager
        seq = prefill(manager, run(0, 2 * BLOCK))
        twin = manager.fork(seq)
        generate(manager, twin, run(1000, 3))
        manager.close(twin)
        manager.close(seq)
        assert names_of(world.take(), "opened", "closing") == ["opened", "closing"]

    def test_only_the_policy_object_of_ordinary_entries_is_told(self, spied):
        world = spied()
        for priority in (0, 1, -1):
            serve(world.manager, run(2000 + 1000 * priority, BLOCK), priority=priority)
        world.take()
        serve(world.manager, run(1000, BLOCK), priority=1)
        assert len(world.policies) == 3
        assert names_of(world.take(), "opened", "closing") == ["opened", "closing"]

    def test_a_resumed_request_visits_again(self, spied):
        world = spied()
        manager = world.manager
        seq = prefill(manager, run(0, 3 * BLOCK))
        manager.suspend(seq)
        manager.reclaim(1)
        manager.resume(seq)
        calls = [call for call in world.take() if call[0] in ("opened", "closing")]
        assert names_of(calls) == ["opened", "closing", "opened"]
        assert calls[2][1].end == 2

    def test_a_policy_that_does_not_watch_is_not_told(self):
        class Blind(SpyingLru):
            watches = False

        world = Spied(Blind)
        serve(world.manager, run(0, 3 * BLOCK))
        assert not names_of(world.take(), "opened", "closing")

    def test_a_refused_request_is_no_visit(self, spied):
        world = spied(num_blocks=4)
        with pytest.raises(OutOfBlocks):
            world.manager.open(run(0, 5 * BLOCK))
        assert world.take() == []


class TestEvicting:
    def test_it_names_every_evicted_block_before_it_goes(self, spied):
        world = spied(num_blocks=10)
        manager = world.manager
        for start in (0, 1000, 0, 2000, 3000, 1000, 0, 4000):
            trunk = run(start - start % 2000, BLOCK)
            serve(manager, [*trunk, *run(start + 50_000, 3 * BLOCK), 7])
            world.check()
        told = [call for call in world.take() if call[0] == "evicting"]
        assert told
        assert all(0 < num_blocks <= there for _, _, there, num_blocks in told)
        assert sum(call[3] for call in told) == manager.stats.evicted_blocks

    @pytest.mark.parametrize("asked", [1, 2, 3, 5, 7, ALL])
    def test_an_entry_is_referenced_when_its_last_block_goes(self, spied, asked):
        world = spied()
        manager = world.manager
        for start in (0, 1000):
            serve(manager, [*run(0, BLOCK), *run(start + 50_000, 3 * BLOCK)])
        world.take()
        done = manager.reclaim(asked)
        calls = [call for call in world.take() if call[0] in ("evicting", "referenced")]
        assert sum(call[3] for call in calls if call[0] == "evicting") == done == min(asked, 7)
        for call, after in zip(calls, [*calls[1:], (None, None)], strict=True):
            if call[0] == "evicting":
                follows = after[0] == "referenced" and after[1] is call[1]
                assert follows == (call[2] == call[3])

    def test_a_policy_is_told_of_its_own_entries_only(self, spied):
        world = spied()
        for start, priority in ((0, 1), (1000, 0)):
            serve(world.manager, run(start, 2 * BLOCK), priority=priority)
        kinds = list(world.policies)
        for policy in kinds:
            policy.calls = []
        world.manager.reclaim(3)
        counts = [[call[3] for call in policy.calls if call[0] == "evicting"] for policy in kinds]
        assert sorted(counts) == [[1], [2]]

    def test_what_is_invalidated_is_not_evicted(self, spied):
        world = spied()
        for start in (0, 1000):
            serve(world.manager, run(start, 3 * BLOCK))
        world.take()
        assert world.manager.evict(run(0, 3 * BLOCK)) == 3
        assert world.manager.clear() == 3
        assert "evicting" not in names_of(world.take())

    def test_a_shrinking_pool_evicts_too(self, spied):
        world = spied(num_blocks=12)
        for start in (0, 1000):
            serve(world.manager, run(start, 4 * BLOCK))
        world.take()
        ops.resize(world.manager, {"full": 5})
        told = sum(call[3] for call in world.take() if call[0] == "evicting")
        assert told == world.manager.stats.evicted_blocks == 3

    def test_a_policy_that_does_not_remember_is_not_told(self):
        class Forgetful(SpyingLru):
            remembers = False

        world = Spied(Forgetful, num_blocks=4)
        for start in (0, 1000):
            serve(world.manager, run(start, 3 * BLOCK))
        assert not names_of(world.take(), "evicting")
