"""Records on a local disk: slabs of recycled places and a log."""

from quire.tiers.disk.tier import Disk

__all__ = ["Disk"]
