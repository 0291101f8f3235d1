"""Three replicas on Ray Serve behind each router, and the same in the simulation: hit rates and times to the first token.

    python benchmarks/replicas.py [--routers prefix,session,round-robin] [--requests 240] [--users 24] [--load-limit 2] [--json]

A made-up trace of conversations under a few system prompts is asked in its order by so many users at once, each of whom
asks the next request when an answer has ended, of `quire serve --replicas 3 --router NAME` (quire-tiny, float32, no tier),
and played through `quire_sim.serving` with the engine's own scheduler, replicas of as many blocks, and steps as long as
a server alone needs, measured first. A block of the trace is 16 tokens drawn from its id. Hit rate: tokens found, of all
prompt tokens. The bar: live and simulated within 3 points.
"""

import argparse
import asyncio
import json
import subprocess
import sys
import time
from contextlib import contextmanager
from statistics import mean, median

import httpx
import numpy as np

from quire.cli.models import load
from quire.engines.loop import Engine
from quire.routing import router_named
from quire_sim.serving import Cluster, Load, ReplicaLimits, simulate
from quire_sim.serving.arrivals import ClosedLoop
from quire_sim.workload import Workload, parts_named

BLOCK, REPLICAS = 16, 3
RUNNING, STEP_TOKENS = 64, 2048
TRAFFIC = {
    "turns": 6.0,
    "systems": 6,
    "system.mean": 320.0,
    "question.mean": 60.0,
    "answer.mean": 24.0,
}
BAR = 0.03


class Linear:
    """Steps that take as long as their tokens: `per_step` seconds, and `per_token` for each that is computed."""

    def __init__(self, per_step, per_token):
        self.per_step, self.per_token = per_step, per_token

    def prefill_s(self, new_tokens, cached_tokens):
        return self.per_step + self.per_token * new_tokens

    def step_s(self, work, contexts):
        return self.per_step + self.per_token * (sum(new for new, _ in work) + len(contexts))

    def decode_run_s(self, contexts, num_steps):
        return np.full(num_steps, self.step_s((), contexts))


def tokens_of(request):
    """Return a prompt of a request's blocks: as many tokens as it has, of the last block a part."""
    drawn = [
        np.random.default_rng(number).integers(5, 250, BLOCK) for number in request.blocks.tolist()
    ]
    rest = request.prompt_tokens - BLOCK * len(drawn)
    if rest > 0:  # what the trace has no name for comes once
        drawn.append(np.random.default_rng((1 << 32) + request.row).integers(5, 250, rest))
    return np.concatenate(drawn)[: request.prompt_tokens].tolist()


@contextmanager
def served(*words):
    """Start a server; yield its URL."""
    command = [sys.executable, "-m", "quire", "serve", "--port", "0", "--dtype", "float32", *words]
    process = subprocess.Popen([*command, "--json"], stdout=subprocess.PIPE, text=True)
    try:
        said = ""
        while not said.endswith("}\n"):
            line = process.stdout.readline()
            assert line, "the server did not begin"
            said += line
        yield json.loads(said)["url"]
    finally:
        process.terminate()
        process.wait(60)


async def ask(client, request, prompt):
    """Ask for an answer; return tokens found, and seconds to the first token and the last."""
    asked = {
        "prompt": prompt,
        "max_tokens": request.output_tokens,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "user": request.session,
    }
    began, first, last = time.perf_counter(), None, None
    async with client.stream("POST", "/v1/completions", json=asked) as answer:
        assert answer.status_code == 200, await answer.aread()
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                first = first or time.perf_counter() - began
                last = line
    usage = json.loads(last[6:])["usage"]
    assert usage["completion_tokens"] == request.output_tokens
    found = usage["prompt_tokens_details"]["cached_tokens"]
    return found, first, time.perf_counter() - began


async def play(url, requests, users):
    """Return (found, seconds to the first token, to the last) of each request, and the seconds of all."""
    prompts = [tokens_of(request) for request in requests]
    results, places = [None] * len(requests), iter(range(len(requests)))
    async with httpx.AsyncClient(base_url=url, timeout=120) as client:

        async def user():
            for at in places:
                results[at] = await ask(client, requests[at], prompts[at])

        began = time.perf_counter()
        await asyncio.gather(*(user() for _ in range(users)))
    return results, time.perf_counter() - began


