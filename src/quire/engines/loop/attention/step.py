"""Attention of one layer over the block tables of a step."""

from collections.abc import Iterator

import numpy as np
import torch

from quire.engines.loop.attention.parts import Keys, Scoring, attend_part, merge
from quire.engines.loop.attention.plan import AttentionPlan, DecodePart, PrefillPart
from quire.engines.loop.attention.runs import Ints

KV = tuple[torch.Tensor, torch.Tensor]
Attended = tuple[torch.Tensor, torch.Tensor]
"""Output [n, heads, Dv] and log-sum-exps, float32 [n, heads]."""


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
    held = (pools[0].flatten(0, 1), pools[1].flatten(0, 1))
    held[0][plan.slots] = new[0]
    held[1][plan.slots] = new[1]
    out = q.new_empty((*q.shape[:2], new[1].shape[-1]), dtype=torch.float32)
    lse = q.new_empty(q.shape[:2], dtype=torch.float32)
    if len(plan.decode.rows):
        rows = plan.decode.rows
        out[rows], lse[rows] = _decode(plan, held, q[rows], scoring)
    for part in plan.prefills:
        rows = slice(part.start, part.stop)
        parts = list(_prefill(part, held, q[rows], (new[0][rows], new[1][rows]), scoring))
        out[rows], lse[rows] = parts[0] if len(parts) == 1 else merge(*parts)
    for run in plan.runs:
        rows = run.rows
        keys = Keys(_of_heads(held[0][run.slots]), _of_heads(held[1][run.slots]))
        read = _whole(q[rows], keys, scoring)
        out[rows], lse[rows] = merge((out[rows], lse[rows]), read)
    if scoring.sinks is not None:
        out *= torch.sigmoid(lse - scoring.sinks)[..., None]
    return out.to(q.dtype)


def _decode(plan: AttentionPlan, held: KV, q: torch.Tensor, scoring: Scoring) -> Attended:
    """Return the attention of requests of one row over what each alone has, gathered and padded."""
    slots, mask = _padded_slots(plan.decode, plan.block_size)
    kv_heads = held[0].shape[1]
    keys = Keys(held[0][slots].transpose(1, 2), held[1][slots].transpose(1, 2), mask)
    rows = q.view(len(q), kv_heads, -1, q.shape[-1])
    out, lse = attend_part(rows, keys, scoring)
    return out.flatten(1, 2), lse.flatten(1, 2)


def _padded_slots(part: DecodePart, block_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return slots [r, width] and what is seen of them [r, 1, 1, width]; pads repeat the row itself."""
    places: Ints = np.arange(int(part.count.max()))
    tokens = np.minimum(places, part.count[:, None] - 1)
    blocks = np.take_along_axis(part.blocks, tokens // block_size, axis=1).astype(np.int64)
    seen = (places < part.count[:, None]) & (places >= part.skip[:, None])
    tokens = np.maximum(tokens, part.skip[:, None])
    slots = blocks * block_size + tokens % block_size
    return torch.as_tensor(slots), torch.as_tensor(seen)[:, None, None]


def _prefill(
    part: PrefillPart, held: KV, q: torch.Tensor, new: KV, scoring: Scoring
) -> Iterator[Attended]:
    """Yield the attention of a request's rows over its own context, and over the rows themselves."""
    k, v = held[0][part.slots], held[1][part.slots]
    if part.mask is not None:
        k, v = torch.cat([k, new[0]]), torch.cat([v, new[1]])
        yield _ungrouped(q, Keys(_of_heads(k), _of_heads(v), part.mask), scoring)
        return
    yield _ungrouped(q, Keys(_of_heads(new[0]), _of_heads(new[1]), causal=True), scoring)
    if len(part.slots):
        yield _whole(q, Keys(_of_heads(k), _of_heads(v)), scoring)


def _whole(q: torch.Tensor, keys: Keys, scoring: Scoring) -> Attended:
    """Return the attention of rows [n, heads, D] that see all keys: K is read once per kv head."""
    kv_heads = keys.k.shape[1]
    folded = q.view(len(q), kv_heads, -1, q.shape[-1]).permute(1, 2, 0, 3)
    out, lse = attend_part(folded.reshape(1, kv_heads, -1, q.shape[-1]), keys, scoring)
    out = out.view(kv_heads, -1, len(q), out.shape[-1]).permute(2, 0, 1, 3)
    lse = lse.reshape(kv_heads, -1, len(q)).permute(2, 0, 1)
    return out.flatten(1, 2), lse.flatten(1, 2)


def _ungrouped(q: torch.Tensor, keys: Keys, scoring: Scoring) -> Attended:
    """Return the attention of rows [n, heads, D] that see keys by their places."""
    out, lse = attend_part(q.transpose(0, 1)[None], keys, scoring)
    return out[0].transpose(0, 1), lse[0].transpose(0, 1)


def _of_heads(kv: torch.Tensor) -> torch.Tensor:
    """View [tokens, kv_heads, width] as [1, kv_heads, tokens, width]."""
    return kv.transpose(0, 1)[None]
