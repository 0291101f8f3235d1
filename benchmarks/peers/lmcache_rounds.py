"""LMCache's storages a round at a time: run by `benchmarks/tiers/lmcache.py` in the peers' environment, one JSON object a line each way.

What is timed is LMCache's own: `bench_store` and `bench_load` of `lmcache bench l2`, one submit in flight.
"""

import argparse
import contextlib
import json
import sys

import torch
from lmcache.cli.commands.bench.l2_adapter_bench import data, runner
from lmcache.v1.distributed.l2_adapters import create_l2_adapter
from lmcache.v1.distributed.l2_adapters.config import parse_args_to_l2_adapters_config

PAGE_BYTES = 4096


class Storage:
    """An adapter, memory for the blocks of a round twice over, and the keys that it was given last."""

    def __init__(self, settings, block_bytes, calls, keys_per_call):
        self._block_bytes, self._calls, self._per_call = block_bytes, calls, keys_per_call
        self._count = calls * keys_per_call
        memory = data.make_aligned_tensor(2 * self._count * block_bytes, PAGE_BYTES)
        asked = argparse.Namespace(l2_adapter=[json.dumps(settings)])
        (config,) = parse_args_to_l2_adapters_config(asked).adapters
        described = data.create_l1_memory_desc(memory, align_bytes=PAGE_BYTES)
        self._adapter = create_l2_adapter(config, l1_memory_desc=described)
        self._sources, self._targets = (
            data.make_memory_objects(memory, self._count, block_bytes, half * len(memory) // 2)
            for half in range(2)
        )
        noise = torch.randint(0, 256, (len(memory) // 2,), dtype=torch.uint8)
        memory[: len(noise)] = noise
        self._round = 0
        self._keys = []

    def store(self):
        """Store all blocks under new keys; return the seconds."""
        self._round += 1
        self._keys = data.make_object_keys(self._count, key_offset=self._round * self._count)
        return self._timed(runner.bench_store, self._sources)

    def load(self):
        """Load all blocks of the last `store`; return the seconds. Fails unless they are the same."""
        seconds = self._timed(runner.bench_load, self._targets)
        pairs = zip(self._sources, self._targets, strict=True)
        if not all(torch.equal(one.raw_data, other.raw_data) for one, other in pairs):
            raise RuntimeError("other bytes were loaded than were stored")
        return seconds

    def forget(self):
        """Delete the blocks of the last `store`."""
        self._adapter.delete(self._keys)
        return 0.0

    def close(self):
        """Close the adapter."""
        self._adapter.close()
        return 0.0

    def _timed(self, bench, objects):
        def batch(each):
            return lambda number: [each[number * self._per_call : (number + 1) * self._per_call]]

        shape = (self._adapter, 1, self._per_call, self._block_bytes, self._calls)
        result = bench(*shape, batch(self._keys), batch(objects), lambda _: None)
        if sum(result.success_counts) != self._count:
            raise RuntimeError(f"{sum(result.success_counts)} of {self._count} blocks")
        return sum(result.round_durations)


def main():
    """Obey until the input ends."""
    answers, storage = sys.stdout, None
    with contextlib.redirect_stdout(sys.stderr):
        for line in sys.stdin:
            order = json.loads(line)
            try:
                if order["do"] == "open":
                    storage, seconds = Storage(**order["with"]), 0.0
                else:
                    seconds = getattr(storage, order["do"])()
                answer = {"seconds": seconds}
            except Exception as error:  # noqa: BLE001 - the other end says it
                answer = {"error": f"{type(error).__name__}: {error}"}
            print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
