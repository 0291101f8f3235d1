"""The event stream: who replays it knows exactly which blocks can be found."""

import random

import numpy as np
import pytest
from core_help import prefill, run, serve

from quire import ops
from quire.core import CacheManager, LayerGroup, MediaItem, Scope
from quire.exchange import AllBlocksCleared, BlockRemoved, BlockStored, block_hashes
from turns import by_turns
from watching import take_events, watchers

BLOCK = 4
SCOPES = (None, Scope(salt="x"))


class Consumer:
    """Knows the cache from its events alone; checks that they can be followed."""

    def __init__(self):
        self.parents = {}

    def replay(self, events):
        for event in events:
            if isinstance(event, AllBlocksCleared):
                self.parents.clear()
            elif isinstance(event, BlockStored):
                parent = event.parent_hash
                assert parent is None or parent in self.parents, "stored below an unknown parent"
                assert len(event.token_bytes) == 4 * len(event.block_hashes) * event.block_size
                for block_hash in event.block_hashes:
                    assert block_hash not in self.parents, "stored twice"
                    self.parents[block_hash] = parent
                    parent = block_hash
            else:
                assert isinstance(event, BlockRemoved)
                for block_hash in event.block_hashes:
                    del self.parents[block_hash]
                    assert block_hash not in self.parents.values(), "a parent went first"


def findable(manager, prompts):
    """Return the hashes of all blocks that a lookup of one of `prompts` can find."""
    hashes = set()
    for tokens, scope, media in prompts:
        whole = manager.probe([*tokens, 2**31 - 1], scope, media).num_blocks
        hashes.update(block_hashes(tokens, BLOCK, scope, media)[:whole])
    return hashes


def test_events_are_off_by_default():
    manager = CacheManager(num_blocks=8, block_size=BLOCK)
    serve(manager, run(0, 8))
    assert take_events(manager) == []


def test_a_commit_stores_and_an_eviction_removes():
    manager = CacheManager(num_blocks=8, block_size=BLOCK, watchers=watchers(events=True))
    seq = prefill(manager, run(0, 10))
    (stored,) = take_events(manager)
    hashes = block_hashes(run(0, 10), BLOCK)
    assert isinstance(stored, BlockStored)
    assert list(stored.block_hashes) == hashes
    assert np.frombuffer(stored.token_bytes, dtype="<i4").tolist() == list(range(8))
    assert stored.parent_hash is None
    manager.close(seq)
    assert take_events(manager) == []
    ops.reclaim(manager, 1)
    (removed,) = take_events(manager)
    assert list(removed.block_hashes) == hashes[1:]
    assert removed.reason == "evicted"


def test_a_continuation_names_its_parent():
    manager = CacheManager(num_blocks=8, block_size=BLOCK, watchers=watchers(events=True))
    serve(manager, run(0, 8))
    take_events(manager)
    serve(manager, run(0, 12))
    (stored,) = take_events(manager)
    hashes = block_hashes(run(0, 12), BLOCK)
    assert (stored.parent_hash, list(stored.block_hashes)) == (hashes[1], hashes[2:])


def test_a_duplicate_stores_nothing():
    manager = CacheManager(num_blocks=8, block_size=BLOCK, watchers=watchers(events=True))
    first, second = manager.open(run(0, 8)), manager.open(run(0, 8))
    for seq in (first, second):
        manager.reserve(seq, 8)
        manager.commit(seq, run(0, 8))
    assert len(take_events(manager)) == 1


def test_a_cut_into_a_published_block_removes_it():
    manager = CacheManager(num_blocks=8, block_size=BLOCK, watchers=watchers(events=True))
    seq = prefill(manager, run(0, 8))
    consumer = Consumer()
    ops.truncate(manager, seq, 6)
    consumer.replay(take_events(manager))
    assert set(consumer.parents) == set(block_hashes(run(0, 4), BLOCK))


def test_a_clear_leaves_what_is_active():
    manager = CacheManager(num_blocks=8, block_size=BLOCK, watchers=watchers(events=True))
    serve(manager, run(1000, 8))
    prefill(manager, run(0, 8))
    consumer = Consumer()
    ops.clear(manager)
    consumer.replay(take_events(manager))
    assert set(consumer.parents) == set(block_hashes(run(0, 8), BLOCK))


@pytest.mark.cases(1)
@pytest.mark.parametrize(("number", "policy"), by_turns(range(3), ["lru", "lfu"]))
def test_a_replay_of_the_stream_knows_exactly_what_can_be_found(policy, number):
    choose = random.Random(number)
    where = (
        {"num_blocks": 9} if number % 2 else {"groups": [LayerGroup("a", 9), LayerGroup("b", 7)]}
    )
    manager = CacheManager(block_size=BLOCK, policy=policy, watchers=watchers(events=True), **where)
    consumer, prompts, running = Consumer(), [], []
    for _ in range(150):
        action = choose.random()
        if action < 0.6:
            tokens = [choose.randrange(2) for _ in range(choose.randrange(1, 21))]
            scope = choose.choice(SCOPES)
            media = (
                (MediaItem(b"m" * 16, 1, 2),) if len(tokens) > 4 and choose.random() < 0.2 else ()
            )
            prompts.append((tokens, scope, media))
            if running:
                manager.close(running.pop())
            running.append(prefill(manager, tokens, scope, media=media))
        elif action < 0.8:
            ops.reclaim(manager, choose.randrange(1, 4))
        elif action < 0.9 and prompts:
            tokens, scope, media = choose.choice(prompts)
            ops.invalidate(manager, tokens, scope, media=media)
        elif action < 0.95 and running and running[-1].computed > 5:
            ops.truncate(manager, running[-1], choose.randrange(4, running[-1].computed))
        elif action > 0.98:
            ops.clear(manager)
        consumer.replay(take_events(manager))
        assert set(consumer.parents) == findable(manager, prompts)
