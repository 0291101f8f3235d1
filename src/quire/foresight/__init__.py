"""Watchers and policies that use past requests: hit-rate curves, the learned policy, rankings."""

from quire.foresight.curve import LiveCurve
from quire.foresight.learned import Learned
from quire.foresight.ranked import RankedPolicy
from quire.foresight.trail import Trail
from quire.foresight.whatif import WhatIf

__all__ = ["Learned", "LiveCurve", "RankedPolicy", "Trail", "WhatIf"]
