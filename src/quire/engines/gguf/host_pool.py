"""Blocks of tokens' rows in host memory."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from quire.engines.gguf.state import SequenceLayout, Words
from quire.tensors.layout import KVLayout
from quire.tensors.pool import KVPool
from quire.tensors.slots import BlockIds, block_array

Places = npt.NDArray[np.int64]


def host_layout(state: SequenceLayout, block_size: int) -> KVLayout:
    """Return the layout of blocks that hold rows of a state, whatever their numbers are: words of two bytes."""
    return KVLayout(1, 1, state.split, state.num_words - state.split, torch.float16, block_size)


class HostPool(KVPool):
    """Blocks in host memory, into which rows go when llama.cpp must not be their only place.

    written  int32 `[num_blocks]`: leading tokens of each block whose rows are there; the rows of others, of a block of
             a request that runs, are in the context of llama.cpp alone
    """

    def poison(self, block_ids: BlockIds) -> None:
        """Take note that blocks are filled next, from elsewhere."""
        super().poison(block_ids)
        self.written[block_array(block_ids, self.num_blocks)] = self.layout.block_size

    def place(self, table: npt.NDArray[np.int32], positions: Places) -> Places:
        """Return the places of positions of a sequence with this block table."""
        size = self.layout.block_size
        return table[positions // size].astype(np.int64) * size + positions % size

    def read_rows(self, places: Places) -> Words:
        """Return rows, copied."""
        return np.concatenate([held[places] for held in self._rows], axis=1)

    def write_rows(self, places: Places, rows: Words) -> None:
        """Write rows."""
        split = self.layout.k_width
        for held, part in zip(self._rows, (rows[:, :split], rows[:, split:]), strict=True):
            held[places] = part

    def _hold(self, tensors: list[torch.Tensor]) -> None:
        super()._hold(tensors)
        self._rows: Sequence[Words] = [
            each.view(torch.int16).flatten(0, 3).numpy().view(np.uint16) for each in tensors
        ]
        self.written = np.full(tensors[0].shape[1], self.layout.block_size, np.int32)
