"""A forward of chosen rows over a filled KV cache: it replaces their columns, the others stay.

The model is an unmodified one of transformers. This module rules out three silent errors of transformers 5.23
with rows that are not adjacent:

- without a mask, sdpa takes the rows for the first ones: a mask is given to every layer;
- eager attention adds a boolean mask as 0 and 1: the mask holds 0 and the lowest number, in the
  model's dtype;
- positions with gaps are taken for several texts side by side: a four-dimensional mask rules that out,
  and positions are given.
"""

from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from quire.engines.models.layers import WorkingLayer
from quire.engines.models.working_cache import WorkingCache
from quire.errors import InvariantError, UnsupportedModel
from quire.tensors import KV
from quire.tensors.kinds import LayerKind, model_type
from quire_passages.hf.attention import register
from quire_passages.hf.shadow import Given, Look, shadow_of

Positions = npt.NDArray[np.int64]

Choose = Callable[[Positions, npt.NDArray[np.float32]], Positions]
"""Takes rows, and how far K and V of each are from those that stood there; returns those that go on."""


class RowForward:
    """Forwards of one model over working caches of one row, with all columns there.

    kinds  what its layers keep: full, sliding or chunked attention each
    """

    def __init__(self, model: Any, kinds: Sequence[LayerKind]) -> None:
        self._model = model
        self._kinds = kinds
        self.config = model.config
        register()

    def __call__(
        self,
        past: WorkingCache,
        tokens: npt.NDArray[np.int32],
        rows: Positions,
        check: tuple[int, Choose] | None = None,
        look: Look | None = None,
        *,
        ends: bool = False,
    ) -> torch.Tensor:
        """Compute `rows` (positions, rising) of `tokens`; return the logits `[vocab]` of the last one.

        past   has a column for each token; those of `rows` are written, the others read
        check  a layer above 0, and who chooses there which rows go on. K and V of that layer and those
               before it are written for all rows, of the later ones for the chosen alone
        look   is shown the attention of each layer
        ends   whether of the last layer K and V alone are computed, but for the last row
        """
        drops = {} if check is None else dict([check])
        run = _RowsForward(past, self._kinds, rows, self._model.dtype, drops, ends=ends)
        logits = self._run(run, tokens, rows, look)
        if run.num_called != len(self._kinds):
            raise UnsupportedModel(
                f"{model_type(self._model.config)}: {run.num_called} of {len(self._kinds)} decoder layers were "
                "called where quire chooses their rows"
            )
        return logits

    def chosen(
        self,
        past: WorkingCache,
        tokens: npt.NDArray[np.int32],
        rows: Positions,
        check: tuple[int, Choose],
    ) -> Positions:
        """Compute `rows` up to a check layer, as a call does, and return those that go on there.

        K and V of that layer and those before it are written for all rows; those behind it are not called.
        """
        layer, choose = check

        def ending(left: Positions, deviation: npt.NDArray[np.float32]) -> Positions:
            raise _Chosen(choose(left, deviation))

        drops = {layer: ending}
        run = _RowsForward(past, self._kinds, rows, self._model.dtype, drops, ends=False)
        try:
            self._run(run, tokens, rows, None)
        except _Chosen as ended:
            return ended.rows
        raise UnsupportedModel(
            f"{model_type(self._model.config)}: decoder layer {layer} was not called where quire chooses its rows"
        )

    def _run(
        self,
        run: "_RowsForward",
        tokens: npt.NDArray[np.int32],
        rows: Positions,
        look: Look | None,
    ) -> torch.Tensor:
        """Have the model compute rows through `run`; return the logits `[vocab]` of the last one."""
        shadow = shadow_of(self._model, len(self._kinds), run.layer, look)
        device = self._model.device
        at = torch.as_tensor(rows).to(device)[None]
        ids = torch.as_tensor(tokens[rows].astype(np.int64)).to(device)[None]
        with torch.no_grad():
            output = shadow(
                input_ids=ids,
                position_ids=at,
                attention_mask=run.mask(0),
                past_key_values=run.cache,
                use_cache=True,
                logits_to_keep=1,
            )
        return output.logits[0, -1]


