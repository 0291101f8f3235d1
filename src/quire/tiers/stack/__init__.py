"""Several tiers as one: lanes, deadlines, write policies, the cost gate."""

from quire.tiers.stack.settings import StackSettings, TierSettings
from quire.tiers.stack.stack import TierStack

__all__ = ["StackSettings", "TierSettings", "TierStack"]
