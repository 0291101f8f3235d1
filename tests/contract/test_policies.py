"""The contract of every eviction policy, and the order of each."""

from core_help import found, run, serve
from policy_contract import BLOCK, PolicyContract

from quire import ops
from quire.core.policies import policy_names


class TestLru(PolicyContract):
    policy = "lru"

    def test_the_prompt_not_used_for_longest_goes_first(self):
        manager = self.manager()
        for start in (0, 1000, 2000, 1000, 0):
            serve(manager, run(start, BLOCK + 1))
        assert self.victims(manager, (0, 1000, 2000)) == [2000, 1000, 0]

    def test_the_use_of_a_branch_moves_its_trunk_but_not_its_siblings(self):
        manager = self.manager()
        trunk = list(range(BLOCK))
        left, right = [*trunk, *run(1000, BLOCK)], [*trunk, *run(2000, BLOCK)]
        for prompt in (left, right, [*left, 1]):
            serve(manager, prompt)
        serve(manager, run(3000, BLOCK))
        ops.reclaim(manager, 1)
        assert (found(manager, left), found(manager, right)) == (2 * BLOCK, BLOCK)
        ops.reclaim(manager, 1)
        assert found(manager, left) == BLOCK
        assert found(manager, run(3000, BLOCK)) == BLOCK


class TestFifo(PolicyContract):
    policy = "fifo"

    def test_the_prompt_inserted_first_goes_first_however_often_it_was_used(self):
        manager = self.manager()
        for start in (0, 1000, 2000, 1000, 0, 0, 0):
            serve(manager, run(start, BLOCK + 1))
        assert self.victims(manager, (0, 1000, 2000)) == [0, 1000, 2000]


class TestLfu(PolicyContract):
    policy = "lfu"

    def test_the_prompt_used_least_goes_first(self):
        manager = self.manager()
        for start in (0, 0, 0, 1000, 2000, 2000):
            serve(manager, run(start, BLOCK + 1))
        assert self.victims(manager, (0, 1000, 2000)) == [1000, 2000, 0]

    def test_a_much_used_prompt_outlives_some_later_traffic(self):
        assert self.found_after(num_others=8) == BLOCK

    def test_a_much_used_prompt_ages(self):
        assert self.found_after(num_others=40) == 0

    def found_after(self, num_others):
        manager = self.manager(num_blocks=4)
        for _ in range(6):
            serve(manager, run(0, BLOCK + 1))
        for start in range(1000, 1000 * num_others + 1000, 1000):
            serve(manager, run(start, BLOCK + 1))
        return found(manager, run(0, BLOCK))


class TestLearned(PolicyContract):
    policy = "learned"

    def test_before_anything_is_learned_it_is_lru(self):
        manager = self.manager()
        for start in (0, 1000, 2000, 0):
            serve(manager, run(start, BLOCK + 1))
        assert self.victims(manager, (0, 1000, 2000)) == [1000, 2000, 0]


def test_every_policy_has_its_contract():
    bound = {each.policy for each in _subclasses(PolicyContract)}
    assert bound - {""} == set(policy_names())


def _subclasses(contract):
    for each in contract.__subclasses__():
        yield each
        yield from _subclasses(each)
