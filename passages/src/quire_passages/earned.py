"""Rows of work that nobody asked for, paid by the rows of those who ask."""

FORWARD_ROWS = 16
"""A forward more, against computing a token: weights are read again, and masks made."""

_MOST_SAVED = 4096.0
"""Rows that are saved at most: a quiet hour pays for no long work of its own later."""


class EarnedRows:
    """A budget of rows for own work, filled by `share` of each row that requests compute.

    A piece of own work cannot be cut, so it may leave a debt, which later rows pay first.
    """

    def __init__(self, share: float) -> None:
        self._share = share
        self._rows = 0.0

    @property
    def is_left(self) -> bool:
        """Whether some work may begin."""
        return self._rows > 0

    def earn(self, rows: float) -> None:
        """Note rows that were computed for requests."""
        self._rows = min(self._rows + self._share * rows, _MOST_SAVED)

    def spend(self, rows: float) -> None:
        """Note rows of own work."""
        self._rows -= rows
