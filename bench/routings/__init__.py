"""The kinds of routing that a workload can be: what each takes, what it costs, and who can run it."""

from bench.routings.attention import AttentionPass
from bench.routings.base import Implementation, Routing
from bench.routings.dynamic import DynamicRouting
from bench.routings.em import EMRouting
from bench.routings.heinsen import HeinsenRouting
from bench.routings.pooling import RoutingPool

__all__ = [
    "AttentionPass",
    "DynamicRouting",
    "EMRouting",
    "HeinsenRouting",
    "Implementation",
    "Routing",
    "RoutingPool",
]
