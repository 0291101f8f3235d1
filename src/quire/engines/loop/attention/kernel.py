"""Attention over block tables: every part of a step's keys, then the merge of the parts.

Where many queries read the same keys, 64 of them stand side by side in vectors, and a block is read once for
all; where few do, a query at a time stands against 16 keys. Weights are powers of 2, of scores times log2(e),
over the highest score so far; sums are float32; of bfloat16 models, weights are rounded before the second
product, as in FlashAttention (https://arxiv.org/abs/2205.14135, algorithm 1).
"""

# pyright: basic

from collections.abc import Callable, Sequence
from ctypes import CFUNCTYPE, c_int64
from functools import cache
from typing import Any, NamedTuple

from llvmlite import ir

from quire.engines.loop.attention.vectors import (
    FLOAT,
    FLOATS,
    INT,
    LANES,
    PAIRED,
    WORD,
    WORDS,
    Code,
    Value,
    Variable,
    compiled,
)
from quire.engines.loop.attention.work import LANES as QUERIES

KEYS = 64
"""Keys that are scored before any of them is weighed, where there are many queries."""

ROWS = 4
"""Rows of a product: with four vectors of queries, as many sums as a core keeps in registers."""

_VECTORS = QUERIES // LANES
_LOWEST = -1e30
_UNSEEN = -2e38
_LOG2_E = 1.4426950408889634


class Shape(NamedTuple):
    """What code is compiled for.

    depth, width  elements of a key, and of a value
    group         query heads that read one of `kv_heads`
    bfloat16      whether q, k, v and the output are that, or float32
    """

    depth: int
    width: int
    group: int
    kv_heads: int
    block_size: int
    bfloat16: bool
    paired: bool = PAIRED


class Layer(NamedTuple):
    """One layer's attention: addresses of arrays, and numbers.

    claimed               int64 [3], zeros: what threads have taken of each phase
    tables .. last        those of `Work`; num_columns of the tables
    slots                 int64 [N]: where the new rows' K and V go
    q, new_k, new_v       with bytes from row to row and from head to head
    k, v                  [slots, kv_heads, D], [slots, kv_heads, Dv]
    out                   [N, heads, Dv]
    partial               float32 [rows of parts, heads, 2 + Dv]: the highest score, the sum of weights over it,
                          and the sum of weighted values
    sinks                 float32 [heads], or 0
    scale, softcap        the bits of a float32; softcap 0: none
    """

    claimed: Any
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
    q: Any
    q_row: Any
    q_head: Any
    new_k: Any
    new_k_row: Any
    new_k_head: Any
    new_v: Any
    new_v_row: Any
    new_v_head: Any
    k: Any
    v: Any
    out: Any
    partial: Any
    sinks: Any
    scale: Any
    softcap: Any


