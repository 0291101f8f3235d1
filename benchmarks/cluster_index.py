"""The cluster's index at size, beside Dynamo's: memory, events applied per second, lookups.

    python benchmarks/cluster_index.py [--blocks 1000000] [--replicas 16] [--dynamo PYTHON]

Prompts of 8,192 tokens that share nothing are told by every replica, in events of 64 blocks of 16; for quire each replica has
hashes of its own, for Dynamo's index, which refuses that ("failed to find parent block"), all have the same.
Each index has a process of its own and gets the same events as bytes: quire's as engines publish them, Dynamo's as its Python
binding reads them (JSON, tokens hashed beforehand). PYTHON is an interpreter with `ai-dynamo-runtime`: another environment will do.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from array import array
from pathlib import Path

BLOCK, PROMPT, EVENT = 16, 512, 64  # tokens per block; blocks per prompt and per event
KEPT, LOOKUPS = 256, 4000


class Quire:
    """`ClusterIndex`, by its public interface."""

    has_own_hashes = True

    def __init__(self, blocks):
        import numpy as np

        from quire.exchange.wire import EventBatch, StoredEvent, decode_batch, encode_batch
        from quire_router.index import ClusterIndex

        self._batch, self._stored, self._encode = EventBatch, StoredEvent, encode_batch
        self._decode, self._array = decode_batch, np.array
        self._index = ClusterIndex(blocks)

    def event(self, number, hashes, parent, tokens):
        event = self._stored(hashes, parent, tokens, BLOCK, None, "GPU", None)
        return self._encode(self._batch(0.0, [event]))

    def apply(self, replica, event):
        self._index.apply(f"http://replica-{replica}", self._decode(event).events)

    def prompt(self, tokens):
        return self._array(tokens, "int32")

    def lookup(self, prompt):
        return self._index.lookup(prompt).held

    def tokens(self, found):
        return [device for device, _, _ in found.values()]


class Dynamo:
    """`RadixTree` of Dynamo's runtime, in Rust."""

    has_own_hashes = False

    def __init__(self, blocks):
        from dynamo.llm import RadixTree, compute_block_hash_for_seq

        self._tree, self._hashes = RadixTree(), compute_block_hash_for_seq

    def event(self, number, hashes, parent, tokens):
        pairs = zip(hashes, self._hashes(tokens, BLOCK), strict=True)
        blocks = [{"block_hash": name, "tokens_hash": digest} for name, digest in pairs]
        stored = {"parent_hash": parent, "blocks": blocks}
        return json.dumps({"event_id": number, "data": {"stored": stored}}).encode()

    def apply(self, replica, event):
        self._tree.apply_event(replica, event)

    def prompt(self, tokens):
        return tokens

    def lookup(self, prompt):
        return self._tree.find_matches(self._hashes(prompt, BLOCK))

    def tokens(self, found):
        return [blocks * BLOCK for blocks in found.scores.values()]


def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def measure(name, blocks, replicas):
    """Fill an index and ask it; return figures by name."""
    index = {"quire": Quire, "dynamo": Dynamo}[name](blocks)
    empty, rng, prompts, applied_s, number = resident(), random.Random(0), [], 0.0, 0
    for first in range(0, blocks, PROMPT):
        count = min(PROMPT, blocks - first)
        tokens = array("H", rng.randbytes(2 * count * BLOCK)).tolist()
        if count == PROMPT and len(prompts) < KEPT:
            prompts.append(index.prompt(tokens))
        hashes = []
        for replica in range(replicas):
            if index.has_own_hashes or not hashes:
                hashes = array("Q", rng.randbytes(8 * count)).tolist()
            events = []
            for at in range(0, count, EVENT):
                part = tokens[at * BLOCK : (at + EVENT) * BLOCK]
                parent = hashes[at - 1] if at else None
                events.append(index.event(number, hashes[at : at + EVENT], parent, part))
                number += 1
            begun = time.process_time()
            for event in events:
                index.apply(replica, event)
            applied_s += time.process_time() - begun
    times = []
    for at in range(LOOKUPS):
        prompt = prompts[at * 97 % len(prompts)]
        begun = time.perf_counter()
        found = index.lookup(prompt)
        times.append((time.perf_counter() - begun) * 1e6)
        assert index.tokens(found) == [PROMPT * BLOCK] * replicas
    return {
        "resident, empty (MB)": empty / 1e6,
        "resident, full (MB)": resident() / 1e6,
        "blocks told per CPU second": blocks * replicas / applied_s,
        f"events of {EVENT} blocks per CPU second": number / applied_s,
        "lookup of 8,192 tokens, best (us)": min(times),
        "median (us)": statistics.median(times),
        "p99 (us)": statistics.quantiles(times, n=100)[98],
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--blocks", type=int, default=1_000_000)
    parser.add_argument("--replicas", type=int, default=16)
    parser.add_argument("--dynamo", default=sys.executable, metavar="PYTHON")
    parser.add_argument("--only", choices=("quire", "dynamo"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.only:
        print(json.dumps(measure(options.only, options.blocks, options.replicas)))
        return
    columns = {}
    for name, python in {"quire": sys.executable, "dynamo": options.dynamo}.items():
        asked = subprocess.run(
            [python, "-c", "import dynamo.llm"], check=False, capture_output=True
        )
        if name == "dynamo" and asked.returncode:
            print(
                "Dynamo is not there: pip install ai-dynamo-runtime==1.6.1, anywhere; --dynamo PYTHON"
            )
            continue
        command = [python, __file__, "--only", name, "--blocks", str(options.blocks)]
        command += ["--replicas", str(options.replicas)]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        columns[name] = json.loads(done.stdout)
    print(f"{options.blocks:,} blocks, each on {options.replicas} replicas\n")
    print("".join([f"{'':40}", *(f"{name:>12}" for name in columns)]))
    for row in columns["quire"]:
        print("".join([f"{row:40}", *(f"{figures[row]:12,.0f}" for figures in columns.values())]))


if __name__ == "__main__":
    main()
