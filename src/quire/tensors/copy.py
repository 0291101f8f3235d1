"""Moving K and V between the paged pool and contiguous tensors, and inside the pool."""

from collections.abc import Callable, Mapping, Sequence
from itertools import chain

import numpy as np
import numpy.typing as npt
import torch

from quire.core import BlockCopy, CacheManager
from quire.errors import ConfigError
from quire.tensors.pool import KVPool, Pool, StatePool
from quire.tensors.slots import BlockIds, block_array, on_device, runs

KV = tuple[torch.Tensor, torch.Tensor]
"""K `[kv_heads, tokens, k_width]` and V `[kv_heads, tokens, v_width]` of one layer."""

SLICE_RUN_BLOCKS = 8
"""Average length of a run of neighbouring blocks from which slices beat an index (measured)."""


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


def gather_into(
    pool: KVPool,
    block_ids: BlockIds,
    num_tokens: int,
    out: Sequence[KV],
    start: int = 0,
    *,
    layer: int | None = None,
) -> None:
    """As `gather`, of tokens `start` to `num_tokens`, into `out`; any strides, dtype and device.

    `block_ids` is the sequence's whole table; what it says of other tokens' blocks is not read.
    With `layer`, the i-th layer alone.
    """
    _check_layers(pool, out)
    ids, spans = _spans(pool, block_ids, start, num_tokens)
    index = None if spans else on_device(ids, pool.device)
    head = start % pool.layout.block_size
    for each in range(len(out)) if layer is None else (layer,):
        for states, target in zip((pool.k[each], pool.v[each]), out[each], strict=True):
            if index is not None:
                slots = states.index_select(0, index).flatten(0, 1)
                target.copy_(slots[head : head + num_tokens - start].transpose(0, 1))
                continue
            slots = states.flatten(0, 1)
            for slot, first, last in spans:
                read = slots[slot : slot + last - first]
                target[:, first - start : last - start].copy_(read.transpose(0, 1))


