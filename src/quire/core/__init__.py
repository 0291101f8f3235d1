"""The control plane: which blocks hold which tokens. No tensors, no clock, no randomness."""

from quire.core.blocks import BlockCopy
from quire.core.decode import BlockTables, DecodeBatch
from quire.core.groups import FullAttention, Kind, LayerGroup
from quire.core.kernel import Watcher
from quire.core.lookup import Hit
from quire.core.manager import CacheManager
from quire.core.policy import Entry, Policy
from quire.core.sequence import Sequence
from quire.core.stats import Stats
from quire.core.terms import Hint
from quire.media import MediaItem
from quire.scope import Scope

__all__ = [
    "BlockCopy",
    "BlockTables",
    "CacheManager",
    "DecodeBatch",
    "Entry",
    "FullAttention",
    "Hint",
    "Hit",
    "Kind",
    "LayerGroup",
    "MediaItem",
    "Policy",
    "Scope",
    "Sequence",
    "Stats",
    "Watcher",
]
