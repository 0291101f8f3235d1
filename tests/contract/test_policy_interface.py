"""The policy interface: the calls and their order, questions to entries and pools, valid policies."""

import os

import numpy as np
import pytest
from core_help import found, prefill, run, serve
from policy_spy import BLOCK, Spied, SpyingLru, SpyingRanked, ends, names_of

from quire import ops
from quire.core import CacheManager, FullAttention, Hint, LayerGroup, Watcher
from quire.core.policies import Lru, policy_names
from quire.errors import ConfigError
from quire.foresight import Learned


class WatcherWithArgument(Watcher):
    """Wants an argument."""

    def __init__(self, what):
        self.what = what


@pytest.fixture(params=[SpyingLru, SpyingRanked])
def spied(request):
    return lambda *args, **options: Spied(request.param, *args, **options)


class TestOrder:
    def test_a_hit_is_touched_from_the_deepest_node_up_before_opened_is_called(self, spied):
        class Listener(Watcher):
            def opened(self, seq, key, missed):
                spy.calls.append(("opened", seq.node))

        spy = spied(watchers=[Listener()])
        manager = spy.manager
        for length in (2, 3, 5):
            serve(manager, [*run(0, length * BLOCK), 7])
        serve(manager, [*run(0, 3 * BLOCK), *run(1000, BLOCK)])
        spy.take()
        seq = manager.open([*run(0, 5 * BLOCK), 7])
        assert set(names_of(spy.calls)) <= {"referenced", "split"}
        manager.reserve(seq, 1)
        calls = [call for call in spy.take() if call[0] in ("opened", "touched")]
        assert names_of(calls)[-1] == "opened"
        assert calls[-1][1] is calls[0][1]
        touched = ends(calls, "touched")
        assert touched == sorted(touched, reverse=True)
        assert touched[0] == 5
        assert sum(call[2] for call in calls[:-1]) == 5

    def test_nodes_of_a_closed_request_are_released_from_the_deepest_up(self, spied):
        spy = spied()
        manager = spy.manager
        serve(manager, [*run(0, 2 * BLOCK), 7])
        seq = prefill(manager, [*run(0, 2 * BLOCK), *run(1000, 3 * BLOCK)])
        spy.take()
        manager.close(seq)
        calls = spy.take()
        released = ends(calls, "released")
        assert released[0] == 5
        assert released == sorted(released, reverse=True)
        assert sum(call[2] for call in calls if call[0] == "released") == 5

    def test_a_found_node_is_referenced_before_it_is_touched(self, spied):
        spy = spied()
        serve(spy.manager, [*run(0, 2 * BLOCK), 7])
        spy.take()
        spy.manager.reserve(spy.manager.open([*run(0, 2 * BLOCK), 7]), 1)
        assert names_of(spy.take(), "referenced", "touched") == ["referenced", "touched"]

    def test_a_parent_is_exposed_when_its_last_child_is_gone(self, spied):
        spy = spied()
        manager = spy.manager
        serve(manager, run(0, 2 * BLOCK))
        for start in (1000, 2000):
            serve(manager, [*run(0, BLOCK), *run(start, BLOCK)])
        spy.take()
        ops.reclaim(manager, 2)
        assert "exposed" not in names_of(spy.take())
        ops.reclaim(manager, 1)
        assert ends(spy.take(), "exposed") == [1]

    @pytest.mark.parametrize("asked", [1, 2, 3, 5, 7, 10**6])
    def test_an_entry_is_referenced_when_its_last_block_goes(self, spied, asked):
        spy = spied()
        manager = spy.manager
        for start in (0, 1000):
            serve(manager, [*run(0, BLOCK), *run(start + 50_000, 3 * BLOCK)])
        spy.take()
        assert ops.reclaim(manager, asked) == min(asked, 7)
        gone = names_of(spy.take(), "referenced")
        assert len(gone) == (asked >= 3) + (asked >= 6) + (asked >= 7)

    def test_a_lookup_calls_no_policy(self, spied):
        spy = spied()
        serve(spy.manager, run(0, 3 * BLOCK))
        spy.take()
        spy.manager.probe(run(0, 2 * BLOCK))
        ops.explain(spy.manager, [*run(0, 2 * BLOCK), 1, 2, 3])
        assert spy.take() == []

    def test_an_ended_session_takes_its_entries_to_another_policy_object(self, spied):
        spy = spied()
        manager = spy.manager
        serve(manager, run(0, 3 * BLOCK), hint=Hint(session_id="a"))
        spy.take()
        manager.end_session("a")
        calls = spy.take()
        assert names_of(calls, "referenced", "returned") == ["referenced", "returned"]
        assert calls[0][1] is calls[1][1]
        assert len(spy.policies) == 2
        assert calls[0][1].mark.policy is spy.policies[1]
        spy.check()


