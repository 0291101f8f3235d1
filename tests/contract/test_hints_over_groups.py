"""Hints beside windows and states: any mix keeps every invariant, under every policy."""

import pytest
from core_help import prefill
from hints_help import BLOCK, NEVER, Clock, blocks, hinted

from quire.core import (
    CacheManager,
    ChunkedAttention,
    FullAttention,
    Hint,
    LayerGroup,
    Recurrent,
    SlidingWindow,
)
from quire.core.policies import POLICIES
from quire.errors import OutOfBlocks

SYSTEM = blocks(0, 2)


@pytest.fixture(params=sorted(POLICIES))
def policy(request):
    return request.param


GROUPS = {
    "window": [("full", 24, FullAttention()), ("window", 16, SlidingWindow(2 * BLOCK))],
    "sinks": [("full", 24, FullAttention()), ("sinks", 16, SlidingWindow(2 * BLOCK, sinks=4))],
    "chunks": [("full", 24, FullAttention()), ("chunks", 16, ChunkedAttention(3 * BLOCK))],
    "states": [("full", 24, FullAttention()), ("states", 9, Recurrent(2 * BLOCK))],
    "all": [
        ("full", 24, FullAttention()),
        ("window", 16, SlidingWindow(2 * BLOCK)),
        ("states", 9, Recurrent(2 * BLOCK)),
    ],
}


@pytest.mark.parametrize("kinds", sorted(GROUPS))
def test_any_mix_of_hints_over_layer_groups_keeps_every_invariant(policy, kinds):
    clock = Clock()
    manager = CacheManager(
        groups=[LayerGroup(*group) for group in GROUPS[kinds]],
        block_size=BLOCK,
        policy=policy,
        clock=clock,
    )
    hints = [
        None,
        NEVER,
        hinted("a"),
        hinted("b", ttl_s=4),
        Hint(ttl_s=3),
        hinted("c", reuse="never"),
    ]
    prompts = [list(SYSTEM), [*SYSTEM, *blocks(1000, 2)], [*SYSTEM, *blocks(1000, 1), 5, 6, 7]]
    prompts += [list(blocks(start, 4)) for start in (2000, 3000)]
    running = []
    for step in range(60):
        clock.now += step % 3
        hint = hints[(step * 7 + step // 5) % len(hints)]
        prompt = prompts[(step * 5 + step // 7) % len(prompts)]
        try:
            options = {"hint": hint} if hint is not None else {}
            seq = prefill(
                manager, [*prompt, step], **options, retain_s=2 if step % 11 == 0 else None
            )
        except OutOfBlocks:
            manager.take_copies()
            while running:
                manager.close(running.pop())
                manager.check()
            continue
        manager.check()
        running.append(seq)
        if step % 4 == 0:
            manager.suspend(seq)
            manager.check()
            manager.reclaim(1)
            manager.resume(seq)
            manager.take_copies()
        elif step % 4 == 1:
            running.append(manager.fork(seq))
        manager.check()
        if step % 3 == 0:
            manager.close(running.pop(0))
        if step % 9 == 0:
            manager.end_session("abc"[step % 4 % 3])
        if step % 13 == 0:
            manager.reclaim(3, group=len(manager.pools) - 1)
        manager.check()
    for seq in manager.sequences.copy().values():
        manager.close(seq)
        manager.check()
    manager.clear()
    manager.check()
    assert [pool.num_free for pool in manager.pools] == [size for _, size, _ in GROUPS[kinds]]
