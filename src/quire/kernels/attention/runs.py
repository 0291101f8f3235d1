"""Runs of blocks that several requests read, found from their block tables alone.

Equal block ids in one column of two tables are the same KV, and so is all before them: sorted
tables are the leaves of a tree of runs.
"""

from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Tables = npt.NDArray[np.int32]


class SharedRun(NamedTuple):
    """Columns `[start, stop)` of the block tables of `requests`, equal in all of them."""

    requests: Ints
    start: int
    stop: int


def shared_runs(tables: Tables, start: int, stops: Ints, min_saved: int) -> list[SharedRun]:
    """Return the runs that are read once for several requests.

    tables     int32 [R, blocks]
    start      the first column that may be shared
    stops      int [R]: the first column of each request that may not
    min_saved  blocks that a run has to save, over each request reading its own, to be one
    """
    width = int(stops.max(initial=0)) - start
    if len(tables) < 2 or width < 1:
        return []
    ids = tables[:, start : start + width].astype(np.int64)
    # Past its stop a table equals no other.
    past = np.arange(width) + start >= stops[:, None]
    ids = np.where(past, -2 - np.arange(len(tables))[:, None], ids)
    order = np.argsort(np.ascontiguousarray(ids).view(f"V{8 * width}")[:, 0], kind="stable")
    ids = ids[order]
    differ = ids[1:] != ids[:-1]
    equal = np.where(differ.any(axis=1), differ.argmax(axis=1), width)
    found: list[SharedRun] = []
    open_ranges = [(0, len(order), 0)]
    while open_ranges:
        low, high, depth = open_ranges.pop()
        between = equal[low : high - 1]
        common = int(between.min())
        if (common - depth) * (high - low - 1) >= max(min_saved, 1):
            found.append(SharedRun(np.sort(order[low:high]), start + depth, start + common))
            depth = common
        cuts = [low, *(low + 1 + np.flatnonzero(between == common)).tolist(), high]
        open_ranges += [(a, b, depth) for a, b in pairwise(cuts) if b - a > 1]
    return found