class _RowsForward:
    """One forward: its rows, the masks of its layers, and the cache that they write into.

    `_started` are the rows that it began with; `_rows` those that are left, `_started[_kept]`.

    drops  by layer, who chooses there which rows go on
    """

    def __init__(
        self,
        past: WorkingCache,
        kinds: Sequence[LayerKind],
        rows: Positions,
        dtype: torch.dtype,
        drops: dict[int, Choose],
        *,
        ends: bool,
    ) -> None:
        self._kinds = kinds
        self._rows = rows
        self._started = rows
        self._dtype = dtype
        self._drops = drops
        self._end = len(kinds) - 1 if ends else None
        self._kept: torch.Tensor | None = None
        self._masks: dict[tuple[str, int | None, int], torch.Tensor] = {}
        self._held = [past.kv_layers[index] for index in range(len(kinds))]
        self.cache = _RowCache([_RowLayer(each, rows) for each in self._held])
        self.num_called = 0

    def layer(self, index: int, call: Callable[..., Any], given: Given) -> Any:
        """Call a decoder layer for the rows that are left."""
        self.num_called += 1
        if index in self._drops or index == self._end:
            hidden = self._dropped(index, call, self._narrowed(index, given))
            given = {**given, "hidden_states": hidden}
        return call(**self._narrowed(index, given))

    def mask(self, index: int) -> torch.Tensor:
        """Return what is added to the scores of a layer: `[1, 1, rows, columns]`."""
        kind, held = self._kinds[index], self._held[index]
        key = (str(kind.tokens), kind.window, held.first)
        if key not in self._masks:
            self._masks[key] = _mask(kind, held, self._rows, self._dtype)
        return self._masks[key]

    def _dropped(self, index: int, call: Callable[..., Any], given: Given) -> torch.Tensor:
        """Compute K and V of a layer for all rows that are left, and return the hidden states of those that go on."""
        layer, choose = self.cache.rows[index], self._drops.get(index)
        layer.probing, layer.compares = True, choose is not None
        try:
            call(**given)
        except _Seen:
            pass
        else:
            raise InvariantError(f"layer {index} wrote no K and V into the cache it was given")
        finally:
            layer.probing = False
        rows = self._rows
        if choose is not None:
            assert layer.deviation is not None
            rows = choose(rows, layer.deviation)
        if index == self._end:
            rows = self._rows[-1:]
        device = given["hidden_states"].device
        left = torch.as_tensor(np.searchsorted(self._rows, rows)).to(device)
        self._rows = rows
        self._kept = torch.as_tensor(np.searchsorted(self._started, rows)).to(device)
        self._masks.clear()
        for each in self.cache.rows[index:]:
            each.take(rows)
        return given["hidden_states"].index_select(1, left)

    def _narrowed(self, index: int, given: Given) -> Given:
        """Return the arguments of a layer with those of the rows that are left, and their mask."""
        parts = dict(given)
        if self._kept is not None:
            parts = {name: self._part(name, value) for name, value in given.items()}
        return {**parts, "attention_mask": self.mask(index)}

    def _part(self, name: str, value: Any) -> Any:
        assert self._kept is not None
        if name in ("hidden_states", "attention_mask", "past_key_values"):
            return value
        if name in ("position_ids", "cache_position"):
            return value[..., self._kept] if isinstance(value, torch.Tensor) else value
        if name == "position_embeddings":
            return _indexed(value, self._kept)
        if isinstance(value, torch.Tensor) and value.ndim > 1:
            raise UnsupportedModel(
                f"its decoder layers take {name}, a tensor {list(value.shape)}, and quire does not know which "
                "part of it belongs to which row"
            )
        return value


def _indexed(value: Any, kept: torch.Tensor) -> Any:
    """Return tables of `[..., rows, width]`, alone or in tuples and by kind, for the rows that are left."""
    if isinstance(value, torch.Tensor):
        return value.index_select(-2, kept)
    if isinstance(value, dict):
        tables = cast("dict[str, Any]", value)
        return {key: _indexed(each, kept) for key, each in tables.items()}
    if isinstance(value, tuple):
        return tuple(_indexed(each, kept) for each in cast("tuple[Any, ...]", value))
    return value


def _mask(kind: LayerKind, held: WorkingLayer, rows: Positions, dtype: torch.dtype) -> torch.Tensor:
    assert held.keys is not None
    device = held.keys.device
    row = torch.as_tensor(rows).to(device)[:, None]
    column = torch.arange(held.first, held.length, device=device)[None]
    hidden = column > row
    if kind.tokens == "sliding" and kind.window is not None:
        hidden |= column <= row - kind.window
    if kind.tokens == "chunked" and kind.window is not None:
        hidden |= column < row // kind.window * kind.window
    mask = torch.zeros(hidden.shape, dtype=dtype, device=device)
    return mask.masked_fill_(hidden, torch.finfo(dtype).min)[None, None]


class _Seen(Exception):  # noqa: N818 - ends a layer's call on purpose
    """K and V of the check layer have been seen."""


class _Chosen(Exception):  # noqa: N818 - ends a forward on purpose
    """The rows that go on behind the check layer are known."""

    def __init__(self, rows: Positions) -> None:
        super().__init__()
        self.rows = rows


class _RowLayer(CacheLayerMixin):
    """K and V of one layer, whole: new rows go into their columns, and all columns are looked at."""

    is_compileable = False
    is_sliding = False

    def __init__(self, held: WorkingLayer, rows: Positions) -> None:
        super().__init__()  # pyright: ignore[reportUnknownMemberType] - untyped **kwargs
        assert held.keys is not None
        assert held.values is not None
        self._held: KV = held.keys, held.values
        self.keys, self.values = self._held
        self._first = held.first
        self.is_initialized = True
        self.probing = self.compares = False
        self.deviation: npt.NDArray[np.float32] | None = None
        self.take(rows)

    def take(self, rows: Positions) -> None:
        """Expect these rows from now on."""
        columns = rows - self._first
        is_run = columns.size and columns[-1] - columns[0] + 1 == columns.size
        self._run = (int(columns[0]), columns.size) if is_run else None
        self._columns = torch.as_tensor(columns).to(self._held[0].device)

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing: all columns are there."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> KV:
        new = (key_states, value_states)
        if self.probing and self.compares:
            k, v = (
                _deviation(each, held.index_select(-2, self._columns))
                for each, held in zip(new, self._held, strict=True)
            )
            self.deviation = (k + v).numpy(force=True)
        for each, held in zip(new, self._held, strict=True):
            if self._run is not None:
                held.narrow(-2, *self._run).copy_(each)
            else:
                held.index_copy_(-2, self._columns, each)
        if self.probing:
            raise _Seen
        return self._held

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._held[0].shape[-2], self._first

    def get_seq_length(self) -> int:
        return self._first + self._held[0].shape[-2]

    def get_max_length(self) -> int:
        return -1


class _RowCache(Cache):
    """The layers of a forward of chosen rows."""

    def __init__(self, rows: list[_RowLayer]) -> None:
        super().__init__(layers=list(rows))
        self.rows = rows


def _deviation(new: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
    """Return the squared distance of each row `[rows]`, over the mean square of a row."""
    size = new.float().square().sum((0, 1, 3)).mean().clamp_min(1e-12)
    return (new.float() - old.float()).square().sum((0, 1, 3)) / size
