"""Re-entry: how soon the branches of a prefix tree are come back to, learned while serving.

    rate of return of a record at age a  =  shape(a) / (1 / weight + shape so far(a))
    weight = product over its cells of (returns + C) / (expected returns + C)

`shape` is one hazard curve for all, in bins of age; a cell is one value of one feature, and its
weight says how much sooner than the average the records in it come back. The denominator is
what a mixture of impatient and patient users looks like: who has not returned for long
is ever less likely to. Counts are exposures and returns, as in survival analysis, so a record that was not
come back to yet counts for exactly as long as it was watched.

The rank of a record is its Gittins index: the largest ratio, over all ages to hold it until, of the
chance of a return to the expected time that it is held. Blocks of one record return together,
so this is expected hits per block and second.
Sources: Cox, Regression models and life-tables, JRSS B 34(2), 1972,
doi:10.1111/j.2517-6161.1972.tb00899.x; Gittins, Bandit processes and dynamic allocation
indices, JRSS B 41(2), 1979, doi:10.1111/j.2517-6161.1979.tb01068.x; Beckmann, Chen, Cidon, LHD:
improving cache hit rate by maximizing hit density, NSDI 2018.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from itertools import pairwise
from math import frexp

import msgspec
import numpy as np

from quire.foresight.forecast import Forecast

EDGES = [0.0] + [2.0 ** (k // 2 - 2) * (1.0, 2.0**0.5)[k % 2] for k in range(30)]
"""Where bins of age begin, in seconds: half octaves from a quarter of a second to 1.6 hours."""

NUM_BINS = len(EDGES)

ENDS = [*EDGES[1:], float("inf")]
"""Where they end."""

WIDTHS = [b - a for a, b in pairwise(EDGES)] + [EDGES[-1] / 2]

CELL_EVENTS = 4.0
"""C: so many returns as expected are taken for granted in every cell."""

BIN_EVENTS = 3.0
"""So many returns at the prior's rate are taken for granted in every bin of age."""

PRIOR = [0.3 / (edge + width / 2) for edge, width in zip(EDGES, WIDTHS, strict=True)]
"""The hazard before anything is seen: it falls with age, so that a cold start acts as LRU."""

CLASS_OCTAVES = 8
"""Weights run from 2^-8 to 2^8."""

NUM_CLASSES = 4 * CLASS_OCTAVES + 1

SILENT, UNMET = -1, -2
"""Features, beside those that a policy names: its caller speaks of times and has said none; the time that was said is over."""

REFRESH = 64
"""Requests between two computations of the ranks."""


class Cell(msgspec.Struct, gc=False, eq=False):
    """One value of one feature: the returns seen, and those that all else led to expect."""

    returns: float = 0.0
    expected: float = 0.0

    @property
    def weight(self) -> float:
        """How much sooner than the average its records are come back to."""
        return (self.returns + CELL_EVENTS) / (self.expected + CELL_EVENTS)


class Stay(msgspec.Struct, gc=False, eq=False):
    """Blocks that nobody uses now, and what is known of how soon such blocks are used again.

    `time`    since when, in seconds
    `cells`   its values of the features; `patience` 1 / weight, `kind` the class of weight
    `bin`     of its age; `watched` while a return would be learned from
    `silent`  whether its caller has spoken of times before, and said none of this
    """

    time: float = 0.0
    cells: tuple[Cell, ...] = ()
    patience: float = 1.0
    kind: int = NUM_CLASSES // 2
    bin: int = 0
    watched: bool = False
    silent: bool = False


class SharedRoot(msgspec.Struct, gc=False, eq=False):
    """A run of blocks from the root that requests went off from: a system prompt, a document, examples.

    `end`    blocks from the root to its end; `above` the shared run that it continues, `depth` how many there are
    `uses`   requests that used it, and `gap` the seconds between the last two
    `stay`   since the last of them
    """

    end: int
    above: SharedRoot | None
    depth: int
    stay: Stay
    uses: int = 1
    gap: float = 0.0


