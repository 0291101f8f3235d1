"""Products of a decoder's rows with its weights, and what becomes of them at once, as vector code for the CPU.

Panels of 64 columns of the result take turns with chunks of rows: the weights of a panel are laid out column beside
column (K. Goto and R. van de Geijn, Anatomy of high-performance matrix multiplication, 2008,
https://doi.org/10.1145/1356052.1356053), a part of their depth at a time, and `ROWS` rows of sums stay in registers.
"""

# pyright: basic

from collections.abc import Sequence
from contextlib import nullcontext
from functools import cache, lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from llvmlite import ir

from quire.engines.packed import tiles
from quire.engines.packed.compiling import Pass, functions
from quire.engines.packed.vectors import (
    FLOAT,
    FLOATS,
    HALF,
    INT,
    LANES,
    LOG2_E,
    PAIRED,
    WORD,
    Number,
)
from quire.engines.packed.writing import Code

COLUMNS = 64
ROWS = 6
"""Rows whose sums are held at once: with four vectors of columns, 24 of a core's 32 registers."""

_DEPTH = 128
"""Operands of a row that are multiplied before its sums are put down; so much of a panel stays in the first cache."""
_CHUNK = 384
"""Rows at most that a panel's weights are laid out for."""
_LINE = 4 * COLUMNS
assert _LINE == tiles.LINE
_VECTOR = 4 * LANES
_VECTORS = range(COLUMNS // LANES)


def paired(dtype: torch.dtype) -> bool:
    """Whether operands are bfloat16 as they stand; else they are float32, which bfloat16s are widened to."""
    return dtype == torch.bfloat16 and (PAIRED or tiles.TILES)


def tiled(dtype: torch.dtype) -> bool:
    """Whether operands are multiplied as tiles."""
    return dtype == torch.bfloat16 and tiles.TILES


def operands(num_rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    """Return room for rows that are multiplied: of a model of bfloat16, of its numbers, as they are multiplied.

    Tiles read whole ones, and what stands behind the last row.
    """
    kept = torch.float32 if not paired(dtype) else dtype
    return torch.empty((num_rows + tiles.ROWS, width), dtype=kept)[:num_rows]


def product(
    rows: torch.Tensor,
    modules: Sequence[Any],
    out: torch.Tensor,
    threads: int,
    *,
    become: str = "plain",
) -> Pass:
    """Return the pass that multiplies operands `[N, K]` with the weights of linear modules, their biases added.

    out     [N, columns]: "plain", the results side by side; "added", what a result is added to; "gated",
            `silu(gate) * up` of two modules, as operands
    """
    dtype = modules[0].weight.dtype
    key = tuple(
        (
            each.weight.data_ptr(),
            each.weight.shape,
            0 if each.bias is None else each.bias.data_ptr(),
        )
        for each in modules
    )
    panels = _panels(key, become == "gated", (dtype.itemsize, out.element_size()))
    # As few chunks as give each thread some of equal length.
    chunks = max(-(-len(rows) // _CHUNK), -(-2 * threads // len(panels)))
    step = tiles.ROWS if tiled(dtype) else ROWS
    chunk = -(-len(rows) // chunks // step) * step
    inputs = _Inputs(
        0,
        rows.data_ptr(),
        rows.stride(0) * rows.element_size(),
        len(rows),
        rows.shape[1] // (2 if paired(dtype) else 1),
        panels.ctypes.data,
        len(panels),
        chunk,
        out.data_ptr(),
        out.stride(0) * out.element_size(),
    )
    found = _compiled(become, dtype == torch.bfloat16, paired(dtype), tiled(dtype))
    return Pass(found, inputs, threads, (rows, out, panels))


class _Inputs(NamedTuple):
    """A product: addresses, and numbers; what was claimed of it is counted in the first place.

    depth    operands of a row
    panels   int64 [panels, 6], each a `_Panel`
    chunk    rows that are claimed at once
    """

    claimed: Any
    rows: Any
    row_bytes: Any
    num_rows: Any
    depth: Any
    panels: Any
    num_panels: Any
    chunk: Any
    out: Any
    out_bytes: Any


RESULT = _Inputs._fields.index("out")
"""Where the inputs of a product say where its result goes."""


class _Panel(NamedTuple):
    """Neighbouring columns of a result.

    weight, second       addresses of the weights of the first, and for a gated one of those of `up`
    bias, second_bias    the same, or 0
    place, columns       bytes from the beginning of a row of the result, and how many they are
    """

    weight: Any
    second: Any
    bias: Any
    second_bias: Any
    place: Any
    columns: Any


@lru_cache(maxsize=4096)
def _panels(weights: tuple[Any, ...], is_gated: bool, sizes: tuple[int, int]) -> Any:
    """Return the panels of weights, each an address, its shape, and the address of a bias.

    sizes  bytes of an element of the weights, and of the result
    """
    found: list[_Panel] = []
    place, width = 0, COLUMNS // 2 if is_gated else COLUMNS
    second, _, second_bias = weights[-1]
    for address, (columns, depth), bias in weights[:1] if is_gated else weights:
        for first in range(0, columns, width):
            ahead, beside = first * depth * sizes[0], first * sizes[0]
            found.append(
                _Panel(
                    address + ahead,
                    second + ahead,
                    bias and bias + beside,
                    second_bias and second_bias + beside,
                    (place + first) * sizes[1],
                    min(width, columns - first),
                )
            )
        place += columns
    return np.array(found, np.int64)


@cache
def _compiled(become: str, bfloat16: bool, is_paired: bool, is_tiled: bool) -> Sequence[int]:
    module = ir.Module()
    code = _ProductCode(module, become, bfloat16, is_paired, is_tiled)
    code.write()
    return functions(module, [code])


class _ProductCode(Code):
    """A function of the address of `_Inputs` that is being written, which any number of threads call."""

    def __init__(
        self, module: ir.Module, become: str, bfloat16: bool, is_paired: bool, is_tiled: bool
    ) -> None:
        super().__init__(module, f"product_{become}", 1)
        self.become, self.bfloat16, self.paired = become, bfloat16, is_paired
        self.tiled = is_tiled
        self.widened = bfloat16 and not is_paired
        self.operand = WORD if is_paired else FLOAT
        self.size = 2 if self.widened else 4
        """Bytes of what becomes an operand of the weights."""
        self.given = _Inputs(*self._numbers(self.arguments[0], _Inputs))
        self.is_gated = become == "gated"
        self.width = COLUMNS // 2 if self.is_gated else COLUMNS

    def _numbers(self, address: Number, kind: Any) -> list[Number]:
        return [self.load(address + i * 8, INT) for i in range(len(kind._fields))]

    def write(self) -> None:
        given = self.given
        laid, sums = self.room(_DEPTH * _LINE), self.room((_CHUNK + tiles.ROWS) * _LINE)
        bias, part = self.room(_LINE), self.room(_LINE)
        chunks = (given.num_rows + (given.chunk - 1)).divided(given.chunk)
        with (
            tiles.configured(self) if self.tiled else nullcontext(),
            self.claims(self.arguments[0], given.num_panels * chunks) as claimed,
        ):
            chunk = claimed.divided(given.num_panels)
            place = given.panels + (claimed - chunk * given.num_panels) * (8 * len(_Panel._fields))
            panel = _Panel(*self._numbers(place, _Panel))
            first = chunk * given.chunk
            num_rows = (given.num_rows - first).min(given.chunk)
            rows = given.rows + first * given.row_bytes
            with self.loop(0, given.depth, _DEPTH) as start:
                depth = (given.depth - start).min(_DEPTH)
                self._lay(panel, start, depth, laid)
                left = rows + start * 4, num_rows
                by_tiles = self._multiply_tiles(left, laid, depth, sums, adds=start > 0)
                with self.when(depth > by_tiles), self.loop(0, num_rows, ROWS) as row:
                    left = [
                        rows + (row + i).min(num_rows - 1) * given.row_bytes + start * 4
                        for i in range(ROWS)
                    ]
                    self._multiply(left, laid, (by_tiles, depth), sums + row * _LINE, start)
            self._lay_biases(panel, bias)
            with self.loop(0, num_rows) as row:
                to = given.out + (first + row) * given.out_bytes + panel.place
                self._finish(sums + row * _LINE, bias, panel.columns, to, part)

    def _lay(self, panel: _Panel, start: Number, depth: Number, to: Number) -> None:
        """Lay operands of a panel's weights down as [depth, COLUMNS]; where it has no column, its last one again."""
        step = self.given.depth * self.size
        whole = depth // LANES * LANES
        with self.loop(0, COLUMNS, LANES) as strip:
            weight, first = panel.weight, strip
            if self.is_gated:
                is_second = strip > self.width - 1
                weight = panel.second.where(is_second, panel.weight)
                first = (strip - self.width).where(is_second, strip)
            weight += start * self.size
            last = panel.columns - 1
            columns = [weight + (first + i).min(last) * step for i in range(LANES)]
            to_strip = to + strip * 4
            with self.loop(0, whole, LANES) as at:
                found = self.transposed([self._operands(each + at * self.size) for each in columns])
                for i, row in enumerate(found):
                    self.store(row, to_strip + (at + i) * _LINE)
            with self.loop(whole, depth) as at:
                for i, each in enumerate(columns):
                    self.store(self._operand(each + at * self.size), to_strip + at * _LINE + i * 4)

    def _operands(self, address: Number) -> Number:
        if self.widened:
            return self.load_floats(address, LANES, bfloat16=True)[0]
        return self.load(address, ir.VectorType(self.operand, LANES))

    def _operand(self, address: Number) -> Number:
        return self.widened_at(address) if self.widened else self.load(address, WORD)

    def _multiply_tiles(
        self, rows: tuple[Number, Number], laid: Number, depth: Number, to: Number, *, adds: Number
    ) -> Number:
        """Add products of so many rows to their sums, as far as tiles go; return how far that is."""
        if not self.tiled:
            return self.constant(0)
        (start, num_rows), line = rows, self.given.row_bytes
        whole = depth // tiles.STEP * tiles.STEP
        with (
            self.when(whole > 0),
            self.loop(0, num_rows, tiles.ROWS) as row,
            self.loop(0, _LINE, 4 * tiles.ROWS) as column,
        ):
            first = start + row * line
            left = tiles.Left(first, first + line * tiles.HALF, line)
            place = to + row * _LINE + column
            tiles.multiply_tiles(self, place, left, laid + column, whole, adds=adds)
        return whole

    def _multiply(
        self,
        left: Sequence[Number],
        laid: Number,
        depth: tuple[Number, Number],
        to: Number,
        start: Number,
    ) -> None:
        """Add products of rows to their sums, from one operand to another; before the first, they begin at 0."""
        places = [to + i * _LINE + v * _VECTOR for i in range(ROWS) for v in _VECTORS]
        sums = self.zeros(len(places))
        with self.when(start + depth[0] > 0):
            for each, place in zip(sums, places, strict=True):
                each.now = self.load(place)
        with self.loop(*depth) as at:
            columns = [
                self.load(laid + at * _LINE + v * _VECTOR, ir.VectorType(self.operand, LANES))
                for v in _VECTORS
            ]
            for i, row in enumerate(left):
                element = self.load(row + at * 4, self.operand).spread()
                for each, column in zip(sums[i * len(columns) :], columns, strict=False):
                    each.now = self.multiply_add(element, column, each.now)
        for each, place in zip(sums, places, strict=True):
            self.store(each.now, place)

    def _lay_biases(self, panel: _Panel, to: Number) -> None:
        """Lay a panel's biases down as floats; zeros where there are none."""
        for v in _VECTORS:
            self.store(self.constant(0, FLOATS), to + v * _VECTOR)
        biases = (panel.bias, panel.second_bias) if self.is_gated else (panel.bias,)
        for half, address in enumerate(biases):
            with self.when(address > 0), self.loop(0, panel.columns) as column:
                if self.bfloat16:
                    found = self.widened_at(address + column * 2)
                else:
                    found = self.load(address + column * 4, WORD)
                self.store(found, to + half * (_LINE // 2) + column * 4)

    def _finish(
        self, sums: Number, bias: Number, columns: Number, to: Number, part: Number
    ) -> None:
        """Make a row of a panel's sums what they become; of a panel that is not full, in room of its own."""
        size = 2 if self.bfloat16 and not (self.is_gated and self.widened) else 4
        kind = HALF if size == 2 else WORD
        with self.either(columns > self.width - 1) as (full, partly):
            with full:
                self._become(sums, bias, to)
            with partly:
                if self.become == "added":
                    with self.loop(0, columns) as i:
                        self.store(self.load(to + i * size, kind), part + i * size)
                self._become(sums, bias, part)
                with self.loop(0, columns) as i:
                    self.store(self.load(part + i * size, kind), to + i * size)

    def _become(self, sums: Number, bias: Number, to: Number) -> None:
        """Store what a row of sums becomes: with a bias, rounded as a module of the model would."""
        found = [self.load(sums + v * _VECTOR) + self.load(bias + v * _VECTOR) for v in _VECTORS]
        if self.bfloat16:
            found = [self.nearest(each) for each in found]
        if self.become == "added":
            before = self.load_floats(to, COLUMNS, bfloat16=self.bfloat16)
            found = [a + b for a, b in zip(before, found, strict=True)]
        if self.is_gated:
            half = len(found) // 2
            found = [
                gate / (self.exp2((gate * -LOG2_E).min(126.0)) + 1.0) * up
                for gate, up in zip(found[:half], found[half:], strict=True)
            ]
            if self.widened:
                found = [self.nearest(each) for each in found]
        self.store_floats(
            found, to, self.width, bfloat16=self.bfloat16 and not (self.is_gated and self.widened)
        )
