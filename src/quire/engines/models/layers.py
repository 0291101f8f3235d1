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
        self._held: KV | None = None

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Allocate for the shape, dtype and device of the first states."""
        self.dtype, self.device = key_states.dtype, key_states.device
        capacity = max(self.room - self.first, key_states.shape[-2])
        rows = key_states.shape[0]
        self._held = (
            self._empty(key_states, rows, capacity),
            self._empty(value_states, rows, capacity),
        )
        self._show(self.length)
        self.is_initialized = True

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        *args: object,
        **kwargs: object,
    ) -> KV:
        """Append `[rows, kv_heads, n, width]` and return what these n tokens look at, as views.

        Raises `ConfigError` when the rows are not the cache's.
        """
        seen = 0 if self.window is None else max(self.length - self.window + 1, 0)
        k_new, v_new = self.extend(key_states, value_states)
        k_new.copy_(key_states.detach())
        v_new.copy_(value_states.detach())
        if seen != self.first:
            return self._columns(seen, self.length)
        assert self.keys is not None
        assert self.values is not None
        return self.keys, self.values

    @property
    def seen_from(self) -> int:
        """The first column that the next token looks at."""
        return self.seen_at(self.length)

    def seen_at(self, column: int) -> int:
        """Return the first column that a token at `column` looks at."""
        return 0 if self.window is None else max(column - self.window + 1, 0)

    def extend(self, key_states: torch.Tensor, value_states: torch.Tensor) -> KV:
        """Append columns for K and V like these and return them, unwritten, as views."""
        if self.arriving is not None:
            self._arrive()
        if self._held is None:
            # A layer of states beside K and V has an initialization of its own.
            WorkingLayer.lazy_initialization(self, key_states, value_states)
        assert self._held is not None
        k, v = self._held
        num_rows, num_new = key_states.shape[0], key_states.shape[-2]
        if num_rows != k.shape[0]:
            check_rows(k, key_states)
        start = self.length - self.first
        stop = start + num_new
        if stop > k.shape[-2]:
            self._move(torch.arange(num_rows, device=k.device), max(stop + 64, 2 * start))
            k, v = self._held
        self.length += num_new
        # As `_show` and `_columns` do: each decode step comes here once per layer.
        self.keys, self.values = k.narrow(-2, 0, stop), v.narrow(-2, 0, stop)
        return k.narrow(-2, start, num_new), v.narrow(-2, start, num_new)

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
        num_columns = column - self.first
        k, v = like[0][..., :1, :], like[1][..., :1, :]
        return self.extend(k.expand(-1, -1, num_columns, -1), v.expand(-1, -1, num_columns, -1))

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return length and offset of K when `query_length` more tokens are appended."""
        seen_from = self.seen_at(self.length)
        return self.length + query_length - seen_from, seen_from

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

    def check_crop(self, tokens_to_remove: int) -> None:
        """Raise `ConfigError` unless `crop` would leave all that the layer looks at."""
        if tokens_to_remove > 0:
            raise ConfigError(
                f"crop takes zero or a negative number of tokens, not {tokens_to_remove}: "
                f"crop(-{tokens_to_remove}) removes the last {tokens_to_remove}"
            )
        left, held_from = self.length + tokens_to_remove, max(self.first, self.whole_from)
        if tokens_to_remove and held_from > self.seen_at(max(left, 0)):
            raise ConfigError(
                f"crop({tokens_to_remove}) leaves {left} columns, whose window of {self.window} starts "
                f"before column {held_from}, the first one that is held: the cached head brought its "
                "last window only; open a session for the shorter text"
            )

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last columns: `tokens_to_remove` is zero or negative, as the protocol says."""
        WorkingLayer.check_crop(self, tokens_to_remove)  # states beside it go nowhere
        self._show(max(self.length + tokens_to_remove, 0))

    def reorder_from(self, beam_idx: torch.Tensor, column: int) -> None:
        """Make row i what row `beam_idx[i]` was, from a column on, in place."""
        self._arrive()
        start = max(column, self.first)
        if self._held is not None and start < self.length:
            for columns in self._columns(start, self.length):
                columns.copy_(columns.index_select(0, beam_idx.to(columns.device)))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep the rows `indices`, in that order."""
        self._arrive()
        if self._held is not None:
            self._move(indices.to(self._held[0].device), self._held[0].shape[-2])

    def row(self, row: int, start: int, stop: int) -> KV:
        """Return K and V of columns `start` to `stop` of one row: `[kv_heads, n, width]`, views."""
        if self._held is None or not self.first <= start <= stop <= self.length:
            raise InvariantError(
                f"columns {start}-{stop} of a layer of columns {self.first}-{self.length}"
            )
        self._arrive()
        k, v = self._columns(start, stop)
        return k[row], v[row]

    def _arrive(self) -> None:
        if self.arriving is not None:
            self.arriving()
            self.arriving = None

    def _columns(self, start: int, stop: int) -> KV:
        """Return columns of all rows, as views."""
        assert self._held is not None
        (k, v), at, num_columns = self._held, start - self.first, stop - start
        return k.narrow(-2, at, num_columns), v.narrow(-2, at, num_columns)

    def _show(self, length: int) -> None:
        self.length = max(length, self.first)
        if self._held is not None:
            self.keys, self.values = self._columns(self.first, self.length)

    def _move(self, rows: torch.Tensor, capacity: int) -> None:
        """Copy these rows into new room for so many columns."""

        def moved(held: torch.Tensor) -> torch.Tensor:
            room, num_columns = self._empty(held, len(rows), capacity), self.length - self.first
            written = held[..., :num_columns, :]
            torch.index_select(written, 0, rows, out=room[..., :num_columns, :])
            return room

        assert self._held is not None
        self._held = moved(self._held[0]), moved(self._held[1])
        self._show(self.length)

    def _empty(self, like: torch.Tensor, num_rows: int, capacity: int) -> torch.Tensor:
        room = like.detach().new_empty(num_rows, like.shape[1], capacity, like.shape[-1])
        return room.fill_(torch.nan) if self.debug_nan else room


def check_rows(held: torch.Tensor | None, given: torch.Tensor) -> None:
    """Raise `ConfigError` unless a model was fed as many rows as its cache holds."""
    if held is not None and held.shape[0] != given.shape[0]:
        raise ConfigError(
            f"the cache holds {held.shape[0]} rows and the model was fed {given.shape[0]}; call "
            "past.batch_repeat_interleave(n) before generate with num_beams or num_return_sequences"
        )