class _Kernel:
    """The code of one shape, as it is written."""

    def __init__(self, shape: Shape, module: ir.Module) -> None:
        self.shape = shape
        self.module = module
        self.kind = WORD if shape.bfloat16 else FLOAT
        self.paired = shape.bfloat16 and shape.paired
        self.element = 2 if shape.bfloat16 else 4
        self.heads = shape.group * shape.kv_heads
        self.key_words = shape.depth * self.element // 4
        self.value_words = shape.width * self.element // 4
        # What products take: an element, or a pair of bfloat16.
        self.operand = WORD if self.paired else FLOAT
        self.wide = 2 if shape.bfloat16 and not self.paired else 1
        self.depth = -(-self.key_words // LANES) * LANES * self.wide
        self.width = -(-self.value_words // LANES) * LANES * (2 if shape.bfloat16 else 1)

    def phase(self, write: Callable[["_Kernel"], None]) -> ir.Function:
        """Write one phase as a function of the address of a `Layer`, which any number of threads call."""
        self.code = Code(self.module, write.__name__, 1)
        base = self.code.arguments[0]
        self.layer = Layer(*(self.code.load(base + 8 * i, INT) for i in range(len(Layer._fields))))
        write(self)
        self.code.builder.ret_void()
        return self.code.function

    def number(self, array: Value, at: Value | int) -> Value:
        return self.code.load(array + at * 8, INT)

    def real(self, bits: Value) -> Value:
        return bits.narrowed().seen_as(FLOAT).spread()

    def slot(self, table: Value, position: Value) -> Value:
        """Return where the K and V of a position are, counted in kv heads."""
        size = self.shape.block_size
        block = self.code.load(table + position // size * 4, WORD).widened()
        return (block * size + position % size) * self.shape.kv_heads

    def operands(self, address: Value, num_words: int) -> list[Value]:
        """Load a row of q, k or v as products take it, zeros behind it."""
        row = self.code.load_row(address, num_words, self.kind)
        return (
            [half for words in row for half in self.code.halves(words)] if self.wide == 2 else row
        )

    def key(self, slot: Value) -> list[Value]:
        return self.operands(self.layer.k + slot * (4 * self.key_words), self.key_words)

    def values(self, slots: Sequence[Value]) -> list[list[Value]]:
        """Load values; of pairs, as one row for every two keys."""
        rows = [
            self.operands(self.layer.v + slot * (4 * self.value_words), self.value_words)
            for slot in slots
        ]
        if not self.paired:
            return rows
        return [
            [pair for both in zip(*two, strict=True) for pair in self.code.interleaved(*both)]
            for two in zip(rows[::2], rows[1::2], strict=True)
        ]

    def query(self, row: Value, head: Value) -> list[Value]:
        layer = self.layer
        return self.operands(layer.q + row * layer.q_row + head * layer.q_head, self.key_words)

    def partial(self, row: Value, head: Value) -> Value:
        """Return the address of one of the partial results."""
        return self.layer.partial + (row * self.heads + head) * (4 * (2 + self.shape.width))

    def capped(self, scores: Value) -> Value:
        """Return `softcap * tanh(scores * scale / softcap)`."""
        code, cap = self.code, self.real(self.layer.softcap)
        twice = scores * (self.real(self.layer.scale) / cap) * (2 * _LOG2_E)
        one = code.constant(1, FLOATS)
        return cap * (one - code.constant(2, FLOATS) / (code.exp2(twice.min(126.0)) + one))

    def factor(self) -> Value:
        """Return what turns scores into powers of 2."""
        one = self.code.constant(1, FLOATS)
        capped = self.layer.softcap.compared("!=", 0)
        return one.where(capped, self.real(self.layer.scale)) * _LOG2_E


def _write(kernel: _Kernel) -> None:
    """Copy the K and V of the new rows to their slots."""
    code, layer, shape = kernel.code, kernel.layer, kernel.shape
    of_k = (layer.k, layer.new_k, layer.new_k_row, layer.new_k_head, kernel.key_words)
    of_v = (layer.v, layer.new_v, layer.new_v_row, layer.new_v_head, kernel.value_words)
    with (
        code.claims(layer.claimed, layer.num_rows // LANES + 1) as some,
        code.loop(some * LANES, (some * LANES + LANES).min(layer.num_rows)) as row,
    ):
        slot = kernel.number(layer.slots, row) * shape.kv_heads
        with code.loop(0, shape.kv_heads) as head:
            for pool, new, to_row, to_head, words in (of_k, of_v):
                found = code.load_row(new + row * to_row + head * to_head, words, kernel.kind)
                code.store_row(found, pool + (slot + head) * (4 * words), words)


class _Task(NamedTuple):
    """A row of `Work.tasks`."""

    table: Any
    rows_start: Any
    num_rows: Any
    first_query: Any
    at_once: Any
    start: Any
    stop: Any
    partial: Any


def _attend(kernel: _Kernel) -> None:
    """Attend the parts."""
    code, layer, shape = kernel.code, kernel.layer, kernel.shape
    with code.claims(layer.claimed + 8, layer.num_tasks * shape.kv_heads) as claimed:
        place, head = layer.tasks + claimed // shape.kv_heads * 64, claimed % shape.kv_heads
        task = _Task(*(kernel.number(place, i) for i in range(len(_Task._fields))))
        task = task._replace(table=layer.tables + task.table * layer.num_columns * 4)
        many = task.at_once.compared("==", QUERIES)
        with code.builder.if_else(many.value) as (then, otherwise):
            with then:
                _attend_many(kernel, task, head)
            with otherwise:
                _attend_few(kernel, task, head)


def _attend_few(kernel: _Kernel, task: _Task, kv_head: Value) -> None:
    """Attend one or two queries at a time, against 16 keys at a time."""
    code, layer, group = kernel.code, kernel.layer, kernel.shape.group
    together = range(2 if group % 2 == 0 else 1)
    weights = [code.room(4 * LANES) for _ in together]
    factor = kernel.factor()
    with code.loop(0, task.num_rows * group, len(together)) as query:
        row = kernel.number(layer.rows, task.rows_start + query // group)
        head = kv_head * group + query % group
        start = task.start.max(kernel.number(layer.seen_from, row))
        stop = task.stop.min(kernel.number(layer.position, row) + 1)
        queries = [kernel.query(row, head + i) for i in together]
        highest = [Variable(code, code.constant(_LOWEST, FLOATS)) for _ in together]
        total = code.zeros(len(together))
        sums = [code.zeros(kernel.width // LANES) for _ in together]
        with code.loop(start, stop, LANES) as at:
            slots = [
                kernel.slot(task.table, (at + i).min(stop - 1)) + kv_head for i in range(LANES)
            ]
            seen = code.lanes().compared("<", (stop - at).narrowed().spread())
            for i, found in enumerate(_scores(kernel, queries, slots)):
                scores = Variable(code, found)
                with code.when(layer.softcap.compared("!=", 0)):
                    scores.set(kernel.capped(scores.get()))
                score = (scores.get() * factor).where(seen, _UNSEEN)
                with code.when(code.any(score.compared(">", highest[i].get()))):
                    above = code.across(score, Value.max).max(highest[i].get())
                    fade = code.exp2(highest[i].get() - above)
                    highest[i].set(above)
                    for each in (total[i], *sums[i]):
                        each.set(each.get() * fade)
                weight = code.exp2(score - highest[i].get())
                total[i].set(total[i].get() + weight)
                if kernel.paired:
                    halves = ir.VectorType(ir.IntType(16), LANES)
                    weight = (code.rounded(weight) >> 16).narrowed(halves)
                code.store(weight, weights[i])
            for j, values in enumerate(kernel.values(slots)):
                for i in together:
                    weight = code.load(weights[i] + 4 * j, kernel.operand).spread()
                    for each, value in zip(sums[i], values, strict=True):
                        each.set(code.multiply_add(weight, value, each.get()))
        for i in together:
            to = kernel.partial(task.partial + query // group, head + i)
            found = [each.get() for each in sums[i]]
            code.store(highest[i].get().picked([0]), to)
            code.store(code.across(total[i].get(), Value.__add__).picked([0]), to + 4)
            code.store_row(found, to + 8, kernel.shape.width)


def _scores(kernel: _Kernel, queries: list[list[Value]], slots: Sequence[Value]) -> list[Value]:
    """Return the products of each query with 16 keys, a key in each lane.

    Sums of elements are added across lanes in a tree, two vectors into one, so that few of them are held at once.
    """
    code = kernel.code
    if len(slots) == 1:
        key = kernel.key(slots[0])
        found = [code.constant(0, FLOATS)] * len(queries)
        for i, query in enumerate(queries):
            for element, other in zip(query, key, strict=True):
                found[i] = code.multiply_add(element, other, found[i])
        return found
    half = len(slots) // 2
    first, second = (_scores(kernel, queries, part) for part in (slots[:half], slots[half:]))
    left, right = _ADDED[len(slots)]
    return [a.picked(left, b) + a.picked(right, b) for a, b in zip(first, second, strict=True)]


def _within(lanes: Sequence[int]) -> list[int]:
    """Return the same lanes of each quarter of two vectors."""
    return [4 * quarter + lane for quarter in range(4) for lane in lanes]


def _whole(quarters: Sequence[int]) -> list[int]:
    """Return whole quarters of two vectors."""
    return [4 * quarter + lane for quarter in quarters for lane in range(4)]


_ADDED = {
    2: (_within([0, 16, 1, 17]), _within([2, 18, 3, 19])),
    4: (_within([0, 1, 16, 17]), _within([2, 3, 18, 19])),
    8: (_whole([0, 2, 4, 6]), _whole([1, 3, 5, 7])),
    16: (_whole([0, 2, 4, 6]), _whole([1, 3, 5, 7])),
}
"""The lanes of two vectors that are added, by the number of keys whose sums these hold.

Behind the last step, lane i holds the sum of key i.
"""


def _attend_many(kernel: _Kernel, task: _Task, kv_head: Value) -> None:
    """Attend up to `QUERIES` queries side by side."""
    code, layer, group = kernel.code, kernel.layer, kernel.shape.group
    depth, width, line = kernel.depth, kernel.width, 4 * QUERIES
    num_queries = (task.num_rows * group - task.first_query).min(QUERIES)
    paired = kernel.paired
    steps = KEYS // 2 if paired else KEYS
    queries, one = code.room(line * depth), code.room(4 * depth)
    upper, lower = code.room(line), code.room(line)
    far, near = code.constant(2**31 - 1), code.constant(0)
    bottom, top = Variable(code, far), Variable(code, near)
    clear_from, clear_to = Variable(code, near), Variable(code, far)
    with code.loop(0, QUERIES) as lane:
        query = task.first_query + lane.min(num_queries - 1)
        row = kernel.number(layer.rows, task.rows_start + query // group)
        first = kernel.number(layer.seen_from, row)
        last = kernel.number(layer.position, row).min(task.stop - 1)
        code.store(first.narrowed(), lower + lane * 4)
        code.store(last.narrowed(), upper + lane * 4)
        bottom.set(bottom.get().min(first))
        top.set(top.get().max(last))
        clear_from.set(clear_from.get().max(first))
        clear_to.set(clear_to.get().min(last))
        code.store_row(kernel.query(row, kv_head * group + query % group), one, depth)
        with code.loop(0, depth) as i:
            code.store(code.load(one + i * 4, WORD), queries + (i * QUERIES + lane) * 4)

    keys, values = code.room(4 * KEYS * depth), code.room(4 * steps * width)
    scores, weights, sums = (code.room(n * line) for n in (KEYS, steps, width))
    vectors = range(_VECTORS)
    highest = [Variable(code, code.constant(_LOWEST, FLOATS)) for _ in vectors]
    total = code.zeros(_VECTORS)
    with code.loop(0, width * _VECTORS) as i:
        code.store(code.constant(0, FLOATS), sums + i * (4 * LANES))
    factor, stop = kernel.factor(), top.get() + 1
    with code.loop(task.start.max(bottom.get()), stop, KEYS) as start:
        with code.loop(0, KEYS // 2) as pair:
            at = start + pair * 2
            slots = [kernel.slot(task.table, (at + i).min(stop - 1)) + kv_head for i in range(2)]
            for i, slot in enumerate(slots):
                code.store_row(kernel.key(slot), keys + (pair * 2 + i) * (4 * depth), depth)
            rows = kernel.values(slots)
            for i, row in enumerate(rows):
                code.store_row(row, values + (pair * len(rows) + i) * (4 * width), width)
        with code.loop(0, KEYS, ROWS) as key:
            left = (keys + key * (4 * depth), 4 * depth, 4)
            _product(kernel, scores + key * line, left, (queries, depth), None)
        with (
            code.when(layer.softcap.compared("!=", 0)),
            code.loop(0, KEYS * _VECTORS) as i,
        ):
            place = scores + i * (4 * LANES)
            code.store(kernel.capped(code.load(place)), place)
        clear = clear_from.get().compared("<=", start) & start.compared(
            "<=", clear_to.get() - (KEYS - 1)
        )
        with (
            code.when(clear.compared("==", 0)),
            code.loop(0, KEYS) as key,
        ):
            at = (start + key).narrowed().spread()
            for v in vectors:
                place = scores + key * line + 4 * LANES * v
                low, high = (code.load(each + 4 * LANES * v, WORDS) for each in (lower, upper))
                seen = low.compared("<=", at) & at.compared("<=", high)
                code.store(code.load(place).where(seen, _UNSEEN), place)
        above = [Variable(code, code.constant(_UNSEEN, FLOATS)) for _ in vectors]
        with code.loop(0, KEYS) as key:
            for v in vectors:
                above[v].set(above[v].get().max(code.load(scores + key * line + 4 * LANES * v)))
        fades = []
        for v in vectors:
            now = highest[v].get().max(above[v].get() * factor)
            fades.append(code.exp2(highest[v].get() - now))
            highest[v].set(now)
            total[v].set(total[v].get() * fades[v])
        below = [code.constant(0, FLOATS) - each.get() for each in highest]
        with code.loop(0, KEYS // 2) as pair:
            for v in vectors:
                place = pair * (2 * line) + 4 * LANES * v
                both = []
                for i in range(2):
                    score = code.load(scores + place + i * line)
                    both.append(code.exp2(code.multiply_add(score, factor, below[v])))
                    total[v].set(total[v].get() + both[i])
                if paired:
                    low, high = (code.rounded(each) for each in both)
                    words = (low >> 16) | (high & -0x10000)
                    code.store(words, weights + pair * line + 4 * LANES * v)
                else:
                    for i in range(2):
                        code.store(both[i], weights + place + i * line)
        with code.loop(0, width, ROWS) as i:
            left = (values + i * 4, 4, 4 * width)
            _product(kernel, sums + i * line, left, (weights, steps), fades)

    found = code.room(line)
    highs = code.room(line)
    for v in vectors:
        code.store(highest[v].get(), highs + 4 * LANES * v)
        code.store(total[v].get(), found + 4 * LANES * v)
    with code.loop(0, num_queries) as lane:
        query = task.first_query + lane
        to = kernel.partial(task.partial + query // group, kv_head * group + query % group)
        code.store(code.load(highs + lane * 4, FLOAT), to)
        code.store(code.load(found + lane * 4, FLOAT), to + 4)
        with code.loop(0, code.constant(kernel.shape.width)) as i:
            code.store(code.load(sums + i * line + lane * 4, FLOAT), to + 8 + i * 4)


def _product(
    kernel: _Kernel,
    to: Value,
    left: tuple[Value, int, int],
    right: tuple[Value, int],
    fades: Sequence[Value] | None,
) -> None:
    """Write `to = to * fades + left @ right`, for `ROWS` rows; without fades, `left @ right`.

    to     address of float32 [ROWS, QUERIES]
    left   address of [ROWS, depth], bytes from row to row, bytes from column to column
    right  address of [depth, QUERIES], depth
    """
    code, vectors = kernel.code, range(_VECTORS)
    start, to_row, to_column = left
    places = [to + 4 * (QUERIES * i + LANES * v) for i in range(ROWS) for v in vectors]
    sums = [
        Variable(
            code, code.load(place) * fades[i % _VECTORS] if fades else code.constant(0, FLOATS)
        )
        for i, place in enumerate(places)
    ]
    with code.loop(0, right[1]) as step:
        at = right[0] + step * (4 * QUERIES)
        columns = [
            code.load(at + 4 * LANES * v, ir.VectorType(kernel.operand, LANES)) for v in vectors
        ]
        for i in range(ROWS):
            element = code.load(start + step * to_column + i * to_row, kernel.operand).spread()
            for each, column in zip(sums[i * _VECTORS :], columns, strict=False):
                each.set(code.multiply_add(element, column, each.get()))
    for each, place in zip(sums, places, strict=True):
        code.store(each.get(), place)


def _merge(kernel: _Kernel) -> None:
    """Fill `out`: of each row its parts and the sink, each by its share of the sum of weights."""
    code, layer, shape = kernel.code, kernel.layer, kernel.shape
    with (
        code.claims(layer.claimed + 16, layer.num_rows) as row,
        code.loop(0, kernel.heads) as head,
    ):
        first, last = (kernel.number(layer.merged_starts, row + i) for i in range(2))

        def part(at: Value, head: Value = head) -> tuple[Value, Value]:
            place = kernel.partial(kernel.number(layer.merged, at), head)
            return place, code.load(place, FLOAT).spread()

        sink = Variable(code, code.constant(_LOWEST, FLOATS))
        with code.when(layer.sinks.compared("!=", 0)):
            sink.set(code.load(layer.sinks + head * 4, FLOAT).spread() * _LOG2_E)
        highest = Variable(code, sink.get())
        with code.loop(first, last) as at:
            highest.set(highest.get().max(part(at)[1]))
        total = Variable(code, code.exp2(sink.get() - highest.get()))
        sums = code.zeros(-(-shape.width // LANES))
        with code.loop(first, last) as at:
            place, high = part(at)
            share = code.exp2(high - highest.get())
            total.set(code.multiply_add(share, code.load(place + 4, FLOAT).spread(), total.get()))
            for each, value in zip(sums, code.load_row(place + 8, shape.width, FLOAT), strict=True):
                each.set(code.multiply_add(share, value, each.get()))
        found = [each.get() / total.get() for each in sums]
        if shape.bfloat16:
            halves = ir.VectorType(ir.IntType(16), LANES)
            found = [(code.rounded(each) >> 16).narrowed(halves) for each in found]
        to = (row * kernel.heads + head) * (kernel.element * shape.width)
        code.store_row(found, layer.out + to, shape.width)


@cache
def kernel(shape: Shape) -> Callable[[int, int, int], None]:
    """Return `run(layer, fork, threads)`: the address of a `Layer`, and of GOMP_parallel, or 0."""
    module = ir.Module()
    written = _Kernel(shape, module)
    phases = [written.phase(write) for write in (_write, _attend, _merge)]
    code = Code(module, "run", 3)
    layer, fork, threads = code.arguments
    start = ir.FunctionType(ir.VoidType(), [INT, INT, WORD, WORD]).as_pointer()
    alone = fork.compared("==", 0)
    for phase in phases:
        with code.builder.if_else(alone.value) as (then, otherwise):
            with then:
                code.builder.call(phase, [layer.value])
            with otherwise:
                values = [
                    code.builder.ptrtoint(phase, INT),
                    layer.value,
                    threads.narrowed().value,
                    WORD(0),
                ]
                code.builder.call(code.builder.inttoptr(fork.value, start), values)
    code.builder.ret_void()
    address, held = compiled(module, "run")
    run: Any = CFUNCTYPE(None, c_int64, c_int64, c_int64)(address)
    run.held = held
    return run
