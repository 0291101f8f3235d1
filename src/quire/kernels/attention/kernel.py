"""Attention over block tables: every part of a step's keys, then the merge of the parts.

Weights are powers of 2, of scores times log2(e), over the highest score so far; sums are float32; of bfloat16
models, weights are rounded before the second product, as in FlashAttention (https://arxiv.org/abs/2205.14135,
algorithm 1).
"""

# pyright: basic

from collections.abc import Sequence
from contextlib import nullcontext

from llvmlite import ir

from quire.kernels import tiles
from quire.kernels.attention.few import attend_few
from quire.kernels.attention.layer import LOG2_E, LOWEST, LayerCode, Shape, Task
from quire.kernels.attention.many import attend_many
from quire.kernels.attention.work import MANY
from quire.kernels.code import Variable
from quire.kernels.vectors import FLOAT, FLOATS, LANES, Number


def phases(module: ir.Module, shape: Shape) -> Sequence[LayerCode]:
    """Write the functions of a pass over `LayerInputs`."""
    writers = (_write, _attend, _merge)
    codes = [LayerCode(module, write.__name__, shape) for write in writers]
    for code, write in zip(codes, writers, strict=True):
        write(code)
    return codes


def _write(code: LayerCode) -> None:
    """Turn the new rows' queries and keys by their positions, where asked to, and copy K and V to their slots."""
    layer = code.layer
    of_k = (layer.k, layer.new_k, layer.new_k_row, layer.new_k_head, code.key_words)
    of_v = (layer.v, layer.new_v, layer.new_v_row, layer.new_v_head, code.value_words)
    with (
        code.claims(code.arguments[0], code.step.num_rows // LANES + 1) as some,
        code.loop(some * LANES, (some * LANES + LANES).min(code.step.num_rows)) as row,
    ):
        with code.when(layer.cos > 0):
            angle = row * (4 * code.key_words)
            with code.loop(0, code.heads) as head:
                _turn(code, layer.q + row * layer.q_row + head * layer.q_head, angle)
            with code.loop(0, layer.kv_heads) as head:
                _turn(code, layer.new_k + row * layer.new_k_row + head * layer.new_k_head, angle)
        with code.loop(0, layer.kv_heads) as head:
            slot = code.number(code.step.slots, row) * layer.kv_heads + head
            for pool, new, to_row, to_head, words in (of_k, of_v):
                found = code.load_row(new + row * to_row + head * to_head, words, code.kind)
                code.store_row(found, pool + slot * (4 * words), words)


def _turn(code: LayerCode, place: Number, angle: Number) -> None:
    """Turn a head in place: the pairs of its first and its second half (rotary position embedding)."""
    half, bfloat16 = code.shape.depth // 2, code.shape.bfloat16
    second = half * (2 if bfloat16 else 4)
    (left, right), (cos_left, cos_right), (sin_left, sin_right) = (
        [code.load_floats(start + i * second, half, bfloat16=bfloat16) for i in range(2)]
        for start in (place, code.layer.cos + angle, code.layer.sin + angle)
    )
    turned = [
        (a * cos_a - b * sin_a, b * cos_b + a * sin_b)
        for a, b, cos_a, cos_b, sin_a, sin_b in zip(
            left, right, cos_left, cos_right, sin_left, sin_right, strict=True
        )
    ]
    for i, row in enumerate(zip(*turned, strict=True)):
        code.store_floats(row, place + i * second, half, bfloat16=bfloat16)


def _attend(code: LayerCode) -> None:
    """Attend the parts."""
    step = code.step
    with (
        tiles.configured(code) if code.shape.fits_tiles else nullcontext(),
        code.claims(code.arguments[0] + 8, step.num_tasks) as claimed,
    ):
        *numbers, first, count = (code.number(step.tasks + claimed * 80, i) for i in range(10))
        with code.loop(first, first + count) as kv_head:
            _attend_one(code, Task._make([*numbers, kv_head]))


def _attend_one(code: LayerCode, task: Task) -> None:
    """Attend a task for one kv head."""
    step = code.step
    task = task._replace(table=step.tables + task.table * step.num_columns * 4)
    with code.either(task.at_once < MANY[0]) as (few, many):
        with few:
            attend_few(code, task)
        with many:
            for side_by_side in MANY:
                with code.when(task.at_once.compared("==", side_by_side)):
                    attend_many(code, task, side_by_side)


def _merge(code: LayerCode) -> None:
    """Fill `out`: of each row its parts and the sink, each by its share of the sum of weights."""
    step = code.step
    with (
        code.claims(code.arguments[0] + 16, step.num_rows) as row,
        code.when(code.is_merged(row)),
    ):
        first, last = (code.number(step.merged_starts, row + i) for i in range(2))
        # Another core may have written them: all are asked for before the first is waited for.
        with code.loop(first, last) as at, code.loop(0, code.heads) as head:
            place = code.partial(code.number(step.merged, at), head)
            code.fetch(place, 4 * (2 + code.shape.width))
        with code.loop(0, code.heads) as head:
            _merge_one(code, row, head, (first, last))


def _merge_one(code: LayerCode, row: Number, head: Number, parts: tuple[Number, Number]) -> None:
    """Put down the output of a head from its parts, one place behind another."""
    layer, width, (first, last) = code.layer, code.shape.width, parts

    def part(at: Number) -> tuple[Number, Number]:
        place = code.partial(code.number(code.step.merged, at), head)
        return place, code.load(place, FLOAT).spread()

    sink = Variable(code, code.constant(LOWEST, FLOATS))
    with code.when(layer.sinks > 0):
        sink.now = code.load(layer.sinks + head * 4, FLOAT).spread() * LOG2_E
    highest = Variable(code, sink.now)
    with code.loop(first, last) as at:
        highest.now = highest.now.max(part(at)[1])
    total = Variable(code, code.exp2(sink.now - highest.now))
    sums = code.zeros(-(-width // LANES))
    with code.loop(first, last) as at:
        place, high = part(at)
        share = code.exp2(high - highest.now)
        total.now += share * code.load(place + 4, FLOAT).spread()
        for each, value in zip(sums, code.load_row(place + 8, width, FLOAT), strict=True):
            each.now += share * value
    code.put(row, head, [each.now / total.now for each in sums])
