"""Attention of one layer over the block tables of a step: compiled if possible, else the reference."""

import logging
from functools import cache
from importlib.util import find_spec

import torch

from quire.kernels.attention.plan import AttentionPlan
from quire.kernels.attention.reference import KV, attend_reference
from quire.kernels.attention.scoring import Scoring

_log = logging.getLogger(__name__)

_COMPILES = find_spec("llvmlite") is not None


def attend(
    plan: AttentionPlan, pools: KV, q: torch.Tensor, new: KV, scoring: Scoring
) -> torch.Tensor:
    """Write the new rows' K and V to the pool, and return the attention of their queries.

    pools    K and V of one layer of a `KVPool`: [blocks, block_size, kv_heads, width]
    q        [N, heads, D]
    new      K [N, kv_heads, D] and V [N, kv_heads, Dv] of the rows
    returns  [N, heads, Dv] in q's dtype: each row over its request's tokens up to itself

    Nothing of the pool is read but what the requests have written.
    """
    if _compiles(pools, q, new):
        return _attend_compiled(plan, pools, q, new, scoring)
    if q.is_cuda and _runs_on_device(pools, q, new):
        return _attend_on_device(plan, pools, q, new, scoring)
    for pool, rows in zip(pools, new, strict=True):
        pool.flatten(0, 1)[plan.slots] = rows
    return attend_reference(plan, pools, q, scoring)


def _compiles(pools: KV, q: torch.Tensor, new: KV) -> bool:
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
    )


def _attend_compiled(
    plan: AttentionPlan, pools: KV, q: torch.Tensor, new: KV, scoring: Scoring
) -> torch.Tensor:
    # The compiler is loaded by who attends, not by who imports the engine.
    from quire.kernels.attention.compiled import Reading, attention_pass  # noqa: PLC0415
    from quire.kernels.compiling import Program  # noqa: PLC0415

    out = torch.empty((*q.shape[:2], new[1].shape[-1]), dtype=q.dtype)
    reading = Reading(q.shape[1], pools[1])
    reading.take(plan)
    Program([attention_pass(reading, pools, q, new, scoring, out=out)]).run()
    return out


def _runs_on_device(pools: KV, q: torch.Tensor, new: KV) -> bool:
    """Return whether kernels of a GPU can attend these, which are there."""
    tensors = (*pools, q, *new)
    return (
        all(each.dtype == q.dtype and each.stride(-1) == 1 for each in tensors)
        and all(pool.is_contiguous() for pool in pools)
        and runs_on_device(pools, q.shape[1])
    )


def runs_on_device(pools: KV, heads: int) -> bool:
    """Return whether kernels of the GPU that has these pools can attend with so many query heads."""
    if not _has_triton():
        return False
    from quire.kernels.attention.device import can_attend  # noqa: PLC0415 - Triton

    k, v = pools
    return can_attend(k.device, k.dtype, heads, (*k.shape[1:], v.shape[-1]))


@cache
def _has_triton() -> bool:
    """Return whether Triton is there and can be imported."""
    if find_spec("triton") is None:
        return False
    try:
        import triton  # noqa: F401, PLC0415  # pyright: ignore[reportMissingImports, reportUnusedImport]
    except Exception as error:  # noqa: BLE001 - a library of the system is missing, for instance
        _log.warning("Triton cannot be imported, and GPUs attend slowly: %s", error)
        return False
    return True


def _attend_on_device(
    plan: AttentionPlan, pools: KV, q: torch.Tensor, new: KV, scoring: Scoring
) -> torch.Tensor:
    # Triton is loaded by who attends on a GPU.
    from quire.kernels.attention.device import attend_on_device  # noqa: PLC0415

    return attend_on_device(plan, pools, q, new, scoring)
