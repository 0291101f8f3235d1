"""Products of few rows in tiles: rows are laid out, and weights are read where they stand.

To lay the weights of a panel out takes most of the time where few rows are multiplied with them. What comes of weights
times rows stands the other way round, and is turned.
"""

# pyright: basic

from llvmlite import ir

from quire.kernels import tiles
from quire.kernels.code import Code
from quire.kernels.product_inputs import COLUMNS, LINE, Share
from quire.kernels.vectors import LANES, WORDS, Number

FEW = 64
"""Rows up to which these are laid out, where there is room."""
ROOM = 1 << 17
"""Words of rows that are laid out: what stays in the second cache, and on the stack of any thread."""


def are_few(code: Code, share: Share) -> Number:
    """Return whether a share's rows are so few that they are laid out, and as deep as whole tiles."""
    num_rows, depth = share.num_rows, share.depth
    blocks = (num_rows + (tiles.ROWS - 1)) // tiles.ROWS * tiles.ROWS
    side_by_side = code.constant(tiles.HALF).where(num_rows < tiles.HALF + 1, blocks)
    has_room = side_by_side * depth < ROOM + 1
    return (depth % tiles.STEP < 1) & (num_rows < FEW + 1) & has_room


def multiply_few(
    code: Code, share: Share, laid: tuple[Number, Number], sums: Number, *, is_gated: bool
) -> None:
    """Write the sums of few rows of a full panel: float32 [rows, COLUMNS].

    laid      the address of `ROOM` words for the rows, and whether these are still to be laid out there
    is_gated  whether half the columns are those of the second weights
    """
    (operands, is_new), turned = laid, code.room(FEW * LINE)
    with code.either(share.num_rows < tiles.HALF + 1) as cases:
        for case, at_once in zip(cases, (tiles.HALF, tiles.ROWS), strict=True):
            with case:
                with code.when(is_new):
                    _lay(code, share, operands, at_once)
                _multiply(code, share, operands, turned, at_once, is_gated=is_gated)
                _turn(code, turned, share.num_rows, at_once, sums)


def _lay(code: Code, share: Share, to: Number, at_once: int) -> None:
    """Lay so many rows at once out as operands [depth, rows]; behind the last one that one stands again."""
    last = share.num_rows - 1
    with code.loop(0, share.num_rows, LANES) as row:
        rows = [share.rows + (row + i).min(last) * share.row_bytes for i in range(LANES)]
        block = row // at_once * at_once
        to_rows = to + block * share.depth * 4 + (row - block) * 4
        with code.loop(0, share.depth, LANES) as at:
            found = code.transposed([code.load(each + at * 4, WORDS) for each in rows])
            for i, column in enumerate(found):
                code.store(column, to_rows + (at + i) * (4 * at_once))


def _multiply(
    code: Code, share: Share, laid: Number, to: Number, at_once: int, *, is_gated: bool
) -> None:
    """Write the products of a panel's weights and rows: [columns, rows], so many rows at once."""
    panel, to_next, anew = share.panel, share.depth * 4, code.constant(0, ir.IntType(1))
    second = panel.second if is_gated else panel.weight + to_next * tiles.ROWS
    for half, weight in enumerate((panel.weight, second)):
        left = tiles.Left(weight, weight + to_next * tiles.HALF, to_next)
        with code.loop(0, share.num_rows, at_once) as row:
            to_rows = to + row * LINE + half * tiles.ROWS * 4 * at_once
            operands = left, laid + row * to_next, share.depth
            tiles.multiply_tiles(code, to_rows, operands, 4 * at_once, adds=anew)


def _turn(code: Code, turned: Number, num_rows: Number, at_once: int, to: Number) -> None:
    """Turn [columns, rows], so many rows at once, to [rows, COLUMNS]."""
    with code.loop(0, num_rows, LANES) as row:
        block = row // at_once * at_once
        from_rows = turned + block * LINE + (row - block) * 4
        with code.loop(0, COLUMNS, LANES) as column:
            found = [code.load(from_rows + (column + i) * (4 * at_once)) for i in range(LANES)]
            for i, each in enumerate(code.transposed(found)):
                code.store(each, to + (row + i) * LINE + column * 4)
