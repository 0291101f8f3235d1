"""What the KV of a model looks like: shapes, widths and bytes, per token and per block."""

from dataclasses import dataclass
from typing import Any

import torch

from quire.config import format_bytes
from quire.errors import ConfigError
from quire.tensors.kinds import check_cacheable, decoder_config, kv_shape


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
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(f"{name} is {value!r}; it must be an integer of at least 1")
        if not self.dtype.is_floating_point:
            raise ConfigError(f"dtype is {self.dtype}; K and V need a floating point dtype")

    @classmethod
    def from_config(
        cls, config: Any, block_size: int = 16, dtype: torch.dtype | None = None
    ) -> "KVLayout":
        """Return the layout of the model that a transformers `config` describes.

        `dtype`: what the pool stores; None takes the config's own dtype, else float32.
        Raises `UnsupportedModel` for a model with anything but full attention layers whose K
        and V depend on the tokens before them alone; it names the layers and the reason.
        """
        check_cacheable(config)
        text = decoder_config(config)
        shape = kv_shape(text)
        if dtype is None:
            declared = getattr(text, "dtype", None)
            dtype = declared if isinstance(declared, torch.dtype) else torch.float32
        return cls(
            num_layers=shape.num_layers,
            kv_heads=shape.kv_heads,
            k_width=shape.k_width,
            v_width=shape.v_width,
            dtype=dtype,
            block_size=block_size,
        )

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

    def k_shape(self, num_blocks: int) -> tuple[int, int, int, int, int]:
        """`[num_layers, num_blocks, block_size, kv_heads, k_width]`."""
        return (self.num_layers, num_blocks, self.block_size, self.kv_heads, self.k_width)

    def v_shape(self, num_blocks: int) -> tuple[int, int, int, int, int]:
        """`[num_layers, num_blocks, block_size, kv_heads, v_width]`."""
        return (self.num_layers, num_blocks, self.block_size, self.kv_heads, self.v_width)
