"""Inputs of compiled matrix products: addresses and sizes, of the product and of a thread's share."""

from typing import Any, NamedTuple

COLUMNS = 64
"""Columns of a panel."""
LINE = 4 * COLUMNS
"""Bytes from row to row of its sums."""


class ProductInputs(NamedTuple):
    """A product: addresses, and numbers; what was claimed of it is counted in the first place.

    count    int64: the rows that there are
    depth    operands of a row
    panels   int64 [panels, 6], each a `Panel`
    longest  rows at most that are claimed at once
    chunks   how many such claims there are for each panel at least
    even     how many there may be, of many rows, so that threads have equally many
    ahead    panels from one of a thread to its next
    """

    claimed: Any
    rows: Any
    row_bytes: Any
    count: Any
    depth: Any
    panels: Any
    num_panels: Any
    longest: Any
    chunks: Any
    even: Any
    ahead: Any
    out: Any
    out_bytes: Any


class Panel(NamedTuple):
    """Neighbouring columns of a result.

    weight, second       addresses of the weights of the first, and for a gated one of those of `up`
    bias, second_bias    the same, or 0
    place, columns       bytes from the beginning of a row of the result, and how many they are
    """

    weight: Any
    second: Any
    bias: Any
    second_bias: Any
    place: Any
    columns: Any


class Share(NamedTuple):
    """Rows of a panel that a thread has claimed.

    rows       address of the first
    row_bytes  bytes from row to row
    num_rows   how many
    depth      operands of a row
    """

    panel: Panel
    rows: Any
    row_bytes: Any
    num_rows: Any
    depth: Any
