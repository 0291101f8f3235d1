"""Which rows of a step read which blocks: made once per step, used by every layer of a group."""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from quire.engines.loop.attention.runs import Ints, SharedRun, Tables, shared_runs
from quire.errors import ConfigError

MIN_SAVED_TOKENS = 1024
"""Reads of a token that a shared run has to save for a product of its own."""


@dataclass(frozen=True, slots=True)
class Packed:
    """The rows of one step, request after request.

    tables   int32 [R, blocks]  block ids, -1 where there is none
    context  int [R]            tokens of each request in the pool before the step
    lengths  int [R]            new rows of each request, at least 1
    """

    tables: Tables
    context: Ints
    lengths: Ints


@dataclass(frozen=True, slots=True)
class RunPart:
    """Rows that read a shared run, each of them all of it.

    rows   int64 [n]
    slots  int64 [tokens], or a slice where the blocks are neighbours
    """

    rows: torch.Tensor
    slots: torch.Tensor | slice


@dataclass(frozen=True, slots=True)
class PrefillPart:
    """The rows `[start, stop)` of a request with several, and what it alone reads.

    slots  int64 [tokens] of its context
    mask   bool [rows, tokens + rows]: what each row sees of its context and of the new rows;
           None: all of the context, and the new rows up to itself
    """

    start: int
    stop: int
    slots: torch.Tensor
    mask: torch.Tensor | None


@dataclass(slots=True)
class DecodePart:
    """Requests of one row each, and the blocks that each alone reads, the row's own included.

    rows    int64 [r]
    blocks  int32 [r, width]  in the order of positions
    skip    int64 [r]         tokens at the beginning that the row does not see
    count   int64 [r]         tokens up to and including the row
    """

    rows: torch.Tensor
    blocks: Tables
    skip: Ints
    count: Ints


