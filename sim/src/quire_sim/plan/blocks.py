"""Choice of a block size: the losses of larger blocks, the costs of smaller ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from quire.config import format_bytes
from quire_sim.hardware import MemoryTier, ModelFacts

SIZES = (16, 32, 64, 128, 256)
LARGEST = 256
"""Attention kernels are rarely made for larger blocks."""

LOSS = 0.005
"""A hit ratio this much lower is a fair price for larger blocks."""

HASH_S = 0.4e-6
"""CPU seconds to name one block outside the process (SHA-256 of a block of 16 tokens)."""

GOOD_TRANSFER = 1 << 20
"""Bytes from which a disk or a network reaches its bandwidth in one read."""


class BlockChoice(msgspec.Struct, frozen=True, kw_only=True):
    """One block size.

    `block_bytes`      bytes of a block, what a tier reads at once
    `token_hit`        of the trace with this memory; None where no trace was given
    `lost`             share of prompt tokens lost to block borders: against the smallest size of the
                       trace, or expected without one (half a block of each context)
    `blocks_per_prompt`, `hash_ms`   what one prompt of the context costs in names
    """

    block_size: int
    block_bytes: int
    token_hit: float | None
    lost: float
    blocks_per_prompt: int
    hash_ms: float


class BlockAdvice(msgspec.Struct, frozen=True, kw_only=True):
    """The block size to use, the reason, and the figures of the others."""

    recommended: int
    reasons: list[str]
    choices: list[BlockChoice]


def advise(
    model: ModelFacts,
    context: int,
    tiers: Sequence[MemoryTier] = (),
    *,
    trace_block: int | None = None,
    hit_at: Callable[[int], float] | None = None,
) -> BlockAdvice:
    """Choose a block size.

    `trace_block`: the block size of a trace, of which multiples can be measured; `hit_at(size)`
    is the token hit of that trace in blocks of `size`. The largest size that loses at most `LOSS`
    of the prompt tokens is recommended.
    """
    sizes, measured = list(SIZES), dict[int, float]()
    if trace_block is not None and hit_at is not None:
        multiples = (trace_block * factor for factor in (1, 2, 4, 8, 16))
        sizes = [size for size in multiples if size <= max(2 * trace_block, LARGEST)]
        measured = {size: hit_at(size) for size in sizes}
    best = max(measured.values(), default=0.0)
    choices: list[BlockChoice] = []
    for size in sizes:
        blocks = -(-context // size)
        lost = best - measured[size] if measured else size / 2 / context
        choices.append(
            BlockChoice(
                block_size=size,
                block_bytes=model.kv.per_token * size,
                token_hit=measured.get(size),
                lost=lost,
                blocks_per_prompt=blocks,
                hash_ms=blocks * HASH_S * 1e3,
            )
        )
    good = [each for each in choices if each.lost <= LOSS and each.block_size <= LARGEST]
    chosen = good[-1] if good else choices[0]
    return BlockAdvice(
        recommended=chosen.block_size,
        reasons=_reasons(chosen, choices, tiers, trace_block),
        choices=choices,
    )


def _reasons(
    chosen: BlockChoice,
    choices: Sequence[BlockChoice],
    tiers: Sequence[MemoryTier],
    trace_block: int | None,
) -> list[str]:
    smallest = choices[0]
    if chosen.token_hit is None:
        lost = f"{chosen.lost:.2%} of the tokens (expected; --trace measures it)"
        reasons = [f"half a block of each context is lost to its border, {lost}"]
    else:
        reasons = [f"the trace finds {chosen.token_hit:.2%} of its tokens"]
        if chosen is not smallest:
            reasons[0] += f", {chosen.lost:.2%} fewer than in blocks of {smallest.block_size}"
    larger = [each for each in choices if each.block_size > chosen.block_size]
    if larger:
        reasons.append(f"blocks of {larger[0].block_size} lose {larger[0].lost:.2%}")
    if chosen.block_size > smallest.block_size:
        reasons.append(
            f"{smallest.blocks_per_prompt / max(1, chosen.blocks_per_prompt):.0f}x fewer blocks to "
            f"name, index and move than with {smallest.block_size}"
        )
    if trace_block is not None and chosen.block_size == trace_block and trace_block > 16:
        reasons.append(
            f"the trace names blocks of {trace_block} tokens and says nothing about smaller ones; "
            f"those would find up to {trace_block // 2} more tokens per reused prompt"
        )
    if tiers and 0 < chosen.block_bytes < GOOD_TRANSFER:
        together = -(-GOOD_TRANSFER // chosen.block_bytes)
        reasons.append(
            f"a block is {format_bytes(chosen.block_bytes)}; move {together} of them at once, so that "
            "a disk or a network reaches its bandwidth"
        )
    return reasons