class TestEntries:
    def test_a_cut_entry_copies_its_policys_fields_to_both_parts(self, spied):
        spy = spied()
        manager = spy.manager
        serve(manager, run(0, 4 * BLOCK))
        entry = next(c[1] for c in spy.take() if c[0] == "released")
        entry.note = (7, 8)
        with ops.pin(manager, run(0, BLOCK)):
            (split,) = [call for call in spy.take() if call[0] == "split"]
        _, lower, _, upper = split
        assert lower is entry
        assert upper.note == (7, 8)
        assert (upper.num_blocks, lower.num_blocks) == (1, 3)

    def test_the_capacity_follows_the_pool(self, spied):
        spy = spied(num_blocks=12)
        (policy,) = spy.policies
        for size in (20, 5):
            assert policy.capacity() == spy.manager.pools[0].num_blocks
            ops.resize(spy.manager, {"full": size})
            assert policy.capacity() == size

    def test_a_policys_capacity_is_that_of_the_smallest_full_group(self, spied):
        groups = [LayerGroup(str(size), size, FullAttention()) for size in (12, 8, 20)]
        spy = spied(groups=groups)
        assert spy.policies[0].capacity() == 8
        ops.resize(spy.manager, {"8": 30})
        assert spy.policies[0].capacity() == 12

    def test_each_class_has_a_policy_object_and_all_share_the_counter(self, spied):
        spy = spied()
        for priority in (0, 1, 0, -1):
            serve(spy.manager, run(1000, BLOCK), priority=priority)
            serve(spy.manager, run(2000 + 100 * priority, BLOCK), priority=priority)
        assert len(spy.policies) == 3
        ticks = [policy.tick() for policy in spy.policies]
        assert ticks == sorted(set(ticks))


class TestWhatMayBeAPolicy:
    @pytest.mark.parametrize(
        ("policy", "message"),
        [
            ("lruu", "unknown policy 'lruu'; there are fifo, learned, lfu, lru"),
            (np.array([1, 2]), "there are fifo, learned, lfu, lru, and what makes"),
            (None, "unknown policy None; .* and what makes quire.core.Policy objects"),
            (lambda: Lru, "policy is called with a counter and a capacity"),
            (lambda tick, capacity: "lru", "makes quire.core.Policy objects, not 'lru'"),
            (WatcherWithArgument, "policy is no Policy and wants arguments"),
        ],
    )
    def test_a_policy_argument_that_makes_no_policy_is_refused(self, policy, message):
        with pytest.raises(ConfigError, match=message):
            CacheManager(8, BLOCK, policy=policy)

    @pytest.mark.parametrize("policy", ["learned", Learned, Learned()])
    def test_a_watcher_that_makes_policies_is_told_of_requests(self, policy):
        manager = CacheManager(8, BLOCK, policy=policy)
        serve(manager, run(0, 3 * BLOCK))
        assert manager.kernel.watchers.find(Learned).mind.num_requests == 1
        assert found(manager, run(0, 3 * BLOCK)) == 3 * BLOCK

    def test_a_learned_policy_serves_one_manager(self):
        learned = Learned()
        CacheManager(8, BLOCK, policy=learned)
        with pytest.raises(ConfigError, match="watches a manager already"):
            CacheManager(8, BLOCK, policy=learned)

    @pytest.mark.parametrize("policy", ["learned", Learned()])
    def test_a_reset_of_the_manager_resets_its_learned_policy(self, policy):
        manager = CacheManager(8, BLOCK, policy=policy)
        for _ in range(2):
            watcher = manager.kernel.watchers.find(Learned)
            assert (watcher.mind.num_requests, len(watcher.mind.doubts)) == (0, 1)
            seq = prefill(manager, run(0, 3 * BLOCK))
            serve(manager, run(1000, 3 * BLOCK), priority=1)
            assert ops.reclaim(manager, 9) == 3
            assert seq.state == "open"
            manager.reset()
        assert manager.kernel.watchers.of(Learned) is watcher

    def test_another_package_offers_one_by_an_entry_point(self, tmp_path, monkeypatch):
        monkeypatch.syspath_prepend(str(tmp_path))
        os.utime(tmp_path, (1, 1))
        assert "mine" not in policy_names()  # it is installed while the process runs
        info = tmp_path / "more_policies-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: more-policies\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(
            "[quire.policies]\nmine = quire.core.policies:Lru\nlost = quire.core.policies:Gone\n"
        )
        assert policy_names() == ["fifo", "learned", "lfu", "lost", "lru", "mine"]
        serve(CacheManager(8, BLOCK, policy="mine"), run(0, BLOCK))
        with pytest.raises(
            ConfigError, match=r"'lost' \(quire.core.policies:Gone\) cannot be loaded"
        ):
            CacheManager(8, BLOCK, policy="lost")
