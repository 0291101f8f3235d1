"""Attention of a decode step with shared prefixes read once, against each request reading its own blocks.

python benchmarks/tree_attention.py [--threads 2] [--dtype bfloat16]

64 requests over one prefix of 2k, 8k and 32k tokens, 96 to 224 tokens of each one's own; one layer of
4 heads, 2 kv heads, width 64. Rows alternate, so what else the machine does meets both.
"""

import argparse
import time

import numpy as np
import torch

from quire.engines.packed.attention import AttentionPlan, Packed, Scoring, attend

BLOCK, REQUESTS, HEADS, KV_HEADS, WIDTH = 16, 64, 4, 2, 64


def step(prefix):
    """Return tables whose first columns are one prefix, and contexts."""
    rng = np.random.default_rng(0)
    context = prefix + rng.integers(96, 225, REQUESTS)
    shared = prefix // BLOCK
    own = int(context.max() - prefix) // BLOCK + 1
    tables = np.tile(np.arange(shared + own, dtype=np.int32), (REQUESTS, 1))
    tables[:, shared:] = shared + np.arange(REQUESTS * own).reshape(REQUESTS, own)
    return Packed(tables, context, np.ones(REQUESTS, np.int64)), shared + REQUESTS * own


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--rounds", type=int, default=20)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    dtype = getattr(torch, args.dtype)
    # What one thread takes is told by its own clock, whatever else the machine does.
    clock = time.thread_time if args.threads == 1 else time.perf_counter
    print(f"{args.dtype}, {args.threads} threads, ms per layer, median (least) of {args.rounds}")
    print(f"{'prefix':>8} {'read once':>18} {'by each request':>18} {'ratio':>6}")
    for prefix in (2048, 8192, 32768):
        packed, num_blocks = step(prefix)
        pools = [torch.randn(num_blocks, BLOCK, KV_HEADS, WIDTH).to(dtype) for _ in range(2)]
        q = torch.randn(REQUESTS, HEADS, WIDTH).to(dtype)
        new = [torch.randn(REQUESTS, KV_HEADS, WIDTH).to(dtype) for _ in range(2)]
        plans = [AttentionPlan(BLOCK), AttentionPlan(BLOCK, min_saved_tokens=2**40)]
        for plan in plans:
            plan.update(packed)
        times, found = [[], []], [None, None]
        for _ in range(args.rounds + 1):
            for i, plan in enumerate(plans):
                start = clock()
                found[i] = attend(plan, pools, q, new, Scoring(WIDTH**-0.5))
                times[i].append(clock() - start)
        torch.testing.assert_close(*found, rtol=1e-2, atol=1e-2)
        taken = np.array(times)[:, 1:] * 1e3
        middle, least = np.median(taken, axis=1), taken.min(axis=1)
        cells = [f"{a:9.2f} ({b:6.2f})" for a, b in zip(middle, least, strict=True)]
        print(f"{prefix:8} {cells[0]:>18} {cells[1]:>18} {least[1] / least[0]:6.1f}")


if __name__ == "__main__":
    main()
