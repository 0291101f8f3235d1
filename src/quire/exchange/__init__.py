"""Prefixes that go elsewhere and come back: for tiers below the pools, and for other processes."""

from quire.exchange.kept import Prefix, all_blocks, blocks_of, prefixes
from quire.exchange.restore import Residency, Restore, hold, required_blocks, residency, restore

__all__ = [
    "Prefix",
    "Residency",
    "Restore",
    "all_blocks",
    "blocks_of",
    "hold",
    "prefixes",
    "required_blocks",
    "residency",
    "restore",
]
