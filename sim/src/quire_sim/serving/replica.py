"""Replicas: the parts of a simulated service, with any scheduler of their requests."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol

import msgspec
import numpy as np

from quire.config import check_count
from quire.core import CacheManager
from quire.errors import ConfigError, OutOfBlocks
from quire_sim.hardware.roofline import Chunk, Contexts, RankWork, Seconds
from quire_sim.serving.requests import LiveRequest
from quire_sim.serving.tiers import Tiers
from quire_sim.trace.rows import TraceRequest


class Timing(Protocol):
    """Durations of steps in seconds, a function of the arguments alone. A `Roofline` is one."""

    def prefill_s(self, new_tokens: int, cached_tokens: int) -> float:
        """One prompt alone: `new_tokens` computed after `cached_tokens` that have KV."""
        ...

    def step_s(self, work: Sequence[Chunk], contexts: Contexts) -> float:
        """One step: parts of prompts, and one token for each decoding sequence."""
        ...

    def decode_run_s(self, contexts: Contexts, num_steps: int) -> Seconds:
        """Each of `num_steps` steps in a row that only decode these sequences, [num_steps].

        Contexts grow by one token a step. Equals `step_s` called for each step, to the bit.
        """
        ...

    def ranks_s(self, ranks: Sequence[RankWork], num_steps: int) -> Seconds:
        """Steps that several data-parallel ranks do together, [num_steps]; asked where a cluster has ranks."""
        ...


class ReplicaLimits(msgspec.Struct, frozen=True):
    """The size of a replica and the limits of its schedule. Raises `ConfigError`.

    `num_blocks`         KV blocks on the device
    `block_size`         tokens per block: the trace's
    `policy`             of eviction, by name
    `max_step_tokens`    tokens per step: one for each decoding request, the rest for prompts
    `max_sequences`      requests that run at once
    `plans_ahead`        1: each step is planned while the one before it runs, as engines do that
                         schedule asynchronously; 0: once it has ended
    """

    num_blocks: int
    block_size: int
    policy: str = "lru"
    max_step_tokens: int = 8192
    max_sequences: int = 256
    plans_ahead: int = 0

    def __post_init__(self) -> None:
        for name in ("num_blocks", "block_size", "max_step_tokens", "max_sequences"):
            check_count(name, getattr(self, name))
        if self.max_step_tokens <= self.max_sequences:
            raise ConfigError(
                f"a step of {self.max_step_tokens} tokens and {self.max_sequences} sequences that "
                "decode leave prompts no room; allow more tokens or fewer sequences"
            )
        if self.plans_ahead not in {0, 1}:
            raise ConfigError(f"steps are planned 0 or 1 ahead, got plans_ahead={self.plans_ahead}")

    def check(self, request: TraceRequest) -> None:
        """Raise `OutOfBlocks` for a request that would not even fit alone."""
        num_tokens = request.prompt_tokens + max(request.output_tokens - 1, 0)
        # a prompt that is found whole computes its last token beside the blocks found
        needed = max(-(-num_tokens // self.block_size), request.num_blocks + 1)
        if needed > self.num_blocks:
            raise OutOfBlocks(
                f"row {request.row}: {request.prompt_tokens} tokens of prompt and "
                f"{request.output_tokens} of output need {needed} blocks of {self.block_size}, but "
                f"a replica has {self.num_blocks}; give it more memory, or leave the request out",
                group="full",
                needed=needed,
                free=self.num_blocks,
                cached=0,
                active=0,
            )


class Replica(ABC):
    """Continuous batching with chunked prefill over one cache manager.

    A *run* is what is under way: one step with parts of prompts, or several that only decode.
    A run ends at `next_s`; nothing the replica decides changes in between, except that an
    arrival may cut it at the end of the step it falls into.

        submit(request, now) ... complete(now) -> finished, then plan(now) -> the next run

    """

    manager: CacheManager
    preemptions: int

    def __init__(
        self, number: int, limits: ReplicaLimits, timing: Timing, tiers: Tiers | None = None
    ) -> None:
        self.number = number
        self.limits = limits
        self.now = 0.0
        self.busy_s = 0.0
        self.num_steps = 0
        self.preemptions: int = 0
        self.tiers = tiers
        self._timing = timing
        self._ends: Seconds = np.empty(0)
        self._busy_since: float | None = None

    @property
    def next_s(self) -> float | None:
        """The end of the run, in seconds; None while idle."""
        return float(self._ends[-1]) if len(self._ends) else None

    @property
    def load(self) -> int:
        """Requests that wait or run."""
        return self.num_waiting + self.num_running

    @property
    @abstractmethod
    def num_waiting(self) -> int: ...

    @property
    @abstractmethod
    def num_running(self) -> int: ...

    @abstractmethod
    def submit(self, request: LiveRequest, now: float) -> None:
        """Queue an arrival. If it may be admitted, the run ends with the step under way."""

    @abstractmethod
    def cached_blocks(self, request: LiveRequest, now: float) -> tuple[int, ...]:
        """Return the first blocks of a prompt that are here now: on the device, and in each tier."""

    @abstractmethod
    def complete(self, now: float) -> list[LiveRequest]:
        """End the run: account for its steps and return the requests that are finished."""

    @abstractmethod
    def plan(self, now: float) -> None:
        """Decide who is admitted and who has to make way, and begin the next run."""

    def _is_idle(self, now: float) -> bool:
        """Account for the time in which something ran; return whether nothing does."""
        if not self.num_running:
            if self._busy_since is not None:
                self.busy_s += now - self._busy_since
                self._busy_since = None
            return True
        if self._busy_since is None:
            self._busy_since = now
        return False
