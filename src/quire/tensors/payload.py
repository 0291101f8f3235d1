"""Where a block's bytes lie in the payload of a record, and moving them there and back.

A payload is what one block holds, layer after layer, so that a layer can be read alone:

    K and V   [K of layer 0 | V of layer 0 | K of layer 1 | ...]   K: [block_size, heads, k_width]
    states    [tensors of layer 0 | tensors of layer 1 | ...]      in the order of the layout

without padding, in the machine's byte order. Nothing here looks at values: all dtypes are
moved as integers, so that every bit pattern, NaNs with their payload included, comes back.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, TypeAlias, cast

import numpy as np
import numpy.typing as npt
import torch

from quire.tensors.layout import KVLayout, StateLayout
from quire.tensors.pool import KVPool, Pool, StatePool

Ids = npt.NDArray[np.int64]

Filled: TypeAlias = Callable[[int], object]
"""Is told which payload is there as soon as it is: its bytes are in the processor's cache then."""

_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


class PayloadForm(ABC):
    """The conversion between the blocks of one layer group and payloads.

    `layer_bytes[i]` are the bytes of the group's i-th layer, which lie behind each other.
    """

    layer_bytes: tuple[int, ...]

    def span(self, layers: range) -> tuple[int, int]:
        """Return where some neighbouring layers begin and end in a payload, in bytes."""
        ends = [0, *accumulate(self.layer_bytes)]
        return ends[layers.start], ends[layers.stop]

    @abstractmethod
    def pack(self, pool: Pool, index: torch.Tensor) -> torch.Tensor:
        """Return the payloads of blocks `index` `[n]`: uint8 `[n, payload bytes]` on the pool's device."""

    @abstractmethod
    def unpack(self, rows: torch.Tensor, pool: Pool, index: torch.Tensor, layers: range) -> None:
        """Write some layers of blocks; `rows` holds their bytes only: uint8 `[n, bytes]`."""


@dataclass(frozen=True, slots=True)
class Plane:
    """One tensor of a pool, and where it goes in a payload.

    held    `[blocks, layers, *inner]`: integers, a view of the pool
    offset  bytes of the payload before its first layer
    stride  bytes of the payload from one layer to the next
    """

    held: torch.Tensor
    offset: int
    stride: int

    def in_payload(self) -> dict[str, Any]:
        """Return the same elements in one payload, as arguments of `numpy.ndarray`."""
        shape = tuple(self.held.shape[1:])
        size = self.held.element_size()
        inner = [size]
        for length in reversed(shape[2:]):
            inner.append(inner[-1] * length)
        return {
            "shape": shape,
            "offset": self.offset,
            "strides": (self.stride, *reversed(inner)),
            "dtype": np.dtype(f"i{size}"),
        }

    def in_rows(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the same elements in payloads `rows`, as a view: `[n, layers, *inner]`."""
        size = self.held.element_size()
        place = self.in_payload()
        strides = (rows.shape[1], *place["strides"])
        words = rows.view(self.held.dtype)
        return words.as_strided(
            (rows.shape[0], *place["shape"]),
            [stride // size for stride in strides],
            words.storage_offset() + self.offset // size,
        )


class ExactForm(PayloadForm):
    """Payloads that hold the very bits of the pool."""

    @abstractmethod
    def planes(self, pool: Pool, layers: range) -> list[Plane]:
        """Return the tensors that hold some layers; offsets count from the first of them."""

    def pack(self, pool: Pool, index: torch.Tensor) -> torch.Tensor:
        layers = range(len(self.layer_bytes))
        rows = torch.empty(
            (len(index), sum(self.layer_bytes)), dtype=torch.uint8, device=pool.device
        )
        for plane in self.planes(pool, layers):
            plane.in_rows(rows).copy_(plane.held[index])
        return rows

    def unpack(self, rows: torch.Tensor, pool: Pool, index: torch.Tensor, layers: range) -> None:
        for plane in self.planes(pool, layers):
            plane.held[index] = plane.in_rows(rows)

    def copy_out(self, pool: Pool, ids: Ids, buffers: Sequence[memoryview], filled: Filled) -> None:
        """Fill payloads from blocks in host memory, one after the other, each byte copied once."""
        planes = self.planes(pool, range(len(self.layer_bytes)))
        places = [(_array(plane.held), plane.in_payload()) for plane in planes]
        view: Any = np.ndarray
        for at, (block, buffer) in enumerate(zip(ids.tolist(), buffers, strict=True)):
            for held, place in places:
                view(buffer=buffer, **place)[...] = held[block]
            filled(at)

    def copy_in(self, buffers: Sequence[memoryview], pool: Pool, ids: Ids, layers: range) -> None:
        """Fill some layers of blocks in host memory from whole payloads, each byte copied once."""
        first, stop = self.span(layers)
        for plane in self.planes(pool, layers):
            held, place = _array(plane.held), plane.in_payload()
            for block, buffer in zip(ids.tolist(), buffers, strict=True):
                held[block] = np.ndarray(buffer=buffer[first:stop], **place)


class ExactKV(ExactForm):
    """K and V, as the pool holds them."""

    def __init__(self, memory: KVLayout) -> None:
        per_width = memory.block_size * memory.kv_heads * memory.dtype.itemsize
        self._k_bytes = per_width * memory.k_width
        layer_bytes = self._k_bytes + per_width * memory.v_width
        self.layer_bytes = (layer_bytes,) * memory.num_layers
        widths = (memory.k_width, memory.v_width)
        self._word = _word(*(width * memory.dtype.itemsize for width in widths))

    def planes(self, pool: Pool, layers: range) -> list[Plane]:
        pool = cast("KVPool", pool)
        stride = self.layer_bytes[0]
        return [
            Plane(self._held(pool.k, layers), 0, stride),
            Plane(self._held(pool.v, layers), self._k_bytes, stride),
        ]

    def _held(self, states: torch.Tensor, layers: range) -> torch.Tensor:
        return states[layers.start : layers.stop].view(self._word).transpose(0, 1).flatten(2)


class ExactStates(ExactForm):
    """Recurrent states, as the pool holds them."""

    def __init__(self, memory: StateLayout) -> None:
        self.layer_bytes = tuple(
            sum(tensor.num_bytes for tensor in layer) for layer in memory.layers
        )

    def planes(self, pool: Pool, layers: range) -> list[Plane]:
        found: list[Plane] = []
        offset = 0
        total = sum(self.layer_bytes[layer] for layer in layers)
        for layer in layers:
            for held in cast("StatePool", pool).layers[layer]:
                num_bytes = held[0].numel() * held.element_size()
                # Words may begin at `offset` of every row only if they divide the rows, too.
                word = _word(num_bytes, offset, total)
                words = held.view(len(held), 1, -1).view(word)
                found.append(Plane(words, offset, num_bytes))
                offset += num_bytes
        return found


def _word(*sizes: int) -> torch.dtype:
    """Return the widest integer whose size divides all of these."""
    return next(word for size, word in _WORDS.items() if not any(each % size for each in sizes))


def _array(tensor: torch.Tensor) -> npt.NDArray[Any]:
    return tensor.numpy().view(f"i{tensor.element_size()}")  # pyright: ignore[reportUnknownMemberType] - torch leaves it untyped
