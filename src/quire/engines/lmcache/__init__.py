"""quire below LMCache: an L2 adapter whose objects lie in quire's tiers. `docs/lmcache.md` says how to use it.

adapter  `QuireL2Adapter`, by which LMCache calls; it alone imports LMCache
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from quire.engines.lmcache.adapter import QuireL2Adapter

__all__ = ["QuireL2Adapter"]


def __getattr__(name: str) -> object:
    """Load the adapter, and LMCache with it, when it is asked for."""
    if name != "QuireL2Adapter":
        raise AttributeError(f"module 'quire.engines.lmcache' has no attribute {name!r}")
    from quire.engines.lmcache.adapter import QuireL2Adapter  # noqa: PLC0415 - it needs LMCache

    return QuireL2Adapter
