"""A prompt as a server's cache sees it: token ids, parts, and times."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, TypeAlias

import msgspec
import numpy as np

from quire.core.tokens import INT32, IntArray
from quire_sim.logs import EngineSteps

Level: TypeAlias = Literal["tools", "system", "messages"]
"""The levels of a prompt, in the order of caches."""

NO_TOKENS: IntArray = np.empty(0, INT32)


class PromptPart(msgspec.Struct, frozen=True, gc=False):
    """A part of a prompt: a tool, a block of the system prompt or of a message.

    `end`          tokens of the prompt up to its end
    `breakpoint_s` the TTL of a breakpoint behind it, in seconds; 0: none
    """

    end: int
    level: Level = "messages"
    breakpoint_s: int = 0
    is_media: bool = False


class CachePrompt(msgspec.Struct, frozen=True):
    """A request as a cache sees it.

    `row`         its line in the log
    `tokens`      ids of the prompt, int32 [n], n > 0: a tokenizer's, or numbers of pieces of text
    `output`      ids of the answer; empty if unknown
    `scope`       what divides caches beside the model: a salt
    `tenant`      whose request it is; it divides the caches of some servers
    `key`         `prompt_cache_key`
    `replica`     the replica that answered; empty if unknown
    `retention_s` how long the request asks its prefix to be kept, in seconds; 0: not said
    `time_s`      when it was sent; None: requests come one at a time, in the log's order
    `first_s`     seconds from there to the first byte of the answer; None: not told
    `duration_s`  seconds from there to its end; None: not told
    `parts`       its parts in order; the last one ends with the prompt. Empty if unknown
    `parameters`  fields beside the prompt that caches depend on, as JSON
    `is_estimated` tokens are pieces of text
    `steps`       the steps of quire's engine that computed it; None: not told
    `merged`      tokens from `parted_at` on that an earlier answer has as text, and not as tokens
    """

    row: int
    tokens: IntArray
    output: IntArray = NO_TOKENS
    model: str = ""
    scope: str = ""
    tenant: str = ""
    key: str = ""
    replica: str = ""
    retention_s: int = 0
    time_s: float | None = None
    first_s: float | None = None
    duration_s: float | None = None
    parts: tuple[PromptPart, ...] = ()
    parameters: Mapping[str, str] = {}
    is_estimated: bool = False
    parted_at: int = 0
    merged: int = 0
    steps: EngineSteps | None = None

    @property
    def size(self) -> int:
        """Tokens of the prompt."""
        return len(self.tokens)
