"""What would more memory give, what was evicted, what comes back: watchers and policies that look ahead from what was."""

from quire.foresight.curve import LiveCurve
from quire.foresight.learned import Learned
from quire.foresight.ranked import RankedPolicy
from quire.foresight.trail import Trail
from quire.foresight.whatif import WhatIf

__all__ = ["Learned", "LiveCurve", "RankedPolicy", "Trail", "WhatIf"]
