"""Working caches for a model: empty, or of rows that were computed one by one."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from transformers.cache_utils import DummyLayer

from quire.engines.models.column_tokens import TokenLedger
from quire.engines.models.layers import WorkingLayer
from quire.engines.models.states import HybridLayer, StateLayer
from quire.engines.models.working_cache import AnyLayer, WorkingCache
from quire.errors import InvariantError
from quire.tensors.copy import KV
from quire.tensors.kinds import LayerKind
from quire.tensors.layout import KVLayout, StateLayout
from quire.tensors.model import GroupLayout, ModelLayout


@dataclass(frozen=True, slots=True)
class CacheFactory:
    """The common settings of one model's working caches.

    kinds       the memory of each layer
    layout      the groups as computed
    device      of K, V and states
    room        columns to allocate from the start
    ends        ids after which a row is finished
    debug_nan   fresh memory is NaN
    padded_below  the column from which rows behind padding are not exact; None: all are
    """

    kinds: Sequence[LayerKind]
    layout: ModelLayout
    device: torch.device
    room: int = 0
    ends: tuple[int, ...] = ()
    debug_nan: bool = False
    padded_below: int | None = None

    def for_call(self, room: int, ends: tuple[int, ...]) -> "CacheFactory":
        """Return the same with the room and the ends of one call."""
        return replace(self, room=room, ends=ends)

    def cache(self, ids: torch.Tensor, pads: npt.NDArray[np.int64], room: int = 0) -> WorkingCache:
        """Make a working cache without columns for prompts of ids `[rows, n]`."""
        layers = make_layers(self.kinds, room=max(self.room, room), debug_nan=self.debug_nan)
        # The ledger lies beside the states: no transfer per token.
        below = self.padded_below if pads.any() else None
        ledger = TokenLedger(ids[:, :0].to(self.device), pads, max_known=below)
        cache = WorkingCache(layers, ledger, block_size=self.layout.block_size)
        cache.ends, cache.prompt_columns = frozenset(self.ends), ids.shape[1]
        return cache

    def like(self, memory: KVLayout, num_rows: int) -> KV:
        """Return K and V `[rows, kv_heads, 1, width]` as the layers of such a group compute them."""
        one = torch.empty((), dtype=memory.dtype, device=self.device)
        shape = (num_rows, memory.kv_heads, 1)
        return one.expand(*shape, memory.k_width), one.expand(*shape, memory.v_width)

    @property
    def token_groups(self) -> list[tuple[GroupLayout, KVLayout]]:
        """The groups with K and V, as computed."""
        return [
            (group, group.memory)
            for group in self.layout.groups
            if isinstance(group.memory, KVLayout)
        ]

    @property
    def state_names(self) -> list[list[str]]:
        """Names of the states of each recurrent layer."""
        return [
            [tensor.name for tensor in layer]
            for group in self.layout.groups
            if isinstance(group.memory, StateLayout)
            for layer in group.memory.layers
        ]


def make_layers(
    kinds: Sequence[LayerKind], *, room: int = 0, debug_nan: bool = False
) -> list[AnyLayer]:
    """Make empty layers of these kinds, with room for so many columns."""
    layers: list[AnyLayer] = []
    for kind in kinds:
        if kind.tokens and kind.states:
            layers.append(
                HybridLayer(room, window=kind.window, num_states=kind.states, debug_nan=debug_nan)
            )
        elif kind.tokens:
            layers.append(WorkingLayer(room, window=kind.window, debug_nan=debug_nan))
        elif kind.states:
            layers.append(StateLayer(number_of_states=kind.states))
        else:
            layers.append(DummyLayer())
    return layers


def stacked(
    caches: Sequence[WorkingCache],
    ids: torch.Tensor,
    pads: npt.NDArray[np.int64],
    column: int,
    factory: CacheFactory,
) -> WorkingCache:
    """Join caches of one row each into one cache of all rows of `ids`.

    Row r has `pads[r]` columns of padding on its left. The rows are brought to `column`: row r has `max(column - pads[r], 0)` tokens. Raises
    `InvariantError` for any other number.
    """
    for row, (each, pad) in enumerate(zip(caches, pads, strict=True)):
        if each.ledger.length != max(column - int(pad), 0):
            raise InvariantError(
                f"row {row} has {each.ledger.length} tokens behind {pad} columns of padding, and "
                f"joins others at column {column}"
            )
    cache = factory.cache(ids, pads, column)
    if column == 0:
        return cache
    for group, memory in factory.token_groups:
        like = factory.like(memory, len(caches))
        for layer in group.layers:
            _stack_columns(cache, caches, layer, column, like)
    if cache.state_layers:
        begun = next(each.row_states(0) for each in caches if each.ledger.length)
        blank = [[torch.zeros_like(held) for held in layer] for layer in begun]
        rows = [each.row_states(0) if each.ledger.length else blank for each in caches]
        cache.fill_states(rows, factory.state_names)
        cache.snapshots = [each.snapshots[0] for each in caches]
    cache.ledger.append(ids[:, :column])
    return cache


def _stack_columns(
    cache: WorkingCache, caches: Sequence[WorkingCache], layer: int, column: int, like: KV
) -> None:
    pads = cache.ledger.pads
    own = [each.kv_layers[layer] for each in caches]
    firsts = [int(pad) + each.first for pad, each in zip(pads, own, strict=True) if each.length]
    # A window reaches into the padding where no row has as many tokens.
    first = min([*firsts, cache.kv_layers[layer].seen_at(column)])
    k, v = cache.kv_layers[layer].start_with(column, like, first)
    begun = [int(pad) + each.first for pad, each in zip(pads, own, strict=True) if each.first]
    cache.kv_layers[layer].whole_from = max(begun, default=0)
    for row, each in enumerate(own):
        num_before = k.shape[-2] - (each.length - each.first)
        # What a row has no columns for is padding or behind its window: masked, but 0 * NaN is NaN.
        k[row, :, :num_before] = 0
        v[row, :, :num_before] = 0
        if each.length:
            k_row, v_row = each.row(0, each.first, each.length)
            k[row, :, num_before:] = k_row
            v[row, :, num_before:] = v_row
