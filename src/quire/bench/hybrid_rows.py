"""quire's rows over two layer groups: full attention beside a sliding window of 1,024 tokens."""

from __future__ import annotations

import statistics
from collections.abc import Callable

from quire import ops
from quire.bench import serving, timing
from quire.bench import workloads as load
from quire.bench.timing import Row
from quire.core import CacheManager, LayerGroup, Sequence
from quire.groups import SlidingWindow

SIZE = load.BLOCK_SIZE
SLIDING = 1
"""The index of the sliding group."""

CONVERSATIONS_TOKENS = 2 * load.NUM_CONVERSATIONS * 32_768
"""Room for all conversations twice over, so that no turn has to evict."""


def _manager(num_tokens: int) -> CacheManager:
    """Make a manager with room for so many tokens in each group."""
    num_blocks = num_tokens // SIZE
    sliding = LayerGroup("sliding", num_blocks, SlidingWindow(load.WINDOW))
    return CacheManager(groups=[LayerGroup("full", num_blocks), sliding], block_size=SIZE)


def _one_conversation() -> CacheManager:
    manager = _manager(65_536)
    serving.store_turns(manager)
    return manager


def _full_of_leaves() -> CacheManager:
    """Fill both pools with leaves; the last token of a prompt is always left to compute."""
    return serving.store_leaves(_manager(load.NUM_LEAVES * load.LEAF_TOKENS))


def _turn() -> Row:
    """Open, reserve, commit and close a request that is one turn longer than what is cached."""
    manager = _manager(CONVERSATIONS_TOKENS)
    turns: list[float] = []
    for prompts in load.growing_conversations():

        def serve(prompts: list[load.Tokens] = prompts) -> None:
            for prompt in prompts:
                serving.store(manager, prompt)

        turns.append(timing.once_us(serve) / len(prompts))
    return {"median_us": statistics.median(turns)}


def _insert() -> Row:
    """Commit a turn of requests that are open and have room: publish their blocks."""
    manager = _manager(CONVERSATIONS_TOKENS)
    inserts: list[float] = []
    for prompts in load.growing_conversations():
        ready = [serving.begin(manager, prompt) for prompt in prompts]

        def insert(ready: list[tuple[Sequence, load.Tokens]] = ready) -> None:
            for seq, tokens in ready:
                manager.commit(seq, tokens)

        inserts.append(timing.once_us(insert) / len(ready))
        for seq, _ in ready:
            manager.close(seq)
    return {"median_us": statistics.median(inserts)}


def _decode(batch_size: int = 256) -> Row:
    """Decode sequences that are longer than the window, so that blocks leave it."""
    manager = _manager(batch_size * (load.WINDOW + 512))
    return serving.decode_row(manager, load.decode_prompts(batch_size, load.WINDOW + 128))


def _evict(build: Callable[[], CacheManager]) -> Row:
    """Make room for 16k tokens in the sliding group's pool."""
    num_blocks = load.EVICTED_TOKENS // SIZE
    times: list[float] = []
    for _ in range(load.EVICT_ROUNDS + 1):
        manager = build()
        sliding = manager.pools[SLIDING]
        before = sliding.num_free
        times.append(timing.once_us(lambda: ops.reclaim(manager, num_blocks, group=SLIDING)))  # noqa: B023 - called at once
        assert sliding.num_free - before >= num_blocks
    return {"median_us": statistics.median(times[1:])}


ROWS: dict[str, Callable[[], Row]] = {
    "hybrid_match_32k_102_turns": lambda: serving.match_turns_row(_manager(65_536)),
    "hybrid_turn": _turn,
    "hybrid_insert_turn": _insert,
    "hybrid_decode_256": _decode,
    "hybrid_evict_16k_turns": lambda: _evict(_one_conversation),
    "hybrid_evict_16k_leaves": lambda: _evict(_full_of_leaves),
    "hybrid_fork_16_of_100k": lambda: serving.fork_row(_manager(2 * serving.FORKED_TOKENS)),
}
"""Every row's measurement by name, in the order of the table."""
