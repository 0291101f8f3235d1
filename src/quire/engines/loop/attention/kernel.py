"""Attention over block tables, compiled: every part of a step's keys, then the merge of the parts.

Of a part, 16 or 64 queries that read the same keys stand side by side in the lanes of vectors, and
their weights run along: no sum goes across lanes, and a block is copied into the core's cache once for
all of them. Scores, sums of weights and outputs are float32; of bfloat16 models, weights are rounded
before the second product, as in FlashAttention (https://arxiv.org/abs/2205.14135, algorithm 1).
"""

# pyright: basic, reportFunctionMemberAccess=false, reportAttributeAccessIssue=false
# ruff: noqa: ANN001, ANN202, ARG001 - numba reads the types of these functions from their calls

from typing import Any, NamedTuple

import numpy as np
from numba import njit, prange, types
from numba.extending import overload

from quire.engines.loop.attention.compiling import MATHS, compiled
from quire.engines.loop.attention.products import make_product
from quire.engines.loop.attention.work import LANES, Work

KEYS = 64
"""Keys that are scored before any of them is weighed."""

ROWS = 4
"""Rows of a product: with four vectors of lanes, as many sums as a core keeps in registers."""

_LOWEST = np.float32(-1e30)


class LayerArrays(NamedTuple):
    """The arrays of one layer.

    q         [N, heads, D], float32, or of bfloat16, uint16
    k         [slots, kv_heads, D], the same
    v         [slots, kv_heads, Dv], the same
    q_words   q, k as products take them: pairs of bfloat16 as uint32 [..., D / 2] where the CPU
    k_words   multiplies these, else the same
    operand   [0], uint32 for such pairs, else float32
    out       float32 [N, heads, Dv]
    partial   float32 [rows of parts, heads, Dv]
    lse       float32 [rows of parts, heads]
    sinks     float32 [heads], or [0]
    scale     float32
    softcap   float32; 0: none
    """

    q: Any
    k: Any
    v: Any
    q_words: Any
    k_words: Any
    operand: Any
    out: Any
    partial: Any
    lse: Any
    sinks: Any
    scale: Any
    softcap: Any


