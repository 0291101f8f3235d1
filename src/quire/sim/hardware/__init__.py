"""Models, accelerators, and the roofline of both: bytes, FLOPs and seconds."""

from quire.sim.hardware.accelerators import Accelerator, accelerator_named, accelerator_names
from quire.sim.hardware.calibration import calibrate
from quire.sim.hardware.config import model_facts
from quire.sim.hardware.engine_times import EngineTimes
from quire.sim.hardware.facts import KVBytes, ModelFacts
from quire.sim.hardware.models import model_named, published
from quire.sim.hardware.roofline import Attention, ModelTimes, Roofline
from quire.sim.hardware.tiers import MemoryTier

__all__ = [
    "Accelerator",
    "Attention",
    "EngineTimes",
    "KVBytes",
    "MemoryTier",
    "ModelFacts",
    "ModelTimes",
    "Roofline",
    "accelerator_named",
    "accelerator_names",
    "calibrate",
    "model_facts",
    "model_named",
    "published",
]
