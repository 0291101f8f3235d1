"""A trace in larger blocks."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import numpy as np

from quire.errors import ConfigError
from quire_sim.columns import Column
from quire_sim.trace.rows import Trace, TraceRequest, compress


class CoarseTrace:
    """A trace whose blocks are `factor` blocks of another; the last id of each names it."""

    def __init__(self, trace: Trace, factor: int) -> None:
        self._trace = trace
        self._factor = factor
        self.source, self.format = trace.source, trace.format
        self.block_size = trace.block_size * factor

    def __iter__(self) -> Iterator[TraceRequest]:
        coarse = Column(0, np.int32)  # by fine id: 0, or the coarse one plus one
        num_ids = 0
        for request in self._trace:
            fine = request.blocks[self._factor - 1 :: self._factor]
            numbers = coarse.upto(int(fine.max(initial=0)) + 1)
            known = int(np.count_nonzero(numbers[fine]))
            if known < len(fine):
                new = num_ids + len(fine) - known
                numbers[fine[known:]] = np.arange(num_ids + 1, new + 1)
                num_ids = new
            yield msgspec.structs.replace(request, runs=compress(numbers[fine] - 1))


def with_block_size(trace: Trace, block_size: int) -> Trace:
    """Return the trace in blocks of `block_size` tokens, a multiple of its own.

    Raises `ConfigError` for a size that is none.
    """
    own = trace.block_size
    if block_size < own or block_size % own:
        raise ConfigError(
            f"blocks of {own} tokens make larger ones of {own}, {2 * own}, {3 * own}, "
            f"{4 * own}, ... tokens, not of {block_size}"
        )
    return trace if block_size == own else CoarseTrace(trace, block_size // own)
