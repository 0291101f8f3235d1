"""The forward of one step: its copies, its block tables, its rows."""

from collections.abc import Callable, Collection, Iterable
from collections.abc import Sequence as Items
from functools import partial
from typing import Any, Protocol, cast

import numpy as np
import numpy.typing as npt
import torch

from quire.core import CacheManager, Scope, Sequence
from quire.core.tokens import INT32, IndexArray, IntArray
from quire.engines.loop.params import own_sampling
from quire.engines.models.inventory import Inventory
from quire.engines.packed.bound_model import BoundModel
from quire.engines.packed.model import PackedModel
from quire.errors import ConfigError
from quire.kernels.attention import Packed, Plans
from quire.ops import blocks_at
from quire.scheduling import Job, Step
from quire.scope import ScopePart
from quire.tensors.copy import do_copies
from quire.tensors.model import ModelLayout
from quire.tensors.pool import KVPool

Ints = npt.NDArray[np.int64]

_PAD = -1
_SPARE = 8
"""Columns, and more, that tables have beside those in use, so that those of the next steps have the same shape."""


class EngineModel(Protocol):
    """A model as an engine has it.

    layout         the layer groups of its blocks
    fingerprint    the name of what its K and V are of
    max_positions  tokens of a prompt and its answer; None: any number
    """

    layout: ModelLayout
    fingerprint: str
    vocab_size: int
    max_positions: int | None
    eos_ids: tuple[int, ...]
    own_sampling: dict[str, Any]

    def scope(self, scope: Scope | None = None) -> Scope:
        """Return a scope bound to the model as it is now. Raises `ScopeError`, `ConfigError`."""
        ...

    def outdated(self, bound: Iterable[Scope]) -> Collection[ScopePart]:
        """Return the models that these scopes are bound to, but for the model as it is now."""
        ...

    def forward(self, manager: CacheManager, *, debug_nan: bool) -> Any:
        """Return what computes steps as `Forward` does."""
        ...


class TransformersModel(BoundModel):
    """A model of transformers as an engine has it."""

    def __init__(self, model: Any, settings: Any, *, outlives: bool) -> None:
        super().__init__(model, settings.block_size, settings.adapters, outlives=outlives)
        self.own_sampling = own_sampling(self.model)

    def forward(self, manager: CacheManager, *, debug_nan: bool) -> "Forward":
        """Return the forward of the engine's steps."""
        return Forward(self.packed, manager, debug_nan=debug_nan)


