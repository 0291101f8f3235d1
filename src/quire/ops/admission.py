"""Admission of a sequence that needs no room: it continues with its hit."""

from __future__ import annotations

from quire.core.manager import CacheManager
from quire.core.sequence import Sequence
from quire.core.take import reserve
from quire.errors import OutOfBlocks
from quire.interrupts import mutating
from quire.ops.rollback import go_back


@mutating
def admit(manager: CacheManager, seq: Sequence) -> None:
    """Count a request that uses its hit, as the first `reserve` that succeeds does.

    For a request that is served whether or not there is room. If no block can be had for the copy of a shared head, the
    head is given up and `seq.computed` shrinks to whole blocks. Pins whose time is over are let go. A sequence that was counted stays as it is.
    Raises `SequenceError`.
    """
    manager.check_open(seq)
    kernel = manager.kernel
    kernel.holds.let_go_expired()
    if seq.pending is None:
        return
    try:
        reserve(kernel, seq, 0)
    except OutOfBlocks:
        go_back(kernel, seq, seq.published)
        seq.num_cached = seq.computed
        reserve(kernel, seq, 0)
