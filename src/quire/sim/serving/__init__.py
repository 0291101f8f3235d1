"""Serving, simulated: requests over replicas that batch continuously, on the real cache manager."""

from quire.sim.serving.arrivals import (
    ClosedLoop,
    PoissonArrivals,
    TraceArrivals,
    parse_arrivals,
)
from quire.sim.serving.metrics import Objective, ServingResult
from quire.sim.serving.replica import ReplicaLimits
from quire.sim.serving.requests import Served
from quire.sim.serving.simulate import Cluster, Load, simulate

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
