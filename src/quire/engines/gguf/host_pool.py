"""Blocks of tokens' rows, and of recurrent states, in host memory."""

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch

from quire.core.tokens import IntArray
from quire.engines.gguf.state import SequenceLayout, Words
from quire.tensors.layout import KVLayout, StateLayout, StateShape
from quire.tensors.pool import KVPool, StatePool
from quire.tensors.slots import BlockIds, block_array


def host_layout(state: SequenceLayout, block_size: int) -> KVLayout:
    """Return the layout of blocks that hold rows of a state, whatever their numbers are: words of two bytes."""
    return KVLayout(1, 1, state.split, state.num_words - state.split, torch.float16, block_size)


def state_layout(num_bytes: int) -> StateLayout:
    """Return the layout of blocks that hold a recurrent state of all layers, whatever its numbers are."""
    return StateLayout(((StateShape("state", (num_bytes // 2,), torch.float16),),))


class HostPool(KVPool):
    """Blocks in host memory, into which rows go when llama.cpp must not be their only place.

    written  int32 `[num_blocks]`: leading tokens of each block whose rows are there; the rows of others, of a block of
             a request that runs, are in the context of llama.cpp alone
    """

    def poison(self, block_ids: BlockIds) -> None:
        """Take note that blocks are filled next, from elsewhere."""
        super().poison(block_ids)
        self.written[block_array(block_ids, self.num_blocks)] = self.layout.block_size

    def read_rows(self, table: IntArray, start: int, stop: int) -> Words:
        """Return the rows of positions `[start, stop)` of a sequence with this block table, copied."""
        split = self.layout.k_width
        found = np.empty((stop - start, split + self.layout.v_width), np.uint16)
        for own, places in self._spans(table, start, stop):
            for held, part in zip(
                self._rows, (found[own, :split], found[own, split:]), strict=True
            ):
                part[:] = held[places]
        return found

    def write_rows(self, table: IntArray, start: int, rows: Words) -> None:
        """Write the rows of positions from `start` on of a sequence."""
        split = self.layout.k_width
        for own, places in self._spans(table, start, start + len(rows)):
            for held, part in zip(self._rows, (rows[own, :split], rows[own, split:]), strict=True):
                held[places] = part

    def _spans(self, table: IntArray, start: int, stop: int) -> Iterator[tuple[slice, slice]]:
        """Yield the positions of each block, from `start` on, and their places in the pool."""
        size = self.layout.block_size
        for begin in range(start - start % size, stop, size):
            first, last = max(begin, start), min(begin + size, stop)
            place = int(table[begin // size]) * size + first - begin
            yield slice(first - start, last - start), slice(place, place + last - first)

    def _hold(self, tensors: list[torch.Tensor]) -> None:
        super()._hold(tensors)
        self._rows: Sequence[Words] = [
            each.view(torch.int16).flatten(0, 3).numpy().view(np.uint16) for each in tensors
        ]
        self.written = np.full(tensors[0].shape[1], self.layout.block_size, np.int32)


class HostStates(StatePool):
    """Recurrent states in host memory: snapshots, and those of requests that run, which the context alone may have.

    written  bool `[num_blocks]`: whether the state of a block is there
    """

    def poison(self, block_ids: BlockIds) -> None:
        """Take note that blocks are filled next, from elsewhere."""
        super().poison(block_ids)
        self.written[block_array(block_ids, self.num_blocks)] = True

    def read_state(self, block: int) -> npt.NDArray[np.uint8]:
        """Return the state of a block: a view."""
        return self._held[block].view(np.uint8)

    def write_state(self, block: int, state: npt.NDArray[np.uint8]) -> None:
        """Write the state of a block."""
        self._held[block] = state.view(np.uint16)
        self.written[block] = True

    def _hold(self, tensors: list[torch.Tensor]) -> None:
        super()._hold(tensors)
        self._held: Words = tensors[0].view(torch.int16).numpy().view(np.uint16)
        self.written = np.full(len(self._held), fill_value=True)
