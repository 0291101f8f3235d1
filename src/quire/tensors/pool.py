"""Paged storage of K and V on a device."""

import torch

from quire.config import format_bytes
from quire.errors import ConfigError
from quire.tensors.layout import KVLayout
from quire.tensors.slots import BlockIds, block_array, on_device


class KVPool:
    """K and V of `num_blocks` blocks, as two tensors.

        k: [layers, blocks, block_size, kv_heads, k_width]
        v: [layers, blocks, block_size, kv_heads, v_width]

    The pool owns bytes; which block holds what, and for whom, is the manager's business.
    Memory is not touched before it is written: a pool of 64 GiB costs what is in use.

    Tokens stand before heads inside a block, as paged attention kernels read them, so that a
    token position is one slot, `block * block_size + offset`, of `k.flatten(1, 2)`. Measured on gathering 2048 tokens of 8
    layers, 8 heads, width 64, in float32 on one CPU core: 5.2 ms from scattered blocks and
    4.0 ms from a run of neighbours; heads before tokens inside a block is 5.1 and 4.1 ms,
    heads before blocks 6.0 and 2.9 ms. A plain copy is 2.6 ms.

    With `debug_nan`, every block starts as NaN and `poison` writes NaN again: whoever reads
    what nobody computed gets NaN out.
    """

    def __init__(
        self,
        layout: KVLayout,
        num_blocks: int,
        device: torch.device | str = "cpu",
        *,
        debug_nan: bool = False,
    ) -> None:
        if num_blocks < 1:
            raise ConfigError(f"num_blocks is {num_blocks}; a pool needs at least 1")
        self.layout = layout
        self.num_blocks = num_blocks
        self.debug_nan = debug_nan
        self.device = torch.device(device)
        self.k = self._allocate(layout.k_shape(num_blocks))
        self.v = self._allocate(layout.v_shape(num_blocks))
        if debug_nan:
            self.k.fill_(torch.nan)
            self.v.fill_(torch.nan)

    @property
    def num_bytes(self) -> int:
        """Bytes of K and V of all blocks."""
        return self.num_blocks * self.layout.bytes_per_block

    def poison(self, block_ids: BlockIds) -> None:
        """Fill K and V of these blocks with NaN, if `debug_nan`; else do nothing."""
        if self.debug_nan and len(block_ids):
            index = on_device(block_array(block_ids, self.num_blocks), self.device)
            self.k.index_fill_(1, index, torch.nan)
            self.v.index_fill_(1, index, torch.nan)

    def _allocate(self, shape: tuple[int, ...]) -> torch.Tensor:
        try:
            # Tensors made in inference mode could never be written outside of it.
            with torch.inference_mode(mode=False):
                return torch.empty(shape, dtype=self.layout.dtype, device=self.device)
        except RuntimeError as error:
            raise ConfigError(
                f"{self.device} has no room for a pool of {format_bytes(self.num_bytes)} "
                f"({self.num_blocks} blocks); lower the capacity: {str(error).splitlines()[0]}"
            ) from error

    def __repr__(self) -> str:
        layout = self.layout
        width = f"{layout.k_width}"
        if layout.v_width != layout.k_width:
            width = f"{layout.k_width}/{layout.v_width}"
        return (
            f"KVPool({self.num_blocks} blocks of {layout.block_size} tokens, "
            f"{format_bytes(self.num_bytes)} of {str(layout.dtype).removeprefix('torch.')} on "
            f"{self.device}, {layout.num_layers} layers, {layout.kv_heads} kv heads, "
            f"width {width})"
        )
