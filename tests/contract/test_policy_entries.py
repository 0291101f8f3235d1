"""What a policy may ask of an entry, and of its pool."""

import pytest
from core_help import run, serve
from policy_spy import BLOCK, Spied, SpyingLru, SpyingRanked

from quire import ops
from quire.core import FullAttention, LayerGroup


@pytest.fixture(params=[SpyingLru, SpyingRanked])
def spied(request):
    return lambda *args, **options: Spied(request.param, *args, **options)


class TestStructure:
    def test_a_cut_entry_hands_down_what_its_policy_wrote_on_it(self, spied):
        world = spied()
        manager = world.manager
        serve(manager, run(0, 4 * BLOCK))
        entry = next(c[1] for c in world.take() if c[0] == "released")
        entry.note = (7, 8)
        with manager.pin(run(0, BLOCK)):
            (split,) = [call for call in world.take() if call[0] == "split"]
        _, lower, _, upper = split
        assert lower is entry
        assert upper.note == (7, 8)
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
