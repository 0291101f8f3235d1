"""The control plane: which blocks hold which tokens. No tensors, no clock, no randomness."""

from quire.core.copies import BlockCopy
from quire.core.decode import BlockTables, DecodeBatch
from quire.core.events import AllBlocksCleared, BlockRemoved, BlockStored, Event
from quire.core.evictions import NamedBlock
from quire.core.groups import (
    ChunkedAttention,
    FullAttention,
    LayerGroup,
    Recurrent,
    SlidingWindow,
)
from quire.core.hashing import block_hashes
from quire.core.hints import Hint
from quire.core.lookup import Hit
from quire.core.manager import CacheManager
from quire.core.pins import Pin
from quire.core.policies import Entry, Policy, RankedPolicy, Visit
from quire.core.scope import MediaItem, Scope
from quire.core.sequence import Observer, Sequence
from quire.core.stats import Stats

__all__ = [
    "AllBlocksCleared",
    "BlockCopy",
    "BlockRemoved",
    "BlockStored",
    "BlockTables",
    "CacheManager",
    "ChunkedAttention",
    "DecodeBatch",
    "Entry",
    "Event",
    "FullAttention",
    "Hint",
    "Hit",
    "LayerGroup",
    "MediaItem",
    "NamedBlock",
    "Observer",
    "Pin",
    "Policy",
    "RankedPolicy",
    "Recurrent",
    "Scope",
    "Sequence",
    "SlidingWindow",
    "Stats",
    "Visit",
    "block_hashes",
]
