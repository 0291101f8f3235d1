"""Prompts that a cache has seen: the base of all caches here, and the reasons of shorter hits."""

from __future__ import annotations

from quire_sim.caches.asking import CacheHit
from quire_sim.caches.prompts import CachePrompt
from quire_sim.caches.radix import RadixNode, SeenPrompts


class TrackedCache:
    """The base of caches: the prompts so far, and which of them are computed."""

    has_steps = True

    def __init__(self) -> None:
        self._seen = SeenPrompts()
        self._nodes: dict[int, RadixNode] = {}
        self._prompts: dict[int, CachePrompt] = {}

    def step(self, now: float) -> None:
        """Compute the requests that started."""

    def _hit(self, number: int, prompt: CachePrompt, hit: int, unit: int) -> CacheHit:
        """Note a request that starts, and return its hit in a cache that finds whole units of tokens."""
        seen, ready, node, earlier_row = self._seen.add(
            (prompt.model, prompt.scope), prompt.tokens.tobytes(), prompt.row
        )
        self._nodes[number], self._prompts[number] = node, prompt
        why = "evicted"
        most = prompt.size - 1
        if hit >= seen:
            why = ""
        elif hit >= min(seen, most) // unit * unit:
            why = "rounding"
        elif hit >= min(ready, most) // unit * unit:
            why = "at-once"
        merged = max(prompt.parted_at + prompt.merged - seen, 0) if seen >= prompt.parted_at else 0
        return CacheHit(
            number, prompt.row, prompt.size, seen, hit, why, earlier_row=earlier_row, merged=merged,
            cost=float(prompt.size - hit),
        )  # fmt: skip

    def _computed(self, number: int) -> CachePrompt | None:
        """Note that a prompt is computed, and return it; None if that was noted before."""
        node = self._nodes.pop(number, None)
        if node is None:
            return None
        SeenPrompts.mark(node)
        return self._prompts[number]

    def _ended(self, number: int) -> CachePrompt:
        """Note that an answer has ended: it may be the beginning of a prompt, but for its last token."""
        prompt = self._prompts.pop(number)
        if len(prompt.output) > 1:
            key = prompt.tokens.tobytes() + prompt.output[:-1].tobytes()
            _, _, node, _ = self._seen.add((prompt.model, prompt.scope), key, prompt.row)
            SeenPrompts.mark(node)
        return prompt
