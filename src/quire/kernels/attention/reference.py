"""Attention over block tables as it is defined: one request after another, in float32."""

import torch

from quire.kernels.attention.plan import AttentionPlan
from quire.kernels.attention.scoring import Scoring

KV = tuple[torch.Tensor, torch.Tensor]


def attend_reference(
    plan: AttentionPlan, pools: KV, q: torch.Tensor, scoring: Scoring
) -> torch.Tensor:
    """Return what `attend` returns, once the new rows are in the pool.

    Of the plan, the step's rows and its window alone are read.
    """
    packed, size = plan.packed, plan.block_size
    out: list[torch.Tensor] = []
    start = 0
    for table, length in zip(packed.tables, packed.lengths, strict=True):
        rows = torch.as_tensor(plan.position[start : start + length])
        keys = torch.arange(int(rows[-1]) + 1)
        lower = torch.as_tensor(plan.lower(rows.numpy()))[:, None]
        seen = (keys <= rows[:, None]) & (keys >= lower)
        blocks = torch.as_tensor(table[: len(keys) // size + 1].astype("int64"))[keys // size]
        first = int(lower.min())
        places = blocks[first:].to(q.device), (keys[first:] % size).to(q.device)
        k, v = (pool[places].float() for pool in pools)
        mine = q[start : start + len(rows)].float().view(len(rows), k.shape[1], -1, k.shape[2])
        scores = torch.einsum("nhgd,thd->hgnt", mine, k) * scoring.scale
        if scoring.softcap is not None:
            scores = scoring.softcap * torch.tanh(scores / scoring.softcap)
        scores = scores.masked_fill(~seen[:, first:].to(q.device), -torch.inf)
        if scoring.sinks is not None:
            sinks = scoring.sinks.float().view(k.shape[1], -1, 1, 1).expand(*scores.shape[:3], 1)
            scores = torch.cat([scores, sinks], -1)
        weights = torch.softmax(scores, -1)[..., : len(keys) - first]
        out.append(torch.einsum("hgnt,thd->nhgd", weights, v).flatten(1, 2))
        start += len(rows)
    return torch.cat(out).to(q.dtype)
