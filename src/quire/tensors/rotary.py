"""Rotating keys to another position: keys that RoPE has rotated by p, by d more.

RoPE (Su et al., https://arxiv.org/abs/2104.09864) turns pairs of a key's numbers by p times a frequency
each. Turns add up, so a key at p + d is the key at p, turned by d: the same for all tokens that move
together, all heads, and all layers of the same frequencies. A factor that a model has put on its keys
(YaRN's, longrope's) stays as it is: nothing is multiplied again.

Angles are computed in float64: at 100,000 positions a float32 angle is off by 1e-3. A stored key is
never changed; what comes out is another tensor, so that errors do not add up over moves.
"""

from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import numpy.typing as npt
import torch


class Pairs(StrEnum):
    """The pairing of the w rotated numbers of a key."""

    HALF = "half"
    """i and i + w/2, as Llama and most models have it."""
    INTERLEAVED = "interleaved"
    """2i and 2i + 1, as GLM and Cohere have it."""


@dataclass(frozen=True, slots=True, eq=False)
class Rotation:
    """The rotary embedding of a layer's keys.

    in_values    whether the rotated numbers are stored as values: transformers keeps the shared rotary key of MLA there
    offset       the first number of a head that takes part
    pairs        their pairing
    frequencies  [w / 2] float64, radians per position, of w numbers that take part
    """

    in_values: bool
    offset: int
    pairs: Pairs
    frequencies: npt.NDArray[np.float64]

    @property
    def width(self) -> int:
        """Numbers of a head that take part."""
        return 2 * self.frequencies.size

    def turns(self, shift: int, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cosines and sines `[w / 2]` for so many positions, in the precision to compute in."""
        angles = shift * self.frequencies
        dtype = torch.float64 if like.dtype is torch.float64 else torch.float32
        cos, sin = (torch.as_tensor(f(angles)).to(like.device, dtype) for f in (np.cos, np.sin))
        return cos, sin


def rotate_into(out: torch.Tensor, keys: torch.Tensor, rotation: Rotation, shift: int) -> None:
    """Write `keys` `[..., width]`, turned by `shift` positions, into `out` of the same shape.

    `out` is other memory than `keys`.
    """
    out.copy_(keys)
    if not shift:
        return
    first, second = _halves(keys, rotation)
    first_out, second_out = _halves(out, rotation)
    cos, sin = rotation.turns(shift, keys)
    if cos.dtype == keys.dtype == out.dtype:
        torch.mul(first, cos, out=first_out)
        first_out.addcmul_(second, sin, value=-1)
        torch.mul(second, cos, out=second_out)
        second_out.addcmul_(first, sin)
        return
    a, b = first.to(cos.dtype), second.to(cos.dtype)
    first_out.copy_(a * cos - b * sin)
    second_out.copy_(b * cos + a * sin)


def _halves(keys: torch.Tensor, rotation: Rotation) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the numbers that are paired, as two views `[..., w / 2]`."""
    part = keys.narrow(-1, rotation.offset, rotation.width)
    if rotation.pairs is Pairs.INTERLEAVED:
        return part[..., 0::2], part[..., 1::2]
    half = rotation.width // 2
    return part[..., :half], part[..., half:]
