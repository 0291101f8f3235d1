"""Attention of a decode step with shared prefixes read once, against each request reading its own blocks.

python benchmarks/tree_attention.py [--threads 2] [--dtype bfloat16] [--device cuda] [--requests 8]

64 requests over one prefix of 2k, 8k and 32k tokens, 96 to 224 tokens of each one's own; one layer of
4 heads, 2 kv heads, width 64, on a GPU of 32 heads, 8 kv heads, width 128. Rows alternate, so what else
the machine does meets both. On a GPU beside them: torch's attention over K and V gathered from their
blocks, every request's padded to the longest.
"""

import argparse
import time
from functools import partial

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from quire.kernels.attention import AttentionPlan, Packed, Scoring, attend

BLOCK = 16
SHAPES = {"cpu": (4, 2, 64), "cuda": (32, 8, 128)}


def step(prefix, requests):
    """Return tables whose first columns are one prefix, and contexts."""
    rng = np.random.default_rng(0)
    context = prefix + rng.integers(96, 225, requests)
    shared = prefix // BLOCK
    own = int(context.max() - prefix) // BLOCK + 1
    tables = np.tile(np.arange(shared + own, dtype=np.int32), (requests, 1))
    tables[:, shared:] = shared + np.arange(requests * own).reshape(requests, own)
    return Packed(tables, context, np.ones(requests, np.int64)), shared + requests * own


def gathered(tables, masks, pools, q):
    """Attend with torch alone: K and V of all requests gathered, as the new rows are in the pool."""
    k, v = (pool[tables].flatten(1, 2).transpose(1, 2) for pool in pools)
    found = scaled_dot_product_attention(q[:, :, None], k, v, masks, enable_gqa=True)
    return found[:, :, 0]


def seconds(device, clock, run):
    """Return what a call takes, and what it returns."""
    if device == "cpu":
        start = clock()
        found = run()
        return clock() - start, found
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    events[0].record()
    found = run()
    events[1].record()
    torch.cuda.synchronize()
    return events[0].elapsed_time(events[1]) / 1e3, found


def ways(device, packed, pools, q, new):
    """Return the ways to attend, by name."""
    plans = {"read once": AttentionPlan(BLOCK)}
    plans["by each request"] = AttentionPlan(BLOCK, min_saved_tokens=2**40)
    for plan in plans.values():
        plan.update(packed)
    scoring = Scoring(q.shape[-1] ** -0.5)
    found = {n: partial(attend, plan, pools, q, new, scoring) for n, plan in plans.items()}
    if device == "cuda":
        there = torch.from_numpy(packed.tables).long().to(device)
        keys = torch.arange(there.shape[1] * BLOCK, device=device)
        ends = torch.from_numpy(packed.context).to(device)[:, None]
        found["gathered"] = partial(gathered, there, (keys <= ends)[:, None, None], pools, q)
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--device", default="cpu", choices=list(SHAPES))
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=20)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    dtype, device = getattr(torch, args.dtype), args.device
    heads, kv_heads, width = SHAPES[device]
    # What one thread takes is told by its own clock, whatever else the machine does.
    clock = time.thread_time if args.threads == 1 else time.perf_counter
    name = torch.cuda.get_device_name() if device == "cuda" else f"{args.threads} threads"
    print(f"{args.dtype}, {name}, ms per layer, median (least) of {args.rounds}")
    for prefix in (2048, 8192, 32768):
        packed, num_blocks = step(prefix, args.requests)
        made = partial(torch.randn, device=device, dtype=dtype)
        pools = [made(num_blocks, BLOCK, kv_heads, width) for _ in range(2)]
        q = made(args.requests, heads, width)
        new = [made(args.requests, kv_heads, width) for _ in range(2)]
        found = ways(device, packed, pools, q, new)
        times = {name: [] for name in found}
        for _ in range(args.rounds + 1):
            results = []
            for name, run in found.items():
                taken, result = seconds(device, clock, run)
                times[name].append(taken * 1e3)
                results.append(result)
        for other in results[1:]:
            torch.testing.assert_close(results[0], other, rtol=1e-2, atol=1e-2)
        least = {name: min(each[1:]) for name, each in times.items()}
        cells = [
            f"{n} {np.median(each[1:]):.3f} ({least[n]:.3f}, {least[n] / least['read once']:.1f} x)"
            for n, each in times.items()
        ]
        print(f"{prefix:6}  " + "  ".join(cells), flush=True)


if __name__ == "__main__":
    main()
