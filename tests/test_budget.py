"""One budget of bytes, split over layer groups."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire import CacheManager
from quire.budget import GroupSize, split_budget
from quire.core import FullAttention
from quire.errors import ConfigError
from quire.groups import ChunkedAttention, Recurrent, SlidingWindow

FULL, SLIDING = FullAttention(), SlidingWindow(100)


@pytest.mark.parametrize(
    ("kind", "num_tokens", "blocks"),
    [
        (FULL, 1, 1),
        (FULL, 8192, 512),
        (SLIDING, 16, 2),  # a short sequence needs no more than its blocks, and one to grow into
        (SLIDING, 399, 9),  # 7 blocks touch its window wherever it starts: 8 with the first
        (SLIDING, 8192, (1 + 20) * 8 + 1),  # a window at every 400 tokens
        (SlidingWindow(100, 20), 399, 11),
        (SlidingWindow(100, 0, 8192), 8192, 2 * 8 + 1),
        (ChunkedAttention(100), 8192, 9),
        (Recurrent(), 8192, 3),
        (Recurrent(1024), 8192, 11),
    ],
)
def test_blocks_for_counts_the_blocks_that_each_kind_keeps(kind, num_tokens, blocks):
    assert kind.blocks_for(num_tokens, 16) == blocks


def test_groups_run_short_after_the_same_number_of_sequences():
    sizes = [GroupSize("full", FULL, 1000), GroupSize("sliding", SLIDING, 5000)]
    full, sliding = split_budget(100_000_000, sizes, 16, 8192)
    sequences = full.num_blocks / FULL.blocks_for(8192, 16)
    assert sliding.num_blocks == pytest.approx(sequences * SLIDING.blocks_for(8192, 16), rel=0.01)
    assert (full.kind, sliding.kind) == (FULL, SLIDING)


def test_longer_sequences_give_full_attention_a_larger_share():
    sizes = [GroupSize("full", FULL, 1000), GroupSize("state", Recurrent(), 100_000)]
    shares = [split_budget(10**8, sizes, 16, tokens)[0].num_blocks for tokens in (512, 8192, 65536)]
    assert shares == sorted(shares)
    assert shares[0] * 2 < shares[2]


def test_a_budget_below_one_expected_sequence_holds_a_shorter_one():
    sizes = [GroupSize("full", FULL, 1000), GroupSize("sliding", SLIDING, 1000)]
    full, sliding = split_budget(30_000, sizes, 16, 8192)
    assert full.num_blocks + sliding.num_blocks == 30
    assert sliding.num_blocks >= SLIDING.blocks_for(full.num_blocks * 16, 16) - 2


def test_a_budget_that_holds_no_sequence_says_what_one_takes():
    sizes = [GroupSize("full", FULL, 1000), GroupSize("state", Recurrent(), 7000)]
    with pytest.raises(ConfigError, match=r"takes 22000 bytes .*3 of 7000 bytes in 'state'"):
        split_budget(21_999, sizes)
    assert [g.num_blocks for g in split_budget(22_000, sizes)] == [1, 3]


KINDS = st.sampled_from(
    [FULL, SLIDING, SlidingWindow(8, 4, 64), ChunkedAttention(50), Recurrent(), Recurrent(128)]
)
SIZES = st.lists(st.tuples(KINDS, st.integers(1, 10_000)), min_size=1, max_size=4).map(
    lambda groups: [GroupSize(f"g{i}", *group) for i, group in enumerate(groups)]
)


@given(SIZES, st.integers(1, 10**9), st.sampled_from([1, 4, 16]), st.integers(1, 20_000))
def test_a_split_stays_within_the_budget_and_holds_a_sequence(sizes, capacity, size, tokens):
    least = sum(s.kind.blocks_for(size, size) * s.bytes_per_block for s in sizes)
    if capacity < least:
        with pytest.raises(ConfigError, match="holds no sequence"):
            split_budget(capacity, sizes, size, tokens)
        return
    groups = split_budget(capacity, sizes, size, tokens)
    used = sum(g.num_blocks * s.bytes_per_block for g, s in zip(groups, sizes, strict=True))
    assert used <= capacity < used + max(s.bytes_per_block for s in sizes)
    assert all(
        g.num_blocks >= s.kind.blocks_for(size, size) for g, s in zip(groups, sizes, strict=True)
    )


def test_a_split_is_what_a_manager_takes():
    sizes = [GroupSize("full", FULL, 100), GroupSize("state", Recurrent(), 300)]
    manager = CacheManager(groups=split_budget(100_000, sizes, 4, 100), block_size=4)
    assert [pool.num_blocks for pool in manager.pools] == [
        g.num_blocks for g in split_budget(100_000, sizes, 4, 100)
    ]
