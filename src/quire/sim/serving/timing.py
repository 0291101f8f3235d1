"""A performance model as the simulation asks it: durations of steps. `Roofline` is one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from quire.sim.hardware.roofline import Chunk, Contexts, Seconds


class Timing(Protocol):
    """Durations in seconds, a function of the arguments alone."""

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
