"""The memory of a deployment: weights, room to compute, and the rest for K and V."""

from __future__ import annotations

from bisect import bisect_right
from math import ceil

import msgspec

from quire.config import check_count, format_bytes
from quire.errors import ConfigError
from quire.sim.hardware import Accelerator, ModelFacts, Roofline

STEP_TOKENS = 8192
"""Tokens of the largest step: what the room for activations is sized for."""

LIVE_TENSORS = 10
"""Tensors of [tokens, hidden] in 16 bits that are alive at once, gate and up projections included.
An assumption; engines measure theirs with a trial step."""

CONTEXTS = (2048, 8192, 32768, 131072, 1048576)
"""Contexts for which users are counted, up to what the model was made for."""

ANY_LENGTH = range(1 << 32)
"""Tokens of a sequence, however long."""


class Placement(msgspec.Struct, frozen=True, kw_only=True):
    """A model on so many devices, and what of their memory is used.

    `utilization`    share of the memory that may be used at all
    `reserve_bytes`  room for activations, all devices together; None is `STEP_TOKENS` of them
    """

    model: ModelFacts
    accelerator: Accelerator
    num_gpus: int = 1
    utilization: float = 0.9
    reserve_bytes: int | None = None
    block_size: int = 16

    def __post_init__(self) -> None:
        check_count("num_gpus", self.num_gpus)
        check_count("block_size", self.block_size)
        if not 0 < self.utilization <= 1:
            raise ConfigError(f"utilization is {self.utilization}; it is above 0, at most 1")

    @property
    def usable_bytes(self) -> int:
        """Memory of all devices that may be used."""
        return int(self.accelerator.memory_bytes * self.utilization) * self.num_gpus

    @property
    def reserved_bytes(self) -> int:
        """Room for activations on all devices: each computes with whole hidden states."""
        if self.reserve_bytes is not None:
            return self.reserve_bytes
        return STEP_TOKENS * self.model.hidden * 2 * LIVE_TENSORS * self.num_gpus

    @property
    def kv_copies(self) -> float:
        """Copies of K and V: more than one where devices outnumber the KV heads."""
        return self.model.kv_copies(self.num_gpus)

    @property
    def free_bytes(self) -> int:
        """Bytes beside weights and activations; negative where they do not fit."""
        return self.usable_bytes - self.model.weight_bytes - self.reserved_bytes

    def sequence_bytes(self, context: int) -> int:
        """Bytes of one cached sequence of `context` tokens, in whole blocks, with one state."""
        whole = ceil(context / self.block_size) * self.block_size
        return round(self.model.kv.of(whole) * self.kv_copies)

    def users(self, context: int) -> int:
        """Sequences of `context` tokens that fit at once."""
        return max(0, self.free_bytes) // max(1, self.sequence_bytes(context))

    def gpus_needed(self, context: int) -> int:
        """The least power of two of devices on which one sequence of `context` tokens fits.

        Raises `ConfigError` where 1,024 do not suffice.
        """
        for power in range(11):
            tried = msgspec.structs.replace(self, num_gpus=1 << power)
            if tried.users(context):
                return 1 << power
        raise ConfigError(
            f"{self.model.name} does not fit on 1,024 x {self.accelerator.name}; use an accelerator "
            f"with more than {format_bytes(self.accelerator.memory_bytes)}, or smaller numbers (--dtype)"
        )


class Budget(msgspec.Struct, frozen=True, kw_only=True):
    """The parts of the memory, and the users for whom it suffices. All devices together.

    `block_bytes`   bytes of a block in layers that see the whole prefix (0: there are none)
    `num_blocks`    such blocks beside the windows and states of `users`
    `users`         sequences of `context` tokens that fit at once
    `users_by_context`  the same for other contexts: (tokens, users)
    `longest_tokens`    the longest sequence that fits alone
    `num_gpus_needed`   devices, a power of two, on which one sequence of `context` tokens fits
    """

    usable_bytes: int
    weight_bytes: int
    reserve_bytes: int
    kv_bytes: int
    kv_copies: float
    block_size: int
    block_bytes: int
    num_blocks: int
    sequence_bytes: int
    context: int
    users: int
    users_by_context: list[tuple[int, int]]
    longest_tokens: int
    num_gpus_needed: int


