"""The cache that a transformers model computes with: contiguous, growing in place.

Implements the `Cache` protocol of transformers 5.23 (`transformers/cache_utils.py`).
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from quire.engines.hf.ledger import TokenLedger
from quire.errors import ConfigError, InvariantError
from quire.tensors.copy import KV


class WorkingLayer(CacheLayerMixin):
    """K and V of one layer: `[rows, kv_heads, capacity, width]`, of which `length` are written.

    `update` writes the new columns in place and returns views of `[..., :length, :]`. The room
    doubles when it is full, so a token costs O(1) copies on average, where `DynamicLayer`
    copies the whole layer for each one. Gradients do not flow through it.
    """

    is_compileable = False
    is_croppable = True
    is_sliding = False

    def __init__(self, room: int = 0, *, debug_nan: bool = False) -> None:
        super().__init__()  # pyright: ignore[reportUnknownMemberType] - untyped **kwargs
        self.room = room
        self.debug_nan = debug_nan
        self.length = 0
        self._k: torch.Tensor | None = None
        self._v: torch.Tensor | None = None

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Allocate for the shape, dtype and device of the first states."""
        self.dtype, self.device = key_states.dtype, key_states.device
        capacity = max(self.room, key_states.shape[-2])
        self._k = self._empty(key_states, capacity)
        self._v = self._empty(value_states, capacity)
        self._show(0)
        self.is_initialized = True

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        *args: object,  # noqa: ARG002 - the protocol's
        **kwargs: object,  # noqa: ARG002
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append `[rows, kv_heads, n, width]` and return all K and V so far, as views.

        Raises `ConfigError` when the rows are not the cache's.
        """
        k_new, v_new = self.extend(key_states, value_states)
        k_new.copy_(key_states.detach())
        v_new.copy_(value_states.detach())
        assert self.keys is not None
        assert self.values is not None
        return self.keys, self.values

    def extend(
        self, key_states: torch.Tensor, value_states: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append columns for K and V like these and return them, unwritten, as views."""
        if self._k is None or self._v is None:
            self.lazy_initialization(key_states, value_states)
            return self.extend(key_states, value_states)
        start, num_new = self.length, key_states.shape[-2]
        if key_states.shape[0] != self._k.shape[0]:
            raise ConfigError(
                f"the cache holds {self._k.shape[0]} rows and the model was fed "
                f"{key_states.shape[0]}; call past.batch_repeat_interleave(n) before generate "
                "with num_beams or num_return_sequences"
            )
        stop = start + num_new
        if stop > self._k.shape[-2]:
            self._grow(max(stop + 64, 2 * start))
        self.length = stop
        self.keys = self._k.narrow(-2, 0, stop)
        self.values = self._v.narrow(-2, 0, stop)
        return self._k.narrow(-2, start, num_new), self._v.narrow(-2, start, num_new)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return length and offset of K when `query_length` more tokens are appended."""
        return self.length + query_length, 0

    def get_seq_length(self) -> int:
        """Return the number of columns that are written."""
        return self.length

    def get_max_length(self) -> int:
        """Return -1: no limit."""
        return -1

    def reset(self) -> None:
        """Forget all columns; the room stays."""
        self._show(0)

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last columns: `tokens_to_remove` is zero or negative, as the protocol says."""
        if tokens_to_remove > 0:
            raise ConfigError(
                f"crop takes zero or a negative number of tokens, not {tokens_to_remove}: "
                f"crop(-{tokens_to_remove}) removes the last {tokens_to_remove}"
            )
        self._show(max(self.length + tokens_to_remove, 0))

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Make row i what row `beam_idx[i]` was."""
        self.batch_select_indices(beam_idx)

    def reorder_from(self, beam_idx: torch.Tensor, first: int) -> None:
        """Make row i what row `beam_idx[i]` was, from column `first` on, in place."""
        for states in (self.keys, self.values):
            if states is not None and first < self.length:
                columns = states[..., first:, :]
                columns.copy_(columns.index_select(0, beam_idx.to(states.device)))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep the rows `indices`, in that order."""
        if self._k is None or self._v is None:
            return
        index = indices.to(self._k.device)
        self._k = self._rebuilt(self._k, index)
        self._v = self._rebuilt(self._v, index)
        self._show(self.length)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Make `repeats` neighbouring rows out of each row."""
        if self._k is None:
            return
        rows = torch.arange(self._k.shape[0], device=self._k.device)
        self.batch_select_indices(rows.repeat_interleave(repeats))

    def row(self, row: int, start: int, stop: int) -> KV:
        """Return K and V of columns `start` to `stop` of one row: `[kv_heads, n, width]`, views."""
        if self._k is None or self._v is None or stop > self.length:
            raise InvariantError(f"columns {start}-{stop} of a layer of {self.length}")
        return self._k[row, :, start:stop], self._v[row, :, start:stop]

    def rows_match(self, num_rows: int) -> bool:
        """Return whether the layer is empty or holds `num_rows` rows."""
        return self._k is None or self._k.shape[0] == num_rows

    def _show(self, length: int) -> None:
        self.length = length
        if self._k is not None and self._v is not None:
            self.keys, self.values = self._k[..., :length, :], self._v[..., :length, :]

    def _grow(self, capacity: int) -> None:
        if self._k is not None and self._v is not None:
            old_k, old_v = self._k, self._v
            self._k, self._v = self._empty(old_k, capacity), self._empty(old_v, capacity)
            self._k[..., : self.length, :] = old_k[..., : self.length, :]
            self._v[..., : self.length, :] = old_v[..., : self.length, :]

    def _rebuilt(self, held: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        """Rows `index` of `held` in new room of the same capacity."""
        rows, heads, capacity, width = len(index), *held.shape[1:]
        fresh = self._empty(held.new_empty(rows, heads, 0, width), capacity)
        written = held[..., : self.length, :]
        torch.index_select(written, 0, index, out=fresh[..., : self.length, :])
        return fresh

    def _empty(self, like: torch.Tensor, capacity: int) -> torch.Tensor:
        rows, heads, _, width = like.shape
        room = like.detach().new_empty(rows, heads, capacity, width)
        return room.fill_(torch.nan) if self.debug_nan else room


class WorkingCache(Cache):
    """One request's KV, as the model reads and writes it, and the tokens behind it.

    `ledger` says which tokens the columns stand for. All layers have `ledger.length` columns
    but while a forward runs, or after one that failed; `drop_partial` mends the latter.

    The first `shared` columns are equal, bit by bit, in all rows that descend from one prompt,
    so that beams are reordered behind them only: 0 <= shared <= ledger.length.
    """

    def __init__(self, layers: Sequence[WorkingLayer], ledger: TokenLedger) -> None:
        super().__init__(layers=list(layers))
        self.working_layers = list(layers)
        self.ledger = ledger
        self.shared = 0

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last `-tokens_to_remove` columns, in all layers and in the ledger."""
        super().crop(tokens_to_remove)
        self._forget(-tokens_to_remove)

    def reset(self) -> None:
        """Forget all columns, in all layers and in the ledger."""
        super().reset()
        self._forget(self.ledger.length)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Make row i what row `beam_idx[i]` was: beam search."""
        origins = self.ledger.origins
        if not np.array_equal(origins[beam_idx.cpu().numpy()], origins):
            self._select(beam_idx)
            return
        for layer in self.working_layers:
            layer.reorder_from(beam_idx, self.shared)
        self.ledger.select(beam_idx)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep the rows `indices`, in that order."""
        self._select(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Make `repeats` neighbouring rows out of each row."""
        if len(set(self.ledger.origins.tolist())) == self.ledger.num_rows:
            self.shared = self.ledger.length
        super().batch_repeat_interleave(repeats)
        self.ledger.repeat(repeats)

    def drop_partial(self) -> None:
        """Forget what a forward that did not finish wrote into some layers.

        Columns that all layers have but the ledger does not were computed without token ids
        being seen; they are entered as unknown.
        """
        lengths = {layer.length for layer in self.working_layers}
        if lengths == {self.ledger.length}:
            return
        if len(lengths) == 1 and (length := lengths.pop()) > self.ledger.length:
            self.ledger.append_unknown(length - self.ledger.length)
            return
        whole = min(min(lengths, default=0), self.ledger.length)
        for layer in self.working_layers:
            layer.crop(whole - layer.length)
        self._forget(self.ledger.length - whole)

    def row_kv(self, row: int, start: int, stop: int) -> list[KV]:
        """Return K and V per layer of tokens `start` to `stop` of a row, padding not counted."""
        pad = int(self.ledger.pads[row])
        if pad + stop > self.ledger.known:
            raise InvariantError(f"token {stop} of row {row}: {self.ledger.known - pad} are known")
        return [layer.row(row, pad + start, pad + stop) for layer in self.working_layers]

    def check(self) -> None:
        """Raise `InvariantError` unless layers and ledger agree."""
        self.ledger.check()
        lengths = {layer.length for layer in self.working_layers}
        if lengths != {self.ledger.length} or not all(
            layer.rows_match(self.ledger.num_rows) for layer in self.working_layers
        ):
            raise InvariantError(
                f"layers of {sorted(lengths)} columns, a ledger of {self.ledger.length} columns "
                f"and {self.ledger.num_rows} rows"
            )
        if not 0 <= self.shared <= self.ledger.length:
            raise InvariantError(f"{self.shared} of {self.ledger.length} columns are shared")

    def _forget(self, num_columns: int) -> None:
        self.ledger.crop(num_columns)
        self.shared = min(self.shared, self.ledger.length)

    def _select(self, indices: torch.Tensor) -> None:
        for layer in self.working_layers:
            layer.batch_select_indices(indices)
        self.ledger.select(indices)


def empty_cache(
    num_layers: int,
    tokens: torch.Tensor,
    pads: npt.NDArray[np.int64],
    *,
    room: int = 0,
    debug_nan: bool = False,
) -> WorkingCache:
    """Make a working cache without columns for rows like `tokens` `[rows, n]`."""
    layers = [WorkingLayer(room, debug_nan=debug_nan) for _ in range(num_layers)]
    return WorkingCache(layers, TokenLedger(tokens[:, :0], pads))