class Record(Stay, gc=False, eq=False):
    """One request: the part of a chain that it used last, and what is known of its kind.

    `number`      of the request; its `time` is that of its end
    `prompt`      full blocks of its prompt; `found` of them were there, or known to be evicted
    `turn`        how many requests before it continued one another
    `shared`      the deepest shared run that its prompt begins with
    `answered`    whether it stored blocks beyond its prompt; `trimmed` whether those go first
    `superseded`  whether another request has gone on from here
    `slot`        its place in the shadow of LRU; -1 beyond its end
    `forecast`    when its caller comes back; only to what lies behind its first `since` blocks
    `foretold`    whether its caller said when somebody comes back
    `spent`       whether its caller said that nobody comes back to what it stored; `finished`: nor to the turns before
    """

    number: int = 0
    prompt: int = 0
    found: int = 0
    turn: int = 0
    shared: SharedRoot | None = None
    answered: bool = False
    trimmed: bool = False
    superseded: bool = False
    closed: bool = False
    slot: int = -1
    forecast: Forecast | None = None
    since: int = 0
    foretold: bool = False
    spent: bool = False
    finished: bool = False


class Reentry:
    """The model: returns and exposures by age and by cell, and the ranks that follow.

    After every `advance`, a watched record stands in the queue of the bin of its age; in the last
    bin nothing ages, and it has none. `moves` counts how often the ranks were computed. Its classes are
    numbered from `first_kind` on.

    `mixed`  1 where records of a class differ in how soon they are come back to, 0 where all are alike
    """

    def __init__(self, first_kind: int = 0, mixed: float = 1.0) -> None:
        self._first_kind = first_kind
        self._mixed = mixed
        self._returns = [0.0] * NUM_BINS
        self._exposure = [0.0] * NUM_BINS
        self._cells: dict[int, Cell] = {}
        self._aging: list[deque[Stay]] = [deque() for _ in EDGES[1:]]
        self._hazard = list(PRIOR)
        self._so_far = [0.0] * NUM_BINS
        self._wait = 1
        self._now = 0.0
        self.moves = 0
        self.rank: list[list[float]] = []
        self.refresh()

    def watch(self, record: Stay, features: tuple[int, ...]) -> None:
        """Begin to wait for the return to a record; each value of a feature has its own number."""
        if record.silent:
            features = (*features, SILENT)
        self._weigh(record, tuple([self._cells.setdefault(value, Cell()) for value in features]))
        record.watched = True
        self._aging[0].append(record)

    def learn(self, record: Stay, feature: int) -> None:
        """From now on a watched record has one more feature."""
        if record.watched:
            self._weigh(record, (*record.cells, self._cells.setdefault(feature, Cell())))

    def _weigh(self, record: Stay, cells: tuple[Cell, ...]) -> None:
        """Sort a record into the class of what its cells weigh."""
        weight = 1.0
        for cell in cells:
            weight *= cell.weight
        weight = min(max(weight, 2.0**-CLASS_OCTAVES), 2.0**CLASS_OCTAVES)
        record.cells = cells
        record.patience = 1.0 / weight
        record.kind = self._first_kind + class_of(weight)

    def advance(self, now: float) -> None:
        """Let all records age until now, and learn from those that were not come back to."""
        if now != self._now:
            self._now = now
            for age_bin, edge in enumerate(EDGES[1:]):
                queue = self._aging[age_bin]
                if queue and now - queue[0].time >= edge:
                    self._grow_older(age_bin, now)
        self._wait -= 1
        if not self._wait:
            self.refresh()

    def returned(self, record: Stay, now: float) -> None:
        """A watched record was come back to."""
        if record.watched:
            self.forget(record, now)
            self._returns[record.bin] += 1
            for cell in record.cells:
                cell.returns += 1

    def forget(self, record: Stay, now: float) -> None:
        """Wait no longer for the return to a record; the time it was watched counts."""
        if record.watched:
            record.watched = False
            width = min(max(now - record.time - EDGES[record.bin], 0.0), WIDTHS[record.bin])
            self._expose(record, width)

    def rank_of(self, record: Stay, now: float) -> tuple[float, float]:
        """Return the rank of a record, expected hits per block and second if held as long as pays, and until when it is that."""
        age_bin = record.bin if record.watched else bisect_right(EDGES, now - record.time) - 1
        return self.rank[record.kind - self._first_kind][age_bin], record.time + ENDS[age_bin]

    def _grow_older(self, age_bin: int, now: float) -> None:
        """Move all records of a bin that are older now to the next: `_expose`, unrolled."""
        queue, edge = self._aging[age_bin], EDGES[age_bin + 1]
        older = self._aging[age_bin + 1] if age_bin + 2 < NUM_BINS else None
        width, hazard, so_far = WIDTHS[age_bin], self._hazard[age_bin], self._so_far[age_bin]
        inside = self._mixed * hazard * width / 2
        exposed = self._exposure[age_bin]
        while queue and now - queue[0].time >= edge:
            record = queue.popleft()
            if record.watched:
                exposure = width / (record.patience + so_far + inside)
                exposed += exposure
                expected = exposure * hazard
                for cell in record.cells:
                    without = (cell.expected + CELL_EVENTS) / (cell.returns + CELL_EVENTS)
                    cell.expected += expected * without
                record.bin = age_bin + 1
                if older is not None:
                    older.append(record)
        self._exposure[age_bin] = exposed

    def _expose(self, record: Stay, width: float) -> None:
        age_bin = record.bin
        hazard = self._hazard[age_bin]
        inside = self._mixed * hazard * width / 2
        exposure = width / (record.patience + self._so_far[age_bin] + inside)
        self._exposure[age_bin] += exposure
        expected = exposure * hazard
        for cell in record.cells:
            without = (cell.expected + CELL_EVENTS) / (cell.returns + CELL_EVENTS)
            cell.expected += expected * without

    def refresh(self) -> None:
        """Compute the hazard curve and from it the rank of every class in every bin.

        Only sums, products and quotients, in a fixed order: every machine gets the same ranks.
        """
        self._wait = REFRESH
        self.moves += 1
        so_far = 0.0
        for i in range(NUM_BINS):
            seen, exposed = self._returns[i] + BIN_EVENTS, self._exposure[i] + BIN_EVENTS / PRIOR[i]
            self._hazard[i] = seen / exposed
            self._so_far[i] = so_far
            so_far += self._mixed * self._hazard[i] * WIDTHS[i]
        self.rank = ranks(np.array(self._hazard), np.array(self._so_far)).tolist()


