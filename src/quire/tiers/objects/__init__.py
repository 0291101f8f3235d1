"""Records in object stores."""

from quire.tiers.objects.tier import Objects

__all__ = ["Objects"]
