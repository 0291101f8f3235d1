"""Products of a few rows without tiles: weights are read where they stand, at the speed of memory.

Up to 4 rows are multiplied at once, and lanes add along the depth. Of more rows, 16 at once are laid out, a row in each
lane, and a weight is multiplied with all of them.
"""

# pyright: basic

from collections.abc import Sequence
from typing import NamedTuple

from llvmlite import ir

from quire.kernels.code import Code
from quire.kernels.product_few import ROOM
from quire.kernels.product_inputs import LINE, Share
from quire.kernels.vectors import LANES, WIDE, WORDS, Number

STREAMED = 4 if WIDE else 48
"""Rows up to which weights are streamed: above it, weights that are laid out cost less."""
PARTS = 2
"""Parts of a panel that threads claim: few panels are shared out evenly."""
STEP = 64
"""Bytes of a column's weights that are multiplied at once."""

_ROWS = 4
"""Rows at once, where lanes add along the depth."""
_COLUMNS = 4
"""Columns whose sums are held at once, with a row in each lane: of narrow registers, 8 of 16."""
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

    def elements(self, code: Code, words: Number) -> list[Number]:
        """Return the weights in 16 words as vectors of operands."""
        return code.halves(words) if self.widened else [words.seen_as(self.operands)]

    @property
    def operands(self) -> ir.Type:
        """A vector of operands."""
        return ir.VectorType(self.operand, LANES)


def in_lanes(num_rows: Number) -> Number:
    """Return how many rows are multiplied by 16 in lanes; the others are multiplied by fours."""
    return num_rows // LANES * LANES


def lay_streamed(code: Code, share: Share, form: Streamed, to: Number) -> None:
    """Lay rows out as they are multiplied: those in lanes as [depth, 16]; those by fours as weights are widened.

    Of 32 elements the even ones come first then, and then the odd ones.
    """
    whole = in_lanes(share.num_rows)
    step = 2 * LANES if form.widened else LANES
    with code.loop(0, whole, LANES) as first, code.loop(0, share.depth, step) as at:
        places = [share.rows + (first + i) * share.row_bytes for i in range(LANES)]
        elements = [
            each
            for part in range(0, step, LANES)
            for each in code.transposed([code.load(place + (at + part) * 4) for place in places])
        ]
        if form.widened:
            elements = elements[::2] + elements[1::2]
        for i, each in enumerate(elements):
            code.store(each, to + first * share.depth * 4 + (at + i) * STEP)
    if not form.widened:
        return
    with (
        code.loop(whole, share.num_rows) as row,
        code.loop(0, share.depth, 2 * LANES) as at,
    ):
        place = share.rows + row * share.row_bytes + at * 4
        first, second = (code.load(place + i * STEP) for i in range(2))
        for i in range(2):
            found = first.picked(range(i, 2 * LANES, 2), second)
            code.store(found, to + (row * share.depth + at) * 4 + i * STEP)


def multiply_streamed(
    code: Code, share: Share, form: Streamed, laid: Number, to: Sequence[Number]
) -> None:
    """Write the sums of a panel's rows: float32 [rows, COLUMNS].

    laid  the address of rows that are laid out
    to    the address of the sums, and of a gated panel that of those of the second weights
    """
    with code.when(in_lanes(share.num_rows) > 0):
        for weight, sums in zip((share.panel.weight, share.panel.second), to, strict=False):
            _multiply_lanes(code, share, form, (weight, laid), sums)
    _multiply_fours(code, share, form, laid, to)


def _multiply_lanes(
    code: Code, share: Share, form: Streamed, operands: tuple[Number, Number], to: Number
) -> None:
    """Write the sums of rows that stand in lanes. `operands`: the addresses of weights and of rows."""
    (weight, laid), depth = operands, share.depth
    whole, last = in_lanes(share.num_rows), share.panel.columns - 1
    found = code.room((STREAMED + LANES) * STEP)
    with code.loop(0, share.panel.columns, LANES) as strip:
        with code.loop(0, LANES, _COLUMNS) as first:
            places = [(strip + first + i).min(last) for i in range(_COLUMNS)]
            columns = [weight + place * (depth * form.size) for place in places]
            if form.widened:
                columns = _widened(code, form, columns, depth)
            with code.loop(0, whole, LANES) as row:
                sums, rows = code.zeros(_COLUMNS), laid + row * depth * 4
                with code.loop(0, depth) as at:
                    beside = code.load(rows + at * STEP, form.operands)
                    for each, column in zip(sums, columns, strict=True):
                        one = code.load(column + at * 4, form.operand).spread()
                        each.now = code.multiply_add(one, beside, each.now)
                for i, each in enumerate(sums):
                    code.store(each.now, found + (row + first + i) * STEP)
        with code.loop(0, whole, LANES) as row:
            turned = code.transposed([code.load(found + (row + i) * STEP) for i in range(LANES)])
            for i, each in enumerate(turned):
                code.store(each, to + (row + i) * LINE + strip * 4)


def _widened(code: Code, form: Streamed, columns: Sequence[Number], depth: Number) -> list[Number]:
    """Return addresses of a few columns' weights as operands, of 32 the even ones first."""
    to = code.room(_COLUMNS * 4 * (ROOM // LANES))
    places = [to + depth * (4 * i) for i in range(len(columns))]
    with code.loop(0, depth * form.size, STEP) as at:
        for column, place in zip(columns, places, strict=True):
            code.fetch(column + at + _AHEAD, STEP)
            for i, each in enumerate(form.elements(code, code.load(column + at, WORDS))):
                code.store(each, place + at * 2 + i * STEP)
    return places


def _multiply_fours(
    code: Code, share: Share, form: Streamed, laid: Number, to: Sequence[Number]
) -> None:
    """Write the sums of the other rows, up to 4 at once."""
    panel, last = share.panel, share.panel.columns - 1
    first, line = (laid, share.depth * 4) if form.widened else (share.rows, share.row_bytes)
    column_bytes, found = share.depth * form.size, code.room(LANES * _ROWS * STEP)
    with code.loop(in_lanes(share.num_rows), share.num_rows, _ROWS) as row:
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
        weights = form.elements(code, code.load(column + at, WORDS))
        for each, row in zip(sums, rows, strict=True):
            for i, weight in enumerate(weights):
                place = row + at * per_word + i * STEP
                operand = code.load(place, form.operands)
                each.now = code.multiply_add(weight, operand, each.now)
    return [each.now for each in sums]
