"""Moving K and V between the paged pool and contiguous tensors, and inside the pool."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from quire.errors import ConfigError
from quire.tensors.pool import KVPool
from quire.tensors.slots import BlockIds, block_array, block_slots, on_device, runs

KV = tuple[torch.Tensor, torch.Tensor]
"""K `[kv_heads, tokens, k_width]` and V `[kv_heads, tokens, v_width]` of one layer."""

SLICE_RUN_BLOCKS = 8
"""Average length of a run of neighbouring blocks from which slices beat an index (measured)."""


class Copy(Protocol):
    """What a planned block copy says; `quire.core.BlockCopy` does."""

    @property
    def src(self) -> int:
        """Block id to read."""
        ...

    @property
    def dst(self) -> int:
        """Block id to write."""
        ...

    @property
    def num_tokens(self) -> int:
        """Leading tokens of the block to copy."""
        ...


def gather(pool: KVPool, block_ids: BlockIds, num_tokens: int) -> list[KV]:
    """Return K and V of the first `num_tokens` tokens that lie in `block_ids`, per layer, contiguous.

    Returns `[kv_heads, num_tokens, k_width]` and `[kv_heads, num_tokens, v_width]` per layer,
    new tensors of the pool's dtype. Raises `ConfigError` when the blocks hold fewer tokens.
    """
    layout = pool.layout
    out = [
        (
            pool.k.new_empty(layout.kv_heads, num_tokens, layout.k_width),
            pool.v.new_empty(layout.kv_heads, num_tokens, layout.v_width),
        )
        for _ in range(layout.num_layers)
    ]
    gather_into(pool, block_ids, num_tokens, out)
    return out


def gather_into(pool: KVPool, block_ids: BlockIds, num_tokens: int, out: Sequence[KV]) -> None:
    """As `gather`, into `out`, one pair per layer; any strides, dtype and device."""
    _check_layers(pool, out)
    ids, spans = _spans(pool, block_ids, 0, num_tokens)
    index = None if spans else on_device(ids, pool.device)
    for layer, pair in enumerate(out):
        for states, target in zip((pool.k[layer], pool.v[layer]), pair, strict=True):
            if index is not None:
                read = states.index_select(0, index).flatten(0, 1)[:num_tokens]
                target.copy_(read.transpose(0, 1))
                continue
            slots = states.flatten(0, 1)
            for slot, start, stop in spans:
                read = slots[slot : slot + stop - start]
                target[:, start:stop].copy_(read.transpose(0, 1))


def scatter(pool: KVPool, block_ids: BlockIds, start: int, kv: Sequence[KV]) -> None:
    """Write K and V of tokens from position `start` on into the blocks of a sequence.

    `block_ids` is the sequence's whole table; `kv` is one pair per layer, K
    `[kv_heads, n, k_width]`, V `[kv_heads, n, v_width]`, of any strides, float dtype and device.
    Raises `ConfigError` when the blocks end before token `start + n`.
    """
    _check_layers(pool, kv)
    end = start + int(kv[0][0].shape[1])
    ids, spans = _spans(pool, block_ids, start, end)
    size = pool.layout.block_size
    index = None if spans else on_device(block_slots(ids, start, end, size), pool.device)
    for layer, pair in enumerate(kv):
        for states, source in zip((pool.k[layer], pool.v[layer]), pair, strict=True):
            slots, written = states.flatten(0, 1), source.detach().transpose(0, 1)
            if index is not None:
                slots.index_copy_(0, index, written.to(states))
                continue
            for slot, first, last in spans:
                target = slots[slot : slot + last - first]
                target.copy_(written[first - start : last - start])


def apply_copies(pool: KVPool, copies: Sequence[Copy], fresh: BlockIds = ()) -> None:
    """Do planned block copies as one simultaneous assignment.

    Every source is read before any destination is written; of each block the first
    `num_tokens` tokens are copied. `fresh` are blocks given out since the last call: with
    `debug_nan` they and the destinations become NaN after the sources are read (a source may
    have been evicted and given out again) and before the destinations are written.
    Raises `ConfigError` for a block outside the pool, two copies into one block, or more
    tokens than a block has.
    """
    if not copies:
        pool.poison(fresh)
        return
    block_size = pool.layout.block_size
    src = block_array([c.src for c in copies], pool.num_blocks)
    dst = block_array([c.dst for c in copies], pool.num_blocks)
    counts = np.array([c.num_tokens for c in copies], dtype=np.int64)
    if np.unique(dst).size != dst.size:
        raise ConfigError("two copies have the same destination block; it can hold one only")
    if counts.min() < 0 or counts.max() > block_size:
        raise ConfigError(
            f"a copy of {int(counts.max())} tokens (least {int(counts.min())}) is not within a "
            f"block of {block_size}"
        )
    # One index over all copies: token j of copy i, for j < counts[i].
    copy_of, offset = np.nonzero(np.arange(block_size)[None, :] < counts[:, None])
    read = on_device(src[copy_of] * block_size + offset, pool.device)
    write = on_device(dst[copy_of] * block_size + offset, pool.device)
    k_slots, v_slots = pool.k.flatten(1, 2), pool.v.flatten(1, 2)
    k, v = k_slots.index_select(1, read), v_slots.index_select(1, read)
    pool.poison(np.concatenate((block_array(fresh, pool.num_blocks), dst)))
    k_slots.index_copy_(1, write, k)
    v_slots.index_copy_(1, write, v)


def _spans(
    pool: KVPool, block_ids: BlockIds, start: int, stop: int
) -> tuple[npt.NDArray[np.int64], list[tuple[int, int, int]]]:
    """Return the blocks up to token `stop`, and the tokens from `start` on as spans of slots.

    A span is (slot of its first token, its first token, its last token + 1). There are none
    where the blocks lie so scattered that one index over all is faster.
    """
    ids = block_array(block_ids, pool.num_blocks)
    size = pool.layout.block_size
    if not 0 <= start <= stop <= ids.size * size:
        raise ConfigError(
            f"tokens {start} to {stop} are not within the {ids.size * size} tokens of "
            f"{ids.size} blocks of {size}"
        )
    ids = ids[: -(-stop // size)]
    first_block = start // size
    neighbours = runs(ids[first_block:])
    if len(neighbours) * SLICE_RUN_BLOCKS > max(ids.size - first_block, SLICE_RUN_BLOCKS):
        return ids, []
    spans: list[tuple[int, int, int]] = []
    for index, length in neighbours:
        block = first_block + index
        begin, end = max(block * size, start), min((block + length) * size, stop)
        spans.append((int(ids[block]) * size + begin - block * size, begin, end))
    return ids, spans


def _check_layers(pool: KVPool, kv: Sequence[KV]) -> None:
    if len(kv) != pool.layout.num_layers:
        raise ConfigError(
            f"K and V of {len(kv)} layers do not fit a pool of {pool.layout.num_layers} layers"
        )
