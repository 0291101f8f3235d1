"""The scoring of keys by a layer: scale, sinks, softcap."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Scoring:
    """Parameters by which a layer turns queries and keys into weights.

    scale    each product is multiplied by it
    sinks    [heads] a score per head that takes weight and has no value (gpt-oss); None: none
    softcap  scores become `softcap * tanh(score / softcap)` (Gemma 2); None: they stay
    """

    scale: float
    sinks: torch.Tensor | None = None
    softcap: float | None = None
