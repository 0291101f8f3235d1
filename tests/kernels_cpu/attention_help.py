"""Steps over random trees of block tables, and how near attention comes to the reference."""

import numpy as np
import torch

from quire.kernels.attention import Packed, attend, attend_reference
from quire.tensors.layout import KVLayout
from quire.tensors.pool import KVPool

TOLERANCES = {torch.float32: 2e-5, torch.bfloat16: 3e-2}


class Step:
    """A step over a random tree of tables: K and V of every context is in the pool, all else is NaN."""

    def __init__(self, seed, *, size=4, heads=4, kv_heads=2, widths=(16, 16), dtype=torch.float32):
        self.rng = np.random.default_rng(seed)
        self.size, self.heads, self.widths, self.dtype = size, heads, widths, dtype
        layout = KVLayout(1, kv_heads, *widths, dtype, size)
        self.pool = KVPool(layout, 600, debug_nan=True)
        self.free = self.rng.permutation(600).tolist()

    def tree(self, num_requests, depth):
        """Return tables of requests that branch off each other at random blocks, and their contexts."""
        paths, contexts = [[]], [0]
        for _ in range(num_requests):
            parent = self.rng.integers(len(paths))
            whole = contexts[parent] // self.size
            shared = paths[parent][: self.rng.integers(whole + 1)]
            own = [self.free.pop() for _ in range(self.rng.integers(depth + 1))]
            paths.append(shared + own)
            whole = len(paths[-1]) * self.size
            # What others share is full; the last block of its own may be cut, off by one too.
            cut = int(self.rng.choice([0, 1, self.size - 1])) if own else 0
            contexts.append(whole - cut)
        return paths[1:], contexts[1:]

    def packed(self, paths, contexts, lengths, *, gaps=False):
        """Return the step; with gaps, rows stand at some positions behind their contexts, and K and V between them."""
        positions, skipped = None, [0] * len(paths)
        if gaps:
            chosen = [
                np.sort(self.rng.choice(3 * length, length, replace=False)) + context
                for context, length in zip(contexts, lengths, strict=True)
            ]
            positions = np.concatenate(chosen)
            skipped = [
                int(rows[-1]) + 1 - context - len(rows)
                for rows, context in zip(chosen, contexts, strict=True)
            ]
        tables = np.full((len(paths), 100), -1, np.int32)
        held_k, held_v = self.pool.k[0], self.pool.v[0]
        for row, (path, context, length) in enumerate(zip(paths, contexts, lengths, strict=True)):
            blocks = list(path)
            stop = context + length + skipped[row]
            while len(blocks) * self.size < stop:
                blocks.append(self.free.pop())
            tables[row, : len(blocks)] = blocks
            held = stop if gaps else context
            for column in range(-(-held // self.size)):
                filled = min(self.size, held - column * self.size)
                fresh = torch.isnan(held_k[blocks[column], :filled]).flatten(1).any(1)
                for pool in (held_k, held_v):
                    pool[blocks[column], :filled][fresh] = self.random(*pool.shape[2:])
        return Packed(tables, np.array(contexts), np.array(lengths), positions)

    def random(self, *shape):
        return torch.from_numpy(self.rng.standard_normal(shape)).to(self.dtype)

    def rows(self, num_rows):
        kv_heads = self.pool.k.shape[3]
        q = self.random(num_rows, self.heads, self.widths[0])
        return q, tuple(self.random(num_rows, kv_heads, width) for width in self.widths)

    def compare(self, plan, scoring):
        """Assert that `attend` and the reference give the same, and write the same."""
        q, new = self.rows(len(plan.slots))
        pools = (self.pool.k[0], self.pool.v[0])
        before = [pool.clone() for pool in pools]
        out = attend(plan, pools, q, new, scoring)
        for pool, rows in zip(before, new, strict=True):
            pool.flatten(0, 1)[plan.slots] = rows
        wanted = attend_reference(plan, tuple(before), q, scoring)
        assert out.dtype == self.dtype
        assert not torch.isnan(wanted).any()
        tolerance = TOLERANCES[self.dtype]
        torch.testing.assert_close(out, wanted, rtol=tolerance, atol=tolerance)
        for pool, other in zip(pools, before, strict=True):
            torch.testing.assert_close(pool, other, rtol=0, atol=0, equal_nan=True)


SHAPES = [
    {},
    {"size": 1},
    {"size": 5, "heads": 6, "kv_heads": 1},
    {"size": 16, "heads": 3, "kv_heads": 3, "widths": (24, 16)},
    {"size": 16, "heads": 16, "widths": (32, 48)},  # whole tiles, where there are any
    {"size": 32, "heads": 8, "kv_heads": 1, "widths": (64, 64)},
    {"widths": (8, 12)},
    {"widths": (7, 5)},  # what no code is compiled for
]
SIGHTS = [
    {},
    {"window": 1},
    {"window": 7},
    {"window": 100},
    {"chunk": 6},
    {"chunk": 64},
    {"window": 300},
]
