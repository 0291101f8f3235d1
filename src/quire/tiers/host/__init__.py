"""Records in the memory of this process."""

from quire.tiers.host.tier import Host

__all__ = ["Host"]
