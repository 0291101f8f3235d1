"""What tiers cost prompts that never come back: the same cache with and without them.

    OMP_NUM_THREADS=1 python benchmarks/tier_no_reuse.py [tokens [prompts]]

First in turn prompt by prompt, each time until all is stored. Then back to back, some prompts at a time, and
then without an end: behind so many prompts that no more stores can be put off. Prints medians of ratios to a
cache without tiers, and their standard error; the control is another one without tiers.
"""

import random
import sys
import tempfile
import time
from pathlib import Path
from statistics import median, stdev

import torch

from quire import PrefixCache
from quire.bench.tier_ttft import quire_tiny
from quire.engines.tiered.beside import PUT_OFF_SHARE
from quire.tiers import Disk, Host

WARM_UP = 3
"""Rounds whose times do not count."""

AT_A_TIME = 4
STEADY = 8
"""Prompts at a time in a run without an end."""

NEW_TOKENS = 32
DRAIN_S = 10.0
COLUMNS = ("answer", "stored", "cpu")


def main(num_tokens: int = 512, num_prompts: int = 84) -> None:
    """Measure and print."""
    model = quire_tiny()
    model.generation_config.eos_token_id = None
    generator = torch.Generator().manual_seed(1)

    def prompts(count: int) -> list[torch.Tensor]:
        shape = (1, num_tokens)
        return [
            torch.randint(5, model.config.vocab_size, shape, generator=generator)
            for _ in range(count)
        ]

    with tempfile.TemporaryDirectory(prefix="quire-bench-") as folder:
        tiers = [Host("32MiB"), Disk(Path(folder) / "kv", "128MiB")]
        with PrefixCache(model, "32MiB", tiers=tiers) as with_tiers:
            caches = {
                "off": PrefixCache(model, "32MiB"),
                "control": PrefixCache(model, "32MiB"),
                "tiers": with_tiers,
            }
            _measure("in turn", caches, [prompts(1) for _ in range(num_prompts)])
            groups = [prompts(AT_A_TIME) for _ in range(num_prompts // AT_A_TIME)]
            _measure(f"{AT_A_TIME} back to back", caches, groups)
            per_prompt = (
                with_tiers.layout.bytes_per_block * num_tokens // with_tiers.layout.block_size
            )
            before = 2 + int(PUT_OFF_SHARE * with_tiers.num_bytes) // per_prompt
            groups = [prompts(before + STEADY) for _ in range(num_prompts // STEADY)]
            _measure("without an end", caches, groups, before)


def _measure(
    name: str,
    caches: dict[str, PrefixCache],
    groups: list[list[torch.Tensor]],
    before: int = 0,
) -> None:
    """Print what groups of prompts cost, without the first of each; those only come before."""
    ratios: dict[str, list[list[float]]] = {cache: [] for cache in caches}
    order = list(caches)
    for number, group in enumerate(groups):
        random.Random(number).shuffle(order)
        taken = {cache: _generate(caches[cache], group, before) for cache in order}
        for cache, row in ratios.items():
            pairs = zip(taken[cache], taken["off"], strict=True)
            row.append([one / other for one, other in pairs])
    for cache, rows in ratios.items():
        words = [
            f"{what} {median(column):.4f} ±{1.25 * stdev(column) / len(column) ** 0.5:.4f}"
            for what, column in zip(COLUMNS, zip(*rows[WARM_UP:], strict=True), strict=True)
        ]
        # What is stored behind an end says nothing about a run without one.
        print(f"{name}, {cache:8}", *words[: 1 if before else None], sep="  ")


def _generate(
    cache: PrefixCache, prompts: list[torch.Tensor], before: int
) -> tuple[float, float, float]:
    """Return seconds until the last answer, until all is stored, and of CPU time, all threads."""
    begun = cpu = 0.0
    for number, prompt in enumerate(prompts):
        if number == before:
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
