"""Recurrent states of one layer, and copies of them at one position.

Builds on `LinearAttentionLayer` of transformers 5.23, which keeps per state a convolution's last
inputs, a recurrence's sum, or both.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import LinearAttentionLayer

from quire.engines.hf.layers import WorkingLayer
from quire.errors import ConfigError

RowStates = list[list[torch.Tensor]]
"""The state tensors of one row, per recurrent layer, without rows: `[layer][tensor]`."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Copies of all recurrent states of one row, as they were after its first `length` tokens."""

    length: int
    states: RowStates


class StateLayer(LinearAttentionLayer):
    """The recurrent states of one layer for all rows: valid after the last token fed, nowhere else.

    Adds to transformers' layer what a prefix cache needs: rows that are selected and repeated,
    and states that are read and put back. Gradients do not flow through it.
    """

    def update_conv_state(
        self,
        conv_states: torch.Tensor,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """As in transformers, with rows that must be the cache's and no gradients kept."""
        self._check_rows(conv_states, self.conv_states[state_idx])
        return super().update_conv_state(  # pyright: ignore[reportUnknownMemberType] - untyped **kwargs
            conv_states.detach(), state_idx, conv_kernel_size, **kwargs
        )

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, state_idx: int = 0, **kwargs: Any
    ) -> torch.Tensor:
        """As in transformers, with rows that must be the cache's and no gradients kept."""
        self._check_rows(recurrent_states, self.recurrent_states[state_idx])
        return super().update_recurrent_state(  # pyright: ignore[reportUnknownMemberType] - untyped **kwargs
            recurrent_states.detach(), state_idx, **kwargs
        )

    def read(self, row: int) -> list[torch.Tensor]:
        """Return the state tensors of one row: views, convolutions cut to what a next token needs."""
        return [
            held[row] if kernel is None else held[row, ..., -kernel:]
            for _, _, held, kernel in self._held()
        ]

    def fill(self, rows: Sequence[Sequence[torch.Tensor]], names: Sequence[str]) -> None:
        """Put the states of all rows in: `rows[r][j]` is the one that `names[j]` says."""
        for j, name in enumerate(names):
            which, number = name.split(".")
            index = int(number)
            held = torch.stack([row[j] for row in rows])
            if which == "conv":
                self.conv_states[index] = held
                self.is_conv_states_initialized[index] = True
                self.conv_kernel_size[index] = held.shape[-1]
            else:
                self.recurrent_states[index] = held
                self.is_recurrent_states_initialized[index] = True
            self.dtype, self.device = held.dtype, held.device
            self.has_previous_state[index] = True

    def names(self) -> list[str]:
        """Return the names of the states, `conv.0` or `recurrent.0`, in `read`'s order."""
        return [f"{which}.{index}" for which, index, _, _ in self._held()]

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Make row i what row `beam_idx[i]` was."""
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep the rows `indices`, in that order."""
        for which, index, held, _ in list(self._held()):
            states = self.conv_states if which == "conv" else self.recurrent_states
            states[index] = held.index_select(0, indices.to(held.device))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Make `repeats` neighbouring rows out of each row."""
        for which, index, held, _ in list(self._held()):
            states = self.conv_states if which == "conv" else self.recurrent_states
            states[index] = held.repeat_interleave(repeats, dim=0)

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last tokens, which only convolutions that record their past can."""
        if self.record_past:
            super().crop(tokens_to_remove)
        elif tokens_to_remove:
            raise ConfigError(
                f"crop({tokens_to_remove}): a recurrent state cannot go back; open a session for "
                "the shorter text"
            )

    def can_crop(self, num_columns: int) -> bool:
        """Whether the states can go back so far."""
        return num_columns == 0 or (self.record_past and self.is_croppable)

    def rows_match(self, num_rows: int) -> bool:
        """Return whether the layer is empty or holds `num_rows` rows."""
        return all(held.shape[0] == num_rows for _, _, held, _ in self._held())

    def _held(self) -> Iterator[tuple[str, int, torch.Tensor, int | None]]:
        """Yield (which, index, tensor, convolution width or None) of the states that exist."""
        for index in range(self.number_of_states):
            conv, recurrent = self.conv_states[index], self.recurrent_states[index]
            if conv is not None:
                yield "conv", index, conv, self.conv_kernel_size[index]
            if recurrent is not None:
                yield "recurrent", index, recurrent, None

    def _check_rows(self, given: torch.Tensor, held: torch.Tensor | None) -> None:
        if held is not None and held.shape[0] != given.shape[0]:
            raise ConfigError(
                f"the cache holds {held.shape[0]} rows and the model was fed {given.shape[0]}; "
                "call past.batch_repeat_interleave(n) before generate with num_beams or "
                "num_return_sequences"
            )


class HybridLayer(StateLayer, WorkingLayer):  # pyright: ignore[reportIncompatibleMethodOverride] - transformers' bases
    """A layer that keeps recurrent states beside K and V."""

    is_compileable = False

    def __init__(
        self,
        room: int = 0,
        *,
        window: int | None = None,
        num_states: int = 1,
        debug_nan: bool = False,
    ) -> None:
        WorkingLayer.__init__(self, room, window=window, debug_nan=debug_nan)
        LinearAttentionLayer.__init__(self, number_of_states=num_states)  # pyright: ignore[reportUnknownMemberType] - untyped **kwargs

    def reset(self) -> None:
        """Forget all columns and states."""
        StateLayer.reset(self)
        WorkingLayer.reset(self)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep the rows `indices`, in that order."""
        StateLayer.batch_select_indices(self, indices)
        WorkingLayer.batch_select_indices(self, indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Make `repeats` neighbouring rows out of each row."""
        StateLayer.batch_repeat_interleave(self, repeats)
        WorkingLayer.batch_repeat_interleave(self, repeats)

    def can_crop(self, num_columns: int) -> bool:
        """Whether columns and states can go back so far."""
        return StateLayer.can_crop(self, num_columns) and WorkingLayer.can_crop(self, num_columns)

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last tokens, in the states and in the columns."""
        StateLayer.crop(self, tokens_to_remove)
        WorkingLayer.crop(self, tokens_to_remove)

    def rows_match(self, num_rows: int) -> bool:
        """Return whether columns and states are empty or hold `num_rows` rows."""
        return StateLayer.rows_match(self, num_rows) and WorkingLayer.rows_match(self, num_rows)
