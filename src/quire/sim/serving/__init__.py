"""Serving, simulated: requests over replicas that batch continuously, on the real cache manager."""

from quire.sim.serving.arrivals import (
    Arrivals,
    ClosedLoop,
    PoissonArrivals,
    TraceArrivals,
    parse_arrivals,
)
from quire.sim.serving.metrics import Objective, ServingResult
from quire.sim.serving.replica import Limits, Timing
from quire.sim.serving.requests import Served
from quire.sim.serving.router import PrefixAware, Router, least_loaded, round_robin, router_named
from quire.sim.serving.simulate import Cluster, Load, simulate

__all__ = [
    "Arrivals",
    "ClosedLoop",
    "Cluster",
    "Limits",
    "Load",
    "Objective",
    "PoissonArrivals",
    "PrefixAware",
    "Router",
    "Served",
    "ServingResult",
    "Timing",
    "TraceArrivals",
    "least_loaded",
    "parse_arrivals",
    "round_robin",
    "router_named",
    "simulate",
]
