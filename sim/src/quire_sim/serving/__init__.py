"""Serving, simulated: requests over replicas that batch continuously, on the real cache manager."""

from quire_sim.serving.arrivals import (
    ClosedLoop,
    PoissonArrivals,
    TraceArrivals,
    parse_arrivals,
)
from quire_sim.serving.metrics import Objective, ServingResult
from quire_sim.serving.replica import ReplicaLimits
from quire_sim.serving.requests import Served
from quire_sim.serving.simulate import Cluster, Load, simulate

__all__ = [
    "ClosedLoop",
    "Cluster",
    "Load",
    "Objective",
    "PoissonArrivals",
    "ReplicaLimits",
    "Served",
    "ServingResult",
    "TraceArrivals",
    "parse_arrivals",
    "simulate",
]
