"""The token sequences and request orders that every system in the comparison is given.

NumPy and the standard library only: `benchmarks/peers` imports it by path, in an environment that has no quire. Everything
is seeded, so two systems see the same tokens in the same order, on every machine. docs/benchmarks.md describes the loops.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[np.int32]

BLOCK_SIZE = 16
"""Tokens per block in every row that does not say otherwise."""

VOCABULARY = 128_000
"""Token ids are drawn uniformly from `0 .. VOCABULARY - 1`."""

MATCH_LENGTHS = {"match_1k": 1_024, "match_8k": 8_192, "match_32k": 32_768, "match_128k": 131_072}
"""Prompt length in tokens of each row that matches one edge."""

NUM_TURNS = 102
NUM_BRANCHES = 26
SHARED_PREFIX = 8_192
FRESH_SUFFIX = 512
NUM_LEAVES = 10_000
LEAF_TOKENS = 64
ALLOC_RUNS = (1, 20, 512)
"""Blocks per allocation in the `alloc_free_*` rows."""
ALLOC_POOL_BLOCKS = 16_384
"""Blocks in the pool of the `alloc_free_*` rows, all free at the start."""
LARGE_POOL_BLOCKS = 1_000_000
DECODE_BATCHES = (256, 4_096)
DECODE_STEPS = 36
"""Consecutive decode steps that are timed, after `DECODE_WARMUP` that are not."""
DECODE_WARMUP = 4
WINDOW = 1_024
"""Tokens that the sliding layers of the `hybrid_*` rows attend to; beside them is full attention."""
NUM_CONVERSATIONS = 8
"""Conversations that grow side by side in the rows of one turn: a sample is a turn of each."""
EVICTED_TOKENS = 16_384
"""Tokens that the `hybrid_evict_*` rows make room for in the pool of the sliding layers."""
EVICT_ROUNDS = 5
"""Fresh states that the `hybrid_evict_*` rows are measured on, after one that is not counted."""


class ServedTurn(NamedTuple):
    """One request of a serve loop: `prompt` is the whole history, `output` follows it."""

    session: int
    prompt: Tokens
    output: Tokens


@dataclass(frozen=True)
class ServeLoop:
    """The constants of a serve loop; `num_sessions` are alive at once, each for `turns` turns."""

    pool_tokens: int
    num_sessions: int
    turns: int | None
    output_tokens: int
    seed: int
    num_requests: int = 2_000
    system_tokens: int = 2_048
    user_tokens: int = 300

    def order(self) -> Iterator[int]:
        """Yield the session of each request."""
        draw = np.random.default_rng(self.seed)
        if self.turns is None:
            yield from (int(s) for s in draw.integers(self.num_sessions, size=self.num_requests))
            return
        waiting = iter(range(self.num_sessions, self.num_requests // self.turns))
        live = list(range(self.num_sessions))
        left = dict.fromkeys(range(self.num_requests // self.turns), self.turns)
        while live:
            slot = int(draw.integers(len(live)))
            session = live[slot]
            yield session
            left[session] -= 1
            if left[session] == 0:
                live[slot : slot + 1] = [s for s in [next(waiting, None)] if s is not None]

    def requests(self) -> Iterator[ServedTurn]:
        """Yield the requests in order; every array is fresh and may be kept."""
        text = np.random.default_rng([self.seed, 1])
        system = draw_tokens(text, self.system_tokens)
        history: dict[int, Tokens] = {}
        for session in self.order():
            user = draw_tokens(text, self.user_tokens)
            prompt = np.concatenate([history.get(session, system), user])
            output = draw_tokens(text, self.output_tokens)
            history[session] = np.concatenate([prompt, output])
            yield ServedTurn(session, prompt, output)


SERVE_A = ServeLoop(pool_tokens=262_144, num_sessions=100, turns=None, output_tokens=0, seed=2)
SERVE_B = ServeLoop(pool_tokens=65_536, num_sessions=64, turns=10, output_tokens=64, seed=11)


def draw_tokens(source: np.random.Generator, count: int) -> Tokens:
    """Return `count` token ids drawn from `source`."""
    return source.integers(0, VOCABULARY, count, dtype=np.int32)


def prompt(num_tokens: int, seed: int = 0) -> Tokens:
    """Return one prompt of `num_tokens` tokens; prompts of different seeds share no block."""
    return draw_tokens(np.random.default_rng([seed, num_tokens]), num_tokens)


def turn_lengths(num_tokens: int = 32_768, turns: int = NUM_TURNS) -> list[int]:
    """Return how long a conversation is after each of its turns; the last is `num_tokens`."""
    return [num_tokens * turn // turns for turn in range(1, turns + 1)]


def growing_conversations() -> Iterator[list[Tokens]]:
    """Yield the prompts of `NUM_CONVERSATIONS` conversations after each of `NUM_TURNS` turns."""
    texts = [prompt(32_768, 100 + number) for number in range(NUM_CONVERSATIONS)]
    for length in turn_lengths():
        yield [text[:length] for text in texts]


def branching_prompts(path: Tokens, branches: int = NUM_BRANCHES) -> list[Tokens]:
    """Return prompts that leave `path` at `branches` evenly spaced block boundaries.

    Inserted after `path`, they cut its one edge into `branches + 1`.
    """
    blocks = len(path) // BLOCK_SIZE
    cuts = [blocks * (i + 1) // (branches + 1) * BLOCK_SIZE for i in range(branches)]
    return [np.concatenate([path[:cut], prompt(64, 1_000 + i)]) for i, cut in enumerate(cuts)]


def suffixed_prompts(prefix: Tokens, count: int, seed: int) -> Iterator[Tokens]:
    """Yield `count` prompts: `prefix`, then `FRESH_SUFFIX` tokens never seen before."""
    source = np.random.default_rng([seed, 2])
    for _ in range(count):
        yield np.concatenate([prefix, draw_tokens(source, FRESH_SUFFIX)])


def leaves(count: int = NUM_LEAVES, seed: int = 3) -> Iterator[Tokens]:
    """Yield `count` prompts of `LEAF_TOKENS` tokens that share nothing."""
    source = np.random.default_rng(seed)
    for _ in range(count):
        yield draw_tokens(source, LEAF_TOKENS)


def decode_prompts(batch: int, shortest: int = 128) -> list[Tokens]:
    """Return the prompts of `batch` running sequences, `shortest` to `shortest + 63` tokens long.

    The lengths are random, so in one decode step a sixteenth of the sequences (block size 16), or
    a sixty-fourth (block size 64), fills its last block.
    """
    source = np.random.default_rng([batch, 4])
    return [draw_tokens(source, shortest + int(extra)) for extra in source.integers(0, 64, batch)]
