"""A request on its way through the simulation, and its record afterwards."""

from __future__ import annotations

import msgspec
import numpy as np

from quire.core import Sequence
from quire.core.tokens import IntArray
from quire_sim.trace.rows import TraceRequest

OWN = 2**31 - 1
"""Less the number of a request, the name of the first block that no other request can find."""


class Served(msgspec.Struct, gc=False):
    """The account of one request. Seconds of virtual time, tokens.

    `queued_s` is when its engine took it over, at the end of the step under way: an engine's own
    clocks begin there. `cached_tokens` were found on the device when it was first admitted, `fetched_tokens` came
    from a tier below; `recomputed_tokens` had KV once and lost it to a preemption.
    """

    number: int
    row: int
    prompt_tokens: int
    output_tokens: int
    arrived_s: float
    queued_s: float
    replica: int = -1
    admitted_s: float | None = None
    first_token_s: float = 0.0
    finished_s: float = 0.0
    cached_tokens: int = 0
    fetched_tokens: int = 0
    computed_tokens: int = 0
    recomputed_tokens: int = 0
    preemptions: int = 0

    @property
    def waited_s(self) -> float:
        """From arrival to the first admission."""
        return 0.0 if self.admitted_s is None else self.admitted_s - self.arrived_s

    @property
    def ttft_s(self) -> float:
        """From arrival to the first token."""
        return self.first_token_s - self.arrived_s

    @property
    def e2e_s(self) -> float:
        """From arrival to the last token."""
        return self.finished_s - self.arrived_s

    @property
    def tpot_s(self) -> float | None:
        """Mean time per output token after the first; None without a second token."""
        if self.output_tokens < 2:
            return None
        return (self.finished_s - self.first_token_s) / (self.output_tokens - 1)


class LiveRequest(msgspec.Struct, eq=False):
    """A request that waits or runs.

    `key`         what its manager sees: the ids that the trace names, then one of its own
    `account`     what is kept of it once it is finished
    `target`      tokens to have KV before the next token comes out of a prefill
    `generated`   output tokens so far
    `computed`    tokens of the target that have KV
    `num_blocks`  blocks that its sequence holds
    `order`       when it was admitted: the newest is preempted first
    `lost`        tokens that had KV before it was preempted
    `own_names`   of its blocks behind those of the key that were published once
    `slot`        its place among the decoding ones
    """

    trace: TraceRequest
    key: IntArray
    account: Served
    target: int
    seq: Sequence | None = None
    generated: int = 0
    computed: int = 0
    num_blocks: int = 0
    order: int = 0
    lost: int = 0
    slot: int = -1
    own_names: list[int] = []

    @property
    def num_named_blocks(self) -> int:
        """Blocks of the prompt that have an id, so that others can find them."""
        return len(self.key) - 1

    def found_tokens(self, num_blocks: int, block_size: int) -> int:
        """Return the tokens in its first so many blocks, but the one always computed."""
        tokens = num_blocks * block_size
        if num_blocks <= self.num_named_blocks:
            tokens = min(tokens, self.trace.prompt_tokens)
        return min(tokens, self.target - 1)


def arriving(number: int, trace: TraceRequest, arrived_s: float) -> LiveRequest:
    """Return a request of a trace as it arrives."""
    tokens = trace.prompt_tokens, trace.output_tokens
    account = Served(number, trace.row, *tokens, arrived_s, arrived_s)
    own = OWN - number
    key = np.append(trace.blocks, np.int32(own))
    return LiveRequest(trace, key, account, target=trace.prompt_tokens, own_names=[own])
