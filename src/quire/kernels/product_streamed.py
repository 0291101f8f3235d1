"""Products of a few rows without tiles: weights are read once, where they stand, at the speed of memory.

Lanes add along the depth, so that no weight is laid out; a row's sums do not depend on the rows beside it.
"""

# pyright: basic

from collections.abc import Sequence
from typing import NamedTuple

from llvmlite import ir

from quire.kernels.code import Code
from quire.kernels.product_inputs import LINE, Share
from quire.kernels.vectors import LANES, WIDE, WORDS, Number

STREAMED = 4 if WIDE else 48
"""Rows up to which weights are streamed: above it, weights that are laid out cost less."""
PARTS = 2
"""Parts of a panel that threads claim: few panels are shared out evenly."""
STEP = 64
"""Bytes of a column's weights that are multiplied at once."""

_ROWS = 4
"""Rows at once."""
_AHEAD = 2048
"""Bytes that are fetched ahead: other cores' panels begin behind those of this one."""


class Streamed(NamedTuple):
    """The form of weights, and of the rows that are multiplied with them.

    operand   the type of an operand
    widened   whether weights are bfloat16 and operands floats, laid out by `lay_streamed`
    """

    operand: ir.Type
    widened: bool

    @property
    def size(self) -> int:
        """Bytes of a weight that one operand is multiplied with."""
        return 2 if self.widened else 4


def lay_streamed(code: Code, share: Share, to: Number) -> None:
    """Lay rows out as bfloat16 weights are widened: of 32 elements the even ones, then the odd ones."""
    with (
        code.loop(0, share.num_rows) as row,
        code.loop(0, share.depth, 2 * LANES) as at,
    ):
        place = share.rows + row * share.row_bytes + at * 4
        first, second = (code.load(place + i * STEP) for i in range(2))
        for i in range(2):
            found = first.picked(range(i, 2 * LANES, 2), second)
            code.store(found, to + (row * share.depth + at) * 4 + i * STEP)


def multiply_streamed(
    code: Code, share: Share, form: Streamed, operands: tuple[Number, Number], to: Sequence[Number]
) -> None:
    """Write the sums of a panel's rows: float32 [rows, COLUMNS].

    operands  the address of the first row of operands, and bytes from row to row
    to        the address of the sums, and of a gated panel that of those of the second weights
    """
    panel, (first, line) = share.panel, operands
    column_bytes, last = share.depth * form.size, panel.columns - 1
    found = code.room(LANES * _ROWS * STEP)
    with code.loop(0, share.num_rows, _ROWS) as row:
        num_rows = (share.num_rows - row).min(_ROWS)
        for at_once in range(1, _ROWS + 1):
            with code.when(num_rows.compared("==", at_once)):
                rows = [first + (row + i) * line for i in range(at_once)]
                for weight, sums in zip((panel.weight, panel.second), to, strict=False):
                    with code.loop(0, panel.columns, LANES) as strip:
                        with code.loop(0, LANES) as i:
                            column = weight + (strip + i).min(last) * column_bytes
                            sums_of = _multiplied(code, form, column, column_bytes, rows)
                            for j, each in enumerate(sums_of):
                                code.store(each, found + (i * at_once + j) * STEP)

                        def of_column(i: int, at_once: int = at_once) -> list[Number]:
                            place = found + i * at_once * STEP
                            return [code.load(place + j * STEP) for j in range(at_once)]

                        for j, each in enumerate(code.sums_by_lane(of_column)):
                            code.store(each, sums + (row + j) * LINE + strip * 4)


def _multiplied(
    code: Code, form: Streamed, column: Number, column_bytes: Number, rows: Sequence[Number]
) -> list[Number]:
    """Return, of each row, the products with a column's weights, added up in each lane."""
    sums, per_word = code.zeros(len(rows)), 2 if form.widened else 1
    with code.loop(0, column_bytes, STEP) as at:
        code.fetch(column + at + _AHEAD, STEP)
        if form.widened:
            weights = code.halves(code.load(column + at, WORDS))
        else:
            weights = [code.load(column + at, ir.VectorType(form.operand, LANES))]
        for each, row in zip(sums, rows, strict=True):
            for i, weight in enumerate(weights):
                place = row + at * per_word + i * STEP
                operand = code.load(place, ir.VectorType(form.operand, LANES))
                each.now = code.multiply_add(weight, operand, each.now)
    return [each.now for each in sums]
