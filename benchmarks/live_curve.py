"""What the live curve costs: two managers, one with `curve=True`, serve a trace in turn, 16 requests at a time.

    python benchmarks/live_curve.py TRACE BLOCK_SIZE [requests [rounds]]

Prompts are real tokens, `BLOCK_SIZE` for each id of the trace; the pools hold a tenth of the distinct blocks.
Prints CPU time per request without the curve, and what the curve adds; both managers plain is the control.
"""

import itertools
import sys
import time

import numpy as np

from quire.core import CacheManager
from quire.core.tokens import IntArray
from quire.sim.trace import open_trace

SHARE = 10
STEP = 16


def main(path: str, block_size: int, num_requests: int = 1500, rounds: int = 12) -> None:
    """Measure and print."""
    requests = itertools.islice(open_trace(path), num_requests)
    prompts = [request.blocks for request in requests if len(request.blocks)]
    capacity = (1 + max(int(blocks.max()) for blocks in prompts)) // SHARE
    prompts = [blocks[: capacity - 1] for blocks in prompts]
    for name, curve in (("control", False), ("curve", True)):
        taken = np.array([_round(prompts, block_size, capacity, curve, n) for n in range(rounds)])
        plain, other = np.median(taken, axis=0).sum(axis=0)
        each_us = plain / len(prompts) * 1e6
        print(f"{name:8} {each_us:.1f} us per request, {100 * (other / plain - 1):+.2f} %")


def _round(
    prompts: list[IntArray], block_size: int, capacity: int, curve: bool, number: int
) -> list[tuple[float, float]]:
    """Return CPU seconds without and with the curve for every step."""
    order = (False, True) if number // 2 % 2 else (True, False)
    managers = {
        second: CacheManager(capacity + 1, block_size, sub_block=False, curve=curve and second)
        for second in order
    }
    steps: list[tuple[float, float]] = []
    for start in range(0, len(prompts), STEP):
        tokens = [_tokens(blocks, block_size) for blocks in prompts[start : start + STEP]]
        is_even = (start // STEP + number) % 2 == 0
        seconds = {
            second: _serve(managers[second], tokens)
            for second in ((False, True) if is_even else (True, False))
        }
        steps.append((seconds[False], seconds[True]))
    return steps


def _tokens(blocks: IntArray, block_size: int) -> IntArray:
    inside = np.arange(block_size, dtype=np.int64)
    tokens = (blocks[:, None].astype(np.int64) * block_size + inside) % (2**31 - 2)
    return np.append(tokens.astype(np.int32), np.int32(2**31 - 1))


def _serve(manager: CacheManager, prompts: list[IntArray]) -> float:
    begun = time.thread_time()
    for tokens in prompts:
        seq = manager.open(tokens)
        found = seq.computed
        manager.reserve(seq, len(tokens) - found)
        if len(tokens) - 1 > found:
            manager.commit(seq, tokens[found:-1])
        manager.close(seq)
    return time.thread_time() - begun


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
