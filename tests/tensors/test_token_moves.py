"""Accepted drafts: the KV of single tokens moved together inside a pool."""

import pytest

torch = pytest.importorskip("torch")

from quire import KVLayout, KVPool, TokenMove  # noqa: E402
from quire.errors import ConfigError  # noqa: E402
from quire.tensors import move_tokens  # noqa: E402


def numbered_pool():
    pool = KVPool(KVLayout(2, 3, 4, 5, torch.float32, block_size=4), 6)
    pool.k.copy_(torch.arange(pool.k.numel()).reshape(pool.k.shape))
    pool.v.copy_(-torch.arange(pool.v.numel()).reshape(pool.v.shape))
    return pool


def test_every_source_is_read_before_any_destination_is_written():
    pool = numbered_pool()
    k, v = pool.k.clone(), pool.v.clone()
    move_tokens(pool, [TokenMove(0, 1, 2, 1, 1), TokenMove(0, 5, 0, 1, 2)])
    assert torch.equal(pool.k[:, 1, 1], k[:, 1, 2])
    assert torch.equal(pool.k[:, 1, 2], k[:, 5, 0])
    assert torch.equal(pool.v[:, 1, 1], v[:, 1, 2])
    assert torch.equal(pool.v[:, 1, 2], v[:, 5, 0])
    k[:, 1, 1:3] = v[:, 1, 1:3] = 0
    pool.k[:, 1, 1:3] = pool.v[:, 1, 1:3] = 0
    assert torch.equal(pool.k, k), "nothing else was written"
    assert torch.equal(pool.v, v)


def test_moves_of_other_groups_are_left_out():
    pool = numbered_pool()
    before = pool.k.clone()
    move_tokens(pool, [TokenMove(1, 1, 2, 1, 1)])
    assert torch.equal(pool.k, before)


@pytest.mark.parametrize(
    "moves",
    [
        [TokenMove(0, 6, 0, 0, 0)],
        [TokenMove(0, 0, 4, 0, 0)],
        [TokenMove(0, 0, 0, 0, -1)],
        [TokenMove(0, 0, 0, 1, 1), TokenMove(0, 0, 2, 1, 1)],
    ],
)
def test_a_bad_move_writes_nothing(moves):
    pool = numbered_pool()
    before = pool.k.clone()
    with pytest.raises(ConfigError):
        move_tokens(pool, moves)
    assert torch.equal(pool.k, before)
