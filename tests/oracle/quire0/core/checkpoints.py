"""Checkpoints: at which lengths the states of recurrent groups are kept."""

from __future__ import annotations

from quire0.core.blocks import GAP
from quire0.core.copies import BlockCopy, CopyPlan
from quire0.core.room import Room
from quire0.core.rows import Rows
from quire0.core.sequence import Sequence
from quire.errors import CheckpointError


class Checkpoints:
    """Copies the states that sequences work on into snapshots that others can find."""

    def __init__(self, rows: Rows, copies: CopyPlan, room: Room) -> None:
        self._rows = rows
        self.copies = copies
        self._room = room

    def stops(self, seq: Sequence) -> list[int]:
        """Return the lengths ahead at which a forward should end; see `CacheManager.stops`."""
        rows = self._rows
        if not rows.states:
            return []
        size = rows.block_size
        last = max(seq.known_end, seq.computed)
        found = set(self._ends(seq))
        for state in rows.states:
            if state.interval is not None:
                first = seq.computed // state.interval * state.interval
                found.update(end // size * size for end in range(first, last, state.interval))
        return sorted(stop for stop in found if seq.computed < stop < last)

    def keep_if_due(self, seq: Sequence) -> None:
        """Keep a snapshot if the sequence has come to one of its stops."""
        computed, size = seq.computed, self._rows.block_size
        if computed % size or not computed or seq.private_key:
            return
        regular = (
            -(-computed // state.interval) * state.interval < computed + size
            for state in self._rows.states
            if state.interval is not None
        )
        if computed in self._ends(seq) or any(regular):
            self._keep(seq, passing=False)

    def keep(self, seq: Sequence) -> bool:
        """Keep a snapshot now; see `CacheManager.checkpoint`."""
        computed, size = seq.computed, self._rows.block_size
        if not self._rows.states:
            raise CheckpointError("no layer group is recurrent; there is no state to keep")
        slots = [self._rows.flat[state.index][seq.row] for state in self._rows.states]
        if computed % size or not computed or GAP in slots:
            msg = (
                f"checkpoint at {computed} computed tokens; a state can be kept where a block of "
                f"{size} tokens ends that this sequence has computed: commit up to one of "
                "stops(seq) first"
            )
            raise CheckpointError(msg)
        return not seq.private_key and self._keep(seq, passing=True)

    def _keep(self, seq: Sequence, *, passing: bool) -> bool:
        rows = self._rows
        missing = [state for state in rows.states if state.snapshot(seq.node, seq.node.end) is None]
        if any(state.pool.num_available < 1 for state in missing):
            return False
        for state in missing:
            if not state.pool.num_free:
                self._room.evict_sparse(state, 1)
            block = state.pool.allocate(1)[0]
            state.keep(seq.node, block, passing=passing)
            working = rows.flat[state.index][seq.row]
            self.copies.plan(BlockCopy(state.index, working, block, 1))
        return True

    def _ends(self, seq: Sequence) -> tuple[int, int]:
        """Return where a prompt like this can still start: at its end, and at its branch point."""
        size = self._rows.block_size
        return (seq.prompt_len - 1) // size * size, seq.branch // size * size
