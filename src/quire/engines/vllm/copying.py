"""The workers' side: blocks are copied between a worker's KV caches and the arena."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence

import torch

from quire.engines.vllm.arena import ArenaPlace
from quire.engines.vllm.parts import GroupShape
from quire.engines.vllm.scheduling import Copy, StepCopies
from quire.errors import ConfigError
from quire.runs import runs_of


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
        for slots, blocks, layer in self._runs(copies.place, copies.loads):
            layer.index_copy_(0, blocks, slots.to(layer.device))
        self.begin()

    def save(self, copies: StepCopies) -> float:
        """Copy the blocks that a step has computed; return the seconds of its forward, 0 if unknown."""
        seconds = time.perf_counter() - self._began_s if self._is_host else 0.0
        for slots, blocks, layer in self._runs(copies.place, copies.saves):
            if self._is_host:
                torch.index_select(layer, 0, blocks, out=slots)
            else:
                slots.copy_(layer.index_select(0, blocks))
        return seconds

    def _runs(
        self, place: ArenaPlace, copies: Sequence[Copy]
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Yield slots side by side, the blocks that belong to them, and the layer, so that each is copied once."""
        for group, layers in enumerate(self._layers):
            chosen = sorted((each.slot, each.block) for each in copies if each.group == group)
            first = 0
            for run in runs_of([slot for slot, _ in chosen]):
                ids = torch.tensor([block for _, block in chosen[first : first + len(run)]])
                first += len(run)
                for at, layer in enumerate(layers):
                    slots = self._slots(place, group, at)[run.start : run.stop]
                    yield slots, ids.to(layer.device), layer

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