def calibrated(kv_memory, requests):
    """Return the timing of a server alone, by prompts of two lengths and by decoding, one request at a time."""
    with served("--kv-memory", kv_memory) as url:
        asked = [each for each in requests if each.output_tokens >= 8][:24]
        told, _ = asyncio.run(play(url, asked, 1))
    new = np.array(
        [each.prompt_tokens - found for each, (found, _, _) in zip(asked, told, strict=True)]
    )
    first = np.array([each[1] for each in told])
    steps = np.array([each.output_tokens - 1 for each in asked])
    decoding = np.array([last - begun for _, begun, last in told])
    per_step = float(median(decoding / steps))
    slope = np.polyfit(new, first, 1)[0]
    return Linear(per_step, max(float(slope), 1e-6))


def live(router, given, requests):
    words = ("--replicas", str(REPLICAS), "--kv-memory", given.kv_memory)
    words += ("--router", router, "--load-limit", str(given.load_limit))
    with served(*words) as url:
        told, seconds = asyncio.run(play(url, requests, given.users))
    found = sum(each[0] // BLOCK * BLOCK for each in told)  # the simulation finds whole blocks
    return {
        "hit_rate": found / sum(each.prompt_tokens for each in requests),
        "ttft_ms": [1000 * each for each in (mean(t[1] for t in told), median(t[1] for t in told))],
        "requests_per_s": len(requests) / seconds,
    }


def simulated(router, given, requests, num_blocks, timing):
    limits = ReplicaLimits(num_blocks, BLOCK, "lru", STEP_TOKENS, RUNNING)
    cluster = Cluster(limits, timing, REPLICAS, scheduler="quire")
    chosen = router_named(router, load_limit=given.load_limit)
    result = simulate(cluster, Load(requests, ClosedLoop(given.users)), chosen)
    return {
        "hit_rate": result.hit_rate,
        "ttft_ms": [1000 * result.ttft_s.mean, 1000 * result.ttft_s.p50],
        "requests_per_s": result.requests_per_s,
    }


def main():
    reader = argparse.ArgumentParser()
    reader.add_argument("--routers", default="prefix,session,round-robin")
    reader.add_argument("--requests", type=int, default=240)
    reader.add_argument("--users", type=int, default=24)
    reader.add_argument("--load-limit", type=float, default=2.0)
    reader.add_argument("--kv-memory", default="32MiB")
    reader.add_argument("--seed", type=int, default=1)
    reader.add_argument("--only", choices=["live", "simulation"])
    reader.add_argument("--json", action="store_true")
    given = reader.parse_args()
    trace = Workload(parts_named("chat", TRAFFIC), num_requests=given.requests, seed=given.seed)
    requests = list(trace)
    engine = Engine(*load(dtype="float32"), kv_memory=given.kv_memory, block_size=BLOCK)
    num_blocks = engine.manager.pools[0].num_blocks
    engine.close()
    timing = Linear(0.01, 1e-4) if given.only else calibrated(given.kv_memory, requests)
    told = {
        "num_blocks": num_blocks,
        "per_step_s": timing.per_step,
        "per_token_s": timing.per_token,
    }
    for router in given.routers.split(","):
        told[router] = {}
        if given.only != "simulation":
            told[router]["live"] = live(router, given, requests)
        if given.only != "live":
            told[router]["simulated"] = simulated(router, given, requests, num_blocks, timing)
        if not given.json:
            show(router, told[router])
    if given.json:
        print(json.dumps(told, indent=2))
    else:
        print(
            f"{num_blocks} blocks each, {1e3 * timing.per_step:.1f} ms a step, {1e6 * timing.per_token:.0f} us a token"
        )


def show(router, results):
    rates = {}
    for where, each in results.items():
        average, middle = each["ttft_ms"]
        rates[where] = each["hit_rate"]
        print(
            f"{router:12} {where:10} hit rate {each['hit_rate']:6.1%}  TTFT {average:7.1f} ms mean, "
            f"{middle:7.1f} median  {each['requests_per_s']:5.2f} requests/s",
            flush=True,
        )
    if len(rates) == 2 and abs(rates["live"] - rates["simulated"]) > BAR:
        print(f"{router:12} live and simulated differ by more than {BAR:.0%}")


if __name__ == "__main__":
    main()
