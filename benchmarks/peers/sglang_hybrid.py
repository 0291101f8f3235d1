"""The `hybrid_*` rows of SGLang's trees: full attention beside a sliding window."""

from __future__ import annotations

import statistics
from array import array
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import adapter
import timing
import workloads as work
from sglang_peer import PAGE, HybridPeer


def match_row(core: str) -> timing.Row:
    """Return the row of finding a conversation that grew over `NUM_TURNS` turns."""
    peer = one_conversation(core)
    key = peer.key(work.prompt(32_768))
    assert peer.match(key).device_prefix_len == 32_768
    return {
        "name": "hybrid_match_32k_102_turns",
        "median_us": timing.repeat_us(partial(peer.match, key)),
    }


def one_conversation(core: str) -> HybridPeer:
    """Return a tree that holds one conversation of 32k tokens."""
    peer = HybridPeer(core, 65_536)
    tokens = work.prompt(32_768)
    for length in work.turn_lengths():
        peer.store(tokens[:length])
    return peer


def turn_row(core: str) -> timing.Row:
    """Return the row of a turn: match, lock, allocate, insert, unlock."""
    peer = HybridPeer(core, 2 * work.NUM_CONVERSATIONS * 32_768)
    turns: list[float] = []
    for prompts in work.growing_conversations():
        keys = [peer.key(prompt) for prompt in prompts]

        def serve(keys: list[array[int]] = keys) -> None:
            for key in keys:
                peer.serve(key)

        turns.append(timing.once_us(serve) / len(keys))
    return {"name": "hybrid_turn", "median_us": statistics.median(turns)}


def insert_row(core: str) -> timing.Row:
    """Return the row of the insertion alone, of a turn whose request is matched and locked."""
    peer = HybridPeer(core, 2 * work.NUM_CONVERSATIONS * 32_768)
    inserts: list[float] = []
    for prompts in work.growing_conversations():
        ready: list[tuple[array[int], Any, int]] = []
        locks: list[Any] = []
        for prompt in prompts:
            key = peer.key(prompt)
            found = peer.match(key)
            cached = found.device_prefix_len
            locks.append(peer.tree.lock(found.last_device_node))
            new = peer.allocate(len(key) // PAGE * PAGE - cached)
            ready.append((key, peer.torch.cat((peer.path(found), new)), cached))

        def insert(ready: list[tuple[array[int], Any, int]] = ready) -> None:
            for key, value, cached in ready:
                peer.insert(key, value, cached)

        inserts.append(timing.once_us(insert) / len(ready))
        for lock in locks:
            peer.tree.unlock(lock)
    return {"name": "hybrid_insert_turn", "median_us": statistics.median(inserts)}


def evict_row(name: str, build: Callable[[], HybridPeer]) -> timing.Row:
    """Return the row of making room for `EVICTED_TOKENS` in the pool of the sliding layers."""
    times: list[float] = []
    for _ in range(work.EVICT_ROUNDS + 1):
        peer = build()
        before = peer.pool.swa_available_size()
        times.append(timing.once_us(partial(peer.evict_sliding, work.EVICTED_TOKENS)))
        assert peer.pool.swa_available_size() - before >= work.EVICTED_TOKENS
    return {"name": name, "median_us": statistics.median(times[1:])}


def evict_turns_row(core: str) -> timing.Row:
    """Return the row of eviction out of one long conversation."""
    return evict_row("hybrid_evict_16k_turns", lambda: one_conversation(core))


def evict_leaves_row(core: str) -> timing.Row:
    """Return the row of eviction out of many short prompts."""
    return evict_row("hybrid_evict_16k_leaves", lambda: full_of_leaves(core))


def full_of_leaves(core: str) -> HybridPeer:
    """Return a tree of `NUM_LEAVES` leaves of `LEAF_TOKENS` tokens that fill both pools."""
    peer = HybridPeer(core, work.NUM_LEAVES * work.LEAF_TOKENS)
    for tokens in work.leaves():
        peer.insert(peer.key(tokens), peer.allocate(work.LEAF_TOKENS))
    return peer


def measurements(core: str) -> Iterator[adapter.Measurement]:
    """Yield the hybrid rows of `core`."""
    yield ("hybrid_match_32k_102_turns",), lambda: [match_row(core)]
    yield ("hybrid_turn",), lambda: [turn_row(core)]
    yield ("hybrid_insert_turn",), lambda: [insert_row(core)]
    yield ("hybrid_evict_16k_turns",), lambda: [evict_turns_row(core)]
    yield ("hybrid_evict_16k_leaves",), lambda: [evict_leaves_row(core)]
