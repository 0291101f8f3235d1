"""The control plane: which blocks hold which tokens. No tensors, no clock, no randomness."""

from quire.core.copies import BlockCopy
from quire.core.decode import BlockTables, DecodeBatch
from quire.core.events import AllBlocksCleared, BlockRemoved, BlockStored, Event
from quire.core.groups import FullAttention, LayerGroup
from quire.core.hashing import block_hashes
from quire.core.lookup import Explanation, Hit, Segment
from quire.core.manager import CacheManager
from quire.core.pins import Pin
from quire.core.policies import Entry, Policy, RankedPolicy
from quire.core.scope import MediaItem, Scope
from quire.core.sequence import Sequence
from quire.core.slot_copies import SlotCopy
from quire.core.slot_handles import SlotHandle, SlotMatch, SlotPin, SlotStats
from quire.core.slots import SlotCache
from quire.core.stats import Stats

__all__ = [
    "AllBlocksCleared",
    "BlockCopy",
    "BlockRemoved",
    "BlockStored",
    "BlockTables",
    "CacheManager",
    "DecodeBatch",
    "Entry",
    "Event",
    "Explanation",
    "FullAttention",
    "Hit",
    "LayerGroup",
    "MediaItem",
    "Pin",
    "Policy",
    "RankedPolicy",
    "Scope",
    "Segment",
    "Sequence",
    "SlotCache",
    "SlotCopy",
    "SlotHandle",
    "SlotMatch",
    "SlotPin",
    "SlotStats",
    "Stats",
    "block_hashes",
]