class Forward:
    """Computes steps of a scheduler: KV into the pools, logits out.

    pools           one for each layer group of the manager
    companions      its own `EngineCompanion`s of the engine, which come before others
    before_copies   called before anything is written to them
    before_forward  called when all is ready for the model
    """

    companions: Iterable[Any] = ()
    before_copies: Callable[[], None] | None = None
    before_forward: Callable[[], object] | None = None

    def __init__(self, model: PackedModel, manager: CacheManager, *, debug_nan: bool) -> None:
        self.model = model
        self.manager = manager
        groups = zip(model.layout.groups, manager.pools, strict=True)
        self.pools = [
            KVPool(group.memory, blocks.num_blocks, model.device, debug_nan=debug_nan)  # pyright: ignore[reportArgumentType] - no recurrent groups
            for group, blocks in groups
        ]
        self._prepare()
        self.reset()

    def _prepare(self) -> None:
        """Take memory and compile now what the first requests would wait for: compute one token, kept by nobody."""
        for pool in self.pools:
            pool.touch()
        first, plans = np.zeros(1, np.int64), self.model.plans()
        for plan in plans:
            plan.update(Packed(np.zeros((1, 1), INT32), first, first + 1))
        self._computed(np.zeros(1, INT32), first, plans, None)

    def reset(self) -> None:
        """Forget the steps before."""
        self._plans = self.model.plans()
        self._tables = [np.zeros((0, 0), INT32) for _ in self.pools]
        self._moved = False
        self._good_until = 0

    def copy(self) -> None:
        """Do the copies that the manager has planned."""
        if self.before_copies is not None:
            self.before_copies()
        self._moved |= do_copies(self.manager, self.pools)

    def logits(self, step: Step, bound: BoundModel) -> torch.Tensor:
        """Return the logits `[len(step.logit_rows), vocab]` of a step that was planned, of one model from end to end.

        Raises `ConfigError` where the model is another one meanwhile.
        """
        scope = cast("Scope", step.jobs[0].scope)
        compute = partial(self._logits, step, bound.packed_of(scope))
        # the engine has just looked at the model
        if (logits := bound.computed(scope, compute, bound.seen(scope))) is None:
            raise ConfigError("the model was changed while the step was computed")
        return logits

    def rows(self, seq: Sequence, tokens: IntArray, rows: Ints, seen: Inventory) -> None:
        """Write K and V of some rows (positions, rising) of a sequence's tokens, over all that stand in its blocks."""
        if not rows.size:
            return
        first, length = rows[:1], np.array([rows.size])
        plans = self.model.plans()
        for group, plan in enumerate(plans):
            tables = self.manager.tables([seq], group, _PAD).padded
            plan.update(Packed(tables, first, length, rows))
        self._computed(tokens[rows], rows[:0], plans, seen)

    def _logits(self, step: Step, model: PackedModel, seen: Inventory) -> torch.Tensor:
        """Compute a step, which may be done again: its rows come into the same places."""
        self.copy()
        starts, lengths = step.starts.astype(np.int64), step.lengths.astype(np.int64)
        self._update_tables(step)
        for plan, tables in zip(self._plans, self._tables, strict=True):
            plan.update(Packed(tables, starts, lengths))
        if self.before_forward is not None:
            self.before_forward()
        return self._computed(step.tokens, step.logit_rows, self._plans, seen, model)

    def _computed(
        self,
        tokens: IntArray,
        asked: IndexArray,
        plans: Plans,
        seen: Inventory | None,
        model: PackedModel | None = None,
    ) -> torch.Tensor:
        """Compute the rows of plans by a model, this one or it with an adapter; return the logits that are asked for."""
        device = self.model.device
        ids, positions, rows = (
            torch.from_numpy(each.astype(np.int64)).to(device)  # pyright: ignore[reportUnknownMemberType]
            for each in (tokens, plans[0].position, asked)
        )
        model = model or self.model
        return model.forward(ids, positions, rows, plans, self.pools, seen=seen)

    def _update_tables(self, step: Step) -> None:
        """Bring the block tables [R, blocks] of each group up to a step.

        Those of a step that repeats the one before differ where that one has filled a block, and published it: its
        id may be another now, and the next one's is new; where blocks were moved, all are read. `_good_until` is how
        many tokens the first job has when that comes next.
        """
        size, starts, width = self.manager.block_size, step.starts, self._tables[0].shape[1]
        repeats, self._moved = step.repeats and not self._moved, False
        if repeats and starts[0] < self._good_until:
            return
        in_block = starts % size
        if not repeats or starts.max() >= width * size:
            self._read_tables(step.jobs)
        else:
            rows = (in_block == 0).nonzero()[0]
            seqs = [step.jobs[row].open_seq for row in cast("list[int]", rows.tolist())]
            last = starts[rows, None] // size + np.array([-1, 0])
            for group, table in enumerate(self._tables):
                table[rows[:, None], last] = blocks_at(self.manager, seqs, last, group)
        self._good_until = int(starts[0]) + size - int(in_block.max())

    def _read_tables(self, jobs: Items[Job]) -> None:
        """Read the tables of all jobs."""
        seqs = [job.open_seq for job in jobs]
        for group in range(len(self._tables)):
            found = self.manager.tables(seqs, group, _PAD).padded
            shape = len(found), (found.shape[1] // _SPARE + 2) * _SPARE
            self._tables[group] = np.full(shape, _PAD, INT32)
            self._tables[group][:, : found.shape[1]] = found
