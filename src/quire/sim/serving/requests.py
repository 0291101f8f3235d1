"""A request on its way through the simulation, and what is left of it afterwards."""

from __future__ import annotations

import msgspec
import numpy as np

from quire.core.sequence import Sequence
from quire.core.tokens import IntArray
from quire.sim.replay import UNFINISHED
from quire.sim.trace.rows import TraceRequest


class Served(msgspec.Struct, frozen=True, gc=False):
    """One finished request. Seconds of virtual time, tokens.

    `cached_tokens` were found on the device when it was first admitted, `fetched_tokens` came
    from a tier below; `recomputed_tokens` had KV once and lost it to a preemption.
    """

    number: int
    row: int
    replica: int
    prompt_tokens: int
    output_tokens: int
    arrived_s: float
    admitted_s: float
    first_token_s: float
    finished_s: float
    cached_tokens: int
    fetched_tokens: int
    computed_tokens: int
    recomputed_tokens: int
    preemptions: int

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


class Job:
    """A request that waits or runs, the simulator's own account of it.

    `key`         what its manager sees: the ids that the trace names, then one for the rest
    `generated`   output tokens so far
    `target`      tokens to have KV before the next token comes out of a prefill
    `computed`    tokens of them that have KV
    `num_blocks`  blocks that its sequence holds
    `order`       when it was admitted: the newest is preempted first
    `slot`        its place among the decoding ones
    """

    __slots__ = (
        "admitted_s",
        "arrived_s",
        "cached_tokens",
        "computed",
        "computed_tokens",
        "fetched_tokens",
        "first_token_s",
        "generated",
        "key",
        "lost",
        "num_blocks",
        "number",
        "order",
        "preemptions",
        "recomputed_tokens",
        "seq",
        "slot",
        "target",
        "trace",
    )

    def __init__(self, number: int, trace: TraceRequest, arrived_s: float) -> None:
        self.number = number
        self.trace = trace
        self.arrived_s = arrived_s
        self.key: IntArray = np.concatenate((trace.blocks, UNFINISHED))
        self.seq: Sequence | None = None
        self.admitted_s: float | None = None
        self.first_token_s = 0.0
        self.target = trace.prompt_tokens
        self.generated = self.computed = self.num_blocks = self.order = self.lost = 0
        self.slot = -1
        self.cached_tokens = self.fetched_tokens = self.computed_tokens = 0
        self.recomputed_tokens = self.preemptions = 0

    @property
    def num_named_blocks(self) -> int:
        """Blocks of the prompt that have an id, so that others can find them."""
        return len(self.key) - 1

    def found_tokens(self, num_blocks: int, block_size: int) -> int:
        """Return the tokens in its first so many named blocks, but the one always computed."""
        return min(num_blocks * block_size, self.trace.prompt_tokens, self.target - 1)

    def served(self, replica: int, now: float) -> Served:
        """Return what is to be kept of it, now that it is finished."""
        assert self.admitted_s is not None
        trace = self.trace
        return Served(
            number=self.number,
            row=trace.row,
            replica=replica,
            prompt_tokens=trace.prompt_tokens,
            output_tokens=trace.output_tokens,
            arrived_s=self.arrived_s,
            admitted_s=self.admitted_s,
            first_token_s=self.first_token_s,
            finished_s=now,
            cached_tokens=self.cached_tokens,
            fetched_tokens=self.fetched_tokens,
            computed_tokens=self.computed_tokens,
            recomputed_tokens=self.recomputed_tokens,
            preemptions=self.preemptions,
        )
