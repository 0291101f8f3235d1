"""Products of many queries with keys and values, as tiles: keys are read where they are in the pool."""

# pyright: basic

from collections.abc import Callable
from typing import NamedTuple

from llvmlite import ir

from quire.kernels import tiles
from quire.kernels.attention.layer import LayerCode, Task
from quire.kernels.vectors import Number


class Keys(NamedTuple):
    """Keys of a task: `count` from `start`, the first of a block, on; behind `stop` there is none."""

    task: Task
    start: Number
    count: Number
    stop: Number


def score(
    code: LayerCode, keys: Keys, queries: tuple[Number, Number], scores: tuple[Number, int]
) -> None:
    """Write the products of keys and queries: float32 [keys, queries]. What keys behind the last one get means nothing.

    queries  address of operands [key words, queries], and how many queries there are
    scores   address, and bytes from row to row, which are those of queries too
    """
    (start, num_queries), (to_start, line) = queries, scores
    to_key = code.layer.kv_heads * (4 * code.key_words)
    with code.loop(0, keys.count, tiles.ROWS) as key:
        first, second = (code.key_place(_half(code, keys, key, i)[0]) for i in range(2))
        left, anew = tiles.Left(first, second, to_key), code.constant(0, ir.IntType(1))

        def multiply(lane: Number, most: int) -> None:
            operands, to = (
                (left, start + lane * 4, code.key_words),
                to_start + key * line + lane * 4,
            )
            tiles.multiply_tiles(code, to, operands, line, adds=anew, most=most)

        _by_lanes(code, num_queries, line, multiply)


def lay_values(code: LayerCode, keys: Keys, values: Number, line: int) -> None:
    """Lay values down as operands [width, keys], `line` bytes from row to row; the last key's stand again behind it."""
    with code.loop(0, keys.count, tiles.ROWS) as key:
        slots: list[Number] = []
        for i in range(2):
            first, last = _half(code, keys, key, i)
            slots += [
                first + code.constant(j).min(last) * code.layer.kv_heads for j in range(tiles.HALF)
            ]
        for j, columns in enumerate(zip(*code.values(slots), strict=True)):
            for i, row in enumerate(code.transposed(columns)):
                code.store(row, values + (j * tiles.HALF + i) * line + key * 2)


def weigh(
    code: LayerCode,
    values: tuple[Number, int],
    weights: Number,
    shape: tuple[Number, Number],
    sums: tuple[Number, int],
) -> None:
    """Add the products of values and weights: float32 [width, queries].

    values   address of operands [width, keys], bytes from row to row
    weights  address of operands [keys, queries]
    shape    numbers of keys and of queries
    sums     address, and bytes from row to row, which are those of weights too
    """
    (start, to_row), (num_keys, num_queries), (to_start, line) = values, shape, sums
    with code.loop(0, rows_of(code.width), tiles.ROWS) as row:
        first, second = (start + (row + i) * to_row for i in (0, tiles.HALF))
        left = tiles.Left(first, second, code.constant(to_row))
        again = code.constant(1, ir.IntType(1))

        def multiply(lane: Number, most: int) -> None:
            operands = left, weights + lane * 4, num_keys // 2
            to = to_start + row * line + lane * 4
            tiles.multiply_tiles(code, to, operands, line, adds=again, most=most)

        _by_lanes(code, num_queries, line, multiply)


def _by_lanes(
    code: LayerCode, num_queries: Number, line: int, multiply: Callable[[Number, int], None]
) -> None:
    """Write products for 32 queries side by side, and for 16 that are left of a row: more would be in the next one."""
    whole = line // (4 * tiles.ROWS) * tiles.ROWS
    if whole:
        with code.loop(0, num_queries.min(whole), tiles.ROWS) as lane:
            multiply(lane, 2)
    if whole * 4 < line:
        with code.when(num_queries > whole):
            multiply(code.constant(whole), 1)


def rows_of(width: int) -> int:
    """Return the rows that products of so many are computed in."""
    return -(-width // tiles.ROWS) * tiles.ROWS


def _half(code: LayerCode, keys: Keys, key: Number, half: int) -> tuple[Number, Number]:
    """Return the slot of the first of 16 keys, and how many there are behind it, or more; of none, of the last ones."""
    last = keys.stop - 1
    first = (keys.start + key + half * tiles.HALF).min(last // tiles.HALF * tiles.HALF)
    (slot,) = code.slots(keys.task, [first])
    return slot, last - first
