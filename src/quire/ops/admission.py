"""Admission of a sequence that needs no room: it goes on with what it found."""

from __future__ import annotations

from quire.core.manager import CacheManager
from quire.core.sequence import Sequence
from quire.core.take import settle
from quire.interrupts import mutating


@mutating
def admit(manager: CacheManager, seq: Sequence) -> None:
    """Count a request that uses what it found, as the first `reserve` that succeeds does.

    For one that is served whether or not there is room. Pins whose time is over are let go. A sequence that was counted
    stays as it is. Raises `SequenceError`.
    """
    manager.check_open(seq)
    manager.kernel.holds.let_go_expired()
    if seq.pending is not None:
        settle(manager.kernel, seq, seq.pending)
