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

from array import array
from bisect import bisect_right
from itertools import pairwise
from math import inf
from typing import TypeAlias

import msgspec
import numpy as np

from quire.foresight.forecast import Forecast

Counts: TypeAlias = np.ndarray[tuple[int], np.dtype[np.int64]]
Numbers: TypeAlias = np.ndarray[tuple[int], np.dtype[np.float64]]

EDGES = [0.0] + [2.0 ** (k // 2 - 2) * (1.0, 2.0**0.5)[k % 2] for k in range(30)]
"""Where bins of age begin, in seconds: half octaves from a quarter of a second to 1.6 hours."""

NUM_BINS = len(EDGES)

ENDS = [*EDGES[1:], float("inf")]
"""Where they end."""

WIDTHS = [b - a for a, b in pairwise(EDGES)] + [EDGES[-1] / 2]

CELL_EVENTS = 4.0
"""C: returns, all expected, that every cell starts with."""

BIN_EVENTS = 3.0
"""Returns at the prior's rate that every bin of age starts with."""

PRIOR = [0.3 / (edge + width / 2) for edge, width in zip(EDGES, WIDTHS, strict=True)]
"""The hazard before anything is seen: it falls with age, so that a cold start acts as LRU."""

CLASS_OCTAVES = 8
"""Weights run from 2^-8 to 2^8."""

NUM_CLASSES = 4 * CLASS_OCTAVES + 1

NUM_FEATURES = 272
"""Values of features that policies name, from 0 on."""

SILENT, UNMET, NOTHING = range(NUM_FEATURES, NUM_FEATURES + 3)
"""Beside these: its caller speaks of times and has said none; the time that was said is over; and what stands where a record
has no further feature, whose weight is 1."""

MAX_FEATURES = 6
"""Features of a record, at most."""

EARLY = 1024
"""Requests of the early phase, in which little is known and each says much."""

REFRESH, EARLY_REFRESH = 128, 64
"""Requests between two computations of the ranks, and as long as it is early."""

AGING, EARLY_AGING = 64, 4
"""Requests between two looks at how records have aged, and as long as it is early; they divide those."""

MIN_AGING = 1024
"""Records that age before unwatched ones are dropped."""

_EDGES, _WIDTHS, _PRIOR = np.array(EDGES), np.array(WIDTHS), np.array(PRIOR)
_BINS = np.arange(NUM_BINS - 1)
_BETWEEN_CLASSES = [
    2.0**k * q for k in range(-CLASS_OCTAVES, CLASS_OCTAVES) for q in (2.0**0.25, 2.0**0.75)
]
_NO_FEATURES = (NOTHING,) * MAX_FEATURES


class Stay(msgspec.Struct, gc=False, eq=False):
    """Unused blocks, and the features that tell how soon such blocks are used again.

    `time`     since when, in seconds
    `cells`    its values of the features; `kind` the class of its weight
    `watched`  while a return would be learned from, `place` then in what the model has of all that age
    `silent`   whether its caller has spoken of times before, and said none of this
    """

    time: float = 0.0
    cells: tuple[int, ...] = ()
    kind: int = NUM_CLASSES // 2
    place: int = 0
    watched: bool = False
    silent: bool = False


class SharedRoot(msgspec.Struct, gc=False, eq=False):
    """A run of blocks from the root behind which requests differ: a system prompt, a document, examples.

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
    """One request: the part of a chain that it used last, and the features of its kind.

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

    What ages stands in arrays, in the order of its time. So of each bin those that have left it are the first ones, and a
    look at all that has aged since the last is some sums over pieces of these arrays. `moves` counts how often the ranks were
    computed. Its classes are numbered from `first_kind` on.

    `mixed`  1 where records of a class differ in how soon they are come back to, 0 where all are alike
    """

    def __init__(self, first_kind: int = 0, mixed: float = 1.0) -> None:
        self._first_kind = first_kind
        self._mixed = mixed
        self._returns = [0.0] * NUM_BINS
        self._exposure = np.zeros(NUM_BINS)
        # Of each cell the returns seen, those until the last look, those that all else led to expect until then, and its weight.
        self._cell_returns = [0.0] * (NOTHING + 1)
        self._cell_returned, self._cell_expected = np.zeros(NOTHING + 1), np.zeros(NOTHING + 1)
        self._weights = [1.0] * (NOTHING + 1)
        self._aging: list[Stay] = []
        self._times, self._until, self._patience = array("d"), array("d"), array("d")
        self._cells = array("i")
        self._ended: list[int] = []
        self._left = np.zeros(NUM_BINS - 1, np.int64)
        self._limit = MIN_AGING
        self._wait = 1
        self.moves = 0
        self._lowest = self._highest = NUM_CLASSES // 2
        self.refresh()

    def watch(self, record: Stay, features: tuple[int, ...]) -> None:
        """Start to watch for the return to a record, no older than the records before it.

        Each value of a feature has its own number.
        """
        if record.silent:
            features = (*features, SILENT)
        record.place, record.watched = len(self._aging), True
        self._aging.append(record)
        self._times.append(record.time)
        self._until.append(inf)
        self._patience.append(self._weigh(record, features))
        self._cells.extend(features + _NO_FEATURES[len(features) :])

    def learn(self, record: Stay, feature: int) -> None:
        """Add a feature to a watched record."""
        if record.watched:
            self._patience[record.place] = self._weigh(record, (*record.cells, feature))
            self._cells[MAX_FEATURES * record.place + len(record.cells) - 1] = feature

    def _weigh(self, record: Stay, cells: tuple[int, ...]) -> float:
        """Sort a record into the class of its cells' weight; return 1 / weight.

        A cell's weight says how much sooner than the average its records are come back to.
        """
        weights, weight = self._weights, 1.0
        for cell in cells:
            weight *= weights[cell]
        weight = min(max(weight, 2.0**-CLASS_OCTAVES), 2.0**CLASS_OCTAVES)
        record.cells = cells
        record.kind = self._first_kind + class_of(weight)
        return 1.0 / weight

    @property
    def _is_early(self) -> bool:
        return self.moves <= EARLY // EARLY_REFRESH

    def advance(self, now: float) -> None:
        """Count a request; every `AGING` requests, age all records and learn from those without a return.

        While it is early, that is every `EARLY_AGING` requests.
        """
        self._wait -= 1
        if not self._wait % (EARLY_AGING if self._is_early else AGING):
            self._look(now)
            if not self._wait:
                self.refresh()

    def returned(self, record: Stay, now: float) -> None:
        """Note the return to a watched record."""
        if record.watched:
            self.forget(record, now)
            self._returns[bisect_right(EDGES, now - record.time) - 1] += 1
            returns, early = self._cell_returns, self._is_early
            for cell in record.cells:
                returns[cell] += 1
                if early:
                    expected = self._cell_expected.item(cell)
                    self._weights[cell] = (returns[cell] + CELL_EVENTS) / (expected + CELL_EVENTS)

    def forget(self, record: Stay, now: float) -> None:
        """Stop to watch for the return to a record; the time it was watched counts."""
        if record.watched:
            record.watched = False
            self._until[record.place] = now
            self._ended.append(record.place)

    def rank_of(self, record: Stay, now: float) -> tuple[float, float]:
        """Return the rank of a record and the time until which it holds.

        The rank is expected hits per block and second if the record is held as long as that pays.
        """
        kind, age_bin = record.kind - self._first_kind, bisect_right(EDGES, now - record.time) - 1
        ranks_by_age = self.rank[kind]
        if not ranks_by_age:
            self._lowest, self._highest = min(self._lowest, kind), max(self._highest, kind)
            self.rank = self.ranked()
            ranks_by_age = self.rank[kind]
        return ranks_by_age[age_bin], record.time + ENDS[age_bin]

    def _look(self, now: float) -> None:
        """Learn from the ages of all records: the bins that they have left, and the one in which their wait ended."""
        times, until = np.frombuffer(self._times), np.frombuffer(self._until)
        left = times.searchsorted(now - _EDGES[1:], "right")
        counts = left - self._left
        bins = np.repeat(_BINS, counts)
        places = np.arange(len(bins)) + np.repeat(left - counts.cumsum(), counts)
        waited = until[places] - times[places] >= _EDGES[1:][bins]
        bins, places = bins[waited], places[waited]
        ended = np.array(self._ended, np.int64)
        ages = until[ended] - times[ended]
        last = _EDGES.searchsorted(ages, "right") - 1
        widths = np.concatenate((_WIDTHS[bins], np.minimum(ages - _EDGES[last], _WIDTHS[last])))
        self._expose(np.concatenate((places, ended)), np.concatenate((bins, last)), widths)
        self._left = left
        self._ended.clear()
        if len(times) > self._limit:
            del times, until
            self._drop()

    def _expose(self, places: Counts, bins: Counts, widths: Numbers) -> None:
        """Count what was watched for so long in a bin of age: what is expected of its cells, beside their own weights."""
        hazard, patience = self._hazard[bins], np.frombuffer(self._patience)
        halfway = self._so_far[bins] + self._mixed * hazard * widths / 2
        exposure = widths / (patience[places] + halfway)
        self._exposure += np.bincount(bins, exposure, NUM_BINS)
        cells = np.frombuffer(self._cells, np.int32).reshape(-1, MAX_FEATURES)[places]
        grown = np.bincount(cells.ravel(), np.repeat(exposure * hazard, MAX_FEATURES), NOTHING + 1)
        grown[NOTHING] = 0
        expected = self._cell_expected
        expected += grown * (expected + CELL_EVENTS) / (self._cell_returned + CELL_EVENTS)
        self._cell_returned = np.array(self._cell_returns)
        self._weights = ((self._cell_returned + CELL_EVENTS) / (expected + CELL_EVENTS)).tolist()

    def _drop(self) -> None:
        """Drop records that are not watched any more, and leave room for as many again."""
        kept = [place for place, record in enumerate(self._aging) if record.watched]
        self._left = np.searchsorted(kept, self._left)
        self._aging = [self._aging[place] for place in kept]
        for place, record in enumerate(self._aging):
            record.place = place
        self._times, self._until, self._patience = (
            array("d", [column[place] for place in kept])
            for column in (self._times, self._until, self._patience)
        )
        cells = np.frombuffer(self._cells, np.int32).reshape(-1, MAX_FEATURES)[kept]
        self._cells = array("i", cells.tobytes())
        self._limit = max(MIN_AGING, 2 * len(kept))

    def refresh(self) -> None:
        """Compute the hazard curve and from it the rank of every class in use in every bin.

        Only sums, products and quotients, in a fixed order: every machine gets the same ranks.
        """
        self._wait = EARLY_REFRESH if self._is_early else REFRESH
        self.moves += 1
        returns, exposure = np.array(self._returns), self._exposure
        self._hazard = (returns + BIN_EVENTS) / (exposure + BIN_EVENTS / _PRIOR)
        grown = self._mixed * self._hazard * _WIDTHS
        self._so_far = np.concatenate(([0.0], grown.cumsum()[:-1]))
        self.rank = self.ranked()

    def ranked(self) -> list[list[float]]:
        """Return the ranks of each class by bin of age; an empty list for a class not yet asked for."""
        low, high = self._lowest, self._highest + 1
        rows: list[list[float]] = [[] for _ in range(NUM_CLASSES)]
        rows[low:high] = ranks(self._hazard, self._so_far, low, high).tolist()
        return rows


_WEIGHTS = 2.0**-CLASS_OCTAVES * np.array(
    [2.0 ** (k // 2) * (1.0, 2.0**0.5)[k % 2] for k in range(NUM_CLASSES)]
)


def ranks(
    hazard: Numbers, so_far: Numbers, low: int = 0, high: int = NUM_CLASSES
) -> np.ndarray[tuple[int, int], np.dtype[np.float64]]:
    """Return the Gittins index of each class from `low` to before `high` in the middle of every bin, [classes, bins]."""
    rate = hazard / (1.0 / _WEIGHTS[low:high, None] + so_far)
    stay = 1.0 / (1.0 + rate * _WIDTHS)  # of those present, at the end of the bin
    half = 1.0 / (1.0 + rate * _WIDTHS / 2)
    alive = np.cumprod(stay, axis=1)
    nobody, all_of_them = np.zeros((len(rate), 1)), np.ones((len(rate), 1))
    before = np.concatenate((all_of_them, alive[:, :-1]), axis=1)
    held = np.cumsum(before * _WIDTHS * stay, axis=1)
    held_before = np.concatenate((nobody, held[:, :-1]), axis=1)
    here = before * half
    held_here = held_before + before * _WIDTHS / 2 * half
    gone = here[:, :, None] - alive[:, None, :]
    time = held[:, None, :] - held_here[:, :, None]
    best = np.divide(gone, time, out=np.zeros_like(gone), where=time > 0).max(axis=2)
    np.maximum(best[:, 1:], rate[:, 1:], out=best[:, 1:])  # where next to none is left
    return best


def class_of(weight: float) -> int:
    """Return twice the logarithm of a weight to base 2, rounded, from 0 at the lightest."""
    return bisect_right(_BETWEEN_CLASSES, weight)


def bucket(value: int, limit: int) -> int:
    """Return floor(log2(value + 1)), at most `limit`."""
    return min((value + 1).bit_length() - 1, limit)