@compiled
def attend_parts(work: Work, layer: LayerArrays, num_threads: int) -> None:
    """Fill `partial` and `lse` by part, and `out` from them."""
    kv_heads = layer.k.shape[1]
    num_tasks = len(work.tasks) * kv_heads
    for thread in prange(num_threads):
        # Tasks come in order of their size: each thread takes every so-manieth.
        for task in range(thread, num_tasks, num_threads):
            place, head = work.tasks[task // kv_heads], task % kv_heads
            if place[4] == LANES:
                _attend_many(work, layer, place, head)
            else:
                _attend_few(work, layer, place, head)
    for thread in prange(num_threads):
        for row in range(thread, len(layer.q), num_threads):
            _merge(work, layer, row)


@njit(inline="always")
def _exp(number):
    """Return exp of a float32 up to 87, to a few units in the last place; 0 below -87."""
    none = number < np.float32(-87)
    number = np.float32(-87) if none else number
    whole = np.floor(number * np.float32(1.4426950408889634) + np.float32(0.5))
    # The Cephes library's: ln 2 in two parts, and a polynomial of the rest.
    rest = number - whole * np.float32(0.693359375) + whole * np.float32(2.12194440e-4)
    power = np.float32(1.9875691500e-4)
    power = power * rest + np.float32(1.3981999507e-3)
    power = power * rest + np.float32(8.3334519073e-3)
    power = power * rest + np.float32(4.1665795894e-2)
    power = power * rest + np.float32(1.6666665459e-1)
    power = power * rest + np.float32(5.0000001201e-1)
    power = power * rest * rest + rest + np.float32(1)
    power *= np.uint32((np.int32(whole) + np.int32(127)) << np.int32(23)).view(np.float32)
    return np.float32(0) if none else power


@njit(inline="always")
def _rounded(number):
    """Return the bits of the nearest bfloat16, ties to even."""
    bits = np.float32(number).view(np.uint32)
    return (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)


def _float(element):
    """Return an element as float32: bfloat16 as uint16, and what is float32 as it is."""


@overload(_float, inline="always")
def _(element):
    if element == types.uint16:
        return lambda element: np.uint32(np.uint32(element) << np.uint32(16)).view(np.float32)
    return lambda element: element


def _pack_values(to, key, values, slot, head):
    """Copy the value `[Dv]` of a key into `to`, a pair of keys in one row where products take pairs."""


@overload(_pack_values, inline="always")
def _(to, key, values, slot, head):
    if to.dtype == types.uint32:

        def pack(to, key, values, slot, head):
            if key % 2:
                for i in range(values.shape[2]):
                    to[key // 2, i] |= np.uint32(values[slot, head, i]) << np.uint32(16)
            else:
                for i in range(values.shape[2]):
                    to[key // 2, i] = np.uint32(values[slot, head, i])
    else:

        def pack(to, key, values, slot, head):
            for i in range(values.shape[2]):
                to[key, i] = _float(values[slot, head, i])

    return pack


def _pack_weights(to, weights, num_keys):
    """Copy weights `[keys, lanes]` into `to`, as values are packed; return the number of rows."""


@overload(_pack_weights, inline="always")
def _(to, weights, num_keys):
    if to.dtype == types.uint32:

        def pack(to, weights, num_keys):
            for pair in range(num_keys // 2):
                for lane in range(weights.shape[1]):
                    odd = _rounded(weights[2 * pair + 1, lane]) << np.uint32(16)
                    to[pair, lane] = _rounded(weights[2 * pair, lane]) | odd
            return num_keys // 2
    else:

        def pack(to, weights, num_keys):
            to[:num_keys] = weights[:num_keys]
            return num_keys

    return pack


@njit(fastmath=MATHS)
def _cap(scores, num_keys, scale, softcap):
    """Turn scaled products into `softcap * tanh(...)`."""
    for key in range(num_keys):
        for lane in range(scores.shape[1]):
            twice = np.float32(2) * scale * scores[key, lane]
            twice = min(twice, np.float32(87))
            scores[key, lane] = softcap * (1 - 2 / (_exp(twice) + np.float32(1)))


_product = make_product(ROWS, LANES // 16)


@njit(fastmath=MATHS)
def _attend_many(work, layer, place, head):
    """Attend up to `LANES` queries of a task, side by side."""
    table, rows_start, num_rows, lane_start = work.tables[place[0]], place[1], place[2], place[3]
    key_start, key_stop, partial_start = place[5], place[6], place[7]
    q, k, v = layer.q_words, layer.k_words, layer.v
    depth, width, group = k.shape[2], v.shape[2], q.shape[1] // k.shape[1]
    block_size, scale, softcap = work.block_size, layer.scale, layer.softcap
    num_lanes = min(LANES, num_rows * group - lane_start)

    queries = np.zeros((depth, LANES), layer.operand.dtype)
    upper = np.full(LANES, np.int32(2**31 - 1), np.int32)
    lower = np.zeros(LANES, np.int32)
    top, clear_from = np.int64(0), np.int64(0)
    bottom = clear_to = np.int64(2**31 - 1)
    for lane in range(num_lanes):
        row = work.rows[rows_start + (lane_start + lane) // group]
        upper[lane], lower[lane] = work.position[row], work.seen_from[row]
        top, bottom = max(top, work.position[row]), min(bottom, work.seen_from[row])
        clear_from, clear_to = (
            max(clear_from, work.seen_from[row]),
            min(clear_to, work.position[row]),
        )
        of_head = head * group + (lane_start + lane) % group
        for i in range(depth):
            queries[i, lane] = _float(q[row, of_head, i])
    key_start, key_stop = max(key_start, bottom), min(key_stop, top + 1)

    padded_width = -(-width // ROWS) * ROWS
    keys = np.empty((KEYS, depth), layer.operand.dtype)
    values = np.zeros((KEYS, padded_width), layer.operand.dtype)
    packed = np.empty((KEYS, LANES), layer.operand.dtype)
    scores = np.empty((KEYS, LANES), np.float32)
    sums = np.zeros((padded_width, LANES), np.float32)
    highest = np.full(LANES, _LOWEST, np.float32)
    before = np.empty(LANES, np.float32)
    total = np.zeros(LANES, np.float32)
    scores_at, sums_at = scores.ctypes.data, sums.ctypes.data
    keys_at, values_at = keys.ctypes.data, values.ctypes.data
    for start in range(key_start, key_stop, KEYS):
        num_keys = min(KEYS, key_stop - start)
        padded = -(-num_keys // ROWS) * ROWS
        for key in range(num_keys):
            position = start + key
            slot = np.int64(table[position // block_size]) * block_size + position % block_size
            for i in range(depth):
                keys[key, i] = _float(k[slot, head, i])
            _pack_values(values, key, v, slot, head)
        # What stands in the place of pads is multiplied by 0, so it has to be a number: an older key.
        for key in range(0, padded, ROWS):
            for line in range(key, key + ROWS):
                for lane in range(LANES):
                    scores[line, lane] = np.float32(0)
            _product(
                (scores_at + 4 * LANES * key, 4 * LANES),
                (keys_at + 4 * depth * key, 4 * depth, 4),
                queries,
                depth,
            )
        if softcap > 0:
            _cap(scores, num_keys, scale / softcap, softcap)
        else:
            for key in range(num_keys):
                for lane in range(LANES):
                    scores[key, lane] *= scale
        if start < clear_from or start + num_keys - 1 > clear_to:
            for key in range(num_keys):
                at = np.int32(start + key)
                for lane in range(LANES):
                    seen = (lower[lane] <= at) & (at <= upper[lane])
                    scores[key, lane] = scores[key, lane] if seen else -np.inf
        for lane in range(LANES):
            before[lane] = highest[lane]
        for key in range(num_keys):
            for lane in range(LANES):
                score = scores[key, lane]
                highest[lane] = max(highest[lane], score)
        for lane in range(LANES):
            before[lane] = _exp(before[lane] - highest[lane])
            total[lane] *= before[lane]
        for i in range(padded_width):
            for lane in range(LANES):
                sums[i, lane] *= before[lane]
        for key in range(num_keys):
            for lane in range(LANES):
                weight = _exp(scores[key, lane] - highest[lane])
                scores[key, lane] = weight
                total[lane] += weight
        for key in range(num_keys, padded):
            for lane in range(LANES):
                scores[key, lane] = np.float32(0)
        steps = _pack_weights(packed, scores, padded)
        for i in range(0, padded_width, ROWS):
            _product(
                (sums_at + 4 * LANES * i, 4 * LANES),
                (values_at + 4 * i, 4, 4 * padded_width),
                packed,
                steps,
            )
    for lane in range(num_lanes):
        row = partial_start + (lane_start + lane) // group
        of_head = head * group + (lane_start + lane) % group
        layer.lse[row, of_head] = highest[lane] + np.log(total[lane])
        share = np.float32(1) / total[lane] if total[lane] > 0 else np.float32(0)
        for i in range(width):
            layer.partial[row, of_head, i] = sums[i, lane] * share


@njit(fastmath={"reassoc", *MATHS})
def _attend_few(work, layer, place, head):
    """Attend the few queries of a task one after another, block of keys by block of keys."""
    table, block_size = work.tables[place[0]], work.block_size
    q, k, v, scale, softcap = layer.q, layer.k, layer.v, layer.scale, layer.softcap
    depth, width, group = q.shape[2], v.shape[2], q.shape[1] // k.shape[1]
    num_queries = place[2] * group
    queries = np.empty((num_queries, depth), np.float32)
    sums = np.zeros((num_queries, width), np.float32)
    highest = np.full(num_queries, _LOWEST, np.float32)
    total = np.zeros(num_queries, np.float32)
    keys, values = np.empty((KEYS, depth), np.float32), np.empty((KEYS, width), np.float32)
    scores = np.empty((1, KEYS), np.float32)
    first, stop = np.int64(2**31 - 1), np.int64(0)
    for query in range(num_queries):
        row = work.rows[place[1] + query // group]
        first, stop = min(first, work.seen_from[row]), max(stop, work.position[row] + 1)
        for i in range(depth):
            queries[query, i] = _float(q[row, head * group + query % group, i]) * scale
    stop = min(stop, place[6])
    for start in range(max(first, place[5]), stop, KEYS):
        for key in range(min(KEYS, stop - start)):
            at = start + key
            slot = np.int64(table[at // block_size]) * block_size + at % block_size
            for i in range(depth):
                keys[key, i] = _float(k[slot, head, i])
            for i in range(width):
                values[key, i] = _float(v[slot, head, i])
        for query in range(num_queries):
            row = work.rows[place[1] + query // group]
            low = max(work.seen_from[row] - start, 0)
            high = min(min(work.position[row] + 1, stop) - start, KEYS)
            for key in range(low, high):
                score = np.float32(0)
                for i in range(depth):
                    score += queries[query, i] * keys[key, i]
                scores[0, key] = score
            if softcap > 0:
                _cap(scores, 1, np.float32(1) / softcap, softcap)
            best = highest[query]
            for key in range(low, high):
                best = max(best, scores[0, key])
            fade = _exp(highest[query] - best)
            added = np.float32(0)
            for key in range(low, high):
                weight = _exp(scores[0, key] - best)
                scores[0, key] = weight
                added += weight
            highest[query] = best
            total[query] = total[query] * fade + added
            for i in range(width):
                sums[query, i] *= fade
            for key in range(low, high):
                weight = scores[0, key]
                for i in range(width):
                    sums[query, i] += weight * values[key, i]
    for query in range(num_queries):
        row, of_head = place[7] + query // group, head * group + query % group
        layer.lse[row, of_head] = highest[query] + np.log(total[query])
        share = np.float32(1) / total[query] if total[query] > 0 else np.float32(0)
        for i in range(width):
            layer.partial[row, of_head, i] = sums[query, i] * share


@njit(fastmath=MATHS)
def _merge(work, layer, row):
    """Fill one row of `out`: its parts and the sink, each by its share of the sum of weights."""
    first, last = work.merged_starts[row], work.merged_starts[row + 1]
    for head in range(layer.out.shape[1]):
        highest = layer.sinks[head] if len(layer.sinks) else _LOWEST
        for part in work.merged[first:last]:
            highest = max(highest, layer.lse[part, head])
        total = np.exp(layer.sinks[head] - highest) if len(layer.sinks) else np.float32(0)
        for part in work.merged[first:last]:
            total += np.exp(layer.lse[part, head] - highest)
        for i in range(layer.out.shape[2]):
            layer.out[row, head, i] = 0
        for part in work.merged[first:last]:
            share = np.float32(np.exp(layer.lse[part, head] - highest) / total)
            for i in range(layer.out.shape[2]):
                layer.out[row, head, i] += share * layer.partial[part, head, i]
