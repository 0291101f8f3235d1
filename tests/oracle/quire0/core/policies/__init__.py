"""What to evict: one policy per file, all behind the interface in `base`."""

from quire0.core.policies.arc import Arc
from quire0.core.policies.base import (
    Capacity,
    Entry,
    Policy,
    PolicyFactory,
    RankedPolicy,
    Tick,
    Visit,
)
from quire0.core.policies.fifo import Fifo
from quire0.core.policies.gdsf import Gdsf
from quire0.core.policies.learned import Learned
from quire0.core.policies.lfu import Lfu
from quire0.core.policies.lru import Lru
from quire0.core.policies.s3fifo import S3Fifo
from quire0.core.policies.sieve import Sieve
from quire0.core.policies.two_q import TwoQ
from quire0.core.policies.w_tinylfu import WTinyLfu

POLICIES: dict[str, PolicyFactory] = {
    "2q": TwoQ,
    "arc": Arc,
    "fifo": Fifo,
    "gdsf": Gdsf,
    "learned": Learned,
    "lfu": Lfu,
    "lru": Lru,
    "s3fifo": S3Fifo,
    "sieve": Sieve,
    "w-tinylfu": WTinyLfu,
}

__all__ = [
    "POLICIES",
    "Arc",
    "Capacity",
    "Entry",
    "Fifo",
    "Gdsf",
    "Learned",
    "Lfu",
    "Lru",
    "Policy",
    "PolicyFactory",
    "RankedPolicy",
    "S3Fifo",
    "Sieve",
    "Tick",
    "TwoQ",
    "Visit",
    "WTinyLfu",
]
