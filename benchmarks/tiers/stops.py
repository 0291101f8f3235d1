"""Cost to requests of a tier that hangs, refuses or is far away, end to end with quire-tiny.

    OMP_NUM_THREADS=1 python benchmarks/tiers/stops.py [--tokens 512,1024] [--rtt 0,2,8,50] [--prompts 20] [--json]

Milliseconds to the first token, a cache with the tier and one without any in turn; greedy tokens of both are compared.
Needs redis-server and moto.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

from quire.bench.hf_rows import quire_tiny
from quire.bench.proxy import DelayingProxy
from quire.bench.timing import Row
from quire.engines.hf import PrefixCache
from quire.engines.tiered.opening import open_stack
from quire.tiers.stack.stack import TierStack

sys.path.append(str(Path(__file__).parents[2] / "tests" / "tiers"))
sys.path.append(str(Path(__file__).parents[2] / "tests"))

from s3_server import Front, S3Server, hanging, overloaded
from servers import RedisServer

WARM_UPS = 5
ROUNDS, FOLLOWING = 4, 6
POOL = "64MiB"
FIRST_SHARE, FIRST_MS, NEXT_SHARE = 1.5, 50.0, 1.1
"""The first request after a fault may take so many times computing and so much more; the following, so many times."""

LOOKUP_MS = 250.0
"""And the first of a process so much more (`lookup_timeout_s`): what computing takes is not known before it."""


@dataclass
class Place:
    """A tier, by its line, and what breaks it: entered, it is broken."""

    name: str
    line: str
    broken: Callable[[], Any]
    starts_broken: bool = False


def main(arguments: list[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--tokens", default="512,1024")
    parser.add_argument("--rtt", default="0,2,8,50")
    parser.add_argument("--prompts", type=int, default=20)
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args(arguments)
    logging.getLogger("quire").setLevel(logging.ERROR)
    rows: list[Row] = []
    with servers() as (redis, front):
        runs = Runs(quire_tiny(), asked.prompts)
        for num_tokens in map(int, asked.tokens.split(",")):
            for place in places(redis, front):
                rows.append(runs.fault(place, num_tokens))
                print(rows[-1], file=sys.stderr)
            for rtt_ms in map(float, asked.rtt.split(",")):
                rows.append(runs.distance(redis, rtt_ms, num_tokens))
                print(rows[-1], file=sys.stderr)
    print(json.dumps(rows, indent=2) if asked.json else table(rows))


@contextmanager
def servers() -> Generator[tuple[RedisServer, Front]]:
    """Run a Redis, and an object store behind a front that fails when told."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as opened:
        redis = RedisServer(Path(folder))
        opened.callback(redis.stop)
        store = S3Server(f"{folder}/moto.log")
        opened.callback(store.close)
        front = Front(store.port)
        opened.callback(front.close)
        yield redis, front


def places(redis: RedisServer, front: Front) -> list[Place]:
    """Return the tiers and how each breaks."""
    words = f"endpoint={front.url}&access_key_id=test&secret_access_key=test&region=us-east-1"
    bucket = f"s3://quire/{time.monotonic_ns()}?{words}"
    return [
        Place("Redis stops (SIGSTOP)", redis.url, redis.hanging),
        Place("Redis is gone", redis.url, redis.gone),
        Place("Redis is down at start", redis.url, redis.gone, starts_broken=True),
        Place("Redis hangs at start", redis.url, redis.hanging, starts_broken=True),
        Place("a store answers 503", bucket, lambda: front.failing(overloaded)),
        Place("a store hangs", bucket, lambda: front.failing(hanging)),
        Place("a store answers 503 from the start", bucket, lambda: front.failing(overloaded), starts_broken=True),
    ]  # fmt: skip


