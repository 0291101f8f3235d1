"""The scoring of keys by a layer: scale, sinks, softcap, rotary embedding."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Scoring:
    """Parameters by which a layer turns queries and keys into weights.

    scale    each product is multiplied by it
    sinks    [heads] a score per head that takes weight and has no value (gpt-oss); None: none
    softcap  scores become `softcap * tanh(score / softcap)` (Gemma 2); None: they stay
    rotary   cosines and sines [N, D], contiguous, by which queries and new keys are turned first; None: they have been
    """

    scale: float
    sinks: torch.Tensor | None = None
    softcap: float | None = None
    rotary: tuple[torch.Tensor, torch.Tensor] | None = None
