"""Single entries of block tables, for engines that keep tables of their own from step to step."""

from __future__ import annotations

from collections.abc import Sequence as Items

import numpy as np

from quire.core.blocks import GAP
from quire.core.decode import extents
from quire.core.groups import check_group
from quire.core.manager import CacheManager
from quire.core.sequence import Sequence
from quire.core.sparse import sparse_at
from quire.core.tokens import IndexArray, IntArray
from quire.errors import ConfigError, SequenceError


def blocks_at(
    manager: CacheManager, seqs: Items[Sequence], indices: IndexArray | IntArray, group: int = 0
) -> IntArray:
    """Return ids of single blocks of open sequences, int32 [n, k]: `indices` [n, k] of what `Sequence.block_ids` gives.

    With them tables are brought up to a step in place: where a step begins a block, the one before was published, and an
    equal one that was there already may stand in its place. Raises `ConfigError`, `SequenceError`.
    """
    if not isinstance(seqs, tuple | list):
        raise SequenceError(f"blocks of a list of sequences, got {seqs!r}")
    for seq in seqs:
        manager.check_open(seq)
    check_group(group, len(manager.pools))
    rows = manager.kernel.rows
    _, starts, num_blocks = extents(rows, seqs, group)
    fits = isinstance(indices, np.ndarray) and indices.dtype.kind in "iu" and indices.ndim == 2  # pyright: ignore[reportUnnecessaryIsInstance]
    if not fits or len(indices) != len(seqs):
        raise ConfigError(f"indices must be an integer array [{len(seqs)}, k], got {indices!r}")
    at = indices.astype(np.int64)
    if ((at < 0) | (at >= num_blocks[:, None])).any():
        raise ConfigError(
            f"indices {indices.tolist()} of sequences that have {num_blocks.tolist()} blocks; ask for "
            "blocks that they have, or reserve first"
        )
    ids: IntArray = rows.flat_tables[group][starts[:, None] + at]
    if (window := sparse_at(rows.windows, group)) is not None:
        first_read = np.array([window.first_read(seq.computed) for seq in seqs], np.int64)
        ids[(at >= window.num_sinks) & (at < first_read[:, None])] = GAP
    return ids
