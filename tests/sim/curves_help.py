"""Small traces, and what caches do with them block by block: the curves' oracles."""

from collections.abc import Iterable
from itertools import combinations

import numpy as np
from hypothesis import strategies as st

from quire_sim.trace.rows import TraceRequest, compress


class SmallTrace:
    """A trace of prompts given as texts: a block is a letter, and equal prefixes are equal blocks.

    `tails` are the tokens after the last full block; a negative one says that the last block
    lacks so many.
    """

    source, format = "a test", "texts"

    def __init__(self, prompts: Iterable[str], block_size: int = 4, tails: Iterable[int] = ()):
        self.block_size = block_size
        self.chains: list[list[int]] = []
        self.tokens: list[int] = []
        ids: dict[str, int] = {}
        prompts = list(prompts)
        for prompt, tail in zip(prompts, list(tails) or [0] * len(prompts), strict=True):
            prefixes = [prompt[: i + 1] for i in range(len(prompt))]
            self.chains.append([ids.setdefault(prefix, len(ids)) for prefix in prefixes])
            self.tokens.append(max(len(prompt) * block_size + tail, 1))
        self.num_unique = len(ids)

    def runs(self, chain):
        return compress(np.array(chain, np.int32))

    def __iter__(self):
        for row, (chain, tokens) in enumerate(zip(self.chains, self.tokens, strict=True), 1):
            yield TraceRequest(row, float(row), tokens, 0, self.runs(chain))

    def found_tokens(self, hits: Iterable[int], count_from: int = 0) -> int:
        """The tokens of so many first blocks of each request."""
        pairs = list(zip(hits, self.tokens, strict=True))[count_from:]
        return sum(min(blocks * self.block_size, tokens) for blocks, tokens in pairs)


def lru_hits(trace: SmallTrace, capacity: int) -> list[int]:
    """Blocks found per request by a list of blocks, the most recent first."""
    recent: list[int] = []
    hits = []
    for chain in trace.chains:
        hits.append(_prefix(chain, recent))
        for block in reversed(chain):
            if block in recent:
                recent.remove(block)
            recent.insert(0, block)
        del recent[capacity:]
    return hits


def belady_hits(trace: SmallTrace, capacity: int) -> list[int]:
    """Blocks found per request when those used again soonest are kept, parents first."""
    held: list[int] = []
    hits = []
    for now, chain in enumerate(trace.chains):
        hits.append(_prefix(chain, held))

        def next_use(block: int, now: int = now) -> int:
            later = range(now + 1, len(trace.chains))
            return next((use for use in later if block in trace.chains[use]), len(trace.chains))

        # A parent has the lower id, so ties go to it.
        held = sorted({*held, *chain}, key=lambda block: (next_use(block), block))[:capacity]
    return hits


def best_possible(trace: SmallTrace, capacity: int, *, bypass: bool = True) -> int:
    """The most tokens that any choice of what to keep after each request can find.

    Without bypass the first blocks of the request itself are kept, as far as there is room.
    """
    states = {frozenset[int](): 0}
    for chain, tokens in zip(trace.chains, trace.tokens, strict=True):
        after: dict[frozenset[int], int] = {}
        must = frozenset[int]() if bypass else frozenset(chain[:capacity])
        for held, found in states.items():
            total = found + min(_prefix(chain, held) * trace.block_size, tokens)
            may = sorted((held | set(chain) if bypass else held) - must)
            for size in range(min(capacity - len(must), len(may)) + 1):
                for kept in combinations(may, size):
                    key = must.union(kept)
                    after[key] = max(after.get(key, 0), total)
        states = after
    return max(states.values())


def _prefix(chain, held) -> int:
    return next((i for i, block in enumerate(chain) if block not in held), len(chain))


prompts = st.lists(st.text("ab", max_size=6), min_size=1, max_size=14)
"""Tries that branch at every depth."""

growing = st.lists(
    st.tuples(st.integers(0, 3), st.integers(0, 9)).map(
        lambda talk: "s" + "wxyz"[talk[0]] * talk[1]
    ),
    min_size=1,
    max_size=30,
)
"""Conversations that share their first block, longer and shorter again."""

tails = st.integers(-3, 3)
