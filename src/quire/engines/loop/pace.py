"""The pace of an engine's steps."""

from quire.engines.companions import EngineCompanion
from quire.scheduling import StepPace


class EnginePace(StepPace, EngineCompanion):
    """A `StepPace` that learns from an engine's steps."""
