"""Attention of one layer as a pass of compiled code."""

# pyright: basic

from typing import Any

import numpy as np
import torch

from quire.kernels.attention.few import MOST_TOGETHER
from quire.kernels.attention.kernel import phases
from quire.kernels.attention.layer import LayerInputs, Shape, StepInputs
from quire.kernels.attention.plan import AttentionPlan
from quire.kernels.attention.reference import KV
from quire.kernels.attention.scoring import Scoring
from quire.kernels.attention.work import FEW, FEW_BESIDE_TILES
from quire.kernels.compiling import Pass, functions
from quire.kernels.tiles import TILES


class Reading:
    """Inputs that all layers with the same heads share; `take` sets them for each step.

    inputs   `StepInputs`, as int64
    threads  number of threads that attend
    """

    def __init__(self, heads: int, v: torch.Tensor) -> None:
        self.threads = torch.get_num_threads()
        self._heads, (self._kv_heads, self._width) = heads, v.shape[2:]
        in_tiles = TILES and v.dtype == torch.bfloat16
        self._few = FEW_BESIDE_TILES if in_tiles else FEW
        self.inputs = np.zeros(len(StepInputs._fields), np.int64)
        self._held: Any = None

    def take(self, plan: AttentionPlan) -> None:
        """Take the plan of the step that runs next."""
        group = self._heads // self._kv_heads
        work = plan.work(group, self._kv_heads, self.threads, self._few)
        if self._held is not None and work is self._held[0]:
            return
        partial = np.empty((len(work.merged), self._heads, 2 + self._width), np.float32)
        self._held = work, partial, plan.slots
        self.inputs[:] = StepInputs(
            _at(work.tables),
            work.tables.shape[1],
            _at(work.position),
            _at(work.seen_from),
            _at(work.rows),
            _at(work.tasks),
            len(work.tasks),
            _at(work.merged),
            _at(work.merged_starts),
            plan.slots.data_ptr(),
            len(plan.slots),
            _at(partial),
        )


def attention_pass(
    reading: Reading,
    pools: KV,
    q: torch.Tensor,
    new: KV,
    scoring: Scoring,
    *,
    out: torch.Tensor,
    rotary: KV | None = None,
) -> Any:
    """Return the pass that does what `attend` does, to `out`; bfloat16s go there as floats where it has these.

    rotary  cosines and sines [N, D], contiguous, by which queries and new keys are turned in place first
    There may be more rows than a step has. The pass does not keep pools alive.
    """
    (k, v), (heads, depth) = pools, q.shape[1:]
    kv_heads, width = v.shape[2:]
    group = heads // kv_heads
    sinks = None if scoring.sinks is None else scoring.sinks.detach().float()
    cos, sin = (0, 0) if rotary is None else (each.data_ptr() for each in rotary)
    numbers = np.array([scoring.scale, scoring.softcap or 0], np.float32).view(np.int32)

    layer = LayerInputs(
        0,
        0,
        0,
        kv_heads,
        group,
        _at(reading.inputs),
        *_rows(q),
        *_rows(new[0]),
        *_rows(new[1]),
        cos,
        sin,
        k.data_ptr(),
        v.data_ptr(),
        out.data_ptr(),
        0 if sinks is None else sinks.data_ptr(),
        *numbers.tolist(),
    )
    is_bfloat16, wide = q.dtype == torch.bfloat16, out.dtype != q.dtype
    together = max(count for count in range(1, MOST_TOGETHER + 1) if group % count == 0)
    shape = Shape(depth, width, together, k.shape[1], is_bfloat16, wide)
    held = reading, sinks, rotary, q, new, out
    return Pass(functions(phases, shape), layer, reading.threads, held)


def _at(array: Any) -> int:
    return array.ctypes.data


def _rows(tensor: torch.Tensor) -> tuple[int, int, int]:
    """Return the address of rows, and the bytes from row to row and from head to head."""
    size = tensor.element_size()
    return tensor.data_ptr(), tensor.stride(0) * size, tensor.stride(1) * size
