"""Records on a local disk: slabs of recycled slots and a log."""

from quire.tiers.disk.reader import DiskReader
from quire.tiers.disk.tier import Disk

__all__ = ["Disk", "DiskReader"]
