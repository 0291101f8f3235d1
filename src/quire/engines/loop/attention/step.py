"""Attention of one layer over the block tables of a step."""

import numpy as np
import torch

from quire.engines.loop.attention.parts import Scoring
from quire.engines.loop.attention.plan import AttentionPlan
from quire.engines.loop.attention.kernel import Layer, attend_parts
from quire.engines.loop.attention.products import PAIRED

KV = tuple[torch.Tensor, torch.Tensor]


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
    threads = torch.get_num_threads()
    work = plan.work(q.shape[1] // k.shape[1], threads)
    heads, width = q.shape[1], v.shape[2]
    out = torch.empty((len(q), heads, width), dtype=torch.float32)
    sinks = torch.empty(0) if scoring.sinks is None else scoring.sinks.float()
    paired = q.dtype == torch.bfloat16 and PAIRED
    layer = Layer(
        _words(q.contiguous(), False),
        _words(k, False),
        _words(v, False),
        _words(q.contiguous(), paired),
        _words(k, paired),
        np.empty(0, np.uint32 if paired else np.float32),
        out.numpy(),
        np.empty((len(work.merged), heads, width), np.float32),
        np.empty((len(work.merged), heads), np.float32),
        sinks.numpy(),
        np.float32(scoring.scale),
        np.float32(scoring.softcap or 0),
    )
    attend_parts(work, layer, threads)
    return out.to(q.dtype)

def _words(t, paired):
    if t.dtype==torch.float32: return t.numpy()
    a=t.view(torch.uint16).numpy()
    return a.view(np.uint32) if paired else a
