"""Attention of one layer over the block tables of a step: compiled where it can be, else as it is defined."""

from importlib.util import find_spec
from typing import Any

import numpy as np
import torch

from quire.engines.loop.attention.plan import AttentionPlan
from quire.engines.loop.attention.reference import KV, attend_reference
from quire.engines.loop.attention.scoring import Scoring

_COMPILES = find_spec("numba") is not None


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
    k, v = pools[0].flatten(0, 1), pools[1].flatten(0, 1)
    k[plan.slots] = new[0]
    v[plan.slots] = new[1]
    known = q.dtype in (torch.float32, torch.bfloat16) and q.dtype == k.dtype
    if not (_COMPILES and known and q.device.type == "cpu" and q.shape[2] % 2 == 0):
        return attend_reference(plan, pools, q, scoring)
    # The compiler is loaded by who attends, not by who imports the engine.
    from quire.engines.loop.attention.compiling import use_threads  # noqa: PLC0415
    from quire.engines.loop.attention.kernel import LayerArrays, attend_parts  # noqa: PLC0415
    from quire.engines.loop.attention.products import PAIRED  # noqa: PLC0415

    wanted = torch.get_num_threads()
    threads = use_threads(wanted)
    if torch.get_num_threads() != wanted:  # OpenMP is one for both, and numba's first use sets all
        torch.set_num_threads(wanted)
    work = plan.work(q.shape[1] // k.shape[1], threads)
    out = torch.empty((*q.shape[:2], v.shape[2]), dtype=torch.float32)
    partial = np.empty((len(work.merged), *out.shape[1:]), np.float32)
    queries, keys = _elements(q.contiguous()), _elements(k)
    words = np.uint32 if PAIRED and q.dtype == torch.bfloat16 else queries.dtype
    attend_parts(
        work,
        LayerArrays(
            queries,
            keys,
            _elements(v),
            queries.view(words),
            keys.view(words),
            np.empty(0, np.uint32 if words == np.uint32 else np.float32),
            out.numpy(),
            partial,
            np.empty(partial.shape[:2], np.float32),
            (torch.empty(0) if scoring.sinks is None else scoring.sinks).detach().float().numpy(),
            np.float32(scoring.scale),
            np.float32(scoring.softcap or 0),
        ),
        threads,
    )
    return out.to(q.dtype)


def _elements(tensor: torch.Tensor) -> Any:
    """View a tensor as an array, bfloat16 as uint16, for which NumPy has no name."""
    tensor = tensor.detach()
    return (tensor if tensor.dtype == torch.float32 else tensor.view(torch.uint16)).numpy()
