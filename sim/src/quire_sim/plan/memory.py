"""The memory of a deployment: weights, room to compute, and the rest for K and V."""

from __future__ import annotations

from bisect import bisect_right
from math import ceil

import msgspec

from quire.config import check_count, format_bytes
from quire.errors import ConfigError
from quire_sim.hardware import Accelerator, ModelFacts

STEP_TOKENS, SEQUENCES = 8192, 256
"""Tokens of the largest step and sequences in it, where nothing else is said."""

LIVE_STATES = 4
"""Hidden states of all tokens of a step that are alive at once, beside what a layer makes of them."""

LOGIT_BYTES = 12
"""Bytes per sequence and word of the vocabulary: logits in 32 bits, and their order in 64."""

GRAPH_BYTES, PEER_BYTES = 560 << 20, 300 << 20
"""Bytes of graphs, workspaces and what libraries keep on each device, and of messages to peers.
The first is what is left of what vLLM 0.19 set aside on an RTX 4090, where the terms above are known."""

STAGED = 4
"""Requests whose blocks are in transit at once behind vLLM."""

CONTEXTS = (2048, 8192, 32768, 131072, 1048576)
"""Contexts for which users are counted, up to what the model was made for."""

ANY_LENGTH = range(1 << 32)
"""Tokens of a sequence, however long."""


class Placement(msgspec.Struct, frozen=True, kw_only=True):
    """A model on `num_gpus` devices, and the use of their memory.

    `utilization`    share of the memory that may be used at all
    `reserve_bytes`  room to compute in, all devices together; None is what steps of `step_tokens`
                     tokens and `max_sequences` sequences take
    `data_parallel`  groups of `num_gpus` devices that share the routed experts; bytes and blocks are
                     those of one group
    """

    model: ModelFacts
    accelerator: Accelerator
    num_gpus: int = 1
    utilization: float = 0.9
    reserve_bytes: int | None = None
    block_size: int = 16
    step_tokens: int = STEP_TOKENS
    max_sequences: int = SEQUENCES
    data_parallel: int = 1

    def __post_init__(self) -> None:
        for name in ("num_gpus", "block_size", "step_tokens", "max_sequences", "data_parallel"):
            check_count(name, getattr(self, name))
        if not 0 < self.utilization <= 1:
            raise ConfigError(f"utilization is {self.utilization}; it is above 0, at most 1")

    @property
    def usable_bytes(self) -> int:
        """Memory of all devices that may be used."""
        return int(self.accelerator.memory_bytes * self.utilization) * self.num_gpus

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights that the devices hold: of routed experts their share."""
        model = self.model
        elsewhere = model.expert_params * (1 - 1 / self.data_parallel)
        return round(model.weight_bytes - elsewhere * model.weight_bytes_per_param)

    @property
    def reserved_bytes(self) -> int:
        """Room to compute in: activations of the largest step, logits, graphs and workspaces."""
        if self.reserve_bytes is not None:
            return self.reserve_bytes
        model, devices = self.model, self.num_gpus
        used = model.active_params - model.lookup_params - model.head_params
        made = used / model.num_layers / model.hidden / devices
        activations = self.step_tokens * (LIVE_STATES * model.hidden + made) * 2
        logits = self.max_sequences * model.vocab * LOGIT_BYTES
        beside = GRAPH_BYTES + (PEER_BYTES if devices * self.data_parallel > 1 else 0)
        return round(activations + logits + beside) * devices

    @property
    def kv_copies(self) -> float:
        """Copies of K and V: more than one where devices outnumber the KV heads."""
        return self.model.kv_copies(self.num_gpus)

    @property
    def free_bytes(self) -> int:
        """Bytes beside weights and room to compute in; negative where they do not fit."""
        return self.usable_bytes - self.weight_bytes - self.reserved_bytes

    def sequence_bytes(self, context: int) -> int:
        """Bytes of one cached sequence of `context` tokens, in whole blocks, with one state."""
        whole = ceil(context / self.block_size) * self.block_size
        return round(self.model.kv.of(whole) * self.kv_copies)

    def users(self, context: int) -> int:
        """Sequences of `context` tokens that fit at once."""
        return max(0, self.free_bytes) // max(1, self.sequence_bytes(context))

    def staging_bytes(self, context: int) -> int:
        """Bytes of `staging` behind vLLM: two prompts of `context` tokens for each of up to 4 requests.

        `quire.engines.vllm.staging` takes as much, with `max_model_len` for the context.
        """
        return 2 * self.sequence_bytes(context) * min(self.max_sequences, STAGED)

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
    """The parts of the memory, and the users that fit. All devices together.

    `block_bytes`   bytes of a block in layers that see the whole prefix (0: there are none)
    `num_blocks`    such blocks beside the windows and states of `users`
    `users`         sequences of `context` tokens that fit at once
    `users_by_context`  the same for other contexts: (tokens, users)
    `longest_tokens`    the longest sequence that fits alone
    `staging_bytes`     memory of blocks in transit behind vLLM, for prompts of `context` tokens
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
    staging_bytes: int
    num_gpus_needed: int


