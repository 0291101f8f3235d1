"""What a policy may ask of an entry, and where it may cut one: seams, neighbours, capacity."""

import pytest
from core_help import found, generate, prefill, run, serve
from policy_spy import ALL, BLOCK, Spied, SpyingLru, SpyingRanked, names_of

from quire import ops
from quire.core import FullAttention, Hint, LayerGroup


@pytest.fixture(params=[SpyingLru, SpyingRanked])
def spied(request):
    return lambda *args, **options: Spied(request.param, *args, **options)


class TestSeams:
    @pytest.mark.parametrize("cut_at", [1, 2, 3])
    def test_a_stored_run_becomes_two_entries(self, spied, cut_at):
        world = spied(cut_at=cut_at)
        manager = world.manager
        serve(manager, run(0, 4 * BLOCK))
        world.check()
        calls = world.take()
        lower, upper = (call[1] for call in calls if call[0] == "released")
        assert [call[2] for call in calls if call[0] == "added"] == [4 - cut_at, cut_at]
        assert (upper.num_blocks, upper.end) == (cut_at, cut_at)
        assert (lower.num_blocks, lower.end) == (4 - cut_at, 4)
        assert (lower.above, upper.below) == (upper, lower)
        assert (upper.num_tokens, lower.num_tokens) == (cut_at * BLOCK, (4 - cut_at) * BLOCK)

    @pytest.mark.parametrize("cut_at", [-1, 0, 4, 5, 100])
    def test_outside_of_the_run_there_is_nothing_to_cut(self, spied, cut_at):
        world = spied(cut_at=cut_at)
        serve(world.manager, run(0, 4 * BLOCK))
        world.check()
        assert [call[2] for call in world.take() if call[0] == "released"] == [4]

    def test_a_hit_is_the_same(self, spied):
        world = spied(cut_at=1)
        manager = world.manager
        for start in (0, 1000):
            serve(manager, [*run(0, 2 * BLOCK), *run(start + 50_000, 3 * BLOCK)])
            world.check()
        for start in (0, 1000):
            prompt = [*run(0, 2 * BLOCK), *run(start + 50_000, 3 * BLOCK)]
            assert found(manager, prompt) == 5 * BLOCK
            seq = manager.open([*prompt, 7])
            world.check()
            assert seq.num_cached == 5 * BLOCK
            assert seq.tokens.tolist() == prompt

    def test_it_is_asked_once_for_what_has_grown(self, spied):
        world = spied()
        manager = world.manager
        seq = prefill(manager, run(0, 2 * BLOCK))
        twin = manager.fork(seq)
        manager.close(seq)
        assert "seam" not in names_of(world.take())
        manager.close(twin)
        assert names_of(world.take(), "seam") == ["seam"]
        serve(manager, run(0, 2 * BLOCK + 1))
        assert "seam" not in names_of(world.take())

    def test_all_blocks_come_back_to_the_pool(self, spied):
        world = spied(cut_at=1)
        manager = world.manager
        for start in range(0, 5000, 1000):
            seq = prefill(manager, [*run(0, BLOCK), *run(start + 50_000, 4 * BLOCK)])
            twin = manager.fork(seq)
            generate(manager, seq, run(60_000 + start, 2 * BLOCK))
            manager.suspend(twin)
            world.check()
            manager.resume(twin)
            manager.close(seq)
            world.check()
            manager.close(twin)
            world.check()
        assert manager.reclaim(ALL) == manager.num_free - 1 == 31

    def test_hints_and_terms_hold_on_both_sides(self, spied):
        world = spied(cut_at=2, clock=lambda: 100.0)
        manager = world.manager
        serve(manager, run(0, 4 * BLOCK), hint=Hint("never"), priority=3)
        serve(manager, run(1000, 4 * BLOCK), retain_s=10)
        serve(manager, run(2000, 4 * BLOCK))
        world.check()
        for gone in (0, 2000, 1000):
            assert manager.reclaim(4) == 4
            world.check()
            assert not found(manager, run(gone, 4 * BLOCK))


class TestStructure:
    def test_above_is_what_an_entry_continues_and_below_the_youngest_that_continues_it(self, spied):
        world = spied()
        manager = world.manager
        serve(manager, run(0, 2 * BLOCK))
        deepest = []
        for start in (1000, 2000, 3000):
            serve(manager, [*run(0, 2 * BLOCK), *run(start, BLOCK)])
            deepest.append(next(c[1] for c in world.take()[::-1] if c[0] == "added"))
        trunk = deepest[0].above
        assert trunk.above is None
        assert trunk.num_blocks == 2
        assert all(each.above is trunk and each.below is None for each in deepest)
        assert trunk.below is deepest[-1]

    def test_a_cut_entry_hands_down_what_its_policy_wrote_on_it(self, spied):
        world = spied()
        manager = world.manager
        serve(manager, run(0, 4 * BLOCK))
        entry = next(c[1] for c in world.take() if c[0] == "added")
        entry.queue, entry.note = 3, "mine"
        kept = entry.uses, entry.rank
        with manager.pin(run(0, BLOCK)):
            (split,) = [call for call in world.take() if call[0] == "split"]
        _, lower, _, upper = split
        assert lower is entry
        assert (upper.queue, upper.note) == (3, "mine")
        assert (lower.uses, lower.rank) == kept
        assert (upper.num_blocks, lower.num_blocks) == (1, 3)

    def test_the_capacity_follows_the_pool(self, spied):
        world = spied(num_blocks=12)
        (policy,) = world.policies
        for size in (20, 5):
            assert policy.capacity() == world.manager.pools[0].num_blocks
            ops.resize(world.manager, {"full": size})
            assert policy.capacity() == size

    def test_of_several_full_groups_the_smallest_counts(self, spied):
        groups = [LayerGroup(str(size), size, FullAttention()) for size in (12, 8, 20)]
        world = spied(groups=groups)
        assert world.policies[0].capacity() == 8
        ops.resize(world.manager, {"8": 30})
        assert world.policies[0].capacity() == 12

    def test_each_class_has_a_policy_object_and_all_share_the_counter(self, spied):
        world = spied()
        for priority in (0, 1, 0, -1):
            serve(world.manager, run(1000, BLOCK), priority=priority)
            serve(world.manager, run(2000 + 100 * priority, BLOCK), priority=priority)
        assert len(world.policies) == 3
        ticks = [policy.tick() for policy in world.policies]
        assert ticks == sorted(set(ticks))
