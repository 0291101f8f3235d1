"""Rows as columns, checked together: what a request of a trace cannot be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import msgspec
import numpy as np

from quire.sim.trace.numbering import Bools, Ints
from quire.sim.trace.schemas import MAX_TOKENS, RUN_ROWS

Floats: TypeAlias = np.ndarray[tuple[int], np.dtype[np.float64]]

MAX_SECONDS = 1e10
"""No trace spans more, in seconds: 300 years."""


class RowSizes(msgspec.Struct, frozen=True):
    """Times and lengths of consecutive rows, arrays with a value per row."""

    time_s: Floats
    prompt_tokens: Ints
    output_tokens: Ints
    num_ids: Ints

    def __getitem__(self, part: slice) -> RowSizes:
        return RowSizes(
            self.time_s[part],
            self.prompt_tokens[part],
            self.output_tokens[part],
            self.num_ids[part],
        )


def sizes_of(rows: list[Any], begin: float, ticks_per_s: float) -> RowSizes:
    """Return the sizes of rows; an absurd number of ids is given as `MAX_TOKENS` + 1.

    The rows have times in ticks, and `begin` is the first one of the trace.
    """
    if rows and isinstance(rows[0], RUN_ROWS):
        num_ids = [sum([length for _, length in row.hash_runs]) for row in rows]
    else:
        num_ids = [len(row.hash_ids) for row in rows]
    return RowSizes(
        (np.array([row.timestamp for row in rows], np.float64) - begin) / ticks_per_s,
        np.array([row.input_length for row in rows], np.int64),
        np.array([row.output_length for row in rows], np.int64),
        np.array([min(n, MAX_TOKENS + 1) for n in num_ids], np.int64),
    )


def first_fault(sizes: RowSizes, block_size: int, last_s: float) -> tuple[int, str] | None:
    """Return the first row that cannot be, and why; None where all can.

    The row before these came at `last_s`.
    """
    time_s, tokens, num_ids = sizes.time_s, sizes.prompt_tokens, sizes.num_ids
    before = np.concatenate(([last_s], time_s[:-1]))
    full = tokens // block_size
    most = -(-tokens // block_size)
    faults: list[tuple[int, str]] = []

    def note(bad: Bools, say: Callable[[int], str]) -> None:
        if bad.any():
            row = int(bad.argmax())
            faults.append((row, say(row)))

    note(
        time_s < before,
        lambda i: (
            f"time goes backwards: it came {before[i] - time_s[i]:.9g} s before the row "
            "above; sort the rows by their time"
        ),
    )
    note(
        np.abs(time_s) > MAX_SECONDS,
        lambda i: (
            f"it came {time_s[i]:.3g} s after the first request, over the limit of "
            f"{MAX_SECONDS:.0e} s; is the time given in the right unit?"
        ),
    )
    note(
        num_ids < full,
        lambda i: (
            f"{num_ids[i]:,} block ids are fewer than the {full[i]:,} full blocks of "
            f"{block_size} tokens in a prompt of {tokens[i]:,}; is the block size right?"
        ),
    )
    note(
        num_ids > most,
        lambda i: (
            f"{num_ids[i]:,} block ids are more than a prompt of {tokens[i]:,} tokens has "
            f"blocks of {block_size} ({most[i]:,}); is the block size right?"
        ),
    )
    return min(faults, key=lambda fault: fault[0], default=None)


def possible_block_sizes(sizes: RowSizes) -> range:
    """Return the block sizes for which every row has an id for each block.

    A last, partial block may have an id or none, but the same in all rows. Rows of under two
    ids say too little and are not asked.
    """
    asked = sizes.num_ids >= 2
    tokens, num_ids = sizes.prompt_tokens[asked], sizes.num_ids[asked]
    if not len(tokens):
        return range(0)
    with_partial = range(
        int((-(-tokens // num_ids)).max()), int((-(-tokens // (num_ids - 1))).min())
    )
    without = range(int((tokens // (num_ids + 1)).max()) + 1, int((tokens // num_ids).min()) + 1)
    if with_partial and without:
        return range(min(with_partial[0], without[0]), max(with_partial[-1], without[-1]) + 1)
    return with_partial or without
