"""The `hybrid_*` rows of vLLM's hybrid manager: full attention beside a sliding window."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any

import adapter
import timing
import workloads as work
from vllm_peer import Peer, decode_row, lookup_row


def hybrid(block_size: int, pool_tokens: int) -> Peer:
    """Return a manager over two groups with room for `pool_tokens` tokens in each."""
    return Peer(block_size, pool_tokens, window=work.WINDOW)


def match_row(block_size: int) -> timing.Row:
    """Return the row of finding a conversation that grew over `NUM_TURNS` turns."""
    peer = hybrid(block_size, 65_536)
    prompt = work.prompt(32_768).tolist()
    for length in work.turn_lengths():
        peer.store(prompt[:length])
    return lookup_row("hybrid_match_32k_102_turns", peer, prompt)


def turn_row(block_size: int) -> timing.Row:
    """Return the row of a turn: a new request, its lookup, `allocate_slots`, `free`."""
    peer = hybrid(block_size, 2 * work.NUM_CONVERSATIONS * 32_768)
    turns: list[float] = []
    for prompts in work.growing_conversations():
        lists = [prompt.tolist() for prompt in prompts]

        def serve(lists: list[list[int]] = lists) -> None:
            for prompt in lists:
                peer.store(prompt)

        turns.append(timing.once_us(serve) / len(lists))
    return {"name": "hybrid_turn", "median_us": statistics.median(turns)}


def insert_row(block_size: int) -> timing.Row:
    """Return the row of `allocate_slots` alone, which publishes the blocks of a turn."""
    peer = hybrid(block_size, 2 * work.NUM_CONVERSATIONS * 32_768)
    inserts: list[float] = []
    for prompts in work.growing_conversations():
        found = [peer.find(prompt.tolist()) for prompt in prompts]

        def insert(found: list[tuple[Any, Any, int]] = found) -> None:
            for request, blocks, cached in found:
                fresh = request.num_tokens - cached
                peer.manager.allocate_slots(request, fresh, cached, blocks)

        inserts.append(timing.once_us(insert) / len(found))
        for request, _, _ in found:
            peer.manager.free(request)
    return {"name": "hybrid_insert_turn", "median_us": statistics.median(inserts)}


def hybrid_decode_row(block_size: int) -> timing.Row:
    """Return the row of decode steps over sequences that are longer than the window."""
    peer = hybrid(block_size, 257 * (work.WINDOW + 512))
    prompts = work.decode_prompts(256, work.WINDOW + 128)
    return decode_row("hybrid_decode_256", peer, prompts)


def measurements(size: int) -> Iterator[adapter.Measurement]:
    """Yield the hybrid rows at one block size."""
    yield ("hybrid_match_32k_102_turns",), lambda: [match_row(size)]
    yield ("hybrid_turn",), lambda: [turn_row(size)]
    yield ("hybrid_insert_turn",), lambda: [insert_row(size)]
    yield ("hybrid_decode_256",), lambda: [hybrid_decode_row(size)]
