"""What a model stores and computes, what an accelerator gives, and how long a step takes."""

from quire.sim.hardware.accelerators import Accelerator, accelerator_named, accelerator_names
from quire.sim.hardware.facts import KVBytes, ModelFacts
from quire.sim.hardware.models import model_named, model_names
from quire.sim.hardware.roofline import Attention, Roofline
from quire.sim.hardware.tiers import Tier

__all__ = [
    "Accelerator",
    "Attention",
    "KVBytes",
    "ModelFacts",
    "Roofline",
    "Tier",
    "accelerator_named",
    "accelerator_names",
    "model_named",
    "model_names",
]
