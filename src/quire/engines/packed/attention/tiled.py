"""Products of many queries with keys and values, as tiles: keys are read where they are in the pool."""

# pyright: basic

from typing import NamedTuple

from llvmlite import ir

from quire.engines.packed import tiles
from quire.engines.packed.attention.layer import LayerCode, Task
from quire.engines.packed.attention.work import LANES as QUERIES
from quire.engines.packed.vectors import Number

_LINE = 4 * QUERIES
assert _LINE == tiles.LINE


class Keys(NamedTuple):
    """Keys of a task: `count` from `start`, the first of a block, on; behind `stop` there is none."""

    task: Task
    start: Number
    count: Number
    stop: Number


def score(
    code: LayerCode, keys: Keys, queries: Number, num_queries: Number, scores: Number
) -> None:
    """Write the products of keys and queries: float32 [keys, QUERIES]. What keys behind the last one get means nothing."""
    line = code.layer.kv_heads * (4 * code.key_words)
    with code.loop(0, keys.count, tiles.ROWS) as key:
        first, second = (code.key_place(_half(code, keys, key, i)[0]) for i in range(2))
        with code.loop(0, num_queries, tiles.ROWS) as lane:
            left, to = tiles.Left(first, second, line), scores + key * _LINE + lane * 4
            anew = code.constant(0, ir.IntType(1))
            operands = left, queries + lane * 4, code.key_words
            tiles.multiply_tiles(code, to, operands, adds=anew)


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
    sums: Number,
) -> None:
    """Add the products of values and weights: float32 [width, QUERIES].

    values   address of operands [width, keys], bytes from row to row
    weights  address of operands [keys, QUERIES]
    shape    numbers of keys and of queries
    """
    (start, line), (num_keys, num_queries) = values, shape
    with (
        code.loop(0, rows_of(code.width), tiles.ROWS) as row,
        code.loop(0, num_queries, tiles.ROWS) as lane,
    ):
        first, second = (start + (row + i) * line for i in (0, tiles.HALF))
        left, to = tiles.Left(first, second, code.constant(line)), sums + row * _LINE + lane * 4
        again = code.constant(1, ir.IntType(1))
        operands = left, weights + lane * 4, num_keys // 2
        tiles.multiply_tiles(code, to, operands, adds=again)


def rows_of(width: int) -> int:
    """Return the rows that products of so many are computed in."""
    return -(-width // tiles.ROWS) * tiles.ROWS


def _half(code: LayerCode, keys: Keys, key: Number, half: int) -> tuple[Number, Number]:
    """Return the slot of the first of 16 keys, and how many there are behind it, or more; of none, of the last ones."""
    last = keys.stop - 1
    first = (keys.start + key + half * tiles.HALF).min(last // tiles.HALF * tiles.HALF)
    (slot,) = code.slots(keys.task, [first])
    return slot, last - first
