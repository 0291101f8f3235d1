"""The forward of a step by llama.cpp, over blocks in host memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from quire.core.tokens import TOKEN_BYTES
from quire.engines.companions import EngineCompanion
from quire.engines.gguf.context import PIECE, Chunk, Context, NoCells
from quire.engines.gguf.host_pool import HostPool, HostStates
from quire.engines.gguf.residents import Resident, SequencePool
from quire.errors import InvariantError, QuireError
from quire.ops import blocks_at
from quire.tensors.copy import do_copies
from quire.tensors.layout import StateLayout

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt

    from quire.core import CacheManager, Scope, Sequence
    from quire.core.blocks import BlockCopy
    from quire.core.tokens import IntArray
    from quire.scheduling import Job, Scheduler, Step


@dataclass(slots=True)
class _Part:
    """Tokens of one job in a step, from position `start` on."""

    job: Job
    start: int
    tokens: IntArray
    asked: npt.NDArray[np.int8]

    def halves(self) -> tuple[_Part, _Part]:
        middle = len(self.tokens) // 2
        first = _Part(self.job, self.start, self.tokens[:middle], self.asked[:middle])
        rest = self.tokens[middle:], self.asked[middle:]
        return first, _Part(self.job, self.start + middle, *rest)


class GgufForward:
    """Computes steps of a scheduler with llama.cpp: KV into its context, logits out.

    The manager's blocks are in host memory (`pools`). A request that runs has a resident sequence in the context: what
    another one has of its prompt is shared, what blocks have is restored, and the rest is computed. New rows go to their
    blocks when the request gives them back, when a planned copy reads them, or when its resident has to go:

    a row of a block that is not `written` is in the resident of the open sequence that has computed it.

    So is the state that such a sequence works on, of a model that keeps recurrent states. Its snapshots are the manager's,
    which plans copies of it; the scheduler ends parts of prompts where one is due.

    model   the `BoundGguf` that has made it
    before_copies, before_forward  as of `engines.loop.computing.Forward`
    """

    before_copies: Callable[[], None] | None = None
    before_forward: Callable[[], object] | None = None

    def __init__(
        self, model: Any, context: Context, manager: CacheManager, *, debug_nan: bool
    ) -> None:
        self.model, self.manager, self._context = model, manager, context
        self._pool: HostPool | None = None
        self._states: HostStates | None = None
        for group, blocks in zip(model.layout.groups, manager.pools, strict=True):
            if isinstance(group.memory, StateLayout):
                self._states = HostStates(group.memory, blocks.num_blocks, debug_nan=debug_nan)
            else:
                self._pool = HostPool(group.memory, blocks.num_blocks, debug_nan=debug_nan)
        self.pools = [each for each in (self._pool, self._states) if each is not None]
        self.residents = SequencePool(context, model.ids_per_sequence, self.save_all)
        self.companions = [_Keeper(self, context)]

    def copy(self) -> None:
        """Do the copies that the manager has planned."""
        if self.before_copies is not None:
            self.before_copies()
        plan = self.manager.kernel.copies.peek()
        if self._states is not None:
            self._save_copied(self._states, plan)
        join = partial(self.save_running, self._moved())  # more may be planned then, of others
        do_copies(self.manager, self.pools, join=join)

    def _moved(self) -> Mapping[int, BlockCopy]:
        """Return the planned copies of blocks with rows, by the block that they fill."""
        plan = self.manager.kernel.copies.peek()
        return {each.dst: each for each in plan if self.pools[each.group] is self._pool}

    def save_running(self, moved: Mapping[int, BlockCopy] | None = None) -> None:
        """Write rows to blocks that only running residents have; `moved` as for `save`."""
        for resident in self.residents.by_owner.values():
            self.save(resident, moved)

    def save_shared(self, job: Job) -> None:
        """Write rows to a job's blocks that only residents of others have: tiers may read them next."""
        if self._pool is not None:
            table, needed = self._placed(job.open_seq, job.num_computed)
            if (self._pool.written[table] < needed).any():
                self.save_running()

    def clear(self) -> None:
        """Overwrite all cells; residents of requests that run are restored when they are needed."""
        for resident in self.residents.by_owner.values():
            self.save_all(resident)
        self.residents.clear(data=True)

    def logits(self, step: Step, _: object) -> torch.Tensor:
        """Return the logits `[len(step.logit_rows), vocab]` of a step that was planned."""
        self.copy()
        asked = np.zeros(len(step.tokens), np.int8)
        asked[step.logit_rows] = 1
        ends = np.cumsum(step.lengths)
        self._note_begun(step)
        self._cut_guessed(step)
        starts: list[int] = step.starts.tolist()
        parts = [
            _Part(job, start, step.tokens[end - length : end], asked[end - length : end])
            for job, start, length, end in zip(
                step.jobs, starts, step.lengths.tolist(), ends.tolist(), strict=True
            )
        ]
        order = sorted(range(len(parts)), key=lambda at: self._prefix(parts[at]))
        self.residents.begin_step()
        if self.before_forward is not None:
            self.before_forward()
        logits = np.concatenate(self._computed([parts[at] for at in order]))
        self.model.model.check_files()
        jobs = np.searchsorted(ends, step.logit_rows, side="right")
        rows = np.argsort(np.argsort(np.argsort(order)[jobs], kind="stable"))
        return torch.from_numpy(logits[rows])  # pyright: ignore[reportUnknownMemberType]

    def reset(self) -> None:
        """Do nothing: a step leaves only what the next one cuts off."""

    # -- within ----------------------------------------------------------------------------

    def _note_begun(self, step: Step) -> None:
        """Take note that rows of the blocks that a step writes to are in the context alone."""
        if self._pool is None:
            return
        size, written = self._pool.layout.block_size, self._pool.written
        seqs = [job.open_seq for job in step.jobs]
        first = step.starts // size
        ids = blocks_at(self.manager, seqs, first[:, None])[:, 0]
        written[ids] = np.minimum(written[ids], step.starts - first * size)
        last = (step.starts + step.lengths - 1) // size
        for at in np.flatnonzero(last > first).tolist():
            written[seqs[at].block_ids()[first[at] + 1 : last[at] + 1]] = 0

    def _cut_guessed(self, step: Step) -> None:
        """Forget rows of tokens that were guessed wrongly, before a resident that has to go is saved with them."""
        for job, start in zip(step.jobs, step.starts.tolist(), strict=True):
            if (resident := self.residents.by_owner.get(job.open_seq)) is not None:
                self.residents.cut(resident, start)

    def _prefix(self, part: _Part) -> bytes | bytearray:
        """Return the tokens before a part: by them parts are sorted, as attention reads once what neighbours share."""
        resident = self.residents.by_owner.get(part.job.open_seq)
        return part.job.known(0, part.start).tobytes() if resident is None else resident.key

    def _computed(self, parts: list[_Part]) -> list[npt.NDArray[np.float32]]:
        """Compute parts of a step; where the context has no room for all of them, one half after the other."""
        if sum(len(part.tokens) for part in parts) <= self._context.num_batch:
            needed = {part.job.open_seq for part in parts}
            while True:
                try:
                    return [self._decoded(parts, needed)]
                except NoCells:
                    try:
                        self.residents.make_room(needed)
                    except NoCells:
                        break
        if len(parts) > 1:
            middle = len(parts) // 2
            return self._computed(parts[:middle]) + self._computed(parts[middle:])
        if len(parts[0].tokens) > 1:
            first, second = parts[0].halves()
            return self._computed([first]) + self._computed([second])
        raise QuireError(
            f"the context of {self._context.num_cells} cells has no room for a request of {parts[0].start + 1} "
            "tokens; give a larger n_ctx, or a lower max_model_len"
        )

    def _decoded(self, parts: list[_Part], needed: set[Sequence]) -> npt.NDArray[np.float32]:
        residents = [self._settled(part, needed) for part in parts]
        pairs = zip(residents, parts, strict=True)
        logits = self._context.decode(
            [Chunk(each.ids, part.start, part.tokens, part.asked) for each, part in pairs]
        )
        for resident, part in zip(residents, parts, strict=True):
            resident.key += part.tokens.tobytes()
            resident.used = self.residents.step
            if self._states is not None:
                self._states.written[self._working(part.job.open_seq)] = False
        return logits

    def _settled(self, part: _Part, needed: set[Sequence]) -> Resident:
        """Return the resident of a job, with all positions before the part and no others."""
        seq = part.job.open_seq
        resident = self.residents.by_owner.get(seq)
        if resident is None:
            scope, key = seq.scope, part.job.known(0, part.start).tobytes()
            resident = self.residents.adopt(seq, scope, key, needed)
        if resident.num_tokens < part.start:
            self._restore(resident, part)
        if resident.lacks_state and self._states is not None:
            block = self._working(seq)
            if not self._states.written[block]:
                raise InvariantError(
                    f"the state behind {part.start} tokens is in no context and in no block"
                )
            self._context.restore_recurrent(self._states.read_state(block), resident.ids[0])
        resident.lacks_state = False
        return resident

    def _restore(self, resident: Resident, part: _Part) -> None:
        """Bring what a resident lacks before a part from its blocks. Raises `NoCells`, with some of it there."""
        if self._pool is None:
            resident.key[:] = part.job.known(0, part.start).tobytes()
            return
        table, size = part.job.open_seq.block_ids(), self._pool.layout.block_size
        for start in range(resident.num_tokens, part.start, PIECE):
            stop = min(start + PIECE, part.start)
            positions = np.arange(start, stop)
            lacks = self._pool.written[table[positions // size]] <= positions % size
            if lacks.any():
                raise InvariantError(
                    f"position {positions[lacks][0]} is in no context and in no block"
                )
            rows = self._pool.read_rows(table, start, stop)
            self._context.restore(rows, resident.ids, start)
            resident.key += part.job.known(start, stop).tobytes()

    def save(self, resident: Resident, moved: Mapping[int, BlockCopy] | None = None) -> None:
        """Write rows to blocks that only a resident has; for a block in `moved`, to the source of its copy.

        `moved`  None: those of the copies that are planned now
        """
        if self._pool is None:
            return
        size, written = self.manager.block_size, self._pool.written
        table, needed = self._placed(resident.owner, resident.num_tokens, moved)
        lacks = np.flatnonzero(written[table] < needed)
        begins = lacks * size + written[table[lacks]]
        ends = lacks * size + needed[lacks]
        while len(begins):
            num = int(np.argmax(np.append(begins[1:] != ends[:-1], True))) + 1
            self._save_range(resident, self._pool, table, (int(begins[0]), int(ends[num - 1])))
            begins, ends = begins[num:], ends[num:]
        written[table[lacks]] = needed[lacks]

    def _placed(
        self, seq: Any, num_tokens: int, moved: Mapping[int, BlockCopy] | None = None
    ) -> tuple[IntArray, IntArray]:
        """Return the blocks of a sequence's first tokens, and how many each one has; `moved` as for `save`."""
        moved = self._moved() if moved is None else moved
        size = self.manager.block_size
        table = seq.block_ids()[: -(-num_tokens // size)].copy()
        needed = np.minimum(num_tokens - np.arange(len(table)) * size, size)
        for at, block in enumerate(table.tolist()) if moved else ():
            if (copy := moved.get(block)) is not None:
                table[at], needed[at] = copy.src, min(needed[at], copy.num_tokens)
        return table, needed

    def _save_range(
        self, resident: Resident, pool: HostPool, table: IntArray, extent: tuple[int, int]
    ) -> None:
        for begin in range(*extent, PIECE):
            rows = self._context.save(resident.ids[0], begin, min(begin + PIECE, extent[1]))
            pool.write_rows(table, begin, rows)

    def _working(self, seq: Sequence) -> int:
        """Return the block of the state that a sequence works on."""
        return int(seq.block_ids(len(self.pools) - 1)[0])

    def is_forked(self, seq: Sequence) -> bool:
        """Whether another sequence goes on from the state that this one works on."""
        group, open_seqs = len(self.pools) - 1, self.manager.sequences.values()
        first = [each.block_ids(group)[:1].tolist() for each in open_seqs]
        return first.count([self._working(seq)]) > 1

    def save_all(self, resident: Resident) -> None:
        """Write to blocks what only a resident has, its state too."""
        self.save(resident)
        if self._states is not None and not resident.lacks_state:
            block = self._working(resident.owner)  # pyright: ignore[reportArgumentType] - it runs
            self._states.write_state(block, self._context.save_recurrent(resident.ids[0]))

    def _save_copied(self, states: HostStates, plan: list[BlockCopy]) -> None:
        """Write to blocks the states that planned copies read, and that only residents have."""
        own = [each for each in plan if self.pools[each.group] is states]
        moved, read = {each.dst: each.src for each in own}, {each.src for each in own}
        for seq, resident in self.residents.by_owner.items():
            block = self._working(seq)
            block = moved.get(block, block)
            if block in read and not states.written[block]:
                states.write_state(block, self._context.save_recurrent(resident.ids[0]))
        if lacking := [each for each in sorted(read) if not states.written[each]]:
            raise InvariantError(
                f"the state of block {lacking[0]} is in no context and in no block"
            )


class _Keeper(EngineCompanion):
    """The part of a forward that sees requests end: what only the context has goes to blocks first."""

    def __init__(self, forward: GgufForward, context: Context) -> None:
        self._forward, self._context = forward, context

    def before_step(self, scheduler: Scheduler) -> None:
        """Leave drafts out where there are recurrent states, which cannot go back behind a wrong one."""
        if self._context.state_bytes:
            for job in scheduler.queues.decoding:
                job.drafts = None

    def keep(self, job: Job) -> None:
        """Write a job's rows before its blocks are given back, which its forks may share; its resident outlives it.

        One with a recurrent state does not: no other prompt goes on where it stands.
        """
        residents = self._forward.residents
        if (resident := residents.by_owner.get(job.open_seq)) is None:
            pass  # it has computed nothing yet
        elif self._context.state_bytes:
            if self._forward.manager.kernel.copies:  # of snapshots: next it is too late
                self._forward.copy()
            if resident.num_tokens == job.num_computed and self._forward.is_forked(job.open_seq):
                self._forward.save_all(resident)
            del resident.key[job.num_computed * TOKEN_BYTES :]  # of a step that failed
            self._forward.save(resident)
            residents.drop(job.open_seq)
        else:
            residents.cut(resident, job.num_computed)
            self._forward.save(resident)
            residents.release(job.open_seq)
        self._forward.save_shared(job)

    def purge(self, scope: Scope, is_own: Callable[[Scope], bool], timeout_s: float) -> int:
        """Overwrite all cells; the residents of other tenants are restored when they are needed."""
        self._forward.clear()
        return 0

    def recover(self) -> None:
        """Forget all residents, as all blocks are dropped next."""
        self._forward.residents.clear()

    def close(self) -> None:
        """Free the context."""
        self._context.close()
