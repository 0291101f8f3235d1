"""The attention plan: the blocks that each row reads, made once per step for all layers of a group."""

from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import torch

from quire.errors import ConfigError
from quire.kernels.attention.runs import Ints, SharedRun, Tables, shared_runs
from quire.kernels.attention.work import FEW, MANY, Parts, SentWork, Work, ranges, tasks

MIN_SAVED_TOKENS = 256
"""Reads of a token that a shared run has to save, over each request reading its own."""


@dataclass(frozen=True, slots=True)
class Packed:
    """The rows of one step, request after request.

    tables     int32 [R, blocks]  block ids, -1 where there is none
    context    int [R]            tokens of each request in the pool before the step
    lengths    int [R]            new rows of each request, at least 1
    positions  int [N]            of the rows, rising in each request, where they do not follow the context: what
                                  lies between them is in the pool, too; None: they follow it
    """

    tables: Tables
    context: Ints
    lengths: Ints
    positions: Ints | None = None


_OF_STEP = ("packed", "slots", "position", "seen_from", "_runs", "_parts", "_works")


@dataclass(slots=True)
class AttentionPlan:
    """The reads of a step's rows: runs shared by several requests, and each request's own blocks.

    window            tokens that a row sees, its own included; None: all
    chunk             size of the chunks within which tokens are seen (chunked attention); None: everywhere
    min_saved_tokens  reads of a token that a shared run has to save

    `update` makes it for a step; every layer of the group then uses it. While a batch decodes,
    the parts stay as they are and each request's own grows with it. Then `work` is the same object
    with the same arrays, in which numbers have changed.

    packed     the step
    slots      int64 [N]  where the new rows' K and V go: `block * block_size + offset`
    position   int64 [N]  of each row
    seen_from  int64 [N]  the first position that it sees
    """

    block_size: int
    window: int | None = None
    chunk: int | None = None
    min_saved_tokens: int = MIN_SAVED_TOKENS
    packed: Packed = field(init=False)
    slots: torch.Tensor = field(init=False)
    position: Ints = field(init=False)
    seen_from: Ints = field(init=False)
    _runs: tuple[int, list[SharedRun]] = field(init=False, repr=False)
    _parts: Parts | None = field(init=False, repr=False, default=None)
    _works: dict[tuple[int, int, int, int], Work] = field(
        init=False, repr=False, default_factory=dict[tuple[int, int, int, int], Work]
    )
    _sent: dict[tuple[int, int, int, torch.device], SentWork] = field(
        init=False, repr=False, default_factory=dict[tuple[int, int, int, torch.device], SentWork]
    )
    _ended: "AttentionPlan | None" = field(init=False, repr=False, default=None)

    def update(self, packed: Packed) -> None:
        """Take the rows of a step; its arrays may change once this returns.

        Raises `ConfigError` when arrays do not fit each other, or a new row has no block; the
        plan is then the one before.
        """
        if (before := self.before(packed)) is not None:
            before.go_on(packed)
            for name in _OF_STEP:
                setattr(self, name, getattr(before, name))
        else:
            _check(packed, self.block_size)
            lengths, context = packed.lengths.astype(np.int64), packed.context.astype(np.int64)
            given = None if packed.positions is None else packed.positions.astype(np.int64)
            self.packed = Packed(packed.tables.copy(), context, lengths, given)
            self.position = ranges(context, lengths) if given is None else given
            self.seen_from = self.lower(self.position)
            size, of_row = self.block_size, np.repeat(np.arange(len(lengths)), lengths)
            blocks = self.packed.tables[of_row, self.position // size].astype(np.int64)
            self.slots = torch.as_tensor(blocks * size + self.position % size)
            self._runs = self._shared()
            self._parts, self._works = self._divide(), {}
        self._sent.clear()
        self._ended = None

    def of(self, rows: Ints) -> "AttentionPlan":
        """Return a plan of some rows of the step, in order, which are the last ones of their requests.

        A step that goes on from these rows alone is planned by it.
        """
        packed = self.packed
        ends = np.cumsum(packed.lengths)
        counts = np.bincount(np.searchsorted(ends, rows, side="right"), minlength=len(ends))
        kept = counts > 0
        starts = self.position[(ends - counts)[kept]]
        plan = AttentionPlan(self.block_size, self.window, self.chunk, self.min_saved_tokens)
        plan.position, plan.seen_from = self.position[rows], self.seen_from[rows]
        plan.slots = torch.as_tensor(self._slots()[rows])
        positions = None if packed.positions is None else plan.position
        plan.packed = Packed(packed.tables[kept], starts, counts[kept], positions)
        plan._runs = self._runs if kept.all() else plan._shared()
        plan._parts = plan._divide()
        self._ended = plan
        return plan

    @property
    def parts(self) -> object:
        """The parts into which the work is divided: another object when the division changes."""
        return self._parts

    def work(self, group: int, kv_heads: int, num_threads: int, few: int = FEW) -> Work:
        """Return the tasks of a step in which `group` query heads read each kv head.

        Up to `few` queries of a task are attended one by one.
        """
        key = group, kv_heads, num_threads, few
        if key not in self._works:
            assert self._parts is not None
            found, merged = tasks(self._parts, *key)
            order = np.argsort(merged, kind="stable")
            starts = np.searchsorted(merged[order], np.arange(len(self.position) + 1))
            held = (self.packed.tables, self.position, self.seen_from, self._parts.rows)
            self._works[key] = Work(self.block_size, *held, found, order, starts)
        return self._works[key]

    def arrays(self, group: int, kv_heads: int, num_threads: int) -> tuple[Ints | Tables, ...]:
        """Return what `SentWork` takes of that work."""
        work = self.work(group, kv_heads, num_threads)
        few = work.tasks[:, 4] <= MANY[0]
        of_rows = work.tables, work.position, work.seen_from, work.rows, work.merged
        return *of_rows, work.merged_starts, self._slots(), work.tasks[~few], work.tasks[few]

    def sent(self, group: int, kv_heads: int, num_threads: int, device: torch.device) -> SentWork:
        """Return that work on a device, which it is sent to once in a step."""
        key = group, kv_heads, num_threads, device
        if key not in self._sent:
            arrays = self.arrays(group, kv_heads, num_threads)
            self._sent[key] = SentWork.room(tuple(each.shape for each in arrays), device)
            self._sent[key].take(arrays)
        return self._sent[key]

    def lower(self, positions: Ints) -> Ints:
        """Return the first position that rows at these positions see."""
        if self.chunk is not None:
            return positions // self.chunk * self.chunk
        if self.window is not None:
            return np.maximum(positions - self.window + 1, 0)
        return np.zeros_like(positions)

    def before(self, packed: Packed) -> "AttentionPlan | None":
        """Return the plan that this step continues: this one or that of its last rows; None: neither.

        In a continuing step each request has grown by one row, and nothing else that is read has changed.
        """
        if self._parts is None:
            return None
        tables = self.packed.tables
        if (
            tables.shape == packed.tables.shape
            and len(self.position) == len(packed.lengths)
            and (packed.lengths == 1).all()
            and np.array_equal(packed.context, self.packed.context + 1)
            and packed.positions is self.packed.positions is None
        ):
            rows, columns = ((packed.tables != tables) & (tables >= 0)).nonzero()
            if (columns < self.seen_from[rows] // self.block_size).all():
                return self
        return self._ended and self._ended.before(packed)

    def go_on(self, packed: Packed) -> None:
        """Take rows that stand one further. Raises `ConfigError`, before anything changes, where one has no block."""
        size, position = self.block_size, self.position + 1
        begun = (position % size == 0).nonzero()[0]
        tables, last = packed.tables[begun], position[begun]
        _check_room(tables, last, size)
        self.packed.tables[:] = packed.tables
        self.packed.context[:] = packed.context
        self.position += 1
        self.seen_from[:] = self.lower(position)
        slots = self._slots()
        slots += 1
        slots[begun] = tables[np.arange(len(last)), last // size].astype(np.int64) * size

    def _slots(self) -> Ints:
        return self.slots.numpy()  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]

    def _shared(self) -> tuple[int, list[SharedRun]]:
        """Return the first column that may be shared, and the runs that several requests of the step read."""
        size, context = self.block_size, self.packed.context
        begin = int(self.lower(context).max(initial=0)) // size
        stops, min_saved = context // size, self.min_saved_tokens // size
        return begin, shared_runs(self.packed.tables, begin, stops, min_saved)

    def _divide(self) -> Parts:
        """Return the parts: shared runs, what each request alone reads behind them, and before them.

        Before them there is something where a window begins in a column that not all tables share.
        """
        size, (begin, runs) = self.block_size, self._runs
        context, lengths = self.packed.context, self.packed.lengths
        last_rows = np.cumsum(lengths)
        first_rows = last_rows - lengths
        lower = self.lower(context)
        alone = lower.copy()
        for run in runs:
            alone[run.requests] = np.maximum(alone[run.requests], run.stop * size)
        each = np.arange(len(lengths))
        early = each[(alone > begin * size) & (lower < begin * size)]

        readers = [ranges(first_rows[run.requests], lengths[run.requests]) for run in runs]
        num_readers = np.array([len(rows) for rows in readers], np.int64)
        of_runs = np.array([(run.requests[0], run.start, run.stop) for run in runs], np.int64)
        of_runs = of_runs.reshape(-1, 3)
        own = int(num_readers.sum())
        return Parts(
            np.concatenate([*readers, np.arange(len(self.position))]),
            np.concatenate([of_runs[:, 0], each, early]),
            np.concatenate(
                [np.cumsum(num_readers) - num_readers, own + first_rows, own + first_rows[early]]
            ),
            np.concatenate([num_readers, lengths, lengths[early]]),
            np.concatenate([of_runs[:, 1] * size, alone, lower[early]]),
            np.concatenate(
                [
                    of_runs[:, 2] * size,
                    self.position[last_rows - 1] + 1,
                    np.full(len(early), begin * size),
                ]
            ),
            np.repeat([False, True, False], [len(runs), len(each), len(early)]),
        )


Plans: TypeAlias = list[AttentionPlan]
"""The plans of a step, one for each layer group."""


def _check(packed: Packed, block_size: int) -> None:
    """Raise `ConfigError` unless the arrays fit and the tables hold every new row."""
    tables, context, lengths = packed.tables, packed.context, packed.lengths
    if not len(tables) == len(context) == len(lengths):
        raise ConfigError(
            f"tables of {len(tables)} requests, context of {len(context)} and lengths of "
            f"{len(lengths)}: a step needs one of each per request"
        )
    if len(lengths) and (lengths.min() < 1 or context.min() < 0):
        raise ConfigError(
            f"a request of {int(lengths.min())} rows or {int(context.min())} tokens before: "
            "each needs at least 1 row and 0 tokens"
        )
    last = context + lengths - 1
    if packed.positions is not None:
        last = _last_of(packed.positions, context, lengths)
    _check_room(tables, last, block_size)


def _check_room(tables: Tables, last: Ints, block_size: int) -> None:
    """Raise `ConfigError` unless tables hold the last row of each request."""
    if len(last) and last.max() >= tables.shape[1] * block_size:
        raise ConfigError(
            f"a row at position {int(last.max())}, but tables of {tables.shape[1]} blocks of "
            f"{block_size} tokens: reserve blocks first"
        )
    if (tables[np.arange(len(last)), last // block_size] < 0).any():
        raise ConfigError("a new row has no block in its table: reserve blocks first")


def _last_of(positions: Ints, context: Ints, lengths: Ints) -> Ints:
    """Return the last position of each request. Raises `ConfigError` unless they rise behind its context."""
    ends, num_rows = np.cumsum(lengths), int(lengths.sum())
    if len(positions) != num_rows:
        raise ConfigError(f"{len(positions)} positions for {num_rows} rows: each row needs one")
    before = np.roll(positions, 1)
    before[ends - lengths] = context - 1
    if (positions <= before).any():
        at = int((positions <= before).argmax())
        raise ConfigError(
            f"a row at position {int(positions[at])} behind one at {int(before[at])}: the rows of a request rise, "
            "and stand behind its context"
        )
    return positions[ends - 1]
