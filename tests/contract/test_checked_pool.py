"""A checked pool sees at the call what is wrong with a block."""

import numpy as np
import pytest

from quire.errors import InvariantError
from quire.ops import CheckedPool


def ids(*blocks):
    return memoryview(np.array(blocks, np.int32))


@pytest.fixture
def pool():
    pool = CheckedPool(8)
    pool.take(4)
    return pool


@pytest.mark.parametrize(
    ("blocks", "says"),
    [
        ((0, 8), "unknown blocks"),
        ((-1,), "unknown blocks"),
        ((0, 5), "double free"),
        ((2, 3, 2), "stands twice"),
    ],
)
def test_blocks_that_are_not_held_are_not_freed(pool, blocks, says):
    with pytest.raises(InvariantError, match=says):
        pool.give_back(ids(*blocks))
    assert pool.num_free == 4


def test_a_block_with_several_holders_is_not_freed(pool):
    pool.share(2)
    with pytest.raises(InvariantError, match="block 2 freed with 2 holders"):
        pool.give_back(ids(1, 2))


def test_a_free_stack_that_names_a_held_block_is_seen(pool):
    pool.ids[4] = 1
    with pytest.raises(InvariantError, match="on the free stack but held"):
        pool.take(1)


def test_a_dropped_block_can_be_taken_again(pool):
    pool.cache(2)
    pool.drop(ids(0, 1))
    assert sorted(pool.take(6)) == [0, 1, 4, 5, 6, 7]
    with pytest.raises(InvariantError, match="1 blocks taken, 0 are free"):
        pool.take(1)
