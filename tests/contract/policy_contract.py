"""The contract of every policy, to be bound to one in two lines."""

import pytest
from core_help import found, prefill, rejected, run, serve, state

from clocks import Clock
from quire import errors, ops
from quire.core import CacheManager

BLOCK = 4
INFINITE = 10**6


class PolicyContract:
    """Holds for every policy; a subclass names one."""

    policy = ""

    def manager(self, num_blocks=16, **options):
        return CacheManager(
            num_blocks=num_blocks, block_size=BLOCK, policy=self.policy, sub_block=False, **options
        )

    def victims(self, manager, starts, length=BLOCK):
        """Reclaim block by block; return the prompts (by start) in the order they went."""
        order, left = [], list(starts)
        while left:
            assert ops.reclaim(manager, 1) == 1
            gone = [start for start in left if found(manager, run(start, length)) < length]
            order += gone
            left = [start for start in left if start not in gone]
            ops.check(manager)
        return order

    def test_reclaim_frees_every_cached_block(self):
        manager = self.manager()
        for start in range(0, 4000, 1000):
            serve(manager, run(start, 3 * BLOCK))
        assert manager.num_cached == 12
        assert ops.reclaim(manager, INFINITE) == 12
        assert (manager.num_free, manager.num_cached) == (16, 0)

    @pytest.mark.parametrize("asked", [1, 2, 5, 11, 12])
    def test_exactly_as_many_blocks_as_asked_are_reclaimed(self, asked):
        manager = self.manager()
        for start in range(0, 4000, 1000):
            serve(manager, run(start, 3 * BLOCK))
        assert ops.reclaim(manager, asked) == asked
        assert manager.num_cached == 12 - asked
        ops.check(manager)

    def test_an_active_block_is_never_a_victim(self):
        manager = self.manager()
        serve(manager, run(1000, 2 * BLOCK))
        active = prefill(manager, run(0, 3 * BLOCK))
        table = active.block_ids().tolist()
        assert ops.reclaim(manager, INFINITE) == 2
        assert active.block_ids().tolist() == table
        assert found(manager, run(0, 3 * BLOCK)) == 3 * BLOCK
        assert manager.num_active == 3

    def test_the_ancestors_of_an_active_sequence_are_never_victims(self):
        manager = self.manager()
        serve(manager, run(0, 2 * BLOCK))
        seq = prefill(manager, [*range(2 * BLOCK), 9, 9, 9, 9, 9])
        ops.reclaim(manager, INFINITE)
        assert found(manager, run(0, 2 * BLOCK)) == 2 * BLOCK
        manager.close(seq)

    def test_the_tail_goes_first_and_block_by_block(self):
        manager = self.manager()
        serve(manager, run(0, 8 * BLOCK))
        for left in range(7, -1, -1):
            assert ops.reclaim(manager, 1) == 1
            assert found(manager, run(0, 8 * BLOCK)) == left * BLOCK

    def test_descendants_go_before_their_ancestors(self):
        manager = self.manager()
        trunk = list(range(2 * BLOCK))
        branches = [[*trunk, *run(start, 2 * BLOCK)] for start in (1000, 2000, 3000)]
        for branch in branches:
            serve(manager, branch)
        assert manager.num_cached == 8
        for cached in range(7, -1, -1):
            ops.reclaim(manager, 1)
            lengths = [found(manager, branch) // BLOCK for branch in branches]
            below = sum(max(0, length - 2) for length in lengths)
            assert manager.num_cached == cached
            assert min(2, max(lengths)) + below == cached, "something resident cannot be found"
            if below:
                assert min(lengths) >= 2, "the trunk went before its branches"

    def test_two_managers_decide_alike(self):
        def history(manager):
            states = []
            for i in range(40):
                start = 1000 * (i * i % 7)
                serve(manager, run(start, (i % 3 + 1) * BLOCK), priority=int(i % 5 == 0))
                if i % 6 == 0:
                    ops.reclaim(manager, 2)
                states.append(state(manager))
            return states

        assert history(self.manager(num_blocks=9)) == history(self.manager(num_blocks=9))

    def mixed_history(self, after_each, num_blocks=24):
        """Serve prompts that share prefixes under pressure; return the states after each."""
        manager, states = self.manager(num_blocks=num_blocks), []
        for i in range(120):
            trunk = list(range((i * i % 5) * BLOCK))
            serve(manager, [*trunk, *run(1000 * (i * 7 % 11 + 1), (i % 4 + 1) * BLOCK)])
            if i % 17 == 0:
                ops.reclaim(manager, 3)
            if i % 31 == 0:
                ops.invalidate(manager, trunk[:BLOCK] or None)
            after_each(manager)
            states.append(state(manager))
        return states

    def test_to_check_decides_nothing(self):
        quiet = self.mixed_history(lambda manager: None)
        assert self.mixed_history(ops.check) == quiet

    def test_to_ask_for_the_victim_again_gives_the_same(self):
        def ask(manager):
            order = manager.kernel.tree.order
            assert order.victim() == order.victim()

        self.mixed_history(ask)

    def test_a_lookup_moves_nothing(self):
        def order(lookups):
            manager = self.manager()
            for start in (0, 1000, 2000):
                serve(manager, run(start, BLOCK))
            for _ in range(lookups):
                manager.probe(run(0, BLOCK + 1))
                ops.explain(manager, run(0, BLOCK + 1))
            return self.victims(manager, (0, 1000, 2000))

        assert order(lookups=20) == order(lookups=0)

    def test_a_lower_priority_goes_first(self):
        manager = self.manager()
        for start, priority in ((0, 1), (1000, 0), (2000, 2), (3000, -1), (4000, 0)):
            serve(manager, run(start, BLOCK), priority=priority)
        order = self.victims(manager, (0, 1000, 2000, 3000, 4000))
        assert order[0] == 3000
        assert set(order[1:3]) == {1000, 4000}
        assert order[3:] == [0, 2000]

    def test_pressure_evicts_the_lower_priority_first(self):
        manager = self.manager(num_blocks=4)
        serve(manager, run(0, BLOCK), priority=1)
        for start in range(1000, 20000, 1000):
            serve(manager, run(start, BLOCK))
        assert found(manager, run(0, BLOCK)) == BLOCK

    def test_a_retained_prompt_goes_last(self):
        clock = Clock()
        manager = self.manager(clock=clock)
        serve(manager, run(0, BLOCK), retain_s=10)
        for start in (1000, 2000):
            serve(manager, run(start, BLOCK))
            serve(manager, run(start, BLOCK))
        clock.now += 9
        assert self.victims(manager, (0, 1000, 2000))[-1] == 0

    def test_a_retained_prompt_outlives_a_higher_priority(self):
        clock = Clock()
        manager = self.manager(clock=clock)
        serve(manager, run(0, BLOCK), retain_s=10)
        serve(manager, run(1000, BLOCK), priority=5)
        assert self.victims(manager, (0, 1000)) == [1000, 0]

    def test_retention_is_no_pin(self):
        manager = self.manager(num_blocks=2, clock=Clock())
        serve(manager, run(0, 2 * BLOCK), retain_s=10)
        serve(manager, run(1000, 2 * BLOCK))
        assert found(manager, run(1000, 2 * BLOCK)) == 2 * BLOCK

    def test_blocks_past_their_retention_rank_as_plain_ones(self):
        def order(**options):
            clock = Clock()
            manager = self.manager(clock=clock)
            serve(manager, run(0, BLOCK), **options)
            for start in (1000, 2000):
                serve(manager, run(start, BLOCK))
                serve(manager, run(start, BLOCK))
            clock.now += 11
            return self.victims(manager, (0, 1000, 2000))

        assert order(retain_s=10) == order()

    def test_a_prompt_can_be_used_again_after_its_retention_ended(self):
        clock = Clock()
        manager = self.manager(clock=clock)
        serve(manager, run(0, BLOCK), retain_s=10)
        clock.now += 11
        for length in (BLOCK + 1, 2 * BLOCK, BLOCK):
            serve(manager, run(0, length))
            ops.check(manager)
        assert ops.reclaim(manager, INFINITE) == 2

    def test_the_retention_of_a_branch_covers_its_path_only(self):
        manager = self.manager(clock=Clock())
        trunk = list(range(BLOCK))
        serve(manager, [*trunk, *run(1000, BLOCK)], retain_s=10)
        serve(manager, [*trunk, *run(2000, BLOCK)])
        ops.reclaim(manager, 1)
        assert found(manager, [*trunk, *run(1000, BLOCK)]) == 2 * BLOCK
        assert found(manager, [*trunk, *run(2000, BLOCK)]) == BLOCK

    def test_a_pinned_prefix_is_never_a_victim(self):
        manager = self.manager(num_blocks=8)
        serve(manager, run(0, 3 * BLOCK))
        with ops.pin(manager, run(0, 2 * BLOCK)) as pin:
            assert pin.num_tokens == 2 * BLOCK
            for start in range(1000, 9000, 1000):
                serve(manager, run(start, 4 * BLOCK))
            assert ops.reclaim(manager, INFINITE) == 6
            assert found(manager, run(0, 3 * BLOCK)) == 2 * BLOCK
            assert manager.num_active == 2
        assert ops.reclaim(manager, INFINITE) == 2

    def test_an_expired_pin_holds_nothing(self):
        clock = Clock()
        manager = self.manager(num_blocks=8, clock=clock)
        serve(manager, run(0, 2 * BLOCK))
        ops.pin(manager, run(0, 2 * BLOCK), ttl_s=10)
        clock.now += 9.5
        assert ops.reclaim(manager, INFINITE) == 0
        clock.now += 1
        assert ops.reclaim(manager, INFINITE) == 2
        ops.check(manager)

    def test_an_expired_pin_gives_way_to_a_request(self):
        clock = Clock()
        manager = self.manager(num_blocks=4, clock=clock, pin_budget=1.0)
        serve(manager, run(0, 4 * BLOCK))
        ops.pin(manager, run(0, 4 * BLOCK), ttl_s=10)
        seq = manager.open(run(1000, BLOCK))
        with rejected(manager, errors.OutOfBlocks):
            manager.reserve(seq, BLOCK)
        clock.now += 11
        manager.reserve(seq, BLOCK)

    def test_an_expired_pin_leaves_the_budget(self):
        clock = Clock()
        manager = self.manager(num_blocks=8, clock=clock, pin_budget=0.25)
        serve(manager, run(0, 2 * BLOCK))
        serve(manager, run(1000, 2 * BLOCK))
        ops.pin(manager, run(0, 2 * BLOCK), ttl_s=10)
        with rejected(manager, errors.PinBudgetExceeded):
            ops.pin(manager, run(1000, 2 * BLOCK))
        clock.now += 11
        assert ops.pin(manager, run(1000, 2 * BLOCK)).num_tokens == 2 * BLOCK

    def test_two_pins_on_one_prefix_both_hold_it(self):
        manager = self.manager()
        serve(manager, run(0, 2 * BLOCK))
        first, second = ops.pin(manager, run(0, 2 * BLOCK)), ops.pin(manager, run(0, BLOCK))
        first.close()
        assert ops.reclaim(manager, INFINITE) == 1
        assert found(manager, run(0, 2 * BLOCK)) == BLOCK
        second.close()
        assert ops.reclaim(manager, INFINITE) == 1
