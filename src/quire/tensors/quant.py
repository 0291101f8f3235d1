"""K and V in fewer bits, on the way to a tier: fp8, int8 and int4.

Keys have channels that are large in every token, values have not. So a key channel has a scale
of its own, over the tokens of the block, and a value token has one, over its channels, per head
in both cases: KIVI, https://arxiv.org/abs/2402.02750, sections 3.2 and 4.1 (there with groups
of 32 and a residual that stays exact; here a block is the group, and what is not yet a block is
never stored).

    int8, int4   code = round((x - minimum) / scale), 0 to 255 or 15;  x' = minimum + code * scale
    fp8          code = e4m3fn(x / scale), within +-448;               x' = code * scale

A layer's bytes, K in front of V, all numbers in the machine's byte order, without padding:

    K   scales [heads, k_width]  minimums [heads, k_width]  codes [block_size, heads, k_width]
    V   scales [block_size, heads]  minimums [block_size, heads]  codes [block_size, heads, v_width]

fp8 has no minimums. Scales and minimums are of the pool's dtype, so that a minimum is exact; a
scale is the range over the highest code, rounded up, so that no code is cut off. Two int4 codes
share a byte, the earlier one in the lower half; a single last one has zeros beside it. All is
computed in float32 (float64 for a float64 pool), each operation rounded to nearest, ties to even,
so that every device writes the same bytes. Golden file: `tests/golden/quantized.json`.

What follows from it: a constant channel or token is exact under int8 and int4, zeros under all.
Where a channel or token has a NaN, an infinity or a range beyond float32, all of it comes back as NaN:
what was no number never becomes one.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from math import prod
from typing import TYPE_CHECKING, cast

import torch

from quire.errors import ConfigError
from quire.tensors.layout import KVLayout
from quire.tensors.payload import PayloadForm

if TYPE_CHECKING:
    from quire.tensors.pool import KVPool, Pool

_UP = {2: torch.int16, 4: torch.int32, 8: torch.int64}
_FP8 = torch.float8_e4m3fn


class Quantization(StrEnum):
    """The stored form of a number."""

    FP8 = "fp8"
    INT8 = "int8"
    INT4 = "int4"

    @property
    def highest(self) -> float:
        """The largest code."""
        return {"fp8": 448.0, "int8": 255.0, "int4": 15.0}[self.value]

    @property
    def has_minimums(self) -> bool:
        """Whether codes count from a minimum instead of 0."""
        return self is not Quantization.FP8

    def code_bytes(self, numbers: int) -> int:
        """Return the bytes of so many codes."""
        return -(-numbers // 2) if self is Quantization.INT4 else numbers


@dataclass(frozen=True, slots=True)
class Quantized:
    """Numbers in fewer bits.

    codes     uint8 or float8_e4m3fn, of the numbers' shape; int4 unpacked, 0 to 15
    scales    of the numbers' dtype, with 1 for the dimension that shares one
    minimums  as `scales`; None for fp8
    """

    codes: torch.Tensor
    scales: torch.Tensor
    minimums: torch.Tensor | None


def quantize(numbers: torch.Tensor, kind: Quantization, dim: int) -> Quantized:
    """Return `numbers` with one scale, and minimum, over dimension `dim`.

    `numbers`: float16, bfloat16, float32 or float64, any shape and device.
    """
    # `copy`: what follows writes into it.
    exact = numbers.to(_compute(numbers.dtype), copy=True)
    if kind is Quantization.FP8:
        minimums = None
        span = exact.abs().amax(dim, keepdim=True)
    else:
        minimums = exact.amin(dim, keepdim=True)
        span = exact.amax(dim, keepdim=True) - minimums
    scales = _scales(span, kind.highest, numbers.dtype)
    without = scales.isnan()
    exact.masked_fill_(without, 0)
    if minimums is not None:
        minimums.masked_fill_(without, 0)
        exact.sub_(minimums)
    divisor = scales.to(exact.dtype)
    exact.div_(divisor.masked_fill(without | (divisor == 0), 1))
    if minimums is None:
        return Quantized(exact.clamp_(-kind.highest, kind.highest).to(_FP8), scales, None)
    codes = exact.round_().clamp_(0, kind.highest).to(torch.uint8)
    return Quantized(codes, scales, minimums.to(numbers.dtype))


def dequantize(stored: Quantized) -> torch.Tensor:
    """Return the numbers, in the dtype of the scales. A code that cannot be is computed as it stands."""
    dtype = stored.scales.dtype
    compute = _compute(dtype)
    numbers = stored.codes.to(compute).mul_(stored.scales.to(compute))
    if stored.minimums is not None:
        numbers.add_(stored.minimums.to(compute))
    # A scale is rounded up, so that the largest number may come out just beyond the dtype.
    limit = torch.finfo(dtype).max
    return numbers.clamp_(-limit, limit).to(dtype)


class QuantizedKV(PayloadForm):
    """K and V in fewer bits.

    Raises `ConfigError` for a pool whose dtype has 8 bits already.
    """

    def __init__(self, memory: KVLayout, kind: Quantization) -> None:
        if memory.dtype.itemsize not in _UP:
            raise ConfigError(
                f"a pool of {memory.dtype} cannot be stored as {kind}: it has 8 bits already; "
                "store it as it is (None)"
            )
        self.kind = kind
        self._memory = memory
        count, size = memory.kv_heads, memory.block_size
        self._parts = (
            _QuantPart(kind, memory.dtype, (size, count, memory.k_width), shared=0),
            _QuantPart(kind, memory.dtype, (size, count, memory.v_width), shared=2),
        )
        self.layer_bytes = (sum(part.num_bytes for part in self._parts),) * memory.num_layers

    def pack(self, pool: Pool, index: torch.Tensor) -> torch.Tensor:
        pieces: list[torch.Tensor] = []
        for part, held in zip(self._parts, self._held(pool), strict=True):
            stored = quantize(held.transpose(0, 1)[index], self.kind, 2 + part.shared)
            pieces += part.pieces(stored)
        return torch.cat(pieces, dim=-1).flatten(1)

    def unpack(self, rows: torch.Tensor, pool: Pool, index: torch.Tensor, layers: range) -> None:
        rows = rows.view(rows.shape[0], len(layers), -1)
        offset = 0
        for part, held in zip(self._parts, self._held(pool), strict=True):
            stored = part.stored(rows[:, :, offset : offset + part.num_bytes])
            held[layers.start : layers.stop].transpose(0, 1)[index] = dequantize(stored)
            offset += part.num_bytes

    def _held(self, pool: Pool) -> tuple[torch.Tensor, torch.Tensor]:
        pool = cast("KVPool", pool)
        return pool.k, pool.v


@dataclass(frozen=True, slots=True)
class _QuantPart:
    """K or V of one layer and block: their shape, and the dimension that shares a scale."""

    kind: Quantization
    dtype: torch.dtype
    shape: tuple[int, int, int]
    shared: int

    @property
    def _scales(self) -> tuple[int, ...]:
        return (*self.shape[: self.shared], 1, *self.shape[self.shared + 1 :])

    @property
    def _scale_bytes(self) -> int:
        return prod(self._scales) * self.dtype.itemsize

    @property
    def _sets(self) -> int:
        return 2 if self.kind.has_minimums else 1

    @property
    def num_bytes(self) -> int:
        return self._sets * self._scale_bytes + self.kind.code_bytes(prod(self.shape))

    def pieces(self, stored: Quantized) -> list[torch.Tensor]:
        """Return the bytes in their order, each uint8 `[n, layers, bytes]`."""
        codes = stored.codes.flatten(2)
        if self.kind is Quantization.INT4:
            codes = torch.nn.functional.pad(codes, (0, codes.shape[2] % 2))
            codes = codes[:, :, ::2] | (codes[:, :, 1::2] << 4)
        scales = [stored.scales]
        if stored.minimums is not None:
            scales.append(stored.minimums)
        return [
            *(each.flatten(2).contiguous().view(torch.uint8) for each in scales),
            codes.contiguous().view(torch.uint8),
        ]

    def stored(self, data: torch.Tensor) -> Quantized:
        """Return the numbers of `pieces`, from uint8 `[n, layers, num_bytes]`."""
        front = data.shape[:2]
        sets: list[torch.Tensor] = []
        num_bytes = self._scale_bytes
        for start in range(0, self._sets * num_bytes, num_bytes):
            scales = data[:, :, start : start + num_bytes].contiguous()
            sets.append(scales.view(self.dtype).view(*front, *self._scales))
        codes = data[:, :, self._sets * num_bytes :].contiguous()
        if self.kind is Quantization.INT4:
            both = torch.stack((codes & 15, codes >> 4), dim=-1).flatten(2)
            codes = both[:, :, : prod(self.shape)]
        elif self.kind is Quantization.FP8:
            codes = codes.view(_FP8)
        minimums = sets[1] if self.kind.has_minimums else None
        return Quantized(codes.reshape(*front, *self.shape), sets[0], minimums)


def _compute(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype is torch.float64 else torch.float32


def _scales(span: torch.Tensor, highest: float, dtype: torch.dtype) -> torch.Tensor:
    """Return `span / highest` rounded up to `dtype`; NaN where the span is no number."""
    scales = (span / highest).to(dtype)
    low = scales.to(span.dtype) * highest < span
    scales = (scales.view(_UP[dtype.itemsize]) + low).view(dtype)
    return torch.where(span.isfinite(), scales, torch.full_like(scales, torch.nan))
