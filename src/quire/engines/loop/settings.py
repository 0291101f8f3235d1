"""The settings of an engine, checked, and their values on a model."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING

from quire.config import check_count, check_seconds, format_bytes, parse_bytes
from quire.core import FullAttention, LayerGroup, Watcher
from quire.core.policy import PolicyFactory
from quire.engines.companions import PassageSettings
from quire.engines.hf.memory import named_groups, split_layout
from quire.errors import ConfigError
from quire.scheduling import Limits
from quire.tensors.model import ModelLayout

if TYPE_CHECKING:
    from quire.engines.tiered.opening import Tiers


MOST_SCORED = 256 << 20
"""Bytes of a step's logits, in float32, of prompts that are scored."""


def scored_tokens(vocab_size: int) -> int:
    """Return the most tokens of scored prompts in a step."""
    return max(MOST_SCORED // (4 * vocab_size), 1)


class EngineSettings(Limits, frozen=True, kw_only=True):
    """Settings of an `Engine`, beside the `Limits` of its schedule. Raises `ConfigError`.

    kv_memory      bytes of KV, as a number or "4GiB" (None: 1 GiB), divided over the layer groups; or give
    num_blocks     blocks of each layer group
    block_size     tokens per block
    max_model_len  tokens of a prompt and its answer; None: what the model and the memory allow
    max_inter_token_s  seconds that a step may take, so that answers under way get their next tokens; prompts are cut
                   by what was measured. None: no bound but the `Limits`
    policy         what is evicted first, see `CacheManager`
    watchers       of the manager
    tiers          where KV goes that outlives the pools, as `PrefixCache` takes it; then `close` the engine
    clock          seconds, rising
    passages       reuse K and V of passages at any position where a prompt comes in segments, approximately; None: never
    adapters       folders of LoRA adapters by name: a request whose scope has `lora` of that name is computed with it
    debug_nan      fill fresh memory with NaN, so that reading what nobody computed shows
    """

    kv_memory: int | str | None = None
    num_blocks: int | None = None
    block_size: int = 16
    max_model_len: int | None = None
    max_inter_token_s: float | None = None
    policy: str | PolicyFactory = "lru"
    watchers: Sequence[Watcher] = ()
    tiers: "Tiers | None" = None
    clock: Callable[[], float] = monotonic
    passages: PassageSettings | None = None
    adapters: Mapping[str, str | Path] = {}
    debug_nan: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_seconds("max_inter_token_s", self.max_inter_token_s)
        if not callable(self.clock):
            raise ConfigError(f"clock is a function that returns seconds, got {self.clock!r}")
        if self.adapters and self.passages is not None:
            raise ConfigError("passages are of the model without adapters; give one of the two")

    def groups(self, layout: ModelLayout) -> list[LayerGroup]:
        """Return the layer groups of a model with their blocks."""
        if self.num_blocks is None:
            capacity = parse_bytes("1GiB" if self.kv_memory is None else self.kv_memory)
            return split_layout(layout, capacity, self.max_model_len or 8192)
        if self.kv_memory is not None:
            raise ConfigError(
                f"kv_memory, {self.kv_memory!r}, and num_blocks, {self.num_blocks}, were both given; "
                "give one of them"
            )
        count = check_count("num_blocks", self.num_blocks)
        return named_groups(layout, {group.name: count for group in layout.groups})

    def longest(
        self, positions: int | None, groups: Sequence[LayerGroup], layout: ModelLayout
    ) -> int:
        """Return the most tokens of a prompt and its answer: limited by the model's positions and the blocks."""
        rooms = [
            g.num_blocks * self.block_size for g in groups if isinstance(g.kind, FullAttention)
        ]
        held = min(rooms, default=None)
        limit = min((n for n in (positions, held) if n), default=2**31 - 1)
        if self.max_model_len is None:
            return limit
        wanted = check_count("max_model_len", self.max_model_len)
        if wanted > limit:
            raise ConfigError(
                f"max_model_len is {wanted} tokens; the model has {positions} positions, and the blocks hold "
                f"{held} tokens of {format_bytes(layout.bytes_per_block)} per block of "
                f"{self.block_size}: give more kv_memory, or a lower length"
            )
        return wanted
