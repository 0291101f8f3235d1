"""Serving, simulated: requests over replicas that batch continuously, on the real cache manager."""

from quire.sim.serving.arrivals import (
    ClosedLoop,
    PoissonArrivals,
    TraceArrivals,
    parse_arrivals,
)
from quire.sim.serving.metrics import Objective, ServingResult
from quire.sim.serving.replica import Limits
from quire.sim.serving.requests import Served
from quire.sim.serving.router import PrefixAware, router_named
from quire.sim.serving.simulate import Cluster, Load, simulate

__all__ = [
    "ClosedLoop",
    "Cluster",
    "Limits",
    "Load",
    "Objective",
    "PoissonArrivals",
    "PrefixAware",
    "Served",
    "ServingResult",
    "TraceArrivals",
    "parse_arrivals",
    "router_named",
    "simulate",
]
