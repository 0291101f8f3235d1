"""What would more memory give, and what was evicted: watchers that look ahead from what was."""

from quire.foresight.curve import Curve
from quire.foresight.trail import Trail
from quire.foresight.whatif import WhatIf

__all__ = ["Curve", "Trail", "WhatIf"]
