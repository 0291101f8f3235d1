"""The forward of one step: its copies, its block tables, its rows."""

import numpy as np
import torch

from quire.core import CacheManager
from quire.core.tokens import IntArray
from quire.engines.loop.attention import Packed
from quire.engines.loop.model import PackedModel
from quire.scheduling import Step
from quire.tensors.copy import apply_plan
from quire.tensors.pool import KVPool

_PAD = -1


class Forward:
    """Computes steps of a scheduler: KV into the pools, logits out.

    pools  one for each layer group of the manager
    """

    def __init__(self, model: PackedModel, manager: CacheManager, *, debug_nan: bool) -> None:
        self.model = model
        self.manager = manager
        groups = zip(model.layout.groups, manager.pools, strict=True)
        self.pools = [
            KVPool(group.memory, blocks.num_blocks, model.device, debug_nan=debug_nan)  # pyright: ignore[reportArgumentType] - no recurrent groups
            for group, blocks in groups
        ]
        self._plans = model.plans()

    def logits(self, step: Step) -> torch.Tensor:
        """Return the logits `[len(step.logit_rows), vocab]` of a step that was planned."""
        copies = self.manager.take_copies()
        if copies:
            apply_plan(self.pools, copies)
        seqs = [job.seq for job in step.jobs if job.seq is not None]
        starts, lengths = step.starts.astype(np.int64), step.lengths.astype(np.int64)
        for group, plan in enumerate(self._plans):
            tables = self.manager.tables(seqs, group, _PAD).padded
            plan.update(Packed(tables, starts, lengths))
        device = self.model.device
        ids, positions, rows = (
            torch.from_numpy(each.astype(np.int64)).to(device)  # pyright: ignore[reportUnknownMemberType]
            for each in (step.tokens, _positions(step), step.logit_rows)
        )
        return self.model.forward(ids, positions, rows, self._plans, self.pools)


def _positions(step: Step) -> IntArray:
    """Return the position of each row, [N]."""
    if len(step.tokens) == len(step.starts):
        return step.starts
    ends = np.cumsum(step.lengths)
    first = step.starts - (ends - step.lengths)
    return np.repeat(first, step.lengths) + np.arange(len(step.tokens), dtype=first.dtype)
