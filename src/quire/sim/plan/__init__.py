"""Planning: what fits, for whom, what more memory buys, and when a tier is worth asking."""

from quire.sim.plan.blocks import BlockAdvice, BlockChoice, advise
from quire.sim.plan.crossover import Crossover, crossover
from quire.sim.plan.memory import Budget, Placement, budget
from quire.sim.plan.planning import Plan, Speed, TierPlan, TraceFacts, plan
from quire.sim.plan.value import Workload, Worth

__all__ = [
    "BlockAdvice",
    "BlockChoice",
    "Budget",
    "Crossover",
    "Placement",
    "Plan",
    "Speed",
    "TierPlan",
    "TraceFacts",
    "Workload",
    "Worth",
    "advise",
    "budget",
    "crossover",
    "plan",
]
