"""Products of a decoder's rows with its weights, fused with the operations behind them, on the CPU."""

# pyright: basic

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from llvmlite import ir

from quire.kernels import tiles
from quire.kernels.compiling import Pass, functions
from quire.kernels.product_code import DEPTH, MOST_ROWS, ProductCode
from quire.kernels.product_inputs import COLUMNS, Panel, ProductInputs
from quire.kernels.vectors import PAIRED

_NEAR = 1 << 19
"""Bytes of rows at most that take turns with the panels: these stay in the second cache."""


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
    count: Any = None,
) -> Pass:
    """Return the pass that multiplies operands `[N, K]` with the weights of linear modules, their biases added.

    count   int64 [1]: how many of the rows there are when it runs; None: all of them
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
    depth = rows.shape[1] // (2 if paired(dtype) else 1)
    row_bytes = rows.stride(0) * rows.element_size()
    longest = MOST_ROWS if depth > DEPTH[tiled(dtype)] else max(MOST_ROWS, _NEAR // row_bytes)
    count = np.array([len(rows)], np.int64) if count is None else count
    inputs = ProductInputs(
        0,
        rows.data_ptr(),
        row_bytes,
        count.ctypes.data,
        depth,
        panels.ctypes.data,
        len(panels),
        longest,
        -(-2 * threads // len(panels)),
        min(range(1, 5), key=lambda chunks: _idle(len(panels) * chunks, threads)),
        threads,
        out.data_ptr(),
        out.stride(0) * out.element_size(),
    )
    of_dtype = dtype == torch.bfloat16, paired(dtype), tiled(dtype)
    found = functions(_written, become, *of_dtype)
    return Pass(found, inputs, threads, (rows, out, panels, count))


RESULT = ProductInputs._fields.index("out")
"""Where the inputs of a product say where its result goes."""


def _idle(num_claims: int, threads: int) -> float:
    """Return the share of time in which threads have nothing to do, if claims take equally long."""
    rounds = -(-num_claims // threads)
    return 1 - num_claims / (rounds * threads)


@lru_cache(maxsize=4096)
def _panels(weights: tuple[Any, ...], is_gated: bool, sizes: tuple[int, int]) -> Any:
    """Return the panels of weights, each an address, its shape, and the address of a bias.

    sizes  bytes of an element of the weights, and of the result
    """
    found: list[Panel] = []
    place, width = 0, COLUMNS // 2 if is_gated else COLUMNS
    second, _, second_bias = weights[-1]
    for address, (columns, depth), bias in weights[:1] if is_gated else weights:
        for first in range(0, columns, width):
            ahead, beside = first * depth * sizes[0], first * sizes[0]
            found.append(
                Panel(
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


def _written(
    module: ir.Module, become: str, bfloat16: bool, is_paired: bool, is_tiled: bool
) -> Sequence[ProductCode]:
    code = ProductCode(module, become, bfloat16, is_paired, is_tiled)
    code.write()
    return [code]