@dataclass(slots=True)
class AttentionPlan:
    """What the rows of a step read: shared runs, and what each request alone has.

    window  tokens that a row sees, its own included; None: all
    chunk   tokens are seen within chunks of so many; None: everywhere

    `update` makes it for a step; every layer of the group then uses it. `slots`, int64 [N], is
    where the new rows' K and V go: `block * block_size + offset`.
    """

    block_size: int
    window: int | None = None
    chunk: int | None = None
    min_saved_tokens: int = MIN_SAVED_TOKENS
    packed: Packed = field(init=False)
    slots: torch.Tensor = field(init=False)
    runs: list[RunPart] = field(init=False)
    prefills: list[PrefillPart] = field(init=False)
    decode: DecodePart = field(init=False)

    def update(self, packed: Packed) -> None:
        """Take the rows of a step.

        Raises `ConfigError` when arrays do not fit each other, or a table lacks a block that
        is read or written; the plan is then the one before.
        """
        lengths, context = packed.lengths, packed.context
        _check(packed, self.block_size)
        ends = np.cumsum(lengths)
        starts = ends - lengths
        of_row = np.repeat(np.arange(len(lengths)), lengths)
        positions = np.arange(int(lengths.sum())) - (starts - context)[of_row]
        shared, alone = self._divide(packed)
        self.packed = packed
        self.slots = torch.as_tensor(_slots(packed.tables[of_row], positions, self.block_size))
        self.runs = [self._run(run, starts) for run in shared]
        self.decode = self._decode(np.flatnonzero(lengths == 1), starts, alone)
        self.prefills = [
            self._prefill(request, int(starts[request]), alone[request])
            for request in np.flatnonzero(lengths > 1).tolist()
        ]

    def lower(self, positions: Ints) -> Ints:
        """Return the first position that rows at these positions see."""
        if self.chunk is not None:
            return positions // self.chunk * self.chunk
        if self.window is not None:
            return np.maximum(positions - self.window + 1, 0)
        return np.zeros_like(positions)

    def _divide(self, packed: Packed) -> tuple[list[SharedRun], npt.NDArray[np.bool_]]:
        """Return the shared runs, and bool [R, blocks]: the columns that each request reads alone."""
        size, tables, context = self.block_size, packed.tables, packed.context
        seen_by_all = self.lower(context + packed.lengths - 1)
        begin = -(-int(seen_by_all.max(initial=0)) // size)
        runs = shared_runs(tables, begin, context // size, self.min_saved_tokens // size)
        columns: Ints = np.arange(int(tables.shape[1]))
        until = context + (packed.lengths == 1)
        from_own = columns >= (self.lower(context) // size)[:, None]
        alone = from_own & (columns < (-(-until // size))[:, None])
        for run in runs:
            alone[run.requests, run.start : run.stop] = False
        return runs, alone

    def _run(self, run: SharedRun, starts: Ints) -> RunPart:
        blocks = self.packed.tables[run.requests[0], run.start : run.stop].astype(np.int64)
        lengths = self.packed.lengths[run.requests]
        first = np.repeat(starts[run.requests] - (np.cumsum(lengths) - lengths), lengths)
        rows = torch.as_tensor(first + np.arange(len(first)))
        size = self.block_size
        if (np.diff(blocks) == 1).all():
            return RunPart(rows, slice(int(blocks[0]) * size, (int(blocks[-1]) + 1) * size))
        slots = (blocks[:, None] * size + np.arange(size)).ravel()
        return RunPart(rows, torch.as_tensor(slots))

    def _decode(self, requests: Ints, starts: Ints, alone: npt.NDArray[np.bool_]) -> DecodePart:
        size, context = self.block_size, self.packed.context[requests]
        alone = alone[requests]
        num_blocks = alone.sum(axis=1)
        blocks = np.zeros((len(requests), int(num_blocks.max(initial=0))), np.int32)
        blocks[np.arange(blocks.shape[1]) < num_blocks[:, None]] = self.packed.tables[requests][
            alone
        ]
        count = num_blocks * size - (-(context + 1)) % size
        first = alone.argmax(axis=1) * size
        skip = np.maximum(self.lower(context) - first, 0)
        return DecodePart(torch.as_tensor(starts[requests]), blocks, skip, count)

    def _prefill(self, request: int, start: int, alone: npt.NDArray[np.bool_]) -> PrefillPart:
        size = self.block_size
        context, length = int(self.packed.context[request]), int(self.packed.lengths[request])
        columns = np.flatnonzero(alone)
        keys = (columns[:, None] * size + np.arange(size)).ravel()
        rows = np.arange(context, context + length)
        lower = self.lower(rows)
        keys = keys[(keys >= lower[0]) & (keys < context)]
        slots = _slots(self.packed.tables[request], keys, size)
        mask = None
        if lower[-1] > lower[0]:
            seen = np.concatenate([keys, rows])
            mask = torch.as_tensor((seen <= rows[:, None]) & (seen >= lower[:, None]))
        return PrefillPart(start, start + length, torch.as_tensor(slots), mask)


def _slots(tables: Tables, positions: Ints, block_size: int) -> Ints:
    """Return the slots of positions in a table [blocks], or each in its own, [n, blocks]."""
    columns = positions // block_size
    blocks = tables[columns] if tables.ndim == 1 else tables[np.arange(len(columns)), columns]
    return blocks.astype(np.int64) * block_size + positions % block_size


def _check(packed: Packed, block_size: int) -> None:
    """Raise `ConfigError` unless the arrays fit and the tables hold every new row."""
    tables, context, lengths = packed.tables, packed.context, packed.lengths
    if not len(tables) == len(context) == len(lengths):
        raise ConfigError(
            f"tables of {len(tables)} requests, context of {len(context)} and lengths of "
            f"{len(lengths)}: a step needs one of each per request"
        )
    if len(lengths) and (lengths.min() < 1 or context.min() < 0):
        raise ConfigError(
            f"a request of {int(lengths.min())} rows or {int(context.min())} tokens before: "
            "each needs at least 1 row and 0 tokens"
        )
    last = context + lengths - 1
    held = tables.shape[1] * block_size
    if len(lengths) and last.max() >= held:
        raise ConfigError(
            f"a row at position {int(last.max())}, but tables of {tables.shape[1]} blocks of "
            f"{block_size} tokens: reserve blocks first"
        )
    if (tables[np.arange(len(last)), last // block_size] < 0).any():
        raise ConfigError("a new row has no block in its table: reserve blocks first")
