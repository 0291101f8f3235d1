"""Rows over their root mean square, as operands of products (https://arxiv.org/abs/1910.07467), as vector code for the CPU."""

# pyright: basic

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from llvmlite import ir

from quire.kernels.code import Code, Variable
from quire.kernels.compiling import Pass, functions
from quire.kernels.products import paired
from quire.kernels.vectors import FLOAT, FLOATS, LANES, WORD, Number

_ROWS = 8
"""Rows that a thread claims at a time."""


def normed(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    epsilon: float,
    out: torch.Tensor,
    threads: int,
    *,
    count: Any = None,
) -> Pass:
    """Return the pass that fills operands with hidden states `[N, width]` over their root mean square, times a weight.

    count  int64 [1]: how many of the rows there are when it runs; None: all of them
    """
    bits, weight = int(np.float32(epsilon).view(np.int32)), weight.contiguous()
    count = np.array([len(hidden)], np.int64) if count is None else count
    places = [count.ctypes.data, *(each.data_ptr() for each in (hidden, weight, out))]
    inputs = _NormInputs(0, *places, bits)  # pyright: ignore[reportCallIssue]
    of_dtype = hidden.dtype == torch.bfloat16, paired(hidden.dtype)
    found = functions(_written, hidden.shape[1], *of_dtype)
    return Pass(found, inputs, threads, (hidden, weight, out, count))


class _NormInputs(NamedTuple):
    """Addresses of contiguous rows and of how many they are, and numbers; what was claimed is counted in the first place."""

    claimed: Any
    count: Any
    hidden: Any
    weight: Any
    out: Any
    epsilon_bits: Any


def _written(module: ir.Module, width: int, bfloat16: bool, is_paired: bool) -> Sequence[Code]:
    code = Code(module, "normed", 1)
    given = _NormInputs(*code.numbers(code.arguments[0], _NormInputs))
    num_rows = code.number(given.count, 0)
    epsilon = given.epsilon_bits.narrowed(WORD).seen_as(FLOAT).spread()
    size, out_size = (2 if bfloat16 else 4), (2 if is_paired else 4)
    whole = width // LANES * LANES

    def vectors(visit: Any) -> None:
        with code.loop(0, whole, LANES) as at:
            visit(at, LANES)
        if whole < width:
            visit(code.constant(whole), width - whole)

    def get(address: Number, count: int) -> Number:
        return code.load_floats(address, count, bfloat16=bfloat16)[0]

    def norm(row: Number) -> None:
        squares = Variable(code, code.constant(0, FLOATS))
        hidden, out = given.hidden + row * (size * width), given.out + row * (out_size * width)

        def add(at: Number, count: int) -> None:
            value = get(hidden + at * size, count)
            squares.now = code.multiply_add(value, value, squares.now)

        vectors(add)
        mean = code.across(squares.now, Number.__add__) * (1 / width) + epsilon
        share = code.constant(1, FLOATS) / code.call("llvm.sqrt.v16f32", FLOATS, mean)

        def scale(at: Number, count: int) -> None:
            value = get(hidden + at * size, count) * share
            if bfloat16:
                value = code.nearest(value)
            value *= get(given.weight + at * size, count)
            if bfloat16 and not is_paired:
                value = code.nearest(value)
            code.store_floats([value], out + at * out_size, count, bfloat16=is_paired)

        vectors(scale)

    with (
        code.claims(code.arguments[0], (num_rows + (_ROWS - 1)) // _ROWS) as some,
        code.loop(some * _ROWS, (some * _ROWS + _ROWS).min(num_rows)) as row,
    ):
        norm(row)
    return [code]
