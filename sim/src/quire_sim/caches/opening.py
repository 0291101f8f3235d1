"""Opening the cache of a server by its name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from quire.config import check_count
from quire.errors import ConfigError
from quire_sim.caches.asking import ServerCache, TimedCache
from quire_sim.caches.blocks import STEP_TOKENS, BlockCache
from quire_sim.caches.pages import RadixCache
from quire_sim.caches.providers import ProviderCache
from quire_sim.caches.replicas import ReplicaCaches
from quire_sim.caches.rules import read_rules, rules_of
from quire_sim.caches.slots import PromptSlots
from quire_sim.caches.stepping import SteppedCache
from quire_sim.names import unknown

SERVERS = ("quire", "vllm", "sglang", "llama.cpp", "openai", "anthropic")
"""Servers and providers whose caches are known."""

_DIVIDING = ("quire", "openai", "anthropic")
"""Servers whose caches tenants do not share; those of the others know no API keys."""

_OPTIONS: dict[str, tuple[str, ...]] = {
    "quire": ("capacity_tokens", "block_size"),
    "vllm": ("capacity_tokens", "block_size", "step_tokens"),
    "sglang": ("capacity_tokens",),
    "llama.cpp": ("capacity_tokens", "num_slots"),
    "openai": ("rules",),
    "anthropic": ("rules",),
}


class CacheOptions(msgspec.Struct, frozen=True):
    """Options of a cache; None: the server's default, and of capacity no limit.

    `capacity_tokens` tokens that its memory holds; of llama-server those of saved states (`--cache-ram`)
    `block_size`      tokens of a block
    `step_tokens`     tokens of a step of vLLM
    `num_slots`       slots of llama-server
    `rules`           a file of rules of providers
    """

    capacity_tokens: int | None = None
    block_size: int | None = None
    step_tokens: int | None = None
    num_slots: int | None = None
    rules: str | None = None


def cache_of(server: str, options: CacheOptions = CacheOptions()) -> ReplicaCaches:  # noqa: B008 - frozen
    """Return the empty caches of a server's replicas; of one, unless a log names more. Raises `ConfigError`."""
    if server not in _OPTIONS:
        raise unknown("server", server, SERVERS)
    given: dict[str, Any] = {
        name: value for name, value in msgspec.structs.asdict(options).items() if value is not None
    }
    for name, value in given.items():
        if name not in _OPTIONS[server]:
            raise ConfigError(f"{name} is no option of the cache of {server}; leave it out")
        if name != "rules":
            check_count(name, value)
    return ReplicaCaches(_opener(server, options), divides_tenants=server in _DIVIDING)


def _opener(server: str, options: CacheOptions) -> Callable[[], ServerCache]:
    """Return a function that opens the cache of one replica. Raises `ConfigError`."""
    if server in {"openai", "anthropic"}:
        rules = rules_of(server, read_rules(options.rules))
        return lambda: TimedCache(ProviderCache(rules))
    size, capacity = options.block_size or 16, options.capacity_tokens
    num_blocks = None if capacity is None else capacity // size
    if num_blocks is not None and num_blocks < 2 and server in {"quire", "vllm"}:
        raise ConfigError(
            f"capacity_tokens {capacity} is less than two blocks of {size} tokens; enlarge it"
        )
    match server:
        case "quire":
            return lambda: SteppedCache(num_blocks, size)
        case "vllm":
            step = options.step_tokens or STEP_TOKENS
            return lambda: TimedCache(BlockCache(num_blocks, size, step))
        case "sglang":
            return lambda: TimedCache(RadixCache(capacity))
        case _:
            return lambda: TimedCache(PromptSlots(capacity, options.num_slots or 4))
