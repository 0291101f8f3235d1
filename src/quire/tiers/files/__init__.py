"""Records as files that processes share."""

from quire.tiers.files.tier import Files

__all__ = ["Files"]
