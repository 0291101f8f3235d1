"""Recurrent states of one layer, and copies of them at one position.

Builds on `LinearAttentionLayer` of transformers 5.23, which keeps per state a convolution's last
inputs, a recurrence's sum, or both.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import LinearAttentionLayer

from quire.engines.models.layers import WorkingLayer, check_rows
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
        check_rows(self.conv_states[state_idx], conv_states)
        return super().update_conv_state(  # pyright: ignore[reportUnknownMemberType] - untyped **kwargs
            conv_states.detach(), state_idx, conv_kernel_size, **kwargs
        )

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, state_idx: int = 0, **kwargs: Any
    ) -> torch.Tensor:
        """As in transformers, with rows that must be the cache's and no gradients kept."""
        check_rows(self.recurrent_states[state_idx], recurrent_states)
        return super().update_recurrent_state(  # pyright: ignore[reportUnknownMemberType] - untyped **kwargs
            recurrent_states.detach(), state_idx, **kwargs
        )

    def read(self, row: int) -> list[torch.Tensor]:
        """Return the state tensors of one row: views, convolutions cut to what a next token needs."""
        return [
            held[index][row, ..., -(self.conv_kernel_size[index] or 0) :]
            if held is self.conv_states
            else held[index][row]
            for _, held, index in self._existing()
        ]

    def fill(self, rows: Sequence[Sequence[torch.Tensor]], names: Sequence[str]) -> None:
        """Put the states of all rows in: `rows[r][j]` is the one that `names[j]` says."""
        for j, name in enumerate(names):
            which, number = name.split(".")
            index, held = int(number), torch.stack([row[j] for row in rows])
            getattr(self, f"{which}_states")[index] = held
            getattr(self, f"is_{which}_states_initialized")[index] = True
            if which == "conv":
                self.conv_kernel_size[index] = held.shape[-1]
            self.dtype, self.device = held.dtype, held.device
            self.has_previous_state[index] = True

    def names(self) -> list[str]:
        """Return the names of the states, `conv.0` or `recurrent.0`, in `read`'s order."""
        return [name for name, _, _ in self._existing()]

    def row_counts(self) -> set[int]:
        """Return the numbers of rows that its states have: one, or none while it is empty."""
        return {held[index].shape[0] for _, held, index in self._existing()}

    def select_rows(self, indices: torch.Tensor) -> None:
        """Keep the rows `indices`, in that order."""
        for _, held, index in self._existing():
            held[index] = held[index].index_select(0, indices.to(held[index].device))

    def check_rollback(self, tokens_to_remove: int) -> None:
        """Raise `ConfigError` unless there is nothing to take back, or only convolutions that record it."""
        if tokens_to_remove and not (self.record_past and self.is_croppable):
            raise ConfigError(
                f"crop({tokens_to_remove}): a recurrent state cannot go back; open a session for "
                "the shorter text"
            )

    def _existing(self) -> Iterator[tuple[str, dict[int, Any], int]]:
        """Yield each state that exists: its name, the states of its kind, and its index among them."""
        for index in range(self.number_of_states):
            for which, held in (("conv", self.conv_states), ("recurrent", self.recurrent_states)):
                if held[index] is not None:
                    yield f"{which}.{index}", held, index


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
