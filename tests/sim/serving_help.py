"""Small requests, and a machine whose times can be worked out by hand."""

import msgspec
import numpy as np

from quire_sim.serving import Cluster, Load, ReplicaLimits, simulate
from quire_sim.trace.rows import TraceRequest, compress

BLOCK = 16


class LinearTiming:
    """A step takes 1 ms, 10 us per new token and 10 ns per token with KV: no rounding to hide in."""

    def prefill_s(self, new_tokens, cached_tokens):
        return self.step_s([(new_tokens, cached_tokens)], np.empty(0, np.int64))

    def step_s(self, chunks, contexts):
        new = sum(new for new, _ in chunks) + len(contexts)
        seen = sum(before for _, before in chunks) + int(contexts.sum())
        return 1e-3 + new * 1e-5 + seen * 1e-8

    def decode_run_s(self, contexts, num_steps):
        n = len(contexts)
        seen = int(contexts.sum()) + n * np.arange(num_steps)
        return 1e-3 + n * 1e-5 + seen * 1e-8


def request(row, time_s=0.0, prompt=100, output=10, ids=None):
    """Return a request whose blocks are its own, unless `ids` says which they are."""
    if ids is None:
        ids = np.arange(prompt // BLOCK) + 100_000 * row
    return TraceRequest(
        row=row,
        time_s=time_s,
        prompt_tokens=prompt,
        output_tokens=output,
        runs=compress(np.asarray(ids, np.int32)),
    )


def random_requests(seed, count, *, span_s=1.0, max_prompt=400, max_output=60, families=5):
    """Return requests with shared prefixes: each family is one long text, cut at random.

    Every other one has an id for its last, partial block too.
    """
    random = np.random.default_rng(seed)
    made = []
    for row, time_s in enumerate(np.sort(random.uniform(0, span_s, count)).tolist(), start=1):
        prompt = int(random.integers(1, max_prompt))
        family, shared = (
            int(random.integers(families)),
            int(random.integers(0, prompt // BLOCK + 1)),
        )
        own = (prompt + row % 2 * (BLOCK - 1)) // BLOCK - shared
        ids = [*range(family * 1000, family * 1000 + shared)]
        ids += range(1_000_000 + row * 1000, 1_000_000 + row * 1000 + own)
        made.append(request(row, time_s, prompt, int(random.integers(0, max_output)), ids))
    return made


def limits(num_blocks=1000, **changes):
    return msgspec.structs.replace(
        ReplicaLimits(num_blocks, BLOCK, max_step_tokens=256, max_sequences=16), **changes
    )


def run(requests, arrivals=None, *, router=None, objective=None, **cluster):
    """Simulate on one replica unless told otherwise; return (result, served in order of number)."""
    served = []
    settings = {"limits": limits(), "timing": LinearTiming()} | cluster
    load = Load(requests) if arrivals is None else Load(requests, arrivals)
    result = simulate(
        Cluster(**settings), load, router, objective=objective, observers=[served.append]
    )
    return result, sorted(served, key=lambda each: each.number)
