"""Computing prompts before generate does."""

from typing import Any

import torch

from quire.engines.hf.inputs import Prompts, Signatures
from quire.engines.hf.media import Media
from quire.engines.hf.working import WorkingCache


def prefill(
    model: Any,
    signatures: Signatures,
    prompts: Prompts,
    media: Media,
    past: WorkingCache,
    *,
    stop: int,
    chunk: int | None,
) -> None:
    """Compute the columns of prompts that `past` lacks, up to column `stop`.

    So a prompt is computed once before its rows multiply, where generate would do it once per beam
    or return sequence, and so rows and pieces are computed that generate knows nothing of.
    `chunk`: tokens that one forward may have, None for all.
    """
    names, device = signatures.forward, model.device
    ids, mask = prompts.ids[:, :stop].to(device), prompts.mask
    if mask is not None and "position_ids" not in names:
        return
    fixed: dict[str, Any] = {"past_key_values": past, "use_cache": True}
    if "logits_to_keep" in names:
        fixed["logits_to_keep"] = 1
    content = {
        name: value.to(device) if isinstance(value, torch.Tensor) else value
        for name, value in media.content(past.get_seq_length()).items()
    }
    # Content is fed whole, in one forward: generate cannot split it either.
    step = max(ids.shape[1], 1) if content or chunk is None else chunk
    with torch.no_grad():
        for start in range(past.get_seq_length(), ids.shape[1], step):
            end = min(start + step, ids.shape[1])
            given: dict[str, Any] = {}
            if mask is not None:
                seen = mask[:, :end].to(device)
                positions = (seen.long().cumsum(-1) - 1).clamp_min(0)
                given = {"attention_mask": seen, "position_ids": positions[:, start:]}
            elif "position_ids" in names:  # some models count them from 0 in every forward
                given = {"position_ids": torch.arange(start, end, device=device)[None]}
            if media.positions is not None:
                given["position_ids"] = media.positions[..., start:end]
            model(input_ids=ids[:, start:end], **fixed, **given, **content)
