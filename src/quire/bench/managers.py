"""The managers that the rows measure, with what is switched on beside the cache itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from quire.bench.workloads import BLOCK_SIZE
from quire.core import CacheManager
from quire.exchange import EventLog
from quire.foresight import LiveCurve


@dataclass(frozen=True)
class Features:
    """What a manager does beside caching: `events` to take, a `curve` to ask."""

    events: bool = False
    curve: bool = False


PLAIN = Features()

Built = tuple[CacheManager, Callable[[], object]]
"""A manager, and the call that takes the events it has recorded."""


def make_manager(num_blocks: int, features: Features = PLAIN) -> Built:
    """Make a manager of one full-attention group."""
    return build(num_blocks, BLOCK_SIZE, features)


def build(num_blocks: int, block_size: int, features: Features) -> Built:
    """Make a manager as this core spells the features; `benchmarks/rows_on_core.py` replaces it for older ones."""
    log = EventLog()
    watchers = [log] * features.events + [LiveCurve()] * features.curve
    return CacheManager(num_blocks, block_size, watchers=watchers), log.take