def budget(placement: Placement, context: int) -> Budget:
    """Split the memory. Raises `ConfigError` with the needed size when the model does not fit."""
    model = placement.model
    if placement.free_bytes <= 0:
        raise ConfigError(_does_not_fit(placement, context))
    users = placement.users(context)
    copies, size = placement.kv_copies, placement.block_size
    block_bytes = round(model.kv.per_token * size * copies)
    contexts = [each for each in CONTEXTS if each <= (model.max_context or each)]
    longest = bisect_right(ANY_LENGTH, placement.free_bytes, key=placement.sequence_bytes) - 1
    return Budget(
        usable_bytes=placement.usable_bytes,
        weight_bytes=placement.weight_bytes,
        reserve_bytes=placement.reserved_bytes,
        kv_bytes=placement.free_bytes,
        kv_copies=copies,
        block_size=size,
        block_bytes=block_bytes,
        num_blocks=blocks_that_fit(placement, min(users, placement.max_sequences))
        if block_bytes
        else 0,
        sequence_bytes=placement.sequence_bytes(context),
        context=context,
        users=users,
        users_by_context=[(tokens, placement.users(tokens)) for tokens in contexts],
        longest_tokens=longest,
        staging_bytes=placement.staging_bytes(context),
        num_gpus_needed=placement.num_gpus if users else placement.gpus_needed(context),
    )


def blocks_that_fit(placement: Placement, sequences: int | None = None) -> int:
    """Return the blocks of K and V for which the devices have room.

    Windows and states are held for `sequences` that run at once (None: as many as may run); blocks
    are what the layers that see the whole prefix keep. Raises `ConfigError` if that leaves nothing.
    """
    model, kv = placement.model, placement.model.kv
    sequences = placement.max_sequences if sequences is None else sequences
    devices = f"{placement.num_gpus} x {placement.accelerator.name}"
    what = f"{placement.utilization:.0%} of {devices} is {format_bytes(placement.usable_bytes)}"
    left = placement.free_bytes
    if left <= 0:
        raise ConfigError(
            f"{what}, but the weights of {model.name} are {format_bytes(placement.weight_bytes)} and "
            f"room to compute in takes {format_bytes(placement.reserved_bytes)}; take more devices per "
            "replica, larger ones, or weights of fewer bits"
        )
    per_sequence = round((kv.window_bytes + kv.state_bytes) * placement.kv_copies)
    rest = left - per_sequence * sequences
    block_bytes = max(kv.per_token, 1) * placement.block_size * placement.kv_copies
    num_blocks = int(rest // block_bytes)
    if num_blocks < 1:
        able = f", for example {left // (2 * per_sequence)}" if per_sequence else ""
        raise ConfigError(
            f"{what}: beside the weights, {format_bytes(left)} are left for {sequences} "
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
        f"room to compute in takes {format_bytes(placement.reserved_bytes)}, and "
        f"{format_bytes(placement.usable_bytes)} are usable ({placement.utilization:.0%} of "
        f"{format_bytes(placement.accelerator.memory_bytes * placement.num_gpus)}); "
        f"use --num-gpus {needed}, which also holds a sequence of {context:,} tokens"
    )
    if model.weight_bytes_per_param > 1:
        smaller = msgspec.structs.replace(placement, model=model.stored_as(weights="fp8"))
        says += f", or --dtype fp8 with --num-gpus {smaller.gpus_needed(context)}"
    return says
