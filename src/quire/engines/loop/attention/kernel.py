"""Attention over block tables: every part of a step's keys, then the merge of the parts.

Weights are powers of 2, of scores times log2(e), over the highest score so far; sums are float32; of bfloat16
models, weights are rounded before the second product, as in FlashAttention (https://arxiv.org/abs/2205.14135,
algorithm 1).
"""

# pyright: basic

from collections.abc import Callable
from ctypes import CFUNCTYPE, c_int64
from functools import cache
from typing import Any

from llvmlite import ir

from quire.engines.loop.attention.few import attend_few
from quire.engines.loop.attention.layer import LOG2_E, LOWEST, LayerCode, Shape, Task
from quire.engines.loop.attention.many import attend_many
from quire.engines.loop.attention.vectors import (
    FLOAT,
    FLOATS,
    LANES,
    WORD,
    Code,
    Number,
    Variable,
    compiled,
)
from quire.engines.loop.attention.work import LANES as QUERIES


@cache
def kernel(shape: Shape) -> Callable[[int, int, int], None]:
    """Return `run(layer, fork, threads)`: the address of a `LayerInputs`, and of GOMP_parallel, or 0."""
    module = ir.Module()
    phases = [LayerCode(module, write.__name__, shape) for write in (_write, _attend, _merge)]
    for phase, write in zip(phases, (_write, _attend, _merge), strict=True):
        write(phase)
        phase.end()
    code = Code(module, "run", 3)
    layer, fork, threads = code.arguments
    for phase in phases:
        with code.either(fork > 0) as (forked, alone):
            with forked:
                values = (phase.address(code), layer, threads.narrowed(), code.constant(0, WORD))
                code.call_at(fork, *values)
            with alone:
                code.call_at(phase.address(code), layer)
    code.end()
    address, held = compiled(module, "run")
    run: Any = CFUNCTYPE(None, c_int64, c_int64, c_int64)(address)
    run.held = held
    return run


def _write(code: LayerCode) -> None:
    """Copy the K and V of the new rows to their slots."""
    layer = code.layer
    of_k = (layer.k, layer.new_k, layer.new_k_row, layer.new_k_head, code.key_words)
    of_v = (layer.v, layer.new_v, layer.new_v_row, layer.new_v_head, code.value_words)
    with (
        code.claims(layer.claimed, layer.num_rows // LANES + 1) as some,
        code.loop(some * LANES, (some * LANES + LANES).min(layer.num_rows)) as row,
        code.loop(0, layer.kv_heads) as head,
    ):
        slot = code.number(layer.slots, row) * layer.kv_heads + head
        for pool, new, to_row, to_head, words in (of_k, of_v):
            found = code.load_row(new + row * to_row + head * to_head, words, code.kind)
            code.store_row(found, pool + slot * (4 * words), words)


def _attend(code: LayerCode) -> None:
    """Attend the parts."""
    layer = code.layer
    with code.claims(layer.claimed + 8, layer.num_tasks * layer.kv_heads) as claimed:
        place = layer.tasks + claimed // layer.kv_heads * 64
        task = Task._make([*(code.number(place, i) for i in range(8)), claimed % layer.kv_heads])
        task = task._replace(table=layer.tables + task.table * layer.num_columns * 4)
        with code.either(task.at_once < QUERIES) as (few, many):
            with few:
                attend_few(code, task)
            with many:
                attend_many(code, task)


def _merge(code: LayerCode) -> None:
    """Fill `out`: of each row its parts and the sink, each by its share of the sum of weights."""
    layer, width = code.layer, code.shape.width
    with code.claims(layer.claimed + 16, layer.num_rows) as row, code.loop(0, code.heads) as head:
        first, last = (code.number(layer.merged_starts, row + i) for i in range(2))

        def part(at: Number, head: Number = head) -> tuple[Number, Number]:
            place = code.partial(code.number(layer.merged, at), head)
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
        found = [each.now / total.now for each in sums]
        size = 4
        if code.shape.bfloat16:
            found, size = [code.rounded(each) for each in found], 2
        to = layer.out + (row * code.heads + head) * (size * width)
        code.store_row(found, to, width)
