"""Records in Redis or Valkey."""

from quire.tiers.redis.tier import Redis

__all__ = ["Redis"]