def budget(placement: Placement, context: int) -> Budget:
    """Split the memory. Raises `ConfigError` when the model does not fit, with what it takes."""
    model = placement.model
    if placement.free_bytes <= 0:
        raise ConfigError(_does_not_fit(placement, context))
    users = placement.users(context)
    copies, size = placement.kv_copies, placement.block_size
    block_bytes = round(model.kv.per_token * size * copies)
    beside = placement.sequence_bytes(context) - block_bytes * ceil(context / size)
    left = placement.free_bytes - users * max(0, beside)
    contexts = [each for each in CONTEXTS if each <= (model.max_context or each)]
    longest = bisect_right(ANY_LENGTH, placement.free_bytes, key=placement.sequence_bytes) - 1
    return Budget(
        usable_bytes=placement.usable_bytes,
        weight_bytes=model.weight_bytes,
        reserve_bytes=placement.reserved_bytes,
        kv_bytes=placement.free_bytes,
        kv_copies=copies,
        block_size=size,
        block_bytes=block_bytes,
        num_blocks=left // block_bytes if block_bytes else 0,
        sequence_bytes=placement.sequence_bytes(context),
        context=context,
        users=users,
        users_by_context=[(tokens, placement.users(tokens)) for tokens in contexts],
        longest_tokens=longest,
        num_gpus_needed=placement.num_gpus if users else placement.gpus_needed(context),
    )


def blocks_that_fit(roofline: Roofline, block_size: int, *, max_sequences: int) -> int:
    """Return the KV blocks for which a replica's devices have room beside the weights.

    Windows and states are held for `max_sequences` running sequences; blocks are what the
    layers that see the whole prefix keep. Raises `ConfigError` if that leaves nothing.
    """
    model, kv = roofline.model, roofline.model.kv
    placed = Placement(
        model=model,
        accelerator=roofline.accelerator,
        num_gpus=roofline.num_gpus,
        reserve_bytes=0,
        block_size=block_size,
    )
    devices = f"{placed.num_gpus} x {placed.accelerator.name}"
    what = f"{placed.utilization:.0%} of {devices} is {format_bytes(placed.usable_bytes)}"
    left = placed.free_bytes
    if left <= 0:
        raise ConfigError(
            f"{what}, but the weights of {model.name} are {format_bytes(model.weight_bytes)}; "
            "take more devices per replica, larger ones, or weights of fewer bits"
        )
    per_sequence = round((kv.window_bytes + kv.state_bytes) * placed.kv_copies)
    rest = left - per_sequence * max_sequences
    num_blocks = int(rest // (max(kv.per_token, 1) * block_size * placed.kv_copies))
    if num_blocks < 1:
        able = f", for example {left // (2 * per_sequence)}" if per_sequence else ""
        raise ConfigError(
            f"{what}: beside the weights, {format_bytes(left)} are left for {max_sequences} "
            f"sequences with {format_bytes(per_sequence)} of windows and states each and for blocks; "
            f"that is none. Run fewer sequences{able}, or take more devices per replica"
        )
    return num_blocks


def _does_not_fit(placement: Placement, context: int) -> str:
    model = placement.model
    devices = f"{placement.num_gpus} x {placement.accelerator.name}"
    needed = placement.gpus_needed(context)
    says = (
        f"{model.name} does not fit on {devices}: its weights are "
        f"{format_bytes(model.weight_bytes)} ({model.weight_bytes_per_param:g} bytes per parameter), "
        f"activations take {format_bytes(placement.reserved_bytes)}, and "
        f"{format_bytes(placement.usable_bytes)} are usable ({placement.utilization:.0%} of "
        f"{format_bytes(placement.accelerator.memory_bytes * placement.num_gpus)}); "
        f"use --num-gpus {needed}, which also holds a sequence of {context:,} tokens"
    )
    if model.weight_bytes_per_param > 1:
        smaller = msgspec.structs.replace(placement, model=model.stored_as(weights="fp8"))
        says += f", or --dtype fp8 with --num-gpus {smaller.gpus_needed(context)}"
    return says
