"""The size of the memory in which blocks are on their way between vLLM's processes and the tiers."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from quire.config import format_bytes, memory_bytes, parse_bytes
from quire.engines.vllm.arena import ALIGNED
from quire.engines.vllm.loading import THREADS
from quire.engines.vllm.parts import GroupPart
from quire.tiers.stack.stack import TierStack

SHARE_OF_MEMORY = 1 / 8
"""Share of the memory that the process may use, which `staging` takes at most where its size is not given."""

_log = logging.getLogger("vllm.quire")


class StagingSize:
    """The size of `staging`, and what fits into it.

    prompt_bytes  what a prompt of `max_model_len` tokens takes on its way
    num_bytes     the size; where none is given `2 * prompt_bytes * min(max_num_seqs, THREADS)`, at most
                  `SHARE_OF_MEMORY`: half of it may be taken by blocks that wait to be stored

    Memory is used for what has been on its way at one time.
    """

    def __init__(self, parts: Sequence[GroupPart], config: Any, given: object = None) -> None:
        self._block_size = parts[0].namespace.block_size
        self._max_tokens = int(config.model_config.max_model_len)
        slot_bytes = -(-max(part.payload_bytes for part in parts) // ALIGNED) * ALIGNED
        num_blocks = -(-self._max_tokens // self._block_size)
        self._token_bytes = sum(part.payload_bytes for part in parts) / self._block_size
        self._slots_bytes = slot_bytes * sum(not part.window for part in parts)
        self.prompt_bytes = slot_bytes * sum(len(part.needed(num_blocks)) for part in parts)
        num_seqs = min(int(config.scheduler_config.max_num_seqs), THREADS)
        usual = min(2 * self.prompt_bytes * num_seqs, int(memory_bytes() * SHARE_OF_MEMORY))
        self.num_bytes = max(usual, slot_bytes) if given is None else parse_bytes(given)

    def say(self, stack: TierStack) -> None:
        """Log what fits into each tier and into `staging`; warn where a prompt does not fit twice."""
        fits = fitting(stack, self._token_bytes, staging=self.num_bytes)
        _log.info(
            "quire keeps %s a token: %s", format_bytes(int(self._token_bytes)), ", ".join(fits)
        )
        if self.num_bytes < 2 * self.prompt_bytes:
            longest = self.num_bytes // max(self._slots_bytes, 1) * self._block_size
            _log.warning(
                "staging of %s holds %s tokens, and a prompt has up to %s (max_model_len), beside blocks that wait to be "
                "stored: longer hits are cut (vllm:quire_cut_blocks); set staging to %s or more",
                format_bytes(self.num_bytes),
                f"{longest:,}",
                f"{self._max_tokens:,}",
                format_bytes(2 * self.prompt_bytes),
            )


def fitting(stack: TierStack, token_bytes: float, **more: int) -> list[str]:
    """Return the tokens that fit into each tier, and into more memory by name, as text."""
    sizes = {each.tier.name: each.tier.capacity_bytes for each in stack.stats().tiers} | more
    return [
        f"{name} " + (f"{int(size / token_bytes):,} tokens" if size > 0 else "unlimited")
        for name, size in sizes.items()
    ]