def ranks(hazard: np.ndarray, so_far: np.ndarray) -> np.ndarray:
    """Return the Gittins index of every class in the middle of every bin, [classes, bins]."""
    weights = np.array([2.0 ** (k // 2) * (1.0, 2.0**0.5)[k % 2] for k in range(NUM_CLASSES)])
    weights = weights[:, None] / 2.0**CLASS_OCTAVES
    width = np.array(WIDTHS)
    rate = hazard / (1.0 / weights + so_far)
    stay = 1.0 / (1.0 + rate * width)  # of those present, at the end of the bin
    half = 1.0 / (1.0 + rate * width / 2)
    alive = np.cumprod(stay, axis=1)
    before = np.concatenate((np.ones((NUM_CLASSES, 1)), alive[:, :-1]), axis=1)
    held = np.cumsum(before * width * stay, axis=1)
    held_before = np.concatenate((np.zeros((NUM_CLASSES, 1)), held[:, :-1]), axis=1)
    here = before * half
    held_here = held_before + before * width / 2 * half
    gone = here[:, :, None] - alive[:, None, :]
    time = held[:, None, :] - held_here[:, :, None]
    now = np.broadcast_to(rate[:, :, None], gone.shape).copy()  # where next to none is left
    return np.max(np.divide(gone, time, out=now, where=time > 0), axis=2)


def class_of(weight: float) -> int:
    """Return twice the logarithm of a weight to base 2, rounded, from 0 at the lightest."""
    mantissa, exponent = frexp(weight)  # weight == mantissa * 2**exponent, mantissa in [1/2, 1)
    step = 0 if mantissa < 2.0**-0.75 else 1 if mantissa < 2.0**-0.25 else 2
    return min(max(2 * (exponent - 1) + step + 2 * CLASS_OCTAVES, 0), NUM_CLASSES - 1)


def bucket(value: int, limit: int) -> int:
    """Return floor(log2(value + 1)), at most `limit`."""
    return min((value + 1).bit_length() - 1, limit)