def scatter(pool: KVPool, block_ids: BlockIds, start: int, kv: Sequence[KV]) -> None:
    """Write K and V of tokens from position `start` on into the blocks of a sequence.

    `block_ids` is the sequence's whole table, of which only the blocks of these tokens are read;
    `kv` is one pair per layer, K `[kv_heads, n, k_width]`, V `[kv_heads, n, v_width]`, of any strides, float dtype and device.
    Raises `ConfigError` when the blocks end before token `start + n`.
    """
    _check_layers(pool, kv)
    end = start + int(kv[0][0].shape[1])
    ids, spans = _spans(pool, block_ids, start, end)
    size = pool.layout.block_size
    head = start % size
    index = None
    if not spans:
        places = np.arange(head, head + end - start)
        index = on_device(ids[places // size] * size + places % size, pool.device)
    for layer, pair in enumerate(kv):
        for states, source in zip((pool.k[layer], pool.v[layer]), pair, strict=True):
            slots, written = states.flatten(0, 1), source.detach().transpose(0, 1)
            if index is not None:
                slots.index_copy_(0, index, written.to(states))
                continue
            for slot, first, last in spans:
                target = slots[slot : slot + last - first]
                target.copy_(written[first - start : last - start])


def apply_plan(
    pools: Sequence[Pool], copies: Sequence[BlockCopy], fresh: Mapping[int, BlockIds] | None = None
) -> None:
    """Do the copies that a manager planned, each in the pool of its group: `pools[group]`.

    `fresh`: blocks given out since the last call, per group; see `apply_copies`.
    """
    for group, pool in enumerate(pools):
        own = [copy for copy in copies if copy.group == group]
        apply_copies(pool, own, (fresh or {}).get(group, ()))


def do_copies(
    manager: CacheManager,
    pools: Sequence[Pool],
    fresh: Mapping[int, BlockIds] | None = None,
    join: Callable[[], None] = lambda: None,
) -> bool:
    """Do the copies that a manager has planned, if any; return whether there were some.

    For the manager they are done when they are taken: an exception behind that bars it.

    `fresh`  see `apply_plan`
    `join`   called before a pool of K and V is copied in
    """
    try:
        copies = manager.take_copies()
        if any(isinstance(pools[copy.group], KVPool) for copy in copies):
            join()
        apply_plan(pools, copies, fresh)
    except BaseException as error:
        if not manager.interrupted:
            manager.give_up(f"copying blocks was cut off half-way by {type(error).__name__}")
        raise
    return bool(copies)


def apply_copies(pool: Pool, copies: Sequence[BlockCopy], fresh: BlockIds = ()) -> None:
    """Do planned block copies in one pool as one simultaneous assignment.

    Every source is read before any destination is written; of each block the first
    `num_tokens` tokens are copied, or the whole state. `fresh` are blocks given out since the last call: with
    `debug_nan` they and the destinations become NaN after the sources are read (a source may
    have been evicted and given out again) and before the destinations are written.
    Raises `ConfigError` for a block outside the pool, two copies into one block, or more
    tokens than a block has.
    """
    if not copies:
        pool.poison(fresh)
        return
    src = block_array([c.src for c in copies], pool.num_blocks)
    dst = block_array([c.dst for c in copies], pool.num_blocks)
    counts = np.array([c.num_tokens for c in copies], dtype=np.int64)
    if np.unique(dst).size != dst.size:
        raise ConfigError("two copies have the same destination block; it can hold one only")
    fill = np.concatenate((block_array(fresh, pool.num_blocks), dst))
    if isinstance(pool, StatePool):
        states = list(chain.from_iterable(pool.layers))
        _assign(states, 0, src, dst, lambda: pool.poison(fill))
        return
    block_size = pool.layout.block_size
    if counts.min() < 0 or counts.max() > block_size:
        raise ConfigError(
            f"a copy of {int(counts.max())} tokens (least {int(counts.min())}) is not within a "
            f"block of {block_size}"
        )
    # One index over all copies: token j of copy i, for j < counts[i].
    copy_of, offset = np.nonzero(np.arange(block_size)[None, :] < counts[:, None])
    read, write = (blocks[copy_of] * block_size + offset for blocks in (src, dst))
    slots = [pool.k.flatten(1, 2), pool.v.flatten(1, 2)]
    _assign(slots, 1, read, write, lambda: pool.poison(fill))


def _assign(
    tensors: Sequence[torch.Tensor],
    dim: int,
    read: npt.NDArray[np.int64],
    write: npt.NDArray[np.int64],
    between: Callable[[], None],
) -> None:
    """Copy places of dimension `dim`; of all tensors every source is read before any is written."""
    device = tensors[0].device
    source, target = on_device(read, device), on_device(write, device)
    values = [tensor.index_select(dim, source) for tensor in tensors]
    between()
    for tensor, value in zip(tensors, values, strict=True):
        tensor.index_copy_(dim, target, value)


def _spans(
    pool: KVPool, block_ids: BlockIds, start: int, stop: int
) -> tuple[npt.NDArray[np.int64], list[tuple[int, int, int]]]:
    """Return the blocks of tokens `start` to `stop`, and those tokens as spans of slots.

    A span is (slot of its first token, its first token, its last token + 1). There are none
    where the blocks lie so scattered that one index over all is faster.
    """
    size = pool.layout.block_size
    if not 0 <= start <= stop <= len(block_ids) * size:
        raise ConfigError(
            f"tokens {start} to {stop} are not within the {len(block_ids) * size} tokens of "
            f"{len(block_ids)} blocks of {size}"
        )
    first_block = start // size
    ids = block_array(block_ids[first_block : -(-stop // size)], pool.num_blocks)
    neighbours = runs(ids)
    if len(neighbours) * SLICE_RUN_BLOCKS > max(ids.size, SLICE_RUN_BLOCKS):
        return ids, []
    spans: list[tuple[int, int, int]] = []
    for index, length in neighbours:
        block = first_block + index
        begin, end = max(block * size, start), min((block + length) * size, stop)
        spans.append((int(ids[index]) * size + begin - block * size, begin, end))
    return ids, spans


def _check_layers(pool: KVPool, kv: Sequence[KV]) -> None:
    if len(kv) != pool.layout.num_layers:
        raise ConfigError(
            f"K and V of {len(kv)} layers do not fit a pool of {pool.layout.num_layers} layers"
        )
