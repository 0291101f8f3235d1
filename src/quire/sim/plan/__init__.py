"""Planning: what fits, for whom, what more memory buys, and when a tier is worth asking."""

from quire.sim.plan.blocks import BlockAdvice, BlockChoice, advise
from quire.sim.plan.crossover import Crossover, crossover
from quire.sim.plan.memory import Budget, Placement, budget
from quire.sim.plan.planning import DeploymentPlan, PlannedTrace, Speed, TierPlan, plan
from quire.sim.plan.value import LruHits, Worth, worth_of

__all__ = [
    "BlockAdvice",
    "BlockChoice",
    "Budget",
    "Crossover",
    "DeploymentPlan",
    "LruHits",
    "Placement",
    "PlannedTrace",
    "Speed",
    "TierPlan",
    "Worth",
    "advise",
    "budget",
    "crossover",
    "plan",
    "worth_of",
]
