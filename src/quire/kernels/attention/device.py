"""Attention over block tables on a GPU: writing new rows, tasks and their merge, in Triton.

Triton comes with torch where torch computes on GPUs. A task's queries stand side by side, as many as a product of
matrices takes; blocks that its rows do not see are not loaded. Weights are powers of 2, as on CPUs (`kernel`).
"""

# pyright: basic, reportIndexIssue=false
# ruff: noqa: ANN001, ANN202, N803, PLR0917 - kernels as Triton's users write them: no types, and capitals for what they are compiled for

import logging
from functools import cache, partial
from itertools import chain

import numpy as np
import torch
import triton  # pyright: ignore[reportMissingImports] - where there is a GPU
import triton.language as tl  # pyright: ignore[reportMissingImports]

from quire.kernels.attention.plan import AttentionPlan, Packed
from quire.kernels.attention.reference import KV
from quire.kernels.attention.scoring import Scoring
from quire.kernels.attention.work import MANY, SentWork

_log = logging.getLogger(__name__)

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_WIDEST_BYTES = 512
"""Of a key or a value: above it tiles have no room on the multiprocessors of many GPUs."""

LOG2_E = tl.constexpr(1.4426950408889634)
LOWEST = tl.constexpr(-1e30)
"""The highest score of nobody."""


