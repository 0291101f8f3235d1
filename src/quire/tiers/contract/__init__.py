"""The contract of all tiers, as pytest classes: bind one to a tier of your own.

Tests only: it needs pytest.
"""

from quire.tiers.contract.bounded import BoundedContract
from quire.tiers.contract.every import TierContract

__all__ = ["BoundedContract", "TierContract"]
