"""Planning: capacity in users, the gain from more memory, and the use of tiers."""

from quire_sim.plan.blocks import advise
from quire_sim.plan.crossover import crossover
from quire_sim.plan.memory import Budget, Placement, blocks_that_fit, budget
from quire_sim.plan.planning import DeploymentPlan, plan
from quire_sim.plan.value import LruHits, Worth, worth_of

__all__ = [
    "Budget",
    "DeploymentPlan",
    "LruHits",
    "Placement",
    "Worth",
    "advise",
    "blocks_that_fit",
    "budget",
    "crossover",
    "plan",
    "worth_of",
]
