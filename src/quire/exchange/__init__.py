"""The cache as other processes and tiers see it: events, digests, spills and restores."""

from quire.exchange.digests import Digests, digests_of
from quire.exchange.events import AllBlocksCleared, BlockRemoved, BlockStored, Event, EventLog
from quire.exchange.export import Prefix, all_blocks, blocks_of, prefixes
from quire.exchange.hashing import block_hashes
from quire.exchange.residency import Residency, required_blocks, residency
from quire.exchange.restore import Restore, hold, restore
from quire.exchange.spill import NamedBlock, Spill

__all__ = [
    "AllBlocksCleared",
    "BlockRemoved",
    "BlockStored",
    "Digests",
    "Event",
    "EventLog",
    "NamedBlock",
    "Prefix",
    "Residency",
    "Restore",
    "Spill",
    "all_blocks",
    "block_hashes",
    "blocks_of",
    "digests_of",
    "hold",
    "prefixes",
    "required_blocks",
    "residency",
    "restore",
]
