"""Attention over some of the keys, with the log-sum-exp that merging it with others needs."""

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch.nn import functional

_flash = getattr(cast("Any", torch.ops.aten), "_scaled_dot_product_flash_attention_for_cpu")  # noqa: B009 - its only name


@dataclass(frozen=True, slots=True)
class Scoring:
    """How a layer turns products of queries and keys into weights.

    scale    each product is multiplied by it
    sinks    [heads] a score per head that takes weight and has no value (gpt-oss); None: none
    softcap  scores become `softcap * tanh(score / softcap)` (Gemma 2); None: they stay
    """

    scale: float
    sinks: torch.Tensor | None = None
    softcap: float | None = None


@dataclass(frozen=True, slots=True)
class Keys:
    """What a part reads.

    k     [B, kv_heads, T, D]
    v     [B, kv_heads, T, Dv]
    mask  bool [B or 1, 1, n, T]: what each row sees, at least one key; None: all
    causal  row i sees the first i + 1 keys
    """

    k: torch.Tensor
    v: torch.Tensor
    mask: torch.Tensor | None = None
    causal: bool = False


def attend_part(q: torch.Tensor, keys: Keys, scoring: Scoring) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output [B, heads, n, Dv] over some keys, and log-sum-exps [B, heads, n], float32.

    q  [B, heads, n, D]: heads of one kv head stand together
    """
    if scoring.softcap is not None:
        return _products(q, keys, scoring)
    width, v_width = q.shape[-1], keys.v.shape[-1]
    wide = max(width, v_width)
    mask = None
    if keys.mask is not None:
        mask = torch.zeros(keys.mask.shape, dtype=q.dtype).masked_fill_(~keys.mask, -torch.inf)
    out, lse = _flash(
        _padded(q, wide),
        _padded(keys.k, wide),
        _padded(keys.v, wide),
        is_causal=keys.causal,
        attn_mask=mask,
        scale=scoring.scale,
    )
    return out[..., :v_width].float(), lse


def merge(
    one: tuple[torch.Tensor, torch.Tensor], other: tuple[torch.Tensor, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return attention over the keys of two parts: `[..., Dv]` and log-sum-exps `[...]`."""
    lse = torch.logaddexp(one[1], other[1])
    weight, other_weight = torch.exp(one[1] - lse), torch.exp(other[1] - lse)
    return one[0] * weight[..., None] + other[0] * other_weight[..., None], lse


def _padded(tensor: torch.Tensor, width: int) -> torch.Tensor:
    missing = width - tensor.shape[-1]
    return functional.pad(tensor, (0, missing)) if missing else tensor


def _products(q: torch.Tensor, keys: Keys, scoring: Scoring) -> tuple[torch.Tensor, torch.Tensor]:
    """The same in float32, for scores that the fused kernel does not know."""
    heads, kv_heads = q.shape[1], keys.k.shape[1]
    k = keys.k.float().repeat_interleave(heads // kv_heads, 1)
    v = keys.v.float().repeat_interleave(heads // kv_heads, 1)
    scores = torch.matmul(q.float(), k.transpose(-1, -2)).mul_(scoring.scale)
    if scoring.softcap is not None:
        scores.div_(scoring.softcap).tanh_().mul_(scoring.softcap)
    seen = keys.mask
    if keys.causal:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool).tril_()
    if seen is not None:
        scores.masked_fill_(~seen, -torch.inf)
    return torch.matmul(torch.softmax(scores, -1), v), torch.logsumexp(scores, -1)
