"""The cost of the live curve: two managers, one with a `LiveCurve`, serve a trace in turn.

    python benchmarks/live_curve.py TRACE BLOCK_SIZE [requests [rounds]]

Up to 16 requests run at a time.

Prompts are real tokens, `BLOCK_SIZE` for each id of the trace; the pools hold a tenth of the distinct blocks.
Prints CPU time per request without the curve, and what the curve adds, of prompts alone and with the
tokens that the trace says were generated, in steps of a batch; both managers plain is the control. A trace that is
too short comes again, with other tokens.
"""

import itertools
import sys
import time
from collections.abc import Iterator
from typing import TypeAlias

import numpy as np

from quire.core import CacheManager, Sequence
from quire.core.tokens import IntArray
from quire.foresight import LiveCurve
from quire_sim.trace import open_trace

SHARE = 10
AT_ONCE = 16

Request: TypeAlias = tuple[IntArray, int]
"""The blocks of a prompt, and how many tokens were generated."""


def main(path: str, block_size: int, num_requests: int = 1500, rounds: int = 12) -> None:
    """Measure and print."""
    rows = [row for row in itertools.islice(open_trace(path), num_requests) if len(row.blocks)]
    num_blocks = 1 + max(int(row.blocks.max()) for row in rows)
    capacity = num_blocks // SHARE
    for output in (False, True):
        requests = [
            (row.blocks[: capacity // 2] + turn * num_blocks, row.output_tokens if output else 0)
            for turn in range(-(-num_requests // len(rows)))
            for row in rows
        ][:num_requests]
        groups = list(_groups(requests, block_size, capacity // 2))
        for name, curve in (("control", False), ("curve", True)):
            taken = [_round(groups, block_size, capacity, curve, n) for n in range(rounds)]
            plain, other = np.median(np.array(taken), axis=0).sum(axis=0)
            what = "prompts and outputs" if output else "prompts alone"
            each_us = plain / len(requests) * 1e6
            print(
                f"{what}, {name}: {each_us:.1f} us per request, {100 * (other / plain - 1):+.2f} %"
            )


def _groups(requests: list[Request], block_size: int, room: int) -> Iterator[list[Request]]:
    """Yield the requests that are served together: up to `AT_ONCE`, that have room."""
    group: list[Request] = []
    held = 0
    for blocks, num_generated in requests:
        needed = len(blocks) + 1 + -(-num_generated // block_size)
        if group and (len(group) == AT_ONCE or held + needed > room):
            yield group
            group, held = [], 0
        group.append((blocks, num_generated))
        held += needed
    yield group


def _round(
    groups: list[list[Request]], block_size: int, capacity: int, curve: bool, number: int
) -> list[tuple[float, float]]:
    """Return CPU seconds without and with the curve for every group."""
    order = (False, True) if number // 2 % 2 else (True, False)
    managers = {
        second: CacheManager(
            capacity + 1, block_size, sub_block=False, watchers=[LiveCurve()] * (curve and second)
        )
        for second in order
    }
    taken: list[tuple[float, float]] = []
    for at, group in enumerate(groups):
        served = [(_tokens(blocks, block_size), num_generated) for blocks, num_generated in group]
        seconds = {
            second: _serve(managers[second], served)
            for second in ((False, True) if (at + number) % 2 == 0 else (True, False))
        }
        taken.append((seconds[False], seconds[True]))
    return taken


def _tokens(blocks: IntArray, block_size: int) -> IntArray:
    inside = np.arange(block_size, dtype=np.int64)
    tokens = (blocks[:, None].astype(np.int64) * block_size + inside) % (2**31 - 2)
    return np.append(tokens.astype(np.int32), np.int32(2**31 - 1))


def _serve(manager: CacheManager, requests: list[Request]) -> float:
    begun = time.thread_time()
    running: list[tuple[int, Sequence]] = []
    for tokens, num_generated in requests:
        seq = manager.open(tokens)
        found = seq.computed
        manager.reserve(seq, len(tokens) - found)
        manager.commit(seq, tokens[found:])
        if num_generated:
            running.append((num_generated, seq))
        else:
            manager.close(seq)
    running.sort(key=lambda each: -each[0])
    generated = 0
    while running:
        batch = manager.batch([seq for _, seq in running])
        ids = np.full(len(running), 7, np.int32)
        for _ in range(running[-1][0] - generated):
            manager.reserve_step(batch)
            manager.commit_step(batch, ids)
        generated = running[-1][0]
        while running and running[-1][0] == generated:
            manager.close(running.pop()[1])
    return time.thread_time() - begun


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
