"""What binds cached KV to the model that computed it."""

import hashlib
import json
from typing import Any

import torch

SAMPLED_VALUES = 32


def model_fingerprint(model: Any, layout: object) -> str:
    """Return SHA-256 (hex) over the config, the KV layout and a sample of every weight.

    The sample is `SAMPLED_VALUES` evenly spaced values per parameter: it tells checkpoints and
    fine-tunes apart in milliseconds, and is no proof of equal weights. Adapters that are
    switched on later are not seen: name them in `Scope.lora`.
    """
    digest = hashlib.sha256()
    config = model.config.to_dict()
    for unstable in ("transformers_version", "_name_or_path", "name_or_path"):
        config.pop(unstable, None)
    _add(digest, json.dumps(config, sort_keys=True, default=str).encode())
    _add(digest, repr(layout).encode())
    named: list[tuple[str, torch.Tensor]] = sorted(model.named_parameters())
    for name, weight in named:
        _add(digest, f"{name}{list(weight.shape)}{weight.dtype}".encode())
    samples = torch.cat([_sample(weight) for _, weight in named])
    _add(digest, samples.cpu().numpy().tobytes())
    return digest.hexdigest()


def _sample(weight: torch.Tensor) -> torch.Tensor:
    flat = weight.detach().reshape(-1)
    return flat[:: max(flat.numel() // SAMPLED_VALUES, 1)][:SAMPLED_VALUES].float()


def _add(digest: Any, part: bytes) -> None:
    digest.update(len(part).to_bytes(8, "little"))
    digest.update(part)