class Runs:
    """Requests to one model, with a tier and without one in turn."""

    def __init__(self, model: Any, num_prompts: int) -> None:
        model.generation_config.eos_token_id = None
        self._model = model
        self._num_prompts = num_prompts
        self._random = torch.Generator().manual_seed(0)

    def fault(self, place: Place, num_tokens: int) -> Row:
        """Return what requests of stored prompts take from the moment on at which a tier breaks, in several rounds."""
        texts = self._stored(place.line, num_tokens, ROUNDS * (WARM_UPS + FOLLOWING))
        alone_ms: list[float] = []
        first_ms: list[float] = []
        ratios: list[float] = []
        same = True
        for start in range(0, len(texts), WARM_UPS + FOLLOWING):
            warm = [*self._prompts(num_tokens, 3), *texts[start : start + WARM_UPS]]
            with ExitStack() as opened:
                if place.starts_broken:
                    opened.enter_context(place.broken())
                stack = opened.enter_context(open_stack([place.line], {"read_only": True}))
                caches = self._caches(stack)
                if not place.starts_broken:
                    self._in_turn(caches, warm)
                    opened.enter_context(place.broken())
                some = texts[start + WARM_UPS : start + WARM_UPS + FOLLOWING]
                took_ms, is_same = self._in_turn(caches, some)
            same &= is_same
            first_ms.append(took_ms["tier"][0])
            alone_ms += took_ms["alone"]
            ratios += _ratios(took_ms)[1:]
        most_ms = FIRST_SHARE * median(alone_ms) + FIRST_MS + place.starts_broken * LOOKUP_MS
        return {
            "what": place.name,
            "tokens": num_tokens,
            "computed_ms": median(alone_ms),
            "first_ms": median(first_ms),
            "worst_first_ms": max(first_ms),
            "following_ratio": median(ratios),
            "same_tokens": "yes" if same else "NO",
            "holds": _yes(max(first_ms) <= most_ms and median(ratios) <= NEXT_SHARE),
        }

    def distance(self, redis: RedisServer, rtt_ms: float, num_tokens: int) -> Row:
        """Return what hits and misses take over a link of this round trip, and how much of the hits was loaded."""
        with DelayingProxy(("127.0.0.1", redis.port), rtt_ms / 1e3) as proxy:
            line = f"redis://127.0.0.1:{proxy.port}"
            hits = self._stored(line, num_tokens, WARM_UPS + self._num_prompts)
            with open_stack([line], {"read_only": True}) as stack:
                caches = self._caches(stack)
                hit_ms, same = self._in_turn(caches, hits)
                loads = stack.stats().loads
                loaded = caches["tier"].last.tier_tokens.get("redis", 0)
                miss_ms, _ = self._in_turn(caches, self._prompts(num_tokens, len(hits)))
        ratios = [median(_ratios(took)[WARM_UPS:]) for took in (hit_ms, miss_ms)]
        return {
            "what": f"{rtt_ms:g} ms away",
            "tokens": num_tokens,
            "computed_ms": median(hit_ms["alone"]),
            "first_ms": hit_ms["tier"][0],
            "hit_ms": median(hit_ms["tier"][WARM_UPS:]),
            "hit_ratio": ratios[0],
            "miss_ratio": ratios[1],
            "loaded_tokens": loaded,
            "given_up": loads.get("timeout", 0),
            "same_tokens": "yes" if same else "NO",
            "holds": _yes(max(ratios) <= NEXT_SHARE and not loads.get("timeout", 0)),
        }

    def _caches(self, stack: TierStack) -> dict[str, PrefixCache]:
        """Return a cache with the tier and one without, which know by now what computing takes."""
        return {
            "tier": PrefixCache(self._model, POOL, tiers=stack),
            "alone": PrefixCache(self._model, POOL),
        }

    def _in_turn(
        self, caches: dict[str, PrefixCache], texts: Sequence[torch.Tensor]
    ) -> tuple[dict[str, list[float]], bool]:
        """Return the milliseconds of each text in each cache, and whether the tokens are the same."""
        took_ms: dict[str, list[float]] = {name: [] for name in caches}
        same = True
        for number, ids in enumerate(texts):
            outputs: list[torch.Tensor] = []
            for name in list(caches)[:: 1 - 2 * (number % 2)]:
                begun_s = time.perf_counter()
                outputs.append(_one_token(caches[name], ids))
                took_ms[name].append((time.perf_counter() - begun_s) * 1e3)
            same &= torch.equal(*outputs)
        return took_ms, same

    def _stored(self, line: str, num_tokens: int, count: int) -> list[torch.Tensor]:
        """Store prompts as another process would have; return them."""
        texts = self._prompts(num_tokens, count)
        settings = {"busy_share": 1.0, "close_timeout_s": 60.0}
        with (
            open_stack([line], settings) as stack,
            PrefixCache(self._model, POOL, tiers=stack) as cache,
        ):
            for ids in texts:
                _one_token(cache, ids)
        return texts

    def _prompts(self, num_tokens: int, count: int) -> list[torch.Tensor]:
        """Return texts that have nothing in common."""
        return [
            torch.randint(10, 250, (1, num_tokens), generator=self._random) for _ in range(count)
        ]


def _one_token(cache: PrefixCache, ids: torch.Tensor) -> torch.Tensor:
    return cache.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=1, do_sample=False, pad_token_id=0
    )


def _ratios(took_ms: dict[str, list[float]]) -> list[float]:
    return [mine / alone for mine, alone in zip(*took_ms.values(), strict=True)]


def _yes(holds: bool) -> str:
    return "yes" if holds else "NO"


def table(rows: Sequence[Row]) -> str:
    """Return two tables in Markdown: of faults, and of distances."""
    faults = [row for row in rows if "worst_first_ms" in row]
    away = [row for row in rows if "hit_ms" in row]
    return "\n\n".join(_markdown(each) for each in (faults, away) if each)


def _markdown(rows: Sequence[Row]) -> str:
    lines = ["| " + " | ".join(key.replace("_", " ") for key in rows[0]) + " |"]
    lines.append("|---" * len(rows[0]) + "|")
    for row in rows:
        cells = [
            f"{value:.{2 if 'ratio' in key else 0}f}" if isinstance(value, float) else str(value)
            for key, value in row.items()
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
