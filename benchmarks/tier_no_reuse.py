"""What tiers cost prompts that never come back: the same cache with and without them, in turn prompt by prompt.

    OMP_NUM_THREADS=1 python benchmarks/tier_no_reuse.py [tokens [prompts]]

Prints medians over the prompts of ratios to the cache without tiers.
"""

import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import torch

from quire import PrefixCache
from quire.bench.tier_ttft import quire_tiny
from quire.tiers import Disk, Host

WARM_UP = 10
NEW_TOKENS = 32
DRAIN_S = 10.0


def main(num_tokens: int = 512, num_prompts: int = 84) -> None:
    """Measure and print."""
    model = quire_tiny()
    model.generation_config.eos_token_id = None
    random = torch.Generator().manual_seed(1)
    ratios: dict[str, list[float]] = {"answer": [], "stored": [], "cpu": []}
    with tempfile.TemporaryDirectory(prefix="quire-bench-") as folder:
        tiers = [Host("32MiB"), Disk(Path(folder) / "kv", "128MiB")]
        with PrefixCache(model, "32MiB", tiers=tiers) as on:
            off = PrefixCache(model, "32MiB")
            for number in range(WARM_UP + num_prompts):
                prompt = torch.randint(
                    5, model.config.vocab_size, (1, num_tokens), generator=random
                )
                taken: dict[bool, tuple[float, float, float]] = {}
                for cache in (on, off) if number % 2 else (off, on):
                    taken[cache is on] = _generate(cache, prompt)
                if number >= WARM_UP:
                    pairs = zip(ratios.values(), taken[True], taken[False], strict=True)
                    for column, with_tiers, without in pairs:
                        column.append(with_tiers / without)
    for name, column in ratios.items():
        print(f"{name:7} {median(column):.4f}")


def _generate(cache: PrefixCache, prompt: torch.Tensor) -> tuple[float, float, float]:
    """Return seconds until the answer, until all is stored, and of CPU time, all threads."""
    begun, cpu = time.perf_counter(), time.process_time()
    cache.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
    )
    answered = time.perf_counter() - begun
    if cache.tiers is not None:
        cache.tiers.drain(DRAIN_S)
    return answered, time.perf_counter() - begun, time.process_time() - cpu


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
