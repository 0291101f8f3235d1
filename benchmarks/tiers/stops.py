"""What a Redis that stops answering costs requests, and one that is some milliseconds away gives them, end to end.

OMP_NUM_THREADS=1 python benchmarks/tiers/stops.py
"""

import os
import signal
import subprocess
import time
from statistics import median

import torch
from transformers import AutoModelForCausalLM

from quire import PrefixCache, demo_model
from quire.bench.proxy import DelayingProxy
from quire.engines.tiered.opening import open_stack

PORT = 7393
WARM_UPS = 5


def prompts(num_tokens: int, count: int) -> list[torch.Tensor]:
    """Return texts that have nothing in common."""
    return [torch.randint(10, 250, (1, num_tokens)) for _ in range(count)]


def first_token_ms(cache: PrefixCache, ids: torch.Tensor) -> float:
    """Return the milliseconds of one new token."""
    begun_s = time.perf_counter()
    cache.generate(ids, max_new_tokens=1)
    return (time.perf_counter() - begun_s) * 1e3


def stored(model: torch.nn.Module, line: str, texts: list[torch.Tensor]) -> None:
    """Store texts as another process would have."""
    stack = open_stack([line], {"busy_share": 1.0, "close_timeout_s": 30.0})
    with stack, PrefixCache(model, "64MiB", tiers=stack) as cache:
        for ids in texts:
            first_token_ms(cache, ids)


def at_a_distance(model: torch.nn.Module, rtt_s: float, num_tokens: int) -> str:
    """Return medians of hits and misses, with the gate, without it and without a tier; all take turns."""
    hits, misses = prompts(num_tokens, 40), prompts(num_tokens, 40)
    with DelayingProxy(("127.0.0.1", PORT), rtt_s) as proxy:
        line = f"redis://127.0.0.1:{proxy.port}/0"
        stored(model, line, hits)
        stacks = {
            name: open_stack([line], {"gate": name == "gate", "read_only": True})
            for name in ("gate", "always")
        }
        caches = {name: PrefixCache(model, "64MiB", tiers=each) for name, each in stacks.items()}
        caches["computed"] = PrefixCache(model, "64MiB")
        told: list[str] = []
        for kind, texts in (("hit", hits), ("miss", misses)):
            took_ms: dict[str, list[float]] = {name: [] for name in caches}
            for turn, ids in enumerate(texts):
                names = [*caches][turn % 3 :] + [*caches][: turn % 3]
                for name in names:
                    took_ms[name].append(first_token_ms(caches[name], ids))
            told += [f"{kind} {name} {median(took_ms[name][WARM_UPS:]):.0f}" for name in caches]
        for each in (*caches.values(), *stacks.values()):
            each.close()
    return f"{rtt_s * 1e3:g} ms, {num_tokens} tokens: {', '.join(told)}"


def stopped(model: torch.nn.Module, server_id: int, num_tokens: int) -> str:
    """Return what requests take from the moment on at which the server stops."""
    line, texts = f"redis://127.0.0.1:{PORT}/0", prompts(num_tokens, 12)
    with PrefixCache(model, "64MiB") as cache:
        computing_ms = median([first_token_ms(cache, ids) for ids in prompts(num_tokens, 8)])
    stored(model, line, texts)
    with (
        open_stack([line], {"read_only": True}) as stack,
        PrefixCache(model, "64MiB", tiers=stack) as cache,
    ):
        for ids in (*prompts(num_tokens, 3), *texts[:4]):
            first_token_ms(cache, ids)
        os.kill(server_id, signal.SIGSTOP)
        try:
            after = [f"{first_token_ms(cache, ids):.0f}" for ids in texts[4:]]
        finally:
            os.kill(server_id, signal.SIGCONT)
    return f"stopped, {num_tokens} tokens: computed {computing_ms:.0f}, then {', '.join(after)}"


def main() -> None:
    """Measure and print, in milliseconds to the first token."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(demo_model())
    command = ["redis-server", "--port", str(PORT), "--save", "", "--appendonly", "no"]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        time.sleep(0.5)
        for rtt_s, num_tokens in ((0.002, 512), (0.008, 1024)):
            print(at_a_distance(model, rtt_s, num_tokens))
        for num_tokens in (512, 1024):
            print(stopped(model, server.pid, num_tokens))
    finally:
        server.kill()


if __name__ == "__main__":
    main()
