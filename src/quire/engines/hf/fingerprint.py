"""What binds cached KV to the model that computed it."""

import hashlib
import json
from typing import Any

import torch

SAMPLED_WEIGHTS = 24
SAMPLED_VALUES = 256


def model_fingerprint(model: Any, layout: object) -> str:
    """SHA-256 (hex) over the config, the KV layout and a sample of the weights.

    The sample is the first values of evenly spaced parameters, by name: it tells checkpoints
    and fine-tunes apart for microseconds, and is no proof of equal weights. Adapters that are
    switched on later are not seen: name them in `Scope.lora`.
    """
    digest = hashlib.sha256()
    config = model.config.to_dict()
    for unstable in ("transformers_version", "_name_or_path", "name_or_path"):
        config.pop(unstable, None)
    _add(digest, json.dumps(config, sort_keys=True, default=str).encode())
    _add(digest, repr(layout).encode())
    named: list[tuple[str, torch.Tensor]] = sorted(model.named_parameters())
    step = max(len(named) // SAMPLED_WEIGHTS, 1)
    for name, weight in named[::step]:
        _add(digest, f"{name}{list(weight.shape)}{weight.dtype}".encode())
        values = weight.detach().flatten()[:SAMPLED_VALUES]
        _add(digest, values.to("cpu", torch.float64).numpy().tobytes())
    return digest.hexdigest()


def _add(digest: Any, part: bytes) -> None:
    digest.update(len(part).to_bytes(8, "little"))
    digest.update(part)
