"""The inputs of one layer's attention code, and its loads of queries, keys and values."""

# pyright: basic

from collections.abc import Sequence
from typing import Any, NamedTuple

from llvmlite import ir

from quire.kernels import tiles
from quire.kernels.code import Code
from quire.kernels.vectors import FLOAT, FLOATS, LANES, LOG2_E, PAIRED, WORD, Number

LOWEST = -1e30
"""The highest score of nobody."""

UNSEEN = -2e38
"""The score of a key that a query does not see."""


class Shape(NamedTuple):
    """The constants that attention code is compiled for.

    depth, width  elements of a key, and of a value
    together      queries of one row that few queries are attended by
    bfloat16      whether q, k, v and the output are that, or float32
    wide          whether the output has room for floats where it is bfloat16
    paired        whether the CPU multiplies pairs of bfloat16; where not, they are widened to float32
    tiled         whether it multiplies tiles of them
    """

    depth: int
    width: int
    together: int
    block_size: int
    bfloat16: bool
    wide: bool = False
    paired: bool = PAIRED or tiles.TILES
    tiled: bool = tiles.TILES

    @property
    def fits_tiles(self) -> bool:
        """Whether keys are read as tiles, straight from their blocks."""
        whole = not self.depth % (2 * tiles.STEP) and not self.block_size % tiles.HALF
        return self.bfloat16 and self.paired and self.tiled and whole


class StepInputs(NamedTuple):
    """Inputs that are equal for all layers of a step: addresses of arrays, and numbers.

    tables .. merged_starts  those of `Work`; num_columns of the tables
    slots                    int64 [N]: where the new rows' K and V go
    partial                  float32 [rows of parts, heads, 2 + Dv]: the highest score in powers of 2, the sum of
                             weights over it, and the sum of weighted values
    """

    tables: Any
    num_columns: Any
    position: Any
    seen_from: Any
    rows: Any
    tasks: Any
    num_tasks: Any
    merged: Any
    merged_starts: Any
    slots: Any
    num_rows: Any
    partial: Any


class LayerInputs(NamedTuple):
    """One layer's attention: addresses of arrays, and numbers.

    written .. joined     what threads have claimed of rows to write, of tasks, and of rows to merge
    step                  `StepInputs`, as int64
    q, new_k, new_v       with bytes from row to row and from head to head
    cos, sin              [N, D], by which q and new_k are turned in place, or 0: they are as they should be
    k, v                  [slots, kv_heads, D], [slots, kv_heads, Dv]
    out                   [N, kv_heads * group, Dv]
    sinks                 float32 [heads], or 0
    scale, softcap        the bits of a float32; softcap 0: none
    """

    written: Any
    attended: Any
    joined: Any
    kv_heads: Any
    group: Any
    step: Any
    q: Any
    q_row: Any
    q_head: Any
    new_k: Any
    new_k_row: Any
    new_k_head: Any
    new_v: Any
    new_v_row: Any
    new_v_head: Any
    cos: Any
    sin: Any
    k: Any
    v: Any
    out: Any
    sinks: Any
    scale: Any
    softcap: Any


class Task(NamedTuple):
    """A row of `Work.tasks`, for one kv head; `table` is an address."""

    table: Any
    rows_start: Any
    num_rows: Any
    first_query: Any
    at_once: Any
    start: Any
    stop: Any
    partial: Any
    kv_head: Any


