"""Greedy dual size frequency: worth by what recomputing costs."""

from __future__ import annotations

from quire0.core.policies.base import Capacity, Entry, Tick
from quire0.core.policies.lfu import Lfu

CROSSOVER_TOKENS = 32_768
"""The context length at which attention costs a token as much as all matrix products do:
parameters / (2 x layers x heads x head_dim), 30,600 for Llama-3.1-8B."""


class Gdsf(Lfu):
    """Evicts the leaf whose blocks are worth least: uses x cost / size, plus the cache's age.

    The cost of a run is what computing it again takes: each of its tokens costs one unit for the
    matrix products, and one more for every `crossover_tokens` tokens that stand before it, for
    attention. The size is its blocks; the age is the value of the last victim, as in `Lfu`.
    So at equal use the deeper run stays, and a shared head stays because it is used more.
    Source: Cherkasova, Improving WWW proxies performance with greedy-dual-size-frequency
    caching policy, HP Labs HPL-98-69R1, 1998; after Cao, Irani, Cost-aware WWW proxy caching
    algorithms, USENIX Symposium on Internet Technologies and Systems, 1997.
    Left out: the cost of everything above a block, which is there as long as the block is.
    """

    def __init__(
        self, tick: Tick, capacity: Capacity, crossover_tokens: float = CROSSOVER_TOKENS
    ) -> None:
        super().__init__(tick, capacity)
        self._crossover = crossover_tokens

    def value(self, entry: Entry) -> float:
        num_blocks = entry.num_blocks
        tokens_before = (entry.end / num_blocks - 0.5) * entry.num_tokens  # of its middle
        return entry.uses * (1.0 + tokens_before / self._crossover)