@cache
def can_attend(
    device: torch.device, dtype: torch.dtype, heads: int, block: tuple[int, int, int, int]
) -> bool:
    """Return whether these kernels compile, and have room on a device: seen by attending a few rows.

    block  tokens of a block, kv heads, elements of a key and of a value
    """
    size, kv_heads, depth, width = block
    if dtype not in DTYPES or max(depth, width) * dtype.itemsize > _WIDEST_BYTES:
        return False
    rows = MANY[-1] + 1
    columns = -(-rows // size)
    tables = np.arange(2 * columns, dtype=np.int32).reshape(2, columns)
    plan = AttentionPlan(size)
    plan.update(Packed(tables, np.zeros(2, np.int64), np.array([1, rows])))
    made = partial(torch.zeros, dtype=dtype, device=device)
    try:
        pools, new = (
            (made(*shape, kv_heads, depth), made(*shape, kv_heads, width))
            for shape in ((tables.size, size), (rows + 1,))
        )
        attend_on_device(plan, pools, made(rows + 1, heads, depth), new, Scoring(1.0))
        torch.cuda.synchronize(device)
    except Exception as error:  # noqa: BLE001 - no compiler, too little memory on a multiprocessor, ...
        _log.warning("attention on %s is computed request by request, slowly: %s", device, error)
        return False
    return True


def attend_on_device(
    plan: AttentionPlan, pools: KV, q: torch.Tensor, new: KV, scoring: Scoring
) -> torch.Tensor:
    """Do what `attend` does, where all is on one GPU and of one dtype."""
    kv_heads = pools[1].shape[2]
    key = q.shape[1] // kv_heads, kv_heads, num_threads(q.device)
    with torch.cuda.device_of(q):  # Triton launches on the current one
        return attend_sent(plan.sent(*key, q.device), pools, q, new, scoring)


def attend_sent(
    sent: SentWork, pools: KV, q: torch.Tensor, new: KV, scoring: Scoring
) -> torch.Tensor:
    """Do the same as `attend_on_device` for arrays that were sent to the GPU.

    Rows beyond those of the step have meaningless outputs, and write nothing.
    """
    (k, v), (num_rows, heads, depth) = pools, q.shape
    block_size, kv_heads, width = v.shape[1:]
    known = {"WIDTH": width, "WIDTHS": _padded(width)}
    deep = {"DEPTH": depth, "DEPTHS": _padded(depth)}
    rows = ((each, *each.stride()[:2]) for each in new)
    _write[(num_rows,)](sent.slots, k, v, *chain(*rows), kv_heads, **known, **deep)
    out = torch.empty((num_rows, heads, width), dtype=q.dtype, device=q.device)
    sums = torch.empty((len(sent.merged), heads, width), device=q.device)
    highest, total = torch.empty((2, len(sent.merged), heads), device=q.device)
    parts = highest, total, sums, sent.merged_starts
    known["SINKS"] = scoring.sinks is not None
    lines = max(deep["DEPTHS"], known["WIDTHS"]) * q.element_size()
    for tasks, at_once in ((sent.many, MANY[-1]), (sent.few, MANY[0])):
        if len(tasks):
            _attend[(len(tasks),)](
                tasks,
                *(sent.tables, sent.tables.shape[1], sent.position, sent.seen_from, sent.rows),
                *(q, *q.stride()[:2], k, v, kv_heads, out, *parts),
                *(scoring.scale, scoring.softcap or 0.0),
                **known,
                **deep,
                SOFTCAP=scoring.softcap is not None,
                GROUP=heads // kv_heads,
                BLOCK_SIZE=block_size,
                QUERIES=_padded(at_once),
                KEYS=64 if lines <= 256 else 32,
                PRECISION="ieee",
                num_stages=2,
            )
    sinks = q if scoring.sinks is None else scoring.sinks.detach().float()
    _merge[(num_rows, heads)](out, *parts, sent.merged, sinks, **known)
    return out


@cache
def num_threads(device: torch.device) -> int:
    """Return how many tasks a GPU works on at once."""
    return torch.cuda.get_device_properties(device).multi_processor_count


def _padded(count: int) -> int:
    """Return the size of a side of a product of matrices that has room for so many."""
    return max(16, triton.next_power_of_2(count))


@triton.jit
def _write(
    slots,
    k,
    v,
    new_k,
    k_row,
    k_head,
    new_v,
    v_row,
    v_head,
    kv_heads,
    WIDTH: tl.constexpr,
    WIDTHS: tl.constexpr,
    DEPTH: tl.constexpr,
    DEPTHS: tl.constexpr,
):
    """Write a new row's K and V to its slot."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    d, w = tl.arange(0, DEPTHS), tl.arange(0, WIDTHS)
    if slot >= 0:
        for head in range(kv_heads):
            place = slot * kv_heads + head
            found = tl.load(new_k + row * k_row + head * k_head + d, mask=d < DEPTH)
            tl.store(k + place * DEPTH + d, found, mask=d < DEPTH)
            found = tl.load(new_v + row * v_row + head * v_head + w, mask=w < WIDTH)
            tl.store(v + place * WIDTH + w, found, mask=w < WIDTH)


@triton.jit(do_not_specialize=["columns"])
def _attend(
    tasks,
    tables,
    columns,
    position,
    seen_from,
    rows,
    q,
    q_row,
    q_head,
    k,
    v,
    kv_heads,
    out,
    all_highest,
    all_total,
    all_sums,
    merged_starts,
    scale,
    softcap,
    WIDTH: tl.constexpr,
    WIDTHS: tl.constexpr,
    SINKS: tl.constexpr,
    SOFTCAP: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    DEPTH: tl.constexpr,
    DEPTHS: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Attend one task: write what it found for a query as output where no other part has a say, else as a part."""
    task = tasks + tl.program_id(0) * 10
    table, rows_start, num_rows = tl.load(task), tl.load(task + 1), tl.load(task + 2)
    first_query, at_once = tl.load(task + 3), tl.load(task + 4)
    start, stop, first_part = tl.load(task + 5), tl.load(task + 6), tl.load(task + 7)
    first_head, num_heads = tl.load(task + 8), tl.load(task + 9)
    heads = kv_heads * GROUP
    lane = tl.arange(0, QUERIES)
    query = first_query + lane
    is_query = (lane < at_once) & (query < num_rows * GROUP)
    row = tl.load(rows + rows_start + query // GROUP, mask=is_query, other=0)
    last_seen = tl.load(position + row, mask=is_query, other=-1)
    first_seen = tl.load(seen_from + row, mask=is_query, other=2147483647)
    first_of_row = tl.load(merged_starts + row, mask=is_query, other=0)
    alone = tl.load(merged_starts + row + 1, mask=is_query, other=0) - first_of_row == 1
    if SINKS:
        alone = alone & (lane < 0)
    first_key = tl.maximum(start, tl.min(first_seen, 0))
    end = tl.minimum(stop, tl.max(last_seen, 0) + 1)
    d, w = tl.arange(0, DEPTHS), tl.arange(0, WIDTHS)
    for kv_head in range(first_head, first_head + num_heads):
        head = kv_head * GROUP + query % GROUP
        of_query = row.to(tl.int64) * q_row + head * q_head
        queries = tl.load(
            q + of_query[:, None] + d[None, :],
            mask=is_query[:, None] & (d < DEPTH)[None, :],
            other=0.0,
        )
        highest = tl.full([QUERIES], LOWEST, tl.float32)
        total = tl.zeros([QUERIES], tl.float32)
        sums = tl.zeros([QUERIES, WIDTHS], tl.float32)
        for at in range(first_key, end, KEYS):
            key = at + tl.arange(0, KEYS)
            seen = (key[None, :] <= last_seen[:, None]) & (key[None, :] >= first_seen[:, None])
            seen = seen & (key < end)[None, :]
            is_read = tl.max(seen.to(tl.int32), 0) > 0
            block = tl.load(tables + table * columns + key // BLOCK_SIZE, mask=is_read, other=0)
            slot = (block.to(tl.int64) * BLOCK_SIZE + key % BLOCK_SIZE) * kv_heads + kv_head
            keys = tl.load(
                k + slot[None, :] * DEPTH + d[:, None],
                mask=is_read[None, :] & (d < DEPTH)[:, None],
                other=0.0,
            )
            scores = tl.dot(queries, keys, input_precision=PRECISION) * scale
            if SOFTCAP:
                twice = tl.minimum(scores / softcap * (2 * LOG2_E), 126.0)
                scores = softcap * (1 - 2 / (tl.exp2(twice) + 1))
            scores = tl.where(seen, scores * LOG2_E, LOWEST)
            before = highest
            highest = tl.maximum(before, tl.max(scores, 1))
            share = tl.exp2(before - highest)
            weights = tl.where(seen, tl.exp2(scores - highest[:, None]), 0.0)
            values = tl.load(
                v + slot[:, None] * WIDTH + w[None, :],
                mask=is_read[:, None] & (w < WIDTH)[None, :],
                other=0.0,
            )
            total = total * share + tl.sum(weights, 1)
            sums = sums * share[:, None]
            sums += tl.dot(weights.to(values.dtype), values, input_precision=PRECISION)
        is_width = (w < WIDTH)[None, :]
        place = row.to(tl.int64) * heads + head
        tl.store(
            out + place[:, None] * WIDTH + w[None, :],
            (sums / total[:, None]).to(out.dtype.element_ty),
            mask=(is_query & alone)[:, None] & is_width,
        )
        is_part = is_query & (alone == 0)
        part = (first_part + query // GROUP).to(tl.int64) * heads + head
        tl.store(all_highest + part, highest, mask=is_part)
        tl.store(all_total + part, total, mask=is_part)
        tl.store(
            all_sums + part[:, None] * WIDTH + w[None, :], sums, mask=is_part[:, None] & is_width
        )


@triton.jit
def _merge(
    out,
    all_highest,
    all_total,
    all_sums,
    merged_starts,
    merged,
    sinks,
    WIDTH: tl.constexpr,
    WIDTHS: tl.constexpr,
    SINKS: tl.constexpr,
):
    """Fill the output of a head of a row from its parts and the sink, each by its share of the sum of weights."""
    row, head, heads = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    first, last = tl.load(merged_starts + row), tl.load(merged_starts + row + 1)
    if (last - first > 1) | SINKS:
        highest, total = LOWEST, 0.0
        if SINKS:
            highest, total = tl.load(sinks + head) * LOG2_E, 1.0
        w = tl.arange(0, WIDTHS)
        sums = tl.zeros([WIDTHS], tl.float32)
        for at in range(first, last):
            part = tl.load(merged + at).to(tl.int64) * heads + head
            before, high = highest, tl.load(all_highest + part)
            highest = tl.maximum(before, high)
            kept, share = tl.exp2(before - highest), tl.exp2(high - highest)
            total = total * kept + tl.load(all_total + part) * share
            values = tl.load(all_sums + part * WIDTH + w, mask=w < WIDTH, other=0.0)
            sums = sums * kept + values * share
        to = out + (row.to(tl.int64) * heads + head) * WIDTH + w
        tl.store(to, (sums / total).to(out.dtype.element_ty), mask=w < WIDTH)
