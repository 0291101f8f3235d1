"""Records in a Mooncake Store."""

from quire.tiers.mooncake.tier import Mooncake

__all__ = ["Mooncake"]
