"""What would more memory give, and what was evicted: watchers that look ahead from what was."""

from quire.foresight.curve import LiveCurve
from quire.foresight.trail import Trail
from quire.foresight.whatif import WhatIf

__all__ = ["LiveCurve", "Trail", "WhatIf"]
