"""The layer groups of a model: which layers are kept together, and how."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from quire.core.groups import FullAttention, Kind
from quire.errors import ConfigError, UnsupportedModel
from quire.groups import ChunkedAttention, Recurrent, SlidingWindow
from quire.tensors.kinds import (
    KVShape,
    LayerKind,
    check_cacheable,
    kv_shapes,
    layer_kinds,
    model_type,
)
from quire.tensors.layout import KVLayout, StateLayout, StateShape, declared_dtype

_KINDS: dict[str, Callable[[int], Kind]] = {
    "full": lambda _: FullAttention(),
    "sliding": SlidingWindow,
    "chunked": ChunkedAttention,
}
"""The kinds of layers with K and V, by what `LayerKind.tokens` calls them, in the order of their groups."""

_ORDER = list(_KINDS)


@dataclass(frozen=True, slots=True)
class GroupLayout:
    """Layers whose blocks are allocated, found and evicted together.

    name    "full", "sliding", "chunked" or "recurrent"; a second one of a name is "full-2"
    kind    how its layers look back, for the manager
    layers  their indices in the model, rising
    memory  what a block of the group holds
    """

    name: str
    kind: Kind
    layers: tuple[int, ...]
    memory: KVLayout | StateLayout

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block of the group."""
        return self.memory.bytes_per_block


@dataclass(frozen=True, slots=True)
class ModelLayout:
    """The layer groups of a model, those of K and V first, recurrent states last.

    Layers with K and V form one group per kind, window and shape. A hybrid layer, which keeps a
    state beside K and V, belongs to two groups. Layers that keep nothing belong to none.
    """

    groups: tuple[GroupLayout, ...]
    num_layers: int
    block_size: int

    @classmethod
    def from_config(
        cls, config: Any, block_size: int = 16, dtype: torch.dtype | None = None
    ) -> "ModelLayout":
        """Return the groups of the model that a transformers `config` describes.

        `dtype`: what the pools store; None takes the config's own dtype, else float32.
        Raises `UnsupportedModel` for models that cannot be cached, with the layers and the
        reason, and for those with recurrent layers, whose shapes only a run of the model tells
        (`PrefixCache` makes one).
        """
        check_cacheable(config)
        kinds = layer_kinds(config)
        recurrent = sorted({kind.word for kind in kinds if kind.states})
        if recurrent:
            raise UnsupportedModel(
                f"{model_type(config)} has {', '.join(recurrent)} layers, and its config does not "
                "say what their states look like; PrefixCache(model).layout is read from a run"
            )
        return cls.of_layers(
            kinds, kv_shapes(config), [()] * len(kinds), dtype or declared_dtype(config), block_size
        )

    @classmethod
    def of_layers(
        cls,
        kinds: Sequence[LayerKind],
        shapes: Sequence[KVShape | None],
        states: Sequence[tuple[StateShape, ...]],
        dtype: torch.dtype,
        block_size: int,
    ) -> "ModelLayout":
        """Group layers: per layer its kind, its K and V or None, and its state tensors."""
        token_groups: dict[tuple[str, int, KVShape], list[int]] = {}
        for index, (kind, shape) in enumerate(zip(kinds, shapes, strict=True)):
            if kind.tokens is not None and shape is not None:
                token_groups.setdefault((kind.tokens, kind.window or 0, shape), []).append(index)
        groups: list[GroupLayout] = []
        counts: dict[str, int] = {}
        for (name, window, shape), layers in sorted(
            token_groups.items(), key=lambda item: (_ORDER.index(item[0][0]), item[1][0])
        ):
            counts[name] = counts.get(name, 0) + 1
            memory = KVLayout(
                len(layers), shape.kv_heads, shape.k_width, shape.v_width, dtype, block_size
            )
            title = name if counts[name] == 1 else f"{name}-{counts[name]}"
            groups.append(GroupLayout(title, _KINDS[name](window), tuple(layers), memory))
        recurrent = [index for index, tensors in enumerate(states) if tensors]
        if recurrent:
            memory = StateLayout(tuple(states[index] for index in recurrent))
            groups.append(GroupLayout("recurrent", Recurrent(), tuple(recurrent), memory))
        if not groups:
            raise ConfigError("no layer of the model keeps anything, so there is nothing to cache")
        return cls(tuple(groups), len(kinds), block_size)

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block in every group."""
        return sum(group.bytes_per_block for group in self.groups)

    @property
    def is_full_attention(self) -> bool:
        """Whether every cached token is needed for all that follow it, and nothing else."""
        return all(isinstance(group.kind, FullAttention) for group in self.groups)

    @property
    def is_recurrent(self) -> bool:
        """Whether some layers keep a state that is valid at one position only."""
        return any(isinstance(group.kind, Recurrent) for group in self.groups)

    def stored_as(self, dtype: torch.dtype | None) -> "ModelLayout":
        """Return the same groups with K and V of another dtype; states keep their own.

        A state is a sum over all tokens before it: rounding it would round all of them.
        """
        if dtype is None:
            return self
        groups = tuple(
            replace(group, memory=replace(group.memory, dtype=dtype))
            if isinstance(group.memory, KVLayout)
            else group
            for group in self.groups
        )
        return replace(self, groups=groups)

    def with_interval(self, interval: int | None) -> "ModelLayout":
        """Return the same groups with a window or state kept at each multiple of `interval` tokens.

        None leaves what the kinds say: four windows for sliding layers, none for states.
        """
        if interval is None:
            return self
        return replace(self, groups=tuple(_spaced(group, interval) for group in self.groups))


def _spaced(group: GroupLayout, interval: int) -> GroupLayout:
    kind = group.kind
    if isinstance(kind, SlidingWindow):
        return replace(group, kind=SlidingWindow(kind.window, kind.sinks, interval))
    return replace(group, kind=Recurrent(interval)) if isinstance(kind, Recurrent) else group
