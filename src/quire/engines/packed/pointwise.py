"""What a decoder computes between its products, in one pass each: vector code for the CPU."""

# pyright: basic

from collections.abc import Callable
from ctypes import addressof, c_int64
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from llvmlite import ir

from quire.engines.packed.attention.compiling import for_threads
from quire.engines.packed.attention.step import fork
from quire.engines.packed.attention.vectors import (
    FLOAT,
    FLOATS,
    INT,
    LANES,
    WORD,
    Code,
    Number,
    Variable,
)

_LOG2_E = 1.4426950408889634
_ROWS = 8
"""Rows that a thread claims at a time."""
_ALONE = 1 << 14
"""Elements up to which one thread is as fast as several."""


def add_norm(
    hidden: torch.Tensor, added: torch.Tensor | None, weight: torch.Tensor, epsilon: float
) -> torch.Tensor:
    """Add to hidden states `[N, width]` in place; return them over their root mean square, times a weight `[width]`."""
    out = torch.empty_like(hidden)
    bits = int(np.float32(epsilon).view(np.int32))
    inputs = (hidden, out, weight.contiguous(), hidden if added is None else added)
    _run(_add_norm, inputs, bits, int(added is not None))
    return out


def gated(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Return `silu(gate) * up` of `[N, width]`, in the place of `gate`."""
    _run(_gated, (gate, up))
    return gate


class _RowInputs(NamedTuple):
    """Addresses of rows of the same width, and numbers; how many were claimed is counted in the first place."""

    claimed: Any
    num_rows: Any
    first: Any
    second: Any
    third: Any = 0
    fourth: Any = 0
    bits: Any = 0
    adds: Any = 0


class _RowCode(Code):
    """A function of the address of `_RowInputs` that is being written."""

    def __init__(self, module: ir.Module, width: int, bfloat16: bool) -> None:
        super().__init__(module, "rows", 1)
        self.width, self.bfloat16 = width, bfloat16
        self.size = 2 if bfloat16 else 4
        self.given = _RowInputs(
            *(self.load(self.arguments[0] + i * 8, INT) for i in range(len(_RowInputs._fields)))
        )

    def rows(self, write: Callable[[Number], None]) -> None:
        """Write code for each row, given its distance from the first in bytes."""
        given = self.given
        with (
            self.claims(self.arguments[0], (given.num_rows + (_ROWS - 1)) // _ROWS) as some,
            self.loop(some * _ROWS, (some * _ROWS + _ROWS).min(given.num_rows)) as row,
        ):
            write(row * (self.size * self.width))

    def vectors(self, write: Callable[[Number, int], None]) -> None:
        """Write code for each vector of a row, given its distance from the first in bytes and its length."""
        whole = self.width // LANES * LANES
        with self.loop(0, whole * self.size, LANES * self.size) as at:
            write(at, LANES)
        if whole < self.width:
            write(self.constant(whole * self.size), self.width - whole)

    def get(self, address: Number, count: int) -> Number:
        return self.load_floats(address, count, bfloat16=self.bfloat16)[0]

    def put(self, value: Number, address: Number, count: int) -> None:
        self.store_floats([value], address, count, bfloat16=self.bfloat16)


def _add_norm(code: _RowCode) -> None:
    hidden, out, weight, added, bits, adds = code.given[2:]
    epsilon = bits.narrowed(WORD).seen_as(FLOAT).spread()

    def row(start: Number) -> None:
        squares = Variable(code, code.constant(0, FLOATS))

        def add(at: Number, count: int) -> None:
            place = hidden + start + at
            value = Variable(code, code.get(place, count))
            with code.when(adds > 0):
                code.put(value.now + code.get(added + start + at, count), place, count)
                value.now = code.get(place, count)
            squares.now = code.multiply_add(value.now, value.now, squares.now)

        code.vectors(add)
        mean = code.across(squares.now, Number.__add__) * (1 / code.width) + epsilon
        share = code.constant(1, FLOATS) / code.call("llvm.sqrt.v16f32", FLOATS, mean)

        def scale(at: Number, count: int) -> None:
            value = code.get(hidden + start + at, count) * share
            code.put(value * code.get(weight + at, count), out + start + at, count)

        code.vectors(scale)

    code.rows(row)


def _gated(code: _RowCode) -> None:
    gate, up = code.given[2:4]

    def row(start: Number) -> None:
        def weigh(at: Number, count: int) -> None:
            value = code.get(gate + start + at, count)
            power = (value * -_LOG2_E).min(126.0)
            value = value / (code.exp2(power) + 1.0)
            code.put(value * code.get(up + start + at, count), gate + start + at, count)

        code.vectors(weigh)

    code.rows(row)


@cache
def _compiled(
    write: Callable[[_RowCode], None],
    width: int,
    bfloat16: bool,
) -> Callable[[int, int, int], None]:
    module = ir.Module()
    code = _RowCode(module, width, bfloat16)
    write(code)
    return for_threads(module, [code])


def _run(
    write: Callable[[_RowCode], None], tensors: tuple[torch.Tensor, ...], *numbers: int
) -> None:
    """Run code over the rows of contiguous tensors of one type, which are all as wide as the first."""
    num_rows, width = tensors[0].shape
    threads = torch.get_num_threads() if tensors[0].numel() > _ALONE else 1
    given = _GIVEN(0, num_rows, *(each.data_ptr() for each in tensors), *numbers)
    run = _compiled(write, width, tensors[0].dtype == torch.bfloat16)
    run(addressof(given), fork() if threads > 1 else 0, threads)


_GIVEN = c_int64 * len(_RowInputs._fields)
