"""Attention of the few queries of a task, up to four of a row at once."""

# pyright: basic

from collections.abc import Sequence

from quire.kernels.attention.layer import LOWEST, UNSEEN, LayerCode, Task
from quire.kernels.code import Variable
from quire.kernels.vectors import FLOATS, LANES, WIDE, Number

KEYS = 256
"""Keys that are scored before any of them is weighed: what is read next does not wait for what was."""
MOST_TOGETHER = 4
"""Queries of a row that are attended together at most: keys and values are read and widened once for these."""

_SUMS = 24 if WIDE else 6
"""Vectors of weighted values that are added to at once: as many as a core keeps in registers."""


def attend_few(code: LayerCode, task: Task) -> None:
    """Write the attention of one task after another; what a query's sums are stays in registers."""
    layer, together = code.layer, range(code.shape.together)
    scores = [code.room(4 * KEYS) for _ in together]
    factor = code.factor()
    with code.loop(0, task.num_rows * layer.group, len(together)) as query:
        row = code.number(code.step.rows, task.rows_start + query // layer.group)
        head = task.kv_head * layer.group + query % layer.group
        start = task.start.max(code.number(code.step.seen_from, row))
        stop = task.stop.min(code.number(code.step.position, row) + 1)
        queries = [code.query(row, head + i) for i in together]
        highest = [Variable(code, code.constant(LOWEST, FLOATS)) for _ in together]
        total = code.zeros(len(together))
        sums = [code.zeros(code.width // LANES) for _ in together]
        begin = start if code.shape.block_size % LANES else start // LANES * LANES
        with code.loop(begin, stop, KEYS) as first:
            end = stop.min(first + KEYS)
            above = [Variable(code, each.now) for each in highest]
            with code.loop(first, end, LANES) as at:
                with code.when((at + LANES < stop) & (query < 1)):
                    code.fetch_kv(code.near_slots(task, at + LANES, stop))
                low, high = ((each - at).narrowed().spread() for each in (start, end))
                seen = (low <= code.lanes()) & (code.lanes() < high)
                found = _scores(code, queries, code.near_slots(task, at, end))
                now = [Variable(code, each) for each in found]
                with code.when(layer.softcap > 0):
                    for each in now:
                        each.set(code.capped(each.now))
                for i in together:
                    power = (now[i].now * factor).where(seen, UNSEEN)
                    above[i].now = above[i].now.max(power)
                    code.store(power, scores[i] + (at - first) * 4)
            for i in together:
                best = code.across(above[i].now, Number.max)
                fade = code.exp2(highest[i].now - best)
                highest[i].now = best
                for each in (total[i], *sums[i]):
                    each.now *= fade
            with code.loop(0, (end - first) * 4, 4 * LANES) as place:
                for i in together:
                    weight = code.exp2(code.load(scores[i] + place) - highest[i].now)
                    total[i].now += weight
                    # Rounded ones take half the room, of what has been read.
                    to = scores[i] + (place // 2 if code.paired else place)
                    code.store(code.rounded(weight) if code.paired else weight, to)
            at_once = max(_SUMS // len(together), 1)
            for part in range(0, code.width // LANES, at_once):
                with code.loop(first, end, LANES) as at:
                    size = 2 if code.paired else 4
                    slots = code.near_slots(task, at, end)
                    for j, values in enumerate(code.values(slots)):
                        for i in together:
                            place = scores[i] + (at - first) * size + 4 * j
                            weight = code.load(place, code.operand).spread()
                            for each, value in list(zip(sums[i], values, strict=True))[
                                part : part + at_once
                            ]:
                                each.now = code.multiply_add(weight, value, each.now)
        for i in together:
            sums_now = [each.now for each in sums[i]]
            total_now = code.across(total[i].now, Number.__add__)
            place = task.partial + query // layer.group
            code.finish((row, head + i, place), highest[i].now, total_now, sums_now)


def _scores(code: LayerCode, queries: list[list[Number]], slots: Sequence[Number]) -> list[Number]:
    """Return the products of each query with 16 keys, a key in each lane."""

    def products(at: int) -> list[Number]:
        key = code.key(slots[at])
        found = [code.constant(0, FLOATS)] * len(queries)
        for i, query in enumerate(queries):
            for one, other in zip(query, key, strict=True):
                found[i] = code.multiply_add(one, other, found[i])
        return found

    return code.sums_by_lane(products)
