"""Policies of several queues: the contract, and what each stands for."""

from array import array

import pytest
from core_help import found, run, serve
from policy_contract import BLOCK, PolicyContract

from quire.core.policies.w_tinylfu import Sketch


class QueuedContract(PolicyContract):
    """Holds for every policy of several queues."""

    def test_each_queue_knows_its_blocks(self):
        def recount(manager):
            for policy in manager.kernel.tree.evictor._order:
                sizes = [0] * policy.num_queues
                for node in manager.kernel.tree.nodes():
                    if node.policy is policy and not node.locks:
                        sizes[node.queue] += node.num_blocks
                assert policy.sizes == sizes

        self.mixed_history(recount)

    def test_what_is_remembered_of_evicted_blocks_is_bounded(self):
        def limit(manager):
            for policy in manager.kernel.tree.evictor._order:
                gone = getattr(policy, "_gone", ())
                gone = gone if isinstance(gone, tuple) else (gone,)
                assert sum(map(len, gone)) <= 2 * manager.pools[0].num_blocks

        self.mixed_history(limit)

    def test_a_dead_chain_goes_though_its_parents_were_used(self):
        manager = self.manager(num_blocks=8)
        for turns in range(1, 7):
            serve(manager, run(0, turns * BLOCK))
        for start in range(1000, 40000, 1000):
            serve(manager, run(start, 2 * BLOCK))
            serve(manager, run(start, 2 * BLOCK + 1))
        assert found(manager, run(0, 6 * BLOCK)) <= 5 * BLOCK
        manager.check()

    def scan(self, manager, num_others=30, start=5000):
        for other in range(num_others):
            serve(manager, run(start + 1000 * other, BLOCK))


class TestArc(QueuedContract):
    policy = "arc"

    def test_what_was_used_again_outlives_a_scan(self):
        manager = self.manager(num_blocks=8)
        serve(manager, run(0, BLOCK))
        serve(manager, run(0, BLOCK + 1))
        self.scan(manager)
        assert found(manager, run(0, BLOCK)) == BLOCK

    def with_frequent_half(self):
        """A manager of 16 blocks, 8 of them used again; ARC remembers as many that went."""
        manager = self.manager()
        for _ in range(2):
            serve(manager, [*run(90000, 8 * BLOCK), 1])
        return manager

    def test_what_comes_back_after_it_had_to_go_outlives_a_scan(self):
        manager = self.with_frequent_half()
        serve(manager, run(0, BLOCK))
        self.scan(manager, num_others=10)
        assert found(manager, run(0, BLOCK)) == 0
        serve(manager, run(0, BLOCK))
        self.scan(manager, start=50000)
        assert found(manager, run(0, BLOCK)) == BLOCK

    def test_of_a_prompt_only_the_part_that_comes_back_outlives_a_scan(self):
        manager = self.with_frequent_half()
        serve(manager, run(0, BLOCK))
        self.scan(manager, num_others=10)
        serve(manager, run(0, 4 * BLOCK))
        self.scan(manager, start=50000)
        assert found(manager, run(0, 4 * BLOCK)) == BLOCK


class TestTwoQ(QueuedContract):
    policy = "2q"

    def test_new_prompts_go_in_order_of_arrival_however_often_they_were_used(self):
        manager = self.manager()
        for start in (0, 1000, 2000, 1000, 0, 0, 0):
            serve(manager, run(start, BLOCK + 1))
        assert self.victims(manager, (0, 1000, 2000)) == [0, 1000, 2000]

    def test_what_comes_back_after_it_had_to_go_outlives_a_scan(self):
        manager = self.manager(num_blocks=8)
        serve(manager, run(0, BLOCK))
        self.scan(manager, num_others=9)
        assert found(manager, run(0, BLOCK)) == 0
        serve(manager, run(0, BLOCK))
        self.scan(manager, start=50000)
        assert found(manager, run(0, BLOCK)) == BLOCK


class TestS3Fifo(QueuedContract):
    policy = "s3fifo"

    @pytest.mark.parametrize(("times", "stays"), [(1, 0), (2, 0), (3, BLOCK)])
    def test_what_was_used_twice_while_it_was_new_outlives_a_scan(self, times, stays):
        manager = self.manager(num_blocks=8)
        for _ in range(times):
            serve(manager, run(0, BLOCK + 1))
        self.scan(manager)
        assert found(manager, run(0, BLOCK)) == stays

    def test_what_comes_back_after_it_had_to_go_outlives_a_scan(self):
        manager = self.manager(num_blocks=8)
        serve(manager, run(0, BLOCK))
        self.scan(manager, num_others=10)
        assert found(manager, run(0, BLOCK)) == 0
        serve(manager, run(0, BLOCK))
        self.scan(manager, start=50000)
        assert found(manager, run(0, BLOCK)) == BLOCK


class TestSieve(QueuedContract):
    policy = "sieve"

    def test_what_was_used_is_passed_over_once(self):
        manager = self.manager()
        for start in (0, 1000, 2000, 0):
            serve(manager, run(start, BLOCK + 1))
        assert self.victims(manager, (0, 1000, 2000)) == [1000, 2000, 0]

    def test_the_hand_waits_where_it_was(self):
        manager = self.manager()
        for start in (0, 1000, 2000, 3000, 0):
            serve(manager, run(start, BLOCK + 1))
        manager.reclaim(1)
        serve(manager, run(4000, BLOCK + 1))
        assert self.victims(manager, (0, 2000, 3000, 4000)) == [2000, 3000, 4000, 0]


class TestWTinyLfu(QueuedContract):
    policy = "w-tinylfu"

    def test_what_is_asked_for_once_displaces_nothing_that_was_asked_for_often(self):
        manager = self.manager(num_blocks=16)
        often = range(0, 16000, 1000)
        for _ in range(3):
            for start in often:
                serve(manager, run(start, BLOCK + 1))
        self.scan(manager, start=50000)
        assert sum(found(manager, run(start, BLOCK)) == BLOCK for start in often) >= 14

    def test_counts_are_halved_after_ten_uses_for_each_block(self):
        sketch = Sketch(capacity=4)
        sketch.add(array("I", [7]))
        for _ in range(6):
            sketch.add(array("I", [7]))
        assert sketch.count(7) == 7
        sketch.add(array("I", range(100, 133)))
        assert sketch.count(7) == 3

    def test_counts_end_at_fifteen(self):
        sketch = Sketch(capacity=100)
        for _ in range(40):
            sketch.add(array("I", [7]))
        assert (sketch.count(7), sketch.count(8)) == (15, 0)
