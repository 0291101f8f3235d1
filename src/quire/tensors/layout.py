"""Layouts of a block of one layer group: shapes, widths and bytes."""

from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from quire.config import check_count, format_bytes
from quire.errors import ConfigError
from quire.tensors.kinds import decoder_config


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Shape and size of the K and V that one layer group keeps per block.

    K is `[num_layers, num_blocks, block_size, kv_heads, k_width]`, V the same with `v_width`.
    Multi-head, grouped-query and multi-query attention have `k_width == v_width == head_dim`.
    Multi-head latent attention has one head, the latent as K and the shared rope key as V, of
    different widths: https://arxiv.org/abs/2405.04434, section 2.1, cached as transformers
    5.23 does it.

    bytes_per_token == num_layers * kv_heads * (k_width + v_width) * itemsize
    bytes_per_block == block_size * bytes_per_token
    """

    num_layers: int
    kv_heads: int
    k_width: int
    v_width: int
    dtype: torch.dtype
    block_size: int = 16

    def __post_init__(self) -> None:
        for name in ("num_layers", "kv_heads", "k_width", "v_width", "block_size"):
            check_count(name, getattr(self, name))
        if not self.dtype.is_floating_point:
            raise ConfigError(f"dtype is {self.dtype}; K and V need a floating point dtype")

    def __str__(self) -> str:
        widths = "/".join(map(str, dict.fromkeys((self.k_width, self.v_width))))
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{dtype}, {self.num_layers} layers, {self.kv_heads} kv heads, width {widths}"

    @property
    def bytes_per_token(self) -> int:
        """Bytes of K and V of one token over all layers."""
        widths = self.k_width + self.v_width
        return self.num_layers * self.kv_heads * widths * self.dtype.itemsize

    @property
    def bytes_per_block(self) -> int:
        """Bytes of K and V of one block over all layers."""
        return self.block_size * self.bytes_per_token

    def num_blocks(self, capacity_bytes: int) -> int:
        """Whole blocks that fit into `capacity_bytes`.

        Raises `ConfigError` when not even one does.
        """
        blocks = capacity_bytes // self.bytes_per_block
        if blocks < 1:
            raise ConfigError(
                f"a capacity of {capacity_bytes} bytes ({format_bytes(capacity_bytes)}) holds no "
                f"block: one block of {self.block_size} tokens takes {self.bytes_per_block} "
                f"bytes ({format_bytes(self.bytes_per_block)}); raise the capacity or lower "
                "block_size"
            )
        return blocks


@dataclass(frozen=True, slots=True)
class StateShape:
    """One state tensor of one sequence: its name, its shape, without rows, and dtype."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensor."""
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class StateLayout:
    """The states of a group's recurrent layers: one each, of one or more tensors.

    `layers[i]` are the tensors of the group's i-th layer: the tail of a convolution's input, the
    sum of a recurrence, or both. A block holds the states of all layers at one position, so that
    bytes_per_block == sum of all tensors' bytes, whatever the block size.
    """

    layers: tuple[tuple[StateShape, ...], ...]

    def __post_init__(self) -> None:
        if not self.layers or not all(self.layers):
            raise ConfigError("a state layout needs layers with at least one tensor each")

    @property
    def bytes_per_block(self) -> int:
        """Bytes of the states of all layers at one position."""
        return sum(tensor.num_bytes for layer in self.layers for tensor in layer)


def declared_dtype(config: Any) -> torch.dtype:
    """Return the dtype that the config of a decoder declares, else float32."""
    declared = getattr(decoder_config(config), "dtype", None)
    return declared if isinstance(declared, torch.dtype) else torch.float32
