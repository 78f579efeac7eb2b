"""Modules: routing layers, stacks of them, primary capsules and heads."""

from fastcaps.checks import suggest
from fastcaps.nn.capsnet import CapsNet
from fastcaps.nn.dynamic import DynamicRouting
from fastcaps.nn.em import EMRouting
from fastcaps.nn.head import ClassHead
from fastcaps.nn.heinsen import HeinsenRouting
from fastcaps.nn.inverted_attention import InvertedAttentionRouting
from fastcaps.nn.layer import RoutingLayer
from fastcaps.nn.primary import PrimaryCapsules
from fastcaps.nn.routing_pool import RoutingPool, RoutingPool2d
from fastcaps.nn.stack import CapsuleSpec, RoutingStack, RoutingTrace

__all__ = [
    "CapsNet", "CapsuleSpec", "ClassHead", "DynamicRouting", "EMRouting", "HeinsenRouting",
    "InvertedAttentionRouting", "PrimaryCapsules", "RoutingLayer", "RoutingPool", "RoutingPool2d", "RoutingStack",
    "RoutingTrace",
]  # fmt: skip
suggest(__name__)
