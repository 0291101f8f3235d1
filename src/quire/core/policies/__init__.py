"""What to evict: one policy per file, all behind the interface in `base`."""

from quire.core.policies.base import (
    Capacity,
    Entry,
    Policy,
    PolicyFactory,
    RankedPolicy,
    Tick,
    Visit,
)
from quire.core.policies.fifo import Fifo
from quire.core.policies.learned import Learned
from quire.core.policies.lfu import Lfu
from quire.core.policies.lru import Lru

POLICIES: dict[str, PolicyFactory] = {
    "fifo": Fifo,
    "learned": Learned,
    "lfu": Lfu,
    "lru": Lru,
}

__all__ = [
    "POLICIES",
    "Capacity",
    "Entry",
    "Fifo",
    "Learned",
    "Lfu",
    "Lru",
    "Policy",
    "PolicyFactory",
    "RankedPolicy",
    "Tick",
    "Visit",
]
