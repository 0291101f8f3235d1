"""The memory of a model's layer groups: how it is split, and how it is used."""

from collections.abc import Mapping
from dataclasses import dataclass

from quire.budget import GroupSize, split_budget
from quire.config import format_bytes
from quire.core import CacheManager, LayerGroup
from quire.errors import ConfigError
from quire.groups import Recurrent
from quire.tensors.layout import KVLayout
from quire.tensors.model import ModelLayout


@dataclass(frozen=True, slots=True)
class GroupMemory:
    """The memory of one layer group: `free + active + cached == num_blocks`.

    share: of the bytes of all groups, 0 to 1
    """

    name: str
    kind: str
    num_layers: int
    bytes_per_block: int
    num_blocks: int
    free: int
    active: int
    cached: int
    share: float


def split_layout(
    layout: ModelLayout, capacity_bytes: int, expected_tokens: int
) -> list[LayerGroup]:
    """Split a capacity over the groups of a model; see `quire.budget.split_budget`."""
    only = layout.groups[0]
    if len(layout.groups) == 1 and isinstance(only.memory, KVLayout) and layout.is_full_attention:
        return [LayerGroup(only.name, only.memory.num_blocks(capacity_bytes), only.kind)]
    sizes = [GroupSize(each.name, each.kind, each.bytes_per_block) for each in layout.groups]
    return split_budget(capacity_bytes, sizes, layout.block_size, expected_tokens)


def named_groups(layout: ModelLayout, num_blocks: Mapping[str, int]) -> list[LayerGroup]:
    """Return the groups of a model with these numbers of blocks, by name.

    Raises `ConfigError` unless each group, and nothing else, is named, with room to work in.
    """
    for group in layout.groups:
        if isinstance(group.kind, Recurrent) and num_blocks.get(group.name, 2) < 2:
            raise ConfigError(
                f"capacity gives group {group.name!r} {num_blocks[group.name]} block; it needs 2 at "
                "least: a state to work on and one to keep"
            )
    names = [group.name for group in layout.groups]
    if set(names) != set(num_blocks):
        raise ConfigError(
            f"capacity names the groups {sorted(num_blocks)}; this model has {sorted(names)}: give "
            "a number of blocks for each, or bytes for all"
        )
    return [LayerGroup(group.name, num_blocks[group.name], group.kind) for group in layout.groups]


def group_memory(layout: ModelLayout, manager: CacheManager) -> list[GroupMemory]:
    """Return the blocks and bytes of each group of a model in a manager."""
    pairs = list(zip(layout.groups, manager.pools, strict=True))
    total = sum(group.bytes_per_block * pool.num_blocks for group, pool in pairs)
    return [
        GroupMemory(
            name=group.name,
            kind=_words(group.kind),
            num_layers=len(group.layers),
            bytes_per_block=group.bytes_per_block,
            num_blocks=pool.num_blocks,
            free=pool.num_free,
            active=pool.num_active,
            cached=pool.num_cached,
            share=group.bytes_per_block * pool.num_blocks / total,
        )
        for group, pool in pairs
    ]


def used_words(groups: list[GroupMemory], block_size: int, num_bytes: int) -> str:
    """Return in words how much of the memory is in use."""
    used = sum((group.active + group.cached) * group.bytes_per_block for group in groups)
    blocks = ", ".join(
        (f"{group.name} " if len(groups) > 1 else "")
        + f"{group.active + group.cached} of {group.num_blocks}"
        for group in groups
    )
    return (
        f"{blocks} blocks of {block_size} tokens used ({format_bytes(used)} of "
        f"{format_bytes(num_bytes)}), {sum(group.active for group in groups)} active, "
        f"{sum(group.cached for group in groups)} cached"
    )


def _words(kind: object) -> str:
    """`SlidingWindow(window=8, sinks=0, interval=None)` as `SlidingWindow(window=8)`."""
    fields = ((name, getattr(kind, name)) for name in getattr(kind, "__struct_fields__", ()))
    told = ", ".join(f"{name}={value}" for name, value in fields if value)
    return type(kind).__name__ + (f"({told})" if told else "")
