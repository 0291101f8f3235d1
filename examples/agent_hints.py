"""Agents that say when they come back: how long a tool took before is known when it is called, and goes with the request.

Each agent calls a tool and comes back with its output after all that was said before. Time is counted, not waited for:

    python examples/agent_hints.py
"""

import heapq
from collections import defaultdict

import numpy as np

from quire import CacheManager, Hint, ops

TOOLS = {"read_file": (0.3, 400), "run_tests": (45.0, 900), "ask_a_person": (600.0, 60)}
"""Seconds that a tool takes in the middle, and tokens of its output."""


def hint_of(tool: str, latencies: list[float]) -> Hint:
    """Return what an agent says of a request that ends with a call of this tool: what it took so far."""
    if tool == "answer":
        return Hint("never")
    if len(latencies) < 3:
        return Hint()
    logs = np.log(latencies)
    within = max(float(np.exp(2 * logs.std())), 1.2)
    return Hint(returns_in_s=float(np.exp(logs.mean())), within=within)


def serve(*, hints: bool, num_agents: int = 60, num_steps: int = 20) -> float:
    """Let all agents run to their end; return the share of prompt tokens that were found."""
    numbers, now = np.random.default_rng(1), 0.0
    latencies: dict[str, list[float]] = defaultdict(list)
    manager = CacheManager(2500, 16, policy="learned", clock=lambda: now)
    texts = dict.fromkeys(range(num_agents), np.arange(800, dtype=np.int32))
    arrivals = [(5.0 * agent, agent, 1) for agent in range(num_agents)]
    while arrivals:
        now, agent, step = heapq.heappop(arrivals)
        tool = "answer" if step == num_steps else str(numbers.choice([*TOOLS]))
        prompt = np.append(texts[agent], np.array([agent, step], np.int32))
        seq = manager.open(prompt, hint=hint_of(tool, latencies[tool]) if hints else Hint())
        manager.reserve(seq, len(prompt) - seq.num_cached)
        manager.take_copies()
        manager.commit(seq, prompt[seq.num_cached :])
        manager.close(seq)
        if tool != "answer":
            middle, num_tokens = TOOLS[tool]
            took = middle * float(numbers.lognormal(0, 0.4))
            latencies[tool].append(took)
            texts[agent] = np.append(
                prompt, numbers.integers(50_000, size=num_tokens, dtype=np.int32)
            )
            heapq.heappush(arrivals, (now + took, agent, step + 1))
    ops.check(manager)
    return manager.stats.hit_rate


print(f"without hints {serve(hints=False):.1%} of all prompt tokens are found")
print(f"with the latencies of tools {serve(hints=True):.1%}")
