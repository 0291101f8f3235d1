"""Attention of many queries of a task in vector lanes: each block is read once for all."""

# pyright: basic

from functools import reduce
from operator import or_

from llvmlite import ir

from quire.kernels import tiles
from quire.kernels.attention import tiled
from quire.kernels.attention.layer import LOWEST, UNSEEN, LayerCode, Task
from quire.kernels.code import Variable
from quire.kernels.vectors import FLOAT, FLOATS, LANES, WIDE, WORDS, Number

KEYS = 64
"""Keys that are scored before any of them is weighed."""

SUMS = 16 if WIDE else 4
"""Vectors of a product, at most: as many as a core keeps in registers."""

_VECTOR = 4 * LANES


def attend_many(code: LayerCode, task: Task, side_by_side: int) -> None:
    """Write the attention of up to so many queries; in the place of those that lack, the last one stands."""
    layer, depth, width, in_tiles = code.layer, code.depth, code.width, code.shape.fits_tiles
    steps = KEYS // 2 if code.paired else KEYS
    num_queries = (task.num_rows * layer.group - task.first_query).min(side_by_side)
    line, vectors = 4 * side_by_side, range(side_by_side // LANES)
    queries, places = code.room(line * depth), code.room(8 * side_by_side)
    upper, lower = code.room(line), code.room(line)
    # What the queries see: from the least to the last, and what is seen by all.
    far, near = code.constant(2**31 - 1), code.constant(0)
    bottom, top, all_from, all_to = (Variable(code, each) for each in (far, near, near, far))
    with code.loop(0, side_by_side) as lane:
        row, _, head = _query(code, task, lane.min(num_queries - 1))
        first = code.number(code.step.seen_from, row).max(task.start)
        last = code.number(code.step.position, row).min(task.stop - 1)
        code.store(first.narrowed(), lower + lane * 4)
        code.store(last.narrowed(), upper + lane * 4)
        bottom.now, top.now = bottom.now.min(first), top.now.max(last)
        all_from.now, all_to.now = all_from.now.max(first), all_to.now.min(last)
        code.store(layer.q + row * layer.q_row + head * layer.q_head, places + lane * 8)
    _lay_queries(code, places, queries, side_by_side)

    rows = tiled.rows_of(width)
    keys, values = code.room(4 * KEYS * depth), code.room(4 * steps * rows)
    scores, sums = (code.room(n * line) for n in (KEYS, rows))
    weights = scores  # of pairs they take half of it, that has been read
    highest = [Variable(code, code.constant(LOWEST, FLOATS)) for _ in vectors]
    total = code.zeros(len(vectors))
    with code.loop(0, rows * line, _VECTOR) as place:
        code.store(code.constant(0, FLOATS), sums + place)
    if (
        in_tiles
    ):  # columns without queries are not computed, and no numbers that slow a CPU stand there
        with code.loop(0, KEYS * line, _VECTOR) as place:
            code.store(code.constant(0, FLOATS), scores + place)
    factor, begin, stop = code.factor(), bottom.now, top.now + 1
    at_once = tiles.ROWS if in_tiles else _rows_at_once(len(vectors))
    if in_tiles:
        begin = begin // tiles.HALF * tiles.HALF
    with code.loop(begin, stop, KEYS) as start:
        # Of the last keys, those that any query sees, up to whole rows of a product, and pairs.
        whole = max(at_once, 2)
        num_keys = ((stop - start + (whole - 1)) // whole * whole).min(KEYS)
        if in_tiles:
            these = tiled.Keys(task, start, num_keys, stop)
            tiled.lay_values(code, these, values, 2 * KEYS)
            tiled.score(code, these, (queries, num_queries), (scores, line))
        else:
            _lay(code, task, (start, num_keys, stop), (keys, values))
            with code.loop(0, num_keys, at_once) as key:
                left = (keys + key * (4 * depth), 4 * depth, 4)
                _product(code, scores + key * line, left, (queries, depth, line))
        with code.when(layer.softcap > 0), code.loop(0, num_keys * line, _VECTOR) as i:
            code.store(code.capped(code.load(scores + i)), scores + i)
        unclear = (start < all_from.now) | (all_to.now - (KEYS - 1) < start)
        with code.when(unclear), code.loop(0, num_keys) as key:
            at = (start + key).narrowed().spread()
            for v in vectors:
                low, high = (code.load(each + _VECTOR * v, WORDS) for each in (lower, upper))
                place = scores + key * line + _VECTOR * v
                code.store(code.load(place).where((low <= at) & (at <= high), UNSEEN), place)
        above = [Variable(code, code.constant(UNSEEN, FLOATS)) for _ in vectors]
        with code.loop(0, num_keys) as key:
            for v in vectors:
                above[v].now = above[v].now.max(code.load(scores + key * line + _VECTOR * v))
        best = [now.now.max(each.now * factor) for now, each in zip(highest, above, strict=True)]
        rises = [each > now.now for each, now in zip(best, highest, strict=True)]
        with code.when(reduce(or_, rises).any()):
            fades = [code.exp2(now.now - each) for now, each in zip(highest, best, strict=True)]
            for v in vectors:
                total[v].now *= fades[v]
                highest[v].now = best[v]
            with code.loop(0, rows * line, line) as row:
                for v, fade in enumerate(fades):
                    place = sums + row + _VECTOR * v
                    code.store(code.load(place) * fade, place)
        below = [code.constant(0, FLOATS) - each.now for each in highest]
        with code.loop(0, num_keys // 2) as pair:
            for v in vectors:
                place = pair * (2 * line) + _VECTOR * v
                both = [code.load(scores + place + i * line) for i in range(2)]
                powers = [code.multiply_add(each, factor, below[v]) for each in both]
                both = [code.exp2(each, rough=code.shape.bfloat16) for each in powers]
                total[v].now += both[0] + both[1]
                if code.paired:
                    code.store(code.pairs(*both), weights + pair * line + _VECTOR * v)
                else:
                    for i in range(2):
                        code.store(both[i], weights + place + i * line)
        if in_tiles:
            shape = num_keys, num_queries
            tiled.weigh(code, (values, 2 * KEYS), weights, shape, (sums, line))
        else:
            num_steps = num_keys // 2 if code.paired else num_keys
            with code.loop(0, width, at_once) as i:
                left = (values + i * 4, 4, 4 * width)
                _product(code, sums + i * line, left, (weights, num_steps, line), adds=True)

    for v in vectors:
        code.store(highest[v].now, lower + _VECTOR * v)
        code.store(total[v].now, upper + _VECTOR * v)
    found = code.room(line * width)
    with code.loop(0, side_by_side, LANES) as lane, code.loop(0, width, LANES) as at:
        columns = [code.load(sums + (at + i) * line + lane * 4) for i in range(LANES)]
        for i, row in enumerate(code.transposed(columns)):
            code.store(row, found + (lane + i) * (4 * width) + at * 4)
    with code.loop(0, num_queries) as lane:
        row, place, head = _query(code, task, lane)
        high, all_of_it = (code.load(each + lane * 4, FLOAT).spread() for each in (lower, upper))
        values_of_it = code.load_row(found + lane * (4 * width), width, FLOAT)
        code.finish((row, head, place), high, all_of_it, values_of_it)


def _lay(
    code: LayerCode,
    task: Task,
    span: tuple[Number, Number, Number],
    to: tuple[Number, Number],
) -> None:
    """Lay keys [keys, depth] and values [keys, width] down as operands; the last ones again behind the end.

    span  the first, how many, and the end
    """
    (start, num_keys, stop), (keys, values) = span, to
    depth, width = code.depth, code.width
    with code.loop(0, num_keys // 2) as pair:
        first = start + pair * 2
        slots = code.slots(task, [(first + i).min(stop - 1) for i in range(2)])
        ahead = [(first + (KEYS + i)).min(stop - 1) for i in range(2)]
        with code.when(first + KEYS < stop):
            code.fetch_kv(code.slots(task, ahead))
        for i, slot in enumerate(slots):
            code.store_row(code.key(slot), keys + (pair * 2 + i) * (4 * depth), depth)
        rows = code.values(slots)
        for i, row in enumerate(rows):
            code.store_row(row, values + (pair * len(rows) + i) * (4 * width), width)


def _lay_queries(code: LayerCode, places: Number, to: Number, count: int) -> None:
    """Lay queries at so many places down as operands [depth, queries]."""
    words = code.key_words
    per_vector = 2 * LANES if code.widened else LANES

    def lay(lane: Number, at: Number, num_words: int) -> None:
        rows = [
            code.operands(code.number(places, lane + i) + at * 4, num_words) for i in range(LANES)
        ]
        for j, columns in enumerate(zip(*rows, strict=True)):
            for i, row in enumerate(code.transposed(columns)):
                place = at * (per_vector // LANES) + (j * LANES + i)
                code.store(row, to + place * (4 * count) + lane * 4)

    with code.loop(0, count, LANES) as lane:
        with code.loop(0, words // LANES * LANES, LANES) as at:
            lay(lane, at, LANES)
        if words % LANES:
            lay(lane, code.constant(words // LANES * LANES), words % LANES)


def _query(code: LayerCode, task: Task, lane: Number) -> tuple[Number, Number, Number]:
    """Return the row of the query in a lane, the row of its partial results, and its head."""
    group = code.layer.group
    query = task.first_query + lane
    row = code.number(code.step.rows, task.rows_start + query // group)
    return row, task.partial + query // group, task.kv_head * group + query % group


def _rows_at_once(num_vectors: int) -> int:
    """Return the rows of a product with so many vectors of queries: a power of 2, which divides `KEYS`."""
    return 1 << (SUMS // num_vectors).bit_length() - 1


def _product(
    code: LayerCode,
    to: Number,
    left: tuple[Number, int, int],
    right: tuple[Number, Number | int, int],
    *,
    adds: bool = False,
) -> None:
    """Write `left @ right` for `_rows_at_once`, or add it to what is there.

    to     address of float32 [rows, queries]
    left   address of [rows, depth], bytes from row to row, bytes from column to column
    right  address of [depth, queries], depth, bytes from row to row
    """
    (start, to_row, to_column), (columns_start, depth, line) = left, right
    num_vectors = line // _VECTOR
    rows, vectors = range(_rows_at_once(num_vectors)), range(num_vectors)
    places = [to + line * i + _VECTOR * v for i in rows for v in vectors]
    sums = code.zeros(len(places))
    if adds:
        for each, place in zip(sums, places, strict=True):
            each.now = code.load(place)
    with code.loop(0, depth) as step:
        row, kind = columns_start + step * line, ir.VectorType(code.operand, LANES)
        columns = [code.load(row + _VECTOR * v, kind) for v in vectors]
        for i in rows:
            element = code.load(start + step * to_column + i * to_row, code.operand).spread()
            for each, column in zip(sums[i * len(columns) :], columns, strict=False):
                each.now = code.multiply_add(element, column, each.now)
    for each, place in zip(sums, places, strict=True):
        code.store(each.now, place)
