"""The workers' side: blocks are copied between a worker's KV caches and the arena."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import torch

from quire.engines.vllm.arena import ArenaPlace
from quire.engines.vllm.parts import GroupShape
from quire.engines.vllm.scheduling import Copy, StepCopies
from quire.errors import ConfigError


class WorkerSide:
    """One worker's KV caches, and its heads in every slot of the arena.

    caches  a tensor `[blocks, heads, ...]` for each layer, by name; kernels' smaller blocks as `[blocks * ratio, ...]`
    groups  names of the layers of each group, its window (0: none), and how attention lays a block out
    rank    which of the workers it is

    Raises `ConfigError` for caches of any other form.
    """

    def __init__(
        self,
        caches: Mapping[str, torch.Tensor],
        groups: Sequence[tuple[Sequence[str], int, str]],
        num_blocks: int,
        rank: int = 0,
    ) -> None:
        self._rank = rank
        self._arena: torch.Tensor | None = None
        self._place: ArenaPlace | None = None
        self._layers = [
            [_blocks(caches[name], name, num_blocks) for name in each[0]] for each in groups
        ]
        self._is_host = all(layer.device.type == "cpu" for each in self._layers for layer in each)
        self.shapes = [
            _shape(names, layers, window, layout)
            for (names, window, layout), layers in zip(groups, self._layers, strict=True)
        ]
        # What numbers of 8 bits stand for does not matter here, and not all operations know all of them.
        self._layers = [
            [layer.view(torch.uint8) if layer.itemsize == 1 else layer for layer in each]
            for each in self._layers
        ]
        self._began_s = 0.0

    def begin(self) -> None:
        """Begin a step."""
        self._began_s = time.perf_counter()

    def load(self, copies: StepCopies) -> None:
        """Copy what a step reads into its blocks."""
        for group, chosen in self._by_group(copies.loads):
            slots, blocks = self._indices(chosen)
            for at, layer in enumerate(self._layers[group]):
                payloads = self._slots(copies.place, group, at).index_select(0, slots)
                layer.index_copy_(0, blocks.to(layer.device), payloads.to(layer.device))
        self.begin()

    def save(self, copies: StepCopies) -> float:
        """Copy what a step has computed out of its blocks; return the seconds of its forward, 0 where it is not known."""
        seconds = time.perf_counter() - self._began_s if self._is_host else 0.0
        for group, chosen in self._by_group(copies.saves):
            slots, blocks = self._indices(chosen)
            for at, layer in enumerate(self._layers[group]):
                payloads = layer.index_select(0, blocks.to(layer.device)).cpu()
                self._slots(copies.place, group, at).index_copy_(0, slots, payloads)
        return seconds

    def _by_group(self, copies: Sequence[Copy]) -> list[tuple[int, list[Copy]]]:
        chosen = [
            (group, [each for each in copies if each.group == group])
            for group in range(len(self.shapes))
        ]
        return [each for each in chosen if each[1]]

    def _indices(self, copies: Sequence[Copy]) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.tensor([each.slot for each in copies]), torch.tensor(
            [each.block for each in copies]
        )

    def _slots(self, place: ArenaPlace, group: int, layer: int) -> torch.Tensor:
        """View this worker's heads of one layer in every slot: `[slots, heads, ...]`."""
        if self._arena is None or place != self._place:
            memory = torch.frombuffer(place.map(), dtype=torch.uint8)
            self._arena, self._place = memory.view(place.num_slots, place.slot_bytes), place
        shape, tensor = self.shapes[group], self._layers[group][layer]
        first = self._rank * shape.heads * shape.head_bytes
        mine = self._arena[:, first : first + shape.heads * shape.head_bytes].view(tensor.dtype)
        return mine.view(place.num_slots, shape.heads, -1, *shape.inner)[:, :, layer]


def _blocks(cache: torch.Tensor, name: str, num_blocks: int) -> torch.Tensor:
    """View a layer's cache as `[blocks, heads, ...]`."""
    if not isinstance(cache, torch.Tensor) or cache.dim() != 4 or cache.shape[0] % num_blocks:  # pyright: ignore[reportUnnecessaryIsInstance] - states are lists
        shape = tuple(getattr(cache, "shape", ()))
        raise ConfigError(
            f"the KV cache of layer {name!r} has shape {shape}; quire reads [{num_blocks}, heads, tokens, content]"
        )
    if cache.shape[0] == num_blocks:
        return cache
    return cache.view(num_blocks, -1, *cache.shape[1:]).transpose(1, 2)


def _shape(
    names: Sequence[str], layers: Sequence[torch.Tensor], window: int, layout: str
) -> GroupShape:
    first = layers[0]
    if any(each.shape != first.shape or each.dtype != first.dtype for each in layers):
        raise ConfigError(
            f"the layers of one group have caches of several shapes: {', '.join(names)}"
        )
    return GroupShape(
        layers=tuple(names),
        heads=first.shape[1],
        inner=tuple(first.shape[2:]),
        dtype=str(first.dtype).removeprefix("torch."),
        itemsize=first.itemsize,
        layout=layout,
        window=window,
    )
