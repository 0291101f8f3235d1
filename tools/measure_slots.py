"""Measure `SlotCache`: the table in docs/slots.md. Medians of CPU time, microseconds.

python tools/measure_slots.py
"""

import statistics
import sys
import time
from collections.abc import Callable

import numpy as np

from quire.slots import SlotCache, check

REPEATS, CALLS = 9, 200


def main() -> None:
    """Print one line per operation, for two sizes of cache."""
    for num_slots, max_tokens in ((64, 32_768), (256, 8_192)):
        sys.stdout.write(f"{num_slots} slots of {max_tokens:,} tokens\n")
        for name, value in measure(num_slots, max_tokens).items():
            sys.stdout.write(f"  {name:32}{value:8.1f} us\n")


def measure(num_slots: int, max_tokens: int) -> dict[str, float]:
    """Return the time of each operation on slots that share all but their last 1,000 to 2,000 tokens."""
    cache = SlotCache(num_slots, max_tokens)
    common = np.arange(max_tokens, dtype=np.int32)
    prompts: list[np.ndarray] = []
    for number in range(1, num_slots):
        prompt = common.copy()
        prompt[max_tokens - 2_000 + 1_000 * number // num_slots :] += 100_000 * number
        prompts.append(prompt)
    handles = [cache.open(prompt) for prompt in prompts]
    cache.take_copies()
    for handle, prompt in zip(handles, prompts, strict=True):
        cache.commit(handle, prompt[handle.num_cached :])
    for handle in handles:
        cache.close(handle)
    asked = prompts[num_slots // 2]
    held, key = bytearray(asked.tobytes()), asked.data.cast("B")
    times = {
        "find": each(lambda: cache.find(asked)),
        "open and close": each(lambda: cache.close(cache.open(asked))),
        "allocate and close": each(lambda: cache.close(cache.allocate())),
        "comparing the bytes alone": each(lambda: held.startswith(key)),
    }
    handle = cache.allocate()
    cache.commit(handle, common[:1_000])
    token = np.array([5], dtype=np.int32)
    times["commit of one token"] = each(lambda: cache.commit(handle, token))
    check(cache)
    return times


def each(call: Callable[[], object]) -> float:
    """Return the median time of one call, in microseconds."""
    times: list[float] = []
    for _ in range(REPEATS):
        started = time.process_time()
        for _ in range(CALLS):
            call()
        times.append((time.process_time() - started) / CALLS * 1e6)
    return statistics.median(times)


if __name__ == "__main__":
    main()
