"""The managers that the rows measure, and what an engine asks of them, as the rows time it."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from quire.bench import workloads as load
from quire.bench.timing import Row, once_us, repeat_us
from quire.core import CacheManager, Sequence
from quire.exchange import EventLog
from quire.foresight import LiveCurve

NUM_FORKS = 16
FORKED_TOKENS = 100_007
"""A length that leaves the last block partly filled, as most do."""


@dataclass(frozen=True)
class Features:
    """Features of a manager beside caching: `events` to take, a `curve` to ask."""

    events: bool = False
    curve: bool = False


PLAIN = Features()


def build(num_tokens: int, features: Features) -> tuple[CacheManager, Callable[[], object]]:
    """Make a manager of one full-attention group, and the call that takes the events it has recorded."""
    log = EventLog()
    watchers = [log] * features.events + [LiveCurve()] * features.curve
    num_blocks = num_tokens // load.BLOCK_SIZE
    return CacheManager(num_blocks, load.BLOCK_SIZE, watchers=watchers), log.take


def manager_of(num_tokens: int) -> CacheManager:
    """Make a manager of one full-attention group that does nothing beside."""
    return build(num_tokens, PLAIN)[0]


def store(manager: CacheManager, prompt: load.Tokens) -> None:
    """Serve one request without output: what is not cached is computed and stays cached."""
    manager.close(prefill(manager, prompt))


def begin(manager: CacheManager, prompt: load.Tokens) -> tuple[Sequence, load.Tokens]:
    """Open a request with room for its prompt; return it, and the tokens that are not cached."""
    seq = manager.open(prompt)
    cached = seq.num_cached
    manager.reserve(seq, len(prompt) - cached)
    manager.take_copies()
    return seq, prompt[cached:]


def prefill(manager: CacheManager, prompt: load.Tokens) -> Sequence:
    """Start a request and compute its prompt."""
    seq, rest = begin(manager, prompt)
    manager.commit(seq, rest)
    return seq


def match_row(manager: CacheManager, prompt: load.Tokens) -> Row:
    """Time a probe of a prompt, and one comparison of as many equal tokens.

    All tokens of the prompt but one are cached.
    """
    assert manager.probe(prompt).num_tokens == len(prompt) - 1
    key, view = bytearray(prompt[:-1].tobytes()), prompt[:-1].data.cast("B")
    probe = repeat_us(lambda: manager.probe(prompt))
    return {"median_us": probe, "floor_us": repeat_us(lambda: key.startswith(view))}


def match_turns_row(manager: CacheManager) -> Row:
    """Time a probe of a conversation that was stored turn by turn."""
    prompt = store_turns(manager)
    edges = sum(1 for _ in manager.kernel.tree.nodes())
    return match_row(manager, prompt) | {"edges": edges}


def store_turns(manager: CacheManager) -> load.Tokens:
    """Serve a conversation turn by turn; return its last prompt, of which all but one token is cached."""
    prompt = load.prompt(32_769)
    for length in load.turn_lengths():
        store(manager, prompt[: length + 1])
    return prompt


def store_leaves(manager: CacheManager) -> CacheManager:
    """Fill a manager with leaves that share nothing."""
    for leaf in load.leaves():
        store(manager, leaf)
    return manager


def decode_row(manager: CacheManager, prompts: list[load.Tokens]) -> Row:
    """Time decode steps: room for a token in every sequence, its commit, full blocks published."""
    batch = manager.batch([prefill(manager, prompt) for prompt in prompts])
    tokens = load.draw_tokens(np.random.default_rng(len(prompts)), len(prompts))

    def reserve() -> None:
        manager.reserve_step(batch)

    def step() -> None:
        manager.reserve_step(batch)
        manager.commit_step(batch, tokens)

    for _ in range(load.DECODE_WARMUP):
        step()
    whole = statistics.median(once_us(step) for _ in range(load.DECODE_STEPS))
    reserve_only: list[float] = []
    for _ in range(load.DECODE_STEPS):
        reserve_only.append(once_us(reserve))
        manager.commit_step(batch, tokens)
    return {"median_us": whole, "reserve_only_us": statistics.median(reserve_only)}


def fork_row(manager: CacheManager) -> Row:
    """Time `NUM_FORKS` forks of one long sequence, all together."""
    trunk = prefill(manager, load.prompt(FORKED_TOKENS))

    def fork() -> list[Sequence]:
        return [manager.fork(trunk) for _ in range(NUM_FORKS)]

    times: list[float] = []
    for _ in range(12):
        forked: list[Sequence] = []
        times.append(once_us(lambda forked=forked: forked.extend(fork())))
        for seq in forked:
            manager.close(seq)
    return {"median_us": statistics.median(times[1:])}
