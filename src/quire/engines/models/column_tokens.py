"""The ledger of a working cache: the token behind each column."""

import numpy as np
import numpy.typing as npt
import torch

from quire.errors import InvariantError


class TokenLedger:
    """The tokens behind the columns of a working cache: what may be committed.

        tokens:  [rows, columns]  the id fed at each column, padding included
        pads:    [rows]           leading columns of a row that are padding
        origins: [rows]           the prompt that a row descends from

    A column is entered after a forward over all layers has finished, and follows every crop,
    reorder, repeat and selection of K and V. So row r of the working cache holds the KV of
    `tokens[r, pads[r]:known]`, whatever a decoding loop did in between.

    0 <= known <= length; columns from `known` on were computed from something other than token ids
    or past `max_known`, where the model computes something else for padded rows; they can never be
    committed. `reason` says why, and is None where known == length.
    """

    def __init__(
        self, tokens: torch.Tensor, pads: npt.NDArray[np.int64], *, max_known: int | None = None
    ) -> None:
        rows, length = tokens.shape
        if pads.shape != (rows,):
            raise InvariantError(f"{pads.shape} paddings for {rows} rows")
        self.length = length
        self.known = length
        self.reason: str | None = None
        self.max_known = max_known
        self.pads = pads
        self.origins = np.arange(rows)
        self._tokens = tokens.clone()

    @property
    def num_rows(self) -> int:
        """Rows of the working cache."""
        return self._tokens.shape[0]

    @property
    def num_unknown(self) -> int:
        """Tokens of all rows that are unknown, padding not counted."""
        return sum(max(self.length - max(self.known, int(pad)), 0) for pad in self.pads)

    @property
    def tokens(self) -> torch.Tensor:
        """The ids behind the known columns: `[rows, known]`, a view."""
        return self._tokens[:, : self.known]

    def append(self, ids: torch.Tensor) -> None:
        """Enter the columns that a finished forward computed from `ids` `[rows, n]`.

        Behind unknown columns they are unknown as well: their KV depends on those.
        """
        if self.known < self.length:
            self.length += ids.shape[1]
            return
        stop = self.length + ids.shape[1]
        if stop > self._tokens.shape[1]:
            grown = self._tokens.new_zeros(self.num_rows, max(stop + 64, 2 * self.length))
            grown[:, : self.length] = self._tokens[:, : self.length]
            self._tokens = grown
        self._tokens[:, self.length : stop] = ids
        self.known = self.length = stop
        if self.max_known is not None:
            self.forget_from(
                self.max_known, f"the model pads no rows past {self.max_known} columns"
            )

    def append_unknown(self, num_columns: int, reason: str) -> None:
        """Enter columns computed from something other than token ids."""
        self.length += num_columns
        self.forget_from(self.length - num_columns, reason)

    def forget_from(self, column: int, reason: str) -> None:
        """Count the columns from `column` on as unknown, unless they are none."""
        if column >= self.length:
            return
        if column < self.known or self.reason is None:
            self.known, self.reason = min(self.known, column), reason

    def crop(self, num_columns: int) -> None:
        """Forget the last `num_columns` columns."""
        self.length = max(self.length - num_columns, 0)
        self.known = min(self.known, self.length)
        if self.known == self.length:
            self.reason = None

    def select(self, rows: torch.Tensor) -> None:
        """Make row i what row `rows[i]` was."""
        picked = rows.cpu().numpy()
        self._tokens = self._tokens[rows.to(self._tokens.device)]
        self.pads = self.pads[picked]
        self.origins = self.origins[picked]

    def rows(self) -> list[npt.NDArray[np.int32]]:
        """Return the known tokens of each row, without padding, on the host."""
        known = self.tokens.cpu().numpy().astype(np.int32)
        return [row[pad:] for row, pad in zip(known, self.pads, strict=True)]

    def check(self) -> None:
        """Raise `InvariantError` unless the class equations hold."""
        rows = self.num_rows
        if not (
            0 <= self.known <= self.length
            and self.known <= self._tokens.shape[1]
            and self.pads.shape == self.origins.shape == (rows,)
            and (self.reason is None) == (self.known == self.length)
        ):
            raise InvariantError(
                f"ledger of {rows} rows: known {self.known}, length {self.length}, "
                f"{self.pads.shape} paddings, {self.origins.shape} origins"
            )
