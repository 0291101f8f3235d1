"""The control plane: which blocks hold which tokens. No tensors, no clock, no randomness."""

from quire0.core.budget import GroupSize, split_budget
from quire0.core.copies import BlockCopy
from quire0.core.decode import BlockTables, DecodeBatch
from quire0.core.drafts import TokenMove
from quire0.core.events import AllBlocksCleared, BlockRemoved, BlockStored, Event
from quire0.core.evictions import NamedBlock
from quire0.core.fits import Fit
from quire0.core.groups import (
    ChunkedAttention,
    FullAttention,
    LayerGroup,
    Recurrent,
    SlidingWindow,
)
from quire0.core.hashing import block_hashes
from quire0.core.hints import Hint
from quire0.core.lookup import Explanation, Hit, Segment
from quire0.core.manager import CacheManager
from quire0.core.memory import Usage
from quire0.core.pins import Pin
from quire0.core.policies import Entry, Policy, RankedPolicy, Visit
from quire0.core.restore import Residency, Restore
from quire0.core.scope import MediaItem, Scope
from quire0.core.sequence import Observer, Sequence
from quire0.core.stats import Stats
from quire0.core.terms import TokenRange

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
    "Explanation",
    "Fit",
    "FullAttention",
    "GroupSize",
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
    "Residency",
    "Restore",
    "Scope",
    "Segment",
    "Sequence",
    "SlidingWindow",
    "Stats",
    "TokenMove",
    "TokenRange",
    "Usage",
    "Visit",
    "block_hashes",
    "split_budget",
]
