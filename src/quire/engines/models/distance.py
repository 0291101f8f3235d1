"""Distances of tensors that would be equal but for rounding."""

import math
from collections.abc import Sequence

import torch


def limit_for(dtype: torch.dtype, limits: tuple[float, float], *, coarse: bool = False) -> float:
    """Return the limit for numbers of a dtype, out of one for single precision and one for half.

    `coarse`: they come of quantized activations, which are as coarse as half precision.
    """
    single, half = limits
    return single if dtype in (torch.float32, torch.float64) and not coarse else half


def relative(difference: torch.Tensor, whole: torch.Tensor) -> float:
    """Return the L2 norm of a difference relative to that of the whole; infinite for NaN."""
    far, size = (float(each.double().square().sum().sqrt()) for each in (difference, whole))
    return math.inf if math.isnan(far) or math.isnan(size) else far / max(size, 1e-12)


def of_logits(one: Sequence[torch.Tensor], two: Sequence[torch.Tensor]) -> float:
    """Return the largest relative distance of logits `[vocab]` of the same steps.

    Steps behind the first at which other tokens would be chosen are left out: their texts differ.
    """
    largest = 0.0
    for a, b in zip(one, two, strict=True):
        kept = (a.abs() < 1e4) | (b.abs() < 1e4)  # what a model forbids is a very low number
        largest = max(largest, relative((a.double() - b.double())[kept], a[kept]))
        if a.argmax() != b.argmax():
            break
    return largest
