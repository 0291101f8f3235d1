"""Models, accelerators, and the roofline of both: bytes, FLOPs and seconds."""

from quire_sim.hardware.accelerators import Accelerator, accelerator_named, accelerator_names
from quire_sim.hardware.calibration import calibrate
from quire_sim.hardware.config import model_facts
from quire_sim.hardware.engine_times import EngineTimes
from quire_sim.hardware.facts import KVBytes, ModelFacts
from quire_sim.hardware.models import model_named, published
from quire_sim.hardware.roofline import Attention, ModelTimes, Roofline
from quire_sim.hardware.tiers import MemoryTier

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
