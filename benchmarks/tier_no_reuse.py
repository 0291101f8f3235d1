"""Cost of tiers for prompts that never come back: the same cache with and without them.

    OMP_NUM_THREADS=1 python benchmarks/tier_no_reuse.py [tokens [prompts]]

First in turn prompt by prompt, each time until all is stored. Then back to back, some prompts at a time. Then
without an end: in turn again, but nothing is ever waited for, and for the tiers no time passes while it is another
cache's turn, so that theirs is a process that never rests, behind so many prompts that no more may wait to be
copied. Prints medians of ratios to a cache without tiers, and their standard error; the control is another one
without tiers.
"""

import random
import sys
import tempfile
import threading
import time
from pathlib import Path
from statistics import median, stdev

import torch

from quire import PrefixCache
from quire.bench.hf_rows import quire_tiny
from quire.engines.tiered.offloading import PUT_OFF_SHARE
from quire.tiers import Disk, Host, TierStack
from quire.tiers.stack.lanes import Lanes

WARM_UP = 3
"""Rounds whose times do not count."""

AT_A_TIME = 4
IN_TURN = 3
"""Prompts of a run without an end for each of the other runs: they vary one by one."""

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

    turns = Turns()
    with tempfile.TemporaryDirectory(prefix="quire-bench-") as folder:
        tiers = [Host("32MiB"), Disk(Path(folder) / "kv", "128MiB")]
        with (
            TierStack(tiers, lanes=turns) as stack,
            PrefixCache(model, "32MiB", tiers=stack) as with_tiers,
        ):
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
            _generate(
                with_tiers,
                prompts(2 + int(PUT_OFF_SHARE * with_tiers.kept.num_bytes) // per_prompt),
            )
            groups = [prompts(1) for _ in range(IN_TURN * num_prompts)]
            before = stack.feeding.passed_over
            _measure("without an end", caches, groups, turns)
            passed_over = stack.feeding.passed_over - before
            print(f"of {len(groups)} prompts without an end {passed_over} were not stored")


class Turns(Lanes):
    """Threads of tiers for which no time passes when it is not their turn. Before they begin anything they look
    at the clock; there they wait."""

    def __init__(self) -> None:
        super().__init__()
        self._passed, self._since = 0.0, time.monotonic()
        self._is_on = threading.Event()
        self._is_on.set()

    def now(self) -> float:
        self._is_on.wait()
        return self._passed + time.monotonic() - self._since

    def begin(self) -> None:
        """It is their turn."""
        self._since = time.monotonic()
        self._is_on.set()

    def end(self) -> None:
        """It is their turn no more."""
        self._passed = self.now()
        self._is_on.clear()


def _measure(
    name: str,
    caches: dict[str, PrefixCache],
    groups: list[list[torch.Tensor]],
    turns: Turns | None = None,
) -> None:
    """Print what groups of prompts cost; without an end, nothing is waited for, if there are turns."""
    ratios: dict[str, list[list[float]]] = {cache: [] for cache in caches}
    order = list(caches)
    if turns is not None:
        turns.end()
    for number, group in enumerate(groups):
        random.Random(number).shuffle(order)
        taken: dict[str, tuple[float, float, float]] = {}
        for cache in order:
            if turns is None:
                taken[cache] = _generate(caches[cache], group, DRAIN_S)
                continue
            if cache == "tiers":
                turns.begin()
            taken[cache] = _generate(caches[cache], group)
            if cache == "tiers":
                turns.end()
        for cache, row in ratios.items():
            pairs = zip(taken[cache], taken["off"], strict=True)
            row.append([one / other for one, other in pairs])
    if turns is not None:
        turns.begin()
    for cache, rows in ratios.items():
        words = [
            f"{what} {median(column):.4f} ±{1.25 * stdev(column) / len(column) ** 0.5:.4f}"
            for what, column in zip(COLUMNS, zip(*rows[WARM_UP:], strict=True), strict=True)
            if turns is None or what != "stored"
        ]
        print(f"{name}, {cache:8}", *words, sep="  ")


def _generate(
    cache: PrefixCache, prompts: list[torch.Tensor], drain_s: float = 0.0
) -> tuple[float, float, float]:
    """Return seconds until the last answer, until all is stored, and of CPU time, all threads."""
    begun, cpu = time.perf_counter(), time.process_time()
    for prompt in prompts:
        cache.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
        )
    answered = time.perf_counter() - begun
    if cache.tiers is not None and drain_s:
        cache.tiers.drain(drain_s)
    return answered, time.perf_counter() - begun, time.process_time() - cpu


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
