"""The cache that a transformers model computes with: layers of every kind, and a ledger of tokens.

Implements the `Cache` protocol of transformers 5.23 (`transformers/cache_utils.py`).
"""

from collections.abc import Sequence

import numpy as np
import torch
from transformers.cache_utils import Cache, DummyLayer

from quire.engines.models.column_tokens import TokenLedger
from quire.engines.models.layers import WorkingLayer
from quire.engines.models.states import HybridLayer, RowStates, Snapshot, StateLayer
from quire.errors import ConfigError, InvariantError
from quire.tensors.copy import KV

AnyLayer = WorkingLayer | StateLayer | HybridLayer | DummyLayer


class WorkingCache(Cache):
    """One request's KV and states, as the model reads and writes them, and the tokens behind them.

    `ledger` says which tokens the columns stand for. All layers have `ledger.length` columns
    but while a forward runs, or after one that failed; `drop_partial` mends the latter, but for
    recurrent states, which cannot go back: then the cache is `lost`.

    The first `shared` columns are equal, bit by bit, in all rows that descend from one prompt,
    so that beams are reordered behind them only: 0 <= shared <= ledger.length.

    With recurrent layers, `snapshots[r]` is a copy of row r's states at the last multiple of
    `block_size` tokens at which a forward ended; a row that has ended with one of `ends`, behind
    the first `prompt_columns`, keeps the one from before its end.
    """

    def __init__(
        self, layers: Sequence[AnyLayer], ledger: TokenLedger, *, block_size: int = 16
    ) -> None:
        super().__init__(layers=list(layers))  # pyright: ignore[reportArgumentType] - a union
        self.kv_layers = {i: x for i, x in enumerate(layers) if isinstance(x, WorkingLayer)}
        self.state_layers = [x for x in layers if isinstance(x, StateLayer)]
        self._is_linear = [
            isinstance(x, StateLayer) and not isinstance(x, WorkingLayer) for x in layers
        ]
        self.ledger = ledger
        self.shared = 0
        self.block_size = block_size
        self.snapshots: list[Snapshot | None] = [None] * ledger.num_rows
        self.ends: frozenset[int] = frozenset()
        self.prompt_columns = 0
        self.lost = False
        self._in_forward = False

    @property
    def is_linear(self) -> list[bool]:
        """Whether each layer keeps states and no columns."""
        return self._is_linear

    def forward_starts(self) -> None:
        """Note that a forward begins, and mend what one that failed has left.

        Raises `ConfigError` when it left recurrent states that cannot be mended.
        """
        self.drop_partial()
        if self.lost:
            raise ConfigError(
                "an earlier forward over this cache failed half-way, and recurrent states cannot "
                "go back to where it began; open a new session"
            )
        self._in_forward = True

    def forward_ends(self, fed: torch.Tensor | str) -> None:
        """Enter the columns that a finished forward computed.

        `fed`: the token ids `[rows, n]`, or why the columns are not those of tokens.
        """
        self._in_forward = False
        computed = self.get_seq_length() - self.ledger.length
        if isinstance(fed, str):
            self.ledger.append_unknown(computed, fed)
        elif fed.shape == (self.ledger.num_rows, computed):
            self.ledger.append(fed)
        else:
            reason = f"input_ids of shape {list(fed.shape)} made {computed} columns"
            self.ledger.append_unknown(computed, reason)
        if self.state_layers:
            self._take_snapshots()

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last `-tokens_to_remove` columns, in all layers and in the ledger.

        Raises `ConfigError`, with nothing changed, where a layer cannot: a recurrent state goes
        nowhere back, a window not to before what was loaded.
        """
        for layer in self.kv_layers.values():
            layer.check_crop(tokens_to_remove)
        for layer in self.state_layers:
            layer.check_rollback(tokens_to_remove)
        for layer in self.state_layers:
            if layer.record_past:
                StateLayer.crop(layer, tokens_to_remove)
        for layer in self.kv_layers.values():
            WorkingLayer.crop(layer, tokens_to_remove)
        self._forget(-tokens_to_remove)

    def reset(self) -> None:
        """Forget all columns and states, in all layers and in the ledger."""
        super().reset()
        self._forget(self.ledger.length)
        self.lost = self._in_forward = False

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Make row i what row `beam_idx[i]` was: beam search."""
        origins = self.ledger.origins
        if not np.array_equal(origins[beam_idx.cpu().numpy()], origins):
            self.batch_select_indices(beam_idx)
            return
        for layer in self.kv_layers.values():
            layer.reorder_from(beam_idx, self.shared)
        for layer in self.state_layers:
            layer.select_rows(beam_idx)
        self._select_tokens(beam_idx)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep the rows `indices`, in that order."""
        for layer in self.kv_layers.values():
            layer.batch_select_indices(indices)
        for layer in self.state_layers:
            layer.select_rows(indices)
        self._select_tokens(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Make `repeats` neighbouring rows out of each row."""
        if len(set(self.ledger.origins.tolist())) == self.ledger.num_rows:
            self.shared = self.ledger.length
        self.batch_select_indices(torch.arange(self.ledger.num_rows).repeat_interleave(repeats))

    def drop_partial(self) -> None:
        """Forget what a forward that did not finish wrote into some layers.

        Columns that all layers have but the ledger does not are entered as unknown: no ids were seen.
        """
        self.lost = self.lost or (self._in_forward and bool(self.state_layers))
        self._in_forward = False
        for layer in self.kv_layers.values():
            if layer.length != self.ledger.length:
                break
        else:
            if self.kv_layers:
                return
        lengths = {layer.length for layer in self.kv_layers.values()}
        if len(lengths) == 1 and (length := lengths.pop()) > self.ledger.length:
            self.ledger.append_unknown(
                length - self.ledger.length, "the model was called where quire does not see it"
            )
            return
        whole = min(min(lengths, default=0), self.ledger.length)
        for layer in self.kv_layers.values():
            WorkingLayer.crop(layer, whole - layer.length)
        self._forget(self.ledger.length - whole)

    def row_kv(self, layers: Sequence[int], row: int, start: int, stop: int) -> list[KV]:
        """Return K and V of some layers, for tokens `start` to `stop` of a row, padding not counted."""
        pad = int(self.ledger.pads[row])
        if pad + stop > self.ledger.known:
            raise InvariantError(f"token {stop} of row {row}: {self.ledger.known - pad} are known")
        return [self.kv_layers[layer].row(row, pad + start, pad + stop) for layer in layers]

    def row_states(self, row: int) -> RowStates:
        """Return the states of a row after its last token: views, per recurrent layer."""
        if self.lost:
            raise InvariantError("the states of a forward that failed are at no position")
        return [layer.read(row) for layer in self.state_layers]

    def fill_states(self, rows: Sequence[RowStates], names: Sequence[Sequence[str]]) -> None:
        """Put states in: `rows[r]` are those of row r, `names` say which each layer's are."""
        for index, (layer, which) in enumerate(zip(self.state_layers, names, strict=True)):
            layer.fill([row[index] for row in rows], which)

    def check(self) -> None:
        """Raise `InvariantError` unless layers and ledger agree."""
        self.ledger.check()
        lengths = {layer.length for layer in self.kv_layers.values()}
        rows = {layer.keys.shape[0] for layer in self.kv_layers.values() if layer.keys is not None}
        rows |= {num for layer in self.state_layers for num in layer.row_counts()}
        if lengths != {self.ledger.length} or rows - {self.ledger.num_rows}:
            raise InvariantError(
                f"layers of {sorted(lengths)} columns, a ledger of {self.ledger.length} columns "
                f"and {self.ledger.num_rows} rows"
            )
        if not 0 <= self.shared <= self.ledger.length:
            raise InvariantError(f"{self.shared} of {self.ledger.length} columns are shared")
        if len(self.snapshots) != self.ledger.num_rows:
            raise InvariantError(f"{len(self.snapshots)} snapshots of {self.ledger.num_rows} rows")

    def _take_snapshots(self) -> None:
        ledger = self.ledger
        if ledger.known != ledger.length:
            return
        for row, pad in enumerate(ledger.pads):
            length = ledger.length - int(pad)
            if length > 0 and length % self.block_size == 0 and not self._has_ended(row):
                states = [[held.clone() for held in layer] for layer in self.row_states(row)]
                self.snapshots[row] = Snapshot(length, states)

    def _has_ended(self, row: int) -> bool:
        """Whether a row has an end among the tokens it was given behind its prompt, the last apart."""
        if not self.ends:
            return False
        given = self.ledger.tokens[row, self.prompt_columns : -1].cpu().numpy()
        return not self.ends.isdisjoint(map(int, given))

    def _forget(self, num_columns: int) -> None:
        self.ledger.crop(num_columns)
        self.shared = min(self.shared, self.ledger.length)
        for row, snapshot in enumerate(self.snapshots):
            if snapshot and snapshot.length > self.ledger.length - int(self.ledger.pads[row]):
                self.snapshots[row] = None

    def _select_tokens(self, indices: torch.Tensor) -> None:
        self.ledger.select(indices)
        self.snapshots = [self.snapshots[int(row)] for row in indices.cpu().numpy()]
