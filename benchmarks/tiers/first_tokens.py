"""The first token from a tier, as the cost gate decides, and computed; and what tiers cost where nothing comes back.

    OMP_NUM_THREADS=1 python benchmarks/tiers/first_tokens.py [--kinds host,disk,redis,far] [--prefixes 16,512,4096]
                                                              [--rounds 7] [--report crossover.svg] [--json]

Wall time, medians of rounds in turn, on quire-tiny; nothing of the prefix is on the device.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch
from crossover import crossover
from redis_here import redis_server

from quire import ops
from quire.bench.hf_rows import Stamp, quire_tiny
from quire.bench.tier_rows import Row
from quire.engines.hf import PrefixCache
from quire.engines.tiered.offloading import PUT_OFF_SHARE
from quire.errors import TierError
from quire.tiers.base import Tier
from quire.tiers.disk import Disk
from quire.tiers.faults import FaultPlan, Faulty
from quire.tiers.files import Files
from quire.tiers.host import Host
from quire.tiers.stack.settings import StackSettings
from quire.tiers.stack.stack import TierStack

TIERS = ("host", "disk", "files", "redis", "far")
"""The tiers that a first token can come from here; "far" is memory behind a slow link."""

PREFIXES = "16,32,64,128,256,512,1024,2048,4096"
SUFFIX_TOKENS = 16
POOL, TIER = "256MiB", "1GiB"
FAR = FaultPlan(latency_s=0.02, bandwidth=100e6)
"""A tier that is far away: 20 ms on average and 100 MB/s, drawn from a seed."""

COLD_TOKENS, COLD_NEW, COLD_PROMPTS = 512, 32, 8
COLD_POOL = "32MiB"
DRAIN_S = 30.0


@dataclass
class Timings:
    """Seconds to the first token, per way, round by round; whether the tokens were those of computing."""

    ttft_s: dict[str, list[float]] = field(default_factory=dict[str, list[float]])
    same: bool = True


def main(arguments: list[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--kinds", default=",".join(TIERS))
    parser.add_argument("--prefixes", default=PREFIXES)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--path", type=Path)
    parser.add_argument("--report", type=Path)
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args(arguments)
    measured = rows(asked, quire_tiny())
    if asked.report is not None:
        asked.report.write_text(crossover(measured), "utf-8")
    print(json.dumps(measured, indent=2) if asked.json else table(measured))


def rows(asked: argparse.Namespace, model: Any) -> list[Row]:
    """Return a `ttft` row per tier and prefix length, and a `no_reuse` row; or a row with the `reason`.

    `ttft`: `recompute_ms` without tiers, `hit_ms` from the tier whatever it costs (the gate is off), `gated_ms` as
    the gate decides, from estimates that it learned in this run; ratios to recomputing are medians over rounds, below
    1 is faster. The device holds nothing at the start of each call.
    `no_reuse`: prompts that were never seen, one after the other, with host and disk tiers, against none.
    """
    model.generation_config.eos_token_id = None
    measured: list[Row] = []
    for name in asked.kinds.split(","):
        with tempfile.TemporaryDirectory(prefix="quire-bench-", dir=asked.path) as folder:
            try:
                with _bench(model, name, Path(folder)) as bench:
                    for length in map(int, asked.prefixes.split(",")):
                        print(f"{name}, {length} tokens", file=sys.stderr)
                        measured.append(bench.row(length, asked.rounds))
            except TierError as error:
                measured.append({"name": "ttft", "tier": name, "reason": str(error)})
    with tempfile.TemporaryDirectory(prefix="quire-bench-", dir=asked.path) as folder:
        print("traffic without reuse", file=sys.stderr)
        measured.append(no_reuse(model, Path(folder), asked.rounds + 2))
    return measured


class Bench:
    """One tier twice, behind a cache without the gate and behind one with it, and a cache without tiers."""

    def __init__(self, name: str, caches: dict[str, PrefixCache]) -> None:
        self._name = name
        self._caches = caches
        self._random = torch.Generator().manual_seed(0)

    def row(self, length: int, rounds: int) -> Row:
        """Measure one prefix length. The rounds before those that count teach the gate."""
        prefix = _draw(length, self._random)
        for cache in self._caches.values():
            _first_token(cache, torch.cat([prefix, _draw(SUFFIX_TOKENS, self._random)], 1))
            if cache.tiers is not None:
                cache.tiers.drain(DRAIN_S)
        taken = Timings()
        for number in range(2 + rounds):
            prompt = torch.cat([prefix, _draw(SUFFIX_TOKENS, self._random)], 1)
            ways = list(self._caches)
            outputs: list[list[int]] = []
            for way in ways if number % 2 else reversed(ways):
                cache = self._caches[way]
                ops.clear(cache.manager)
                seconds, tokens = _first_token(cache, prompt)
                outputs.append(tokens)
                if cache.tiers is not None:
                    cache.tiers.drain(DRAIN_S)
                if number >= 2:
                    taken.ttft_s.setdefault(way, []).append(seconds)
            taken.same &= outputs.count(outputs[0]) == len(outputs)
        return self._as_row(length, taken)

    def _as_row(self, length: int, taken: Timings) -> Row:
        row: Row = {"name": "ttft", "tier": self._name, "prefix": length}
        for way, seconds in taken.ttft_s.items():
            row[f"{way}_ms"] = median(seconds) * 1e3
        for way in ("hit", "gated"):
            turns = zip(taken.ttft_s[way], taken.ttft_s["recompute"], strict=True)
            row[f"{way}_ratio"] = median(mine / plain for mine, plain in turns)
        gated = self._caches["gated"].last
        row["gated_tokens"] = sum(gated.tier_tokens.values())
        return row | {"same_tokens": "yes" if taken.same else "NO"}


def no_reuse(model: Any, folder: Path, rounds: int) -> Row:
    """Return the row of traffic that never comes back and never rests: prompts with and without tiers.

    They are timed behind so many others that no more may wait to be copied. `on_ratio` and `cpu_ratio` are
    medians over rounds of wall and of CPU time, all threads counted; `stored_share` of the prompts were stored. The
    host tier is small, so that it is full, and evicts, from the first round on that counts.
    """
    random = torch.Generator().manual_seed(1)
    off = PrefixCache(model, COLD_POOL)
    per_prompt = off.layout.bytes_per_block * COLD_TOKENS // off.layout.block_size
    before = 2 + int(PUT_OFF_SHARE * off.kept.num_bytes) // per_prompt
    taken: dict[str, list[tuple[float, float]]] = {"off": [], "on": []}
    with PrefixCache(
        model, COLD_POOL, tiers=[Host(COLD_POOL), Disk(folder / "kv", "128MiB")]
    ) as on:
        for number in range(3 + rounds):
            prompts = [_draw(COLD_TOKENS, random) for _ in range(before + COLD_PROMPTS)]
            ways = (("off", off), ("on", on))
            for way, cache in ways if number % 2 else reversed(ways):
                begun = cpu = 0.0
                for index, prompt in enumerate(prompts):
                    if index == before:
                        begun, cpu = time.perf_counter(), time.process_time()
                    _generate(cache, prompt, COLD_NEW, None)
                if number >= 3:
                    spent = time.perf_counter() - begun, time.process_time() - cpu
                    taken[way].append(spent)
                if cache.tiers is not None:
                    cache.tiers.drain(DRAIN_S)
        assert on.tiers is not None
        passed_over = on.tiers.stats().passed_over
    pairs = list(zip(taken["on"], taken["off"], strict=True))
    return {
        "name": "no_reuse",
        "tier": "host+disk",
        "prefix": COLD_TOKENS,
        "off_ms": median(wall for wall, _ in taken["off"]) * 1e3 / COLD_PROMPTS,
        "on_ms": median(wall for wall, _ in taken["on"]) * 1e3 / COLD_PROMPTS,
        "on_ratio": median(on[0] / off[0] for on, off in pairs),
        "cpu_ratio": median(on[1] / off[1] for on, off in pairs),
        "stored_share": 1 - passed_over / ((3 + rounds) * (before + COLD_PROMPTS)),
    }


@contextmanager
def _bench(model: Any, name: str, folder: Path) -> Generator[Bench]:
    with ExitStack() as opened:
        caches = {"recompute": PrefixCache(model, POOL)}
        url = ""
        if name == "redis":
            url = f"redis://127.0.0.1:{opened.enter_context(redis_server())}"
        for way in ("hit", "gated"):
            tier = _open(name, folder / way, url, way)
            settings = StackSettings(gate=way == "gated", lookup_timeout_s=1.0)
            stack = opened.enter_context(TierStack([tier], settings))
            caches[way] = opened.enter_context(PrefixCache(model, POOL, tiers=stack))
        yield Bench(name, caches)


def _open(name: str, folder: Path, url: str, prefix: str) -> Tier:
    match name:
        case "host":
            return Host(TIER)
        case "disk":
            return Disk(folder, TIER)
        case "files":
            return Files(folder)
        case "redis":
            from quire.tiers.redis.tier import Redis

            return Redis(url, prefix=prefix)
        case _:
            return Faulty(Host(TIER), FAR, seed=0)


def _first_token(cache: PrefixCache, ids: torch.Tensor) -> tuple[float, list[int]]:
    """Return the seconds to the first new token, and the new tokens."""
    stamp = Stamp()
    output = _generate(cache, ids, 2, stamp)
    return stamp.first_at - stamp.started, output[0, ids.shape[1] :].tolist()


def _generate(cache: PrefixCache, ids: torch.Tensor, num_new: int, stamp: Stamp | None) -> Any:
    words: dict[str, Any] = {} if stamp is None else {"streamer": stamp}
    return cache.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=num_new,
        do_sample=False,
        pad_token_id=0,
        **words,
    )


def _draw(num_tokens: int, random: torch.Generator) -> torch.Tensor:
    return torch.randint(1, 256, (1, num_tokens), generator=random)


def table(rows: list[Row]) -> str:
    """Return a table of first tokens in Markdown, and what tiers cost where nothing comes back."""
    head = (
        "tier",
        "prefix",
        "computed ms",
        "from the tier",
        "ratio",
        "with the gate",
        "ratio",
        "tokens taken",
    )
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for row in rows:
        if "recompute_ms" in row:
            cells = [str(row["tier"]), f"{row['prefix']:,}", f"{row['recompute_ms']:.1f}"]
            for way in ("hit", "gated"):
                cells += [f"{row[f'{way}_ms']:.1f}", f"{row[f'{way}_ratio']:.2f}"]
            lines.append("| " + " | ".join([*cells, f"{row['gated_tokens']:,.0f}"]) + " |")
        elif "reason" in row:
            lines.append(f"{row['tier']}: {row['reason']}")
        else:
            lines.append(
                f"prompts of {row['prefix']} tokens that never come back, {row['tier']}: {row['on_ms']:.0f} ms with tiers, "
                f"{row['off_ms']:.0f} without: {row['on_ratio']:.3f} of the time, {row['cpu_ratio']:.3f} of the CPU time; "
                f"{row['stored_share']:.0%} of them were stored"
            )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
