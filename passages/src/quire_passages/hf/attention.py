"""Attention of chosen rows: as sdpa computes it, but no row looks at columns behind it.

With a mask, sdpa computes the scores of all rows and columns and throws those away that are hidden. Rows that rise
need no column behind the last of them: so they are computed in runs, each over the columns up to its own last row.
"""

from typing import Any, cast

import torch
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import (
    sdpa_attention_forward,  # pyright: ignore[reportUnknownVariableType] - untyped **kwargs
)

NAME = "quire rows"
"""What this attention is called among those of transformers; configs of shallow copies name it."""

_ROWS_AT_ONCE = 128

_attentions: Any = AttentionInterface()
_sdpa = cast("Any", sdpa_attention_forward)


def register() -> None:
    """Have transformers know it by its name; nothing uses it but configs that say so."""
    _attentions.register(NAME, rows_attention)


def rows_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **how: Any,
) -> Any:
    """Return the attention `[1, rows, heads, width]` of rows in rising order, of a mask `[1, 1, rows, columns]`.

    Heads that share K and V are computed as rows of one head, so that K and V are not copied for each.
    """
    num_rows, groups = query.shape[2], query.shape[1] // key.shape[1]
    is_known = (
        attention_mask is not None and not how.get("dropout") and how.get("position_bias") is None
    )
    if not is_known or num_rows <= 1 or how.get("softcap") is not None:
        return _sdpa(module, query, key, value, attention_mask, **how)
    assert attention_mask is not None
    scale = how.get("scaling")
    out = query.new_empty(1, num_rows, query.shape[1], value.shape[-1])
    for start in range(0, num_rows, _ROWS_AT_ONCE):
        stop = min(start + _ROWS_AT_ONCE, num_rows)
        end = int((attention_mask[0, 0, stop - 1] == 0).nonzero()[-1]) + 1
        rows = query[:, :, start:stop]
        folded = rows.reshape(1, key.shape[1], groups * (stop - start), query.shape[-1])
        mask = attention_mask[:, :, start:stop, :end].repeat(1, 1, groups, 1)
        found = torch.nn.functional.scaled_dot_product_attention(
            folded, key[:, :, :end], value[:, :, :end], attn_mask=mask, scale=scale
        )
        found = found.view(1, query.shape[1], stop - start, value.shape[-1])
        out[:, start:stop] = found.transpose(1, 2)
    return out, None
