"""K and V of one layer as a transformers model computes with them: contiguous, growing in place.

Implements `CacheLayerMixin` of transformers 5.23 (`transformers/cache_utils.py`).
"""

from collections.abc import Callable

import torch
from transformers.cache_utils import CacheLayerMixin

from quire.errors import ConfigError, InvariantError
from quire.tensors.copy import KV


class WorkingLayer(CacheLayerMixin):
    """K and V of one layer: `[rows, kv_heads, capacity, width]`, of columns `first` to `length`.

    `update` writes the new columns in place and returns views of those the layer looks at: all,
    or the last `window - 1` before the new ones. The room doubles when it is full, so a token
    costs O(1) copies on average, where `DynamicLayer` copies the whole layer for each one.
    Gradients do not flow through it.

    A windowed layer (sliding, or chunked with its chunk as the window) keeps the columns behind
    its window too: they are what the cache will keep of this request, and crop needs them. It may
    start from a window alone, and then `first` is where that window starts. Where rows start from
    windows that begin at different columns, `whole_from` is the last of these: before it a row has
    zeros in place of K and V that it lacks.

    `arriving`: called before columns are first touched that may still be on their way. Until
    then `keys` and `values` hold anything.

        first, whole_from <= max(length - window + 1, 0)        both are 0 without a window
    """

    is_compileable = False
    is_croppable = True
    is_sliding = False

    def __init__(
        self, room: int = 0, *, window: int | None = None, debug_nan: bool = False
    ) -> None:
        super().__init__()  # pyright: ignore[reportUnknownMemberType] - untyped **kwargs
        self.room = room
        self.window = window
        self.is_sliding = window is not None
        self.debug_nan = debug_nan
        self.first = 0
        self.whole_from = 0
        self.length = 0
        self.arriving: Callable[[], None] | None = None
        self._k: torch.Tensor | None = None
        self._v: torch.Tensor | None = None

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Allocate for the shape, dtype and device of the first states."""
        self._allocate(key_states, value_states)

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        *args: object,
        **kwargs: object,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append `[rows, kv_heads, n, width]` and return what these n tokens look at, as views.

        Raises `ConfigError` when the rows are not the cache's.
        """
        seen = self.seen_from
        k_new, v_new = self.extend(key_states, value_states)
        k_new.copy_(key_states.detach())
        v_new.copy_(value_states.detach())
        assert self._k is not None
        assert self._v is not None
        skipped, num_seen = seen - self.first, self.length - seen
        return self._k.narrow(-2, skipped, num_seen), self._v.narrow(-2, skipped, num_seen)

    @property
    def seen_from(self) -> int:
        """The first column that the next token looks at."""
        return self.seen_at(self.length)

    def seen_at(self, column: int) -> int:
        """Return the first column that a token at `column` looks at."""
        return 0 if self.window is None else max(column - self.window + 1, 0)

    def extend(
        self, key_states: torch.Tensor, value_states: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append columns for K and V like these and return them, unwritten, as views."""
        self._arrive()
        if self._k is None or self._v is None:
            self._allocate(key_states, value_states)
            return self.extend(key_states, value_states)
        start, num_new = self.length - self.first, key_states.shape[-2]
        if key_states.shape[0] != self._k.shape[0]:
            raise ConfigError(
                f"the cache holds {self._k.shape[0]} rows and the model was fed "
                f"{key_states.shape[0]}; call past.batch_repeat_interleave(n) before generate "
                "with num_beams or num_return_sequences"
            )
        stop = start + num_new
        if stop > self._k.shape[-2]:
            self._grow(max(stop + 64, 2 * start))
        self._show(self.length + num_new)
        return self._k.narrow(-2, start, num_new), self._v.narrow(-2, start, num_new)

    def start_with(self, column: int, like: KV, first: int | None = None) -> KV:
        """Begin with what a next token at `column` looks at; return those columns, unwritten.

        `like`: K and V of the shape `[rows, kv_heads, any, width]` and dtype to hold. `first`:
        begin with that column instead, which may be earlier.
        """
        if self.length:
            raise InvariantError(f"a layer of columns {self.first} to {self.length} begins again")
        seen_from = self.seen_at(column)
        self.first = self.length = seen_from if first is None else first
        if self.first > seen_from:
            raise InvariantError(
                f"a layer begins with column {self.first}; a token at {column} looks at {seen_from}"
            )
        k, v = like
        num_columns = column - self.first
        shape = (*k.shape[:2], num_columns)
        return self.extend(
            k[..., :1, :].expand(*shape, k.shape[-1]), v[..., :1, :].expand(*shape, v.shape[-1])
        )

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return length and offset of K when `query_length` more tokens are appended."""
        return self.length + query_length - self.seen_from, self.seen_from

    def get_seq_length(self) -> int:
        """Return the number of columns so far, those of a window's past counted."""
        return self.length

    def get_max_length(self) -> int:
        """Return the window; -1: no limit."""
        return -1 if self.window is None else self.window

    def reset(self) -> None:
        """Forget all columns; the room stays."""
        self.first = self.whole_from = 0
        self._show(0)

    def can_crop(self, num_columns: int) -> bool:
        """Whether the layer still holds all it looks at when it has `num_columns` fewer columns."""
        held_from = max(self.first, self.whole_from)
        return num_columns == 0 or held_from <= self.seen_at(max(self.length - num_columns, 0))

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last columns: `tokens_to_remove` is zero or negative, as the protocol says."""
        if tokens_to_remove > 0:
            raise ConfigError(
                f"crop takes zero or a negative number of tokens, not {tokens_to_remove}: "
                f"crop(-{tokens_to_remove}) removes the last {tokens_to_remove}"
            )
        if not WorkingLayer.can_crop(self, -tokens_to_remove):  # states beside it go nowhere
            raise ConfigError(
                f"crop({tokens_to_remove}) leaves {self.length + tokens_to_remove} columns, whose "
                f"window of {self.window} starts before column {max(self.first, self.whole_from)}, the first "
                "one that is held: "
                "the cached head brought its last window only; open a session for the shorter text"
            )
        self._show(max(self.length + tokens_to_remove, 0))

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Make row i what row `beam_idx[i]` was."""
        self.batch_select_indices(beam_idx)

    def reorder_from(self, beam_idx: torch.Tensor, column: int) -> None:
        """Make row i what row `beam_idx[i]` was, from a column on, in place."""
        self._arrive()
        start = max(column, self.first) - self.first
        for states in (self._k, self._v):
            if states is not None and start < self.length - self.first:
                columns = states[..., start : self.length - self.first, :]
                columns.copy_(columns.index_select(0, beam_idx.to(states.device)))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep the rows `indices`, in that order."""
        self._arrive()
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
        # Of this class: a layer that keeps more selects its rows itself.
        WorkingLayer.batch_select_indices(self, rows.repeat_interleave(repeats))

    def row(self, row: int, start: int, stop: int) -> KV:
        """Return K and V of columns `start` to `stop` of one row: `[kv_heads, n, width]`, views."""
        if self._k is None or self._v is None or not self.first <= start <= stop <= self.length:
            raise InvariantError(
                f"columns {start}-{stop} of a layer of columns {self.first}-{self.length}"
            )
        self._arrive()
        start, stop = start - self.first, stop - self.first
        return self._k[row, :, start:stop], self._v[row, :, start:stop]

    def rows_match(self, num_rows: int) -> bool:
        """Return whether the layer is empty or holds `num_rows` rows."""
        return self._k is None or self._k.shape[0] == num_rows

    def _arrive(self) -> None:
        if self.arriving is not None:
            self.arriving()
            self.arriving = None

    def _show(self, length: int) -> None:
        self.length = max(length, self.first)
        if self._k is not None and self._v is not None:
            held = self.length - self.first
            self.keys, self.values = self._k[..., :held, :], self._v[..., :held, :]

    def _allocate(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        capacity = max(self.room - self.first, key_states.shape[-2])
        self._k = self._empty(key_states, capacity)
        self._v = self._empty(value_states, capacity)
        self._show(self.length)
        self.is_initialized = True

    def _grow(self, capacity: int) -> None:
        if self._k is not None and self._v is not None:
            old_k, old_v, held = self._k, self._v, self.length - self.first
            self._k, self._v = self._empty(old_k, capacity), self._empty(old_v, capacity)
            self._k[..., :held, :] = old_k[..., :held, :]
            self._v[..., :held, :] = old_v[..., :held, :]

    def _rebuilt(self, held: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        """Rows `index` of `held` in new room of the same capacity."""
        rows, heads, capacity, width = len(index), *held.shape[1:]
        fresh = self._empty(held.new_empty(rows, heads, 0, width), capacity)
        num_columns = self.length - self.first
        written = held[..., :num_columns, :]
        torch.index_select(written, 0, index, out=fresh[..., :num_columns, :])
        return fresh

    def _empty(self, like: torch.Tensor, capacity: int) -> torch.Tensor:
        rows, heads, _, width = like.shape
        room = like.detach().new_empty(rows, heads, capacity, width)
        return room.fill_(torch.nan) if self.debug_nan else room
