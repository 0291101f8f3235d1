"""Attention of the few queries of a task, one or two at a time, against 16 keys at a time."""

# pyright: basic

from collections.abc import Sequence

from quire.engines.packed.attention.layer import LOWEST, UNSEEN, LayerCode, Task
from quire.engines.packed.vectors import FLOATS, LANES, Number
from quire.engines.packed.writing import Variable


def attend_few(code: LayerCode, task: Task) -> None:
    """Write the attention of one task after another; what a query's sums are stays in registers."""
    layer, together = code.layer, range(code.shape.together)
    weights = [code.room(4 * LANES) for _ in together]
    factor = code.factor()
    with code.loop(0, task.num_rows * layer.group, len(together)) as query:
        row = code.number(layer.rows, task.rows_start + query // layer.group)
        head = task.kv_head * layer.group + query % layer.group
        start = task.start.max(code.number(layer.seen_from, row))
        stop = task.stop.min(code.number(layer.position, row) + 1)
        queries = [code.query(row, head + i) for i in together]
        highest = [Variable(code, code.constant(LOWEST, FLOATS)) for _ in together]
        total = code.zeros(len(together))
        sums = [code.zeros(code.width // LANES) for _ in together]
        with code.loop(start, stop, LANES) as at:
            # Behind the last key that one stands again, unseen.
            slots = code.slots(task, [(at + i).min(stop - 1) for i in range(LANES)])
            seen = code.lanes() < (stop - at).narrowed().spread()
            for i, found in enumerate(_scores(code, queries, slots)):
                score = Variable(code, found)
                code.cap(found, score.set)
                power = (score.now * factor).where(seen, UNSEEN)
                with code.when((power > highest[i].now).any()):
                    above = code.across(power, Number.max).max(highest[i].now)
                    fade = code.exp2(highest[i].now - above)
                    highest[i].now = above
                    for each in (total[i], *sums[i]):
                        each.now *= fade
                weight = code.exp2(power - highest[i].now)
                total[i].now += weight
                code.store(code.rounded(weight) if code.paired else weight, weights[i])
            for j, values in enumerate(code.values(slots)):
                for i in together:
                    weight = code.load(weights[i] + 4 * j, code.operand).spread()
                    for each, value in zip(sums[i], values, strict=True):
                        each.now = code.multiply_add(weight, value, each.now)
        for i in together:
            sums_now = [each.now for each in sums[i]]
            total_now = code.across(total[i].now, Number.__add__)
            place = task.partial + query // layer.group
            code.finish((row, head + i, place), highest[i].now, total_now, sums_now)


def _scores(code: LayerCode, queries: list[list[Number]], slots: Sequence[Number]) -> list[Number]:
    """Return the products of each query with 16 keys, a key in each lane.

    Products are added across lanes in a tree, two vectors into one, so that few of them are held at once.
    """
    if len(slots) == 1:
        key = code.key(slots[0])
        found = [code.constant(0, FLOATS)] * len(queries)
        for i, query in enumerate(queries):
            for one, other in zip(query, key, strict=True):
                found[i] = code.multiply_add(one, other, found[i])
        return found
    half = len(slots) // 2
    first, second = (_scores(code, queries, part) for part in (slots[:half], slots[half:]))
    left, right = _ADDED[len(slots)]
    return [a.picked(left, b) + a.picked(right, b) for a, b in zip(first, second, strict=True)]


def _within(lanes: Sequence[int]) -> list[int]:
    """Return the same lanes of each quarter of two vectors."""
    return [4 * quarter + lane for quarter in range(4) for lane in lanes]


def _whole(quarters: Sequence[int]) -> list[int]:
    """Return whole quarters of two vectors."""
    return [4 * quarter + lane for quarter in quarters for lane in range(4)]


_ADDED = {
    2: (_within([0, 16, 1, 17]), _within([2, 18, 3, 19])),
    4: (_within([0, 1, 16, 17]), _within([2, 3, 18, 19])),
    8: (_whole([0, 2, 4, 6]), _whole([1, 3, 5, 7])),
    16: (_whole([0, 2, 4, 6]), _whole([1, 3, 5, 7])),
}
"""The lanes of two vectors that are added, by the number of keys whose sums these hold.

Behind the last step, lane i holds the sum of key i.
"""
