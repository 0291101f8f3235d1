"""Tiles of bfloat16 on CPUs with AMX: products of 32 rows by 32 or 16 columns.

A tile is 16 rows of 64 bytes. Four hold sums, two a step of the left operands, two of the right ones.
"""

# pyright: basic

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from llvmlite import binding, ir

from quire.kernels.code import Code
from quire.kernels.vectors import Number

ROWS = 32
"""Rows, and columns, of a product."""
STEP = 16
"""Words of operands, each a pair of bfloat16, that are multiplied at once."""

HALF = 16
"""Rows of one tile."""

_ROW = 64
_SUMS, _LEFT, _RIGHT = (0, 1, 2, 3), (4, 5), (6, 7)
_BYTE = ir.IntType(8)
_NONE = ir.VoidType()

_SETTINGS = bytearray(64)
_SETTINGS[0] = 1  # the palette
_SETTINGS[16:32:2] = bytes([_ROW] * 8)
_SETTINGS[48:56] = bytes([HALF] * 8)


TILES = bool(binding.get_host_cpu_features().get("amx-bf16", False)) and torch.cpu._init_amx()  # noqa: SLF001
"""Whether this CPU multiplies tiles of bfloat16, and the system lets this process do so."""


class Left(NamedTuple):
    """Left operands: the addresses of each half of the rows, and bytes from row to row."""

    first: Number
    second: Number
    line: Number


@contextmanager
def configured(code: Code) -> Generator[None]:
    """Have what is written inside use tiles."""
    _call(code, "ldtilecfg", code.content("tiles", _SETTINGS))
    yield
    _call(code, "tilerelease")


def multiply_tiles(
    code: Code,
    to: Number,
    operands: tuple[Left, Number, Number | int],
    line: int,
    *,
    adds: Number,
    most: int = 2,
    meanwhile: Callable[[Number], None] | None = None,
) -> None:
    """Write the sums of left operands times right ones, or add to what is there.

    to         address of float32 [32, 32]; of [32, 16] where a row has no more
    operands   the left ones; the address of the right ones, column beside column, words [n, 32] or [n, 16]; and n, a
               multiple of `STEP`
    line       bytes from row to row of right operands, and of sums
    adds       whether to add
    most       1: 16 columns alone, whatever stands beside them
    meanwhile  writes what else is done with every `STEP` words: vectors are computed beside tiles
    """
    (left, right, num_words), stride = operands, code.constant(line)
    columns = range(min(line // _ROW, most))
    places = [to + (HALF * line * i + _ROW * j) for i in range(2) for j in columns]
    sums = list(zip(_SUMS, places, strict=False))
    with code.either(adds) as (again, anew):
        with again:
            for tile, place in sums:
                _call(code, "tileloadd64", tile, place, stride)
        with anew:
            for tile, _ in sums:
                _call(code, "tilezero", tile)
    with code.loop(0, num_words, STEP) as at:
        for i in range(2):
            _call(code, "tileloadd64", _LEFT[i], left[i] + at * 4, left.line)
        for j in columns:
            _call(code, "tileloadd64", _RIGHT[j], right + at * line + _ROW * j, stride)
        for i in range(2):
            for j in columns:
                _call(code, "tdpbf16ps", _SUMS[i * len(columns) + j], _LEFT[i], _RIGHT[j])
        if meanwhile is not None:
            meanwhile(at)
    for tile, place in sums:
        _call(code, "tilestored64", tile, place, stride)


def _call(code: Code, name: str, *given: int | Number) -> None:
    """Write an instruction: numbers of Python's are tiles; the first other one is an address."""
    values: list[Any] = []
    for each in given:
        if not isinstance(each, Number):
            values.append(_BYTE(each))
        elif any(value.type != _BYTE for value in values):
            values.append(each.value)
        else:
            values.append(code.builder.inttoptr(each.value, _BYTE.as_pointer()))
    module = code.function.module
    kind = ir.FunctionType(_NONE, [value.type for value in values])
    name = f"llvm.x86.{name}"
    function = module.globals.get(name) or ir.Function(module, kind, name)
    code.builder.call(function, values)
