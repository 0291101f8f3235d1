"""Memory for several layer groups: one budget of bytes, split by the needs of a sequence."""

from __future__ import annotations

from collections.abc import Sequence as Items

import msgspec

from quire.config import check_count
from quire.core.groups import Kind, LayerGroup
from quire.errors import ConfigError

EXPECTED_TOKENS = 8192
"""Tokens of a cached sequence, prompt and answer, where the caller expects nothing else."""


class GroupSize(msgspec.Struct, frozen=True):
    """A layer group as the budget sees it: name, kind, and the bytes of one block."""

    name: str
    kind: Kind
    bytes_per_block: int


def split_budget(
    capacity_bytes: int,
    sizes: Items[GroupSize],
    block_size: int = 16,
    expected_tokens: int = EXPECTED_TOKENS,
) -> list[LayerGroup]:
    """Split `capacity_bytes` over groups so that all run short after the same number of sequences.

    Each gets blocks in proportion to what a sequence of `expected_tokens` keeps in it; where
    not even one such sequence fits, of the longest that does. What is left after rounding goes to
    the first groups that have a use for it. Raises `ConfigError` when no sequence of a single
    block fits, with what that takes.
    """
    expected = check_count("expected_tokens", expected_tokens)
    expected += -expected % block_size
    least = _cost(sizes, block_size, block_size)
    if capacity_bytes < least:
        needs = ", ".join(
            f"{size.kind.blocks_for(block_size, block_size)} of {size.bytes_per_block} bytes in "
            f"{size.name!r}"
            for size in sizes
        )
        msg = (
            f"a capacity of {capacity_bytes} bytes holds no sequence: one of a single block of "
            f"{block_size} tokens takes {least} bytes (blocks: {needs}); raise the capacity or "
            "lower block_size"
        )
        raise ConfigError(msg)
    num_tokens = _longest(sizes, block_size, capacity_bytes, expected)
    per_sequence = [size.kind.blocks_for(num_tokens, block_size) for size in sizes]
    cost = _cost(sizes, num_tokens, block_size)
    counts = [capacity_bytes * each // cost for each in per_sequence]
    left = capacity_bytes - sum(
        count * size.bytes_per_block for count, size in zip(counts, sizes, strict=True)
    )
    for index, size in enumerate(sizes):
        more = left // size.bytes_per_block
        counts[index] += more
        left -= more * size.bytes_per_block
    return [
        LayerGroup(size.name, count, size.kind) for size, count in zip(sizes, counts, strict=True)
    ]


def _longest(sizes: Items[GroupSize], block_size: int, capacity: int, expected: int) -> int:
    """Return the most tokens, a multiple of `block_size` up to `expected`, that fit once."""
    low, high = 1, expected // block_size
    while low < high:
        middle = (low + high + 1) // 2
        if _cost(sizes, middle * block_size, block_size) <= capacity:
            low = middle
        else:
            high = middle - 1
    return low * block_size


def _cost(sizes: Items[GroupSize], num_tokens: int, block_size: int) -> int:
    return sum(
        size.kind.blocks_for(num_tokens, block_size) * size.bytes_per_block for size in sizes
    )