class LayerCode(Code):
    """A function of the address of a `LayerInputs` that is being written, which any number of threads call.

    Products take operands: elements, or pairs of bfloat16. Rows of these have zeros behind them, up to whole
    vectors: `depth` operands of a key, `width` columns of values. Of 32 bfloat16s that are widened the even ones stand
    before the odd ones, in sums of values too.
    """

    def __init__(self, module: ir.Module, name: str, shape: Shape) -> None:
        super().__init__(module, name, 1)
        self.shape = shape
        self.layer = LayerInputs(*self.numbers(self.arguments[0], LayerInputs))
        self.step = StepInputs(*self.numbers(self.layer.step, StepInputs))
        self.heads = self.layer.kv_heads * self.layer.group
        self.kind = WORD if shape.bfloat16 else FLOAT
        self.paired = shape.bfloat16 and shape.paired
        self.widened = shape.bfloat16 and not shape.paired
        self.operand = WORD if self.paired else FLOAT
        self.key_words, self.value_words = (
            width // 2 if shape.bfloat16 else width for width in (shape.depth, shape.width)
        )
        keys, values = (-(-words // LANES) * LANES for words in (self.key_words, self.value_words))
        self.depth = 2 * keys if self.widened else keys
        self.width = 2 * values if shape.bfloat16 else values

    def real(self, bits: Number) -> Number:
        return bits.narrowed().seen_as(FLOAT).spread()

    def slots(self, task: Task, positions: Sequence[Number]) -> list[Number]:
        """Return where the K and V of positions are, counted in heads."""
        size = self.shape.block_size
        blocks = [self.load(task.table + at // size * 4, WORD).sign_extended() for at in positions]
        both = zip(blocks, positions, strict=True)
        return [(b * size + at % size) * self.layer.kv_heads + task.kv_head for b, at in both]

    def near_slots(self, task: Task, start: Number, stop: Number) -> list[Number]:
        """Return where the K and V of 16 positions are; behind the last one before `stop` that one stands again."""
        last = stop - 1 - start
        if self.shape.block_size % LANES:
            return self.slots(task, [start + last.min(i) for i in range(LANES)])
        (first,) = self.slots(task, [start])
        return [first + last.min(i) * self.layer.kv_heads for i in range(LANES)]

    def query(self, row: Number, head: Number) -> list[Number]:
        layer = self.layer
        return self.operands(layer.q + row * layer.q_row + head * layer.q_head, self.key_words)

    def key_place(self, slot: Number) -> Number:
        return self.layer.k + slot * (4 * self.key_words)

    def key(self, slot: Number) -> list[Number]:
        return self.operands(self.key_place(slot), self.key_words)

    def values(self, slots: Sequence[Number]) -> list[list[Number]]:
        """Load values; of pairs, as one row for every two keys."""
        size = self.value_words
        rows = [self.operands(self.layer.v + slot * (4 * size), size) for slot in slots]
        if not self.paired:
            return rows
        return [
            [pair for both in zip(*two, strict=True) for pair in self.interleaved(*both)]
            for two in zip(rows[::2], rows[1::2], strict=True)
        ]

    def fetch_kv(self, slots: Sequence[Number]) -> None:
        """Have the keys and values of slots come while others are attended."""
        pools = (self.layer.k, 4 * self.key_words), (self.layer.v, 4 * self.value_words)
        for slot in slots:
            for start, size in pools:
                self.fetch(start + slot * size, size)

    def operands(self, address: Number, num_words: int) -> list[Number]:
        """Load elements in so many words as operands."""
        row = self.load_row(address, num_words, self.kind)
        return [half for words in row for half in self.halves(words)] if self.widened else row

    def partial(self, row: Number, head: Number) -> Number:
        """Return the address of one of the partial results."""
        return self.step.partial + (row * self.heads + head) * (4 * (2 + self.shape.width))

    def is_merged(self, row: Number) -> Number:
        """Return whether the output of a row is more than what one task finds."""
        first, last = (self.number(self.step.merged_starts, row + i) for i in range(2))
        return (last - first > 1) | (self.layer.sinks > 0)

    def finish(
        self,
        place: tuple[Number, Number, Number],
        highest: Number,
        total: Number,
        sums: Sequence[Number],
    ) -> None:
        """Store a task's result for a query: partial if other tasks share it, else the output.

        place         the row of the step, the head, and the row of the partial results
        highest, total, sums  vectors, of the first two with the same number in each lane
        """
        row, head, partial = place
        if self.widened:
            sums = self.in_order(sums)
        with self.either(self.is_merged(row)) as (merged, alone):
            with merged:
                to = self.partial(partial, head)
                self.store(highest.picked([0]), to)
                self.store(total.picked([0]), to + 4)
                self.store_row(sums, to + 8, self.shape.width)
            with alone:
                self.put(row, head, [each / total for each in sums])

    def put(self, row: Number, head: Number, values: Sequence[Number]) -> None:
        """Store the output of a query."""
        bfloat16, wide = self.shape.bfloat16, self.shape.wide
        size = 2 if bfloat16 and not wide else 4
        to = self.layer.out + (row * self.heads + head) * (size * self.shape.width)
        if wide:
            values = [self.nearest(each) for each in values]
        self.store_floats(values, to, self.shape.width, bfloat16=bfloat16 and not wide)

    def factor(self) -> Number:
        """Return what turns scores, capped where they are, into powers of 2."""
        one = self.constant(1, FLOATS)
        return one.where(self.layer.softcap > 0, self.real(self.layer.scale)) * LOG2_E

    def capped(self, scores: Number) -> Number:
        """Return `softcap * tanh(scores * scale / softcap)`, of a layer that has a softcap."""
        cap, one = self.real(self.layer.softcap), self.constant(1, FLOATS)
        twice = scores * (self.real(self.layer.scale) / cap) * (2 * LOG2_E)
        return cap * (one - self.constant(2, FLOATS) / (self.exp2(twice.min(126.0)) + one))
