"""Attention of one layer over the block tables of a step: compiled where it can be, else as it is defined."""

from importlib.util import find_spec
from typing import Any

import numpy as np
import torch

from quire.engines.packed.attention.plan import AttentionPlan
from quire.engines.packed.attention.reference import KV, attend_reference
from quire.engines.packed.attention.scoring import Scoring

_COMPILES = find_spec("llvmlite") is not None


def attend(
    plan: AttentionPlan, pools: KV, q: torch.Tensor, new: KV, scoring: Scoring
) -> torch.Tensor:
    """Write the new rows' K and V to the pool, and return the attention of their queries.

    pools    K and V of one layer of a `KVPool`: [blocks, block_size, kv_heads, width]
    q        [N, heads, D]
    new      K [N, kv_heads, D] and V [N, kv_heads, Dv] of the rows
             to be turned by `scoring.rotary`, they may be written over
    returns  [N, heads, Dv] in q's dtype: each row over its request's tokens up to itself

    Nothing of the pool is read but what the requests have written.
    """
    if _compiles(pools, q, new, scoring):
        return _attend_compiled(plan, pools, q, new, scoring)
    if scoring.rotary is not None:
        q, new = turned(q, *scoring.rotary), (turned(new[0], *scoring.rotary), new[1])
    write(plan, pools, new)
    return attend_reference(plan, pools, q, scoring)


def write(plan: AttentionPlan, pools: KV, new: KV) -> None:
    """Write the new rows' K and V to the pool."""
    for pool, rows in zip(pools, new, strict=True):
        pool.flatten(0, 1)[plan.slots] = rows


def turned(states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Return heads `[N, heads, D]` turned by their positions (https://arxiv.org/abs/2104.09864)."""
    first, second = states.chunk(2, -1)
    return states * cos[:, None] + torch.cat((-second, first), -1) * sin[:, None]


def _compiles(pools: KV, q: torch.Tensor, new: KV, scoring: Scoring) -> bool:
    """Return whether there is a compiler, and code can be for these."""
    tensors = (*pools, q, *new)
    return (
        _COMPILES
        and q.device.type == "cpu"
        and q.dtype in (torch.float32, torch.bfloat16)
        and all(
            each.dtype == q.dtype and each.stride(-1) == 1 and each.shape[-1] % 2 == 0
            for each in tensors
        )
        and all(pool.is_contiguous() for pool in pools)
        and all(
            each.dtype == q.dtype and each.is_contiguous() and each.shape == (len(q), q.shape[-1])
            for each in scoring.rotary or ()
        )
    )


def _attend_compiled(
    plan: AttentionPlan, pools: KV, q: torch.Tensor, new: KV, scoring: Scoring
) -> torch.Tensor:
    # The compiler is loaded by who attends, not by who imports the engine.
    from quire.engines.packed.compiling import Program  # noqa: PLC0415

    out = torch.empty((*q.shape[:2], new[1].shape[-1]), dtype=q.dtype)
    Program([attention_pass(plan, pools, q, new, scoring, out=out)]).run()
    return out


def attention_pass(
    plan: AttentionPlan,
    pools: KV,
    q: torch.Tensor,
    new: KV,
    scoring: Scoring,
    *,
    out: torch.Tensor,
) -> Any:
    """Return the pass that does what `attend` does, to `out`; bfloat16s go there as floats where it has these."""
    from quire.engines.packed.attention.kernel import kernel  # noqa: PLC0415
    from quire.engines.packed.attention.layer import LayerInputs, Shape  # noqa: PLC0415
    from quire.engines.packed.compiling import Pass  # noqa: PLC0415

    (k, v), (num_rows, heads, depth) = pools, q.shape
    kv_heads, width = v.shape[2:]
    group = heads // kv_heads
    threads = torch.get_num_threads()
    work = plan.work(group, kv_heads, threads)
    partial = np.empty((len(work.merged), heads, 2 + width), np.float32)
    sinks = None if scoring.sinks is None else scoring.sinks.detach().float()
    cos, sin = (0, 0) if scoring.rotary is None else (each.data_ptr() for each in scoring.rotary)
    numbers = np.array([scoring.scale, scoring.softcap or 0], np.float32).view(np.int32)

    layer = LayerInputs(
        0,
        0,
        0,
        kv_heads,
        group,
        _at(work.tables),
        work.tables.shape[1],
        _at(work.position),
        _at(work.seen_from),
        _at(work.rows),
        _at(work.tasks),
        len(work.tasks),
        _at(work.merged),
        _at(work.merged_starts),
        plan.slots.data_ptr(),
        num_rows,
        *_rows(q),
        *_rows(new[0]),
        *_rows(new[1]),
        cos,
        sin,
        k.data_ptr(),
        v.data_ptr(),
        out.data_ptr(),
        _at(partial),
        0 if sinks is None else sinks.data_ptr(),
        *numbers.tolist(),
    )
    is_bfloat16, wide = q.dtype == torch.bfloat16, out.dtype != q.dtype
    shape = Shape(depth, width, 2 - group % 2, plan.block_size, is_bfloat16, wide)
    held = (work, partial, sinks, scoring, plan.slots, q, new, out)
    return Pass(kernel(shape), layer, threads, held)


def _at(array: Any) -> int:
    return array.ctypes.data


def _rows(tensor: torch.Tensor) -> tuple[int, int, int]:
    """Return the address of rows, and the bytes from row to row and from head to head."""
    size = tensor.element_size()
    return tensor.data_ptr(), tensor.stride(0) * size, tensor.stride(1) * size
