"""Small traces made in memory, and a cache of a dozen lines to compare a replay with."""

from collections import OrderedDict
from random import Random

import msgspec
import numpy as np

from quire_sim.trace.rows import TraceRequest, compress

BLOCK = 4


class ListTrace(msgspec.Struct, frozen=True):
    """A trace of given requests."""

    requests: list[TraceRequest]
    block_size: int = BLOCK
    source: str = "a test"
    format: str = "list"

    def __iter__(self):
        return iter(self.requests)


def trace_of(chains, *, tail=1, block_size=BLOCK, **columns):
    """A trace of prompts, each a list of names of blocks; `columns` hold a value per request.

    Equal names after equal prefixes get equal ids, dense, by first appearance.
    """
    ids = {}
    requests = []
    for number, chain in enumerate(chains):
        blocks = [ids.setdefault(tuple(chain[:end]), len(ids)) for end in range(1, len(chain) + 1)]
        values = {name: column[number] for name, column in columns.items()}
        requests.append(
            TraceRequest(
                row=number + 1,
                time_s=values.pop("time_s", float(number)),
                prompt_tokens=len(chain) * block_size + tail,
                output_tokens=values.pop("output_tokens", 0),
                runs=compress(np.array(blocks, np.int32)),
                **values,
            )
        )
    return ListTrace(requests, block_size)


def random_chains(seed, num_requests=60, names=3, longest=9):
    """Prompts that share prefixes often."""
    random = Random(seed)
    return [
        [random.randrange(names) for _ in range(random.randint(1, longest))]
        for _ in range(num_requests)
    ]


def lru_model(trace, capacity):
    """Blocks found per request, and blocks evicted, with least-recently-used blocks evicted."""
    cached, found, evicted = OrderedDict(), [], 0
    for request in trace:
        path = request.blocks[:capacity].tolist()
        hits = next((i for i, block in enumerate(path) if block not in cached), len(path))
        found.append(hits)
        for block in reversed(path[:hits]):
            cached.move_to_end(block)
        for _ in range(len(cached) + len(path) - hits - capacity):
            cached.popitem(last=False)
            evicted += 1
        cached.update(dict.fromkeys(path))
        for block in reversed(path):
            cached.move_to_end(block)
    return found, evicted
