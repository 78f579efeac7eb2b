"""Modules: routing layers, stacks of them, primary capsules and heads."""

from fastcaps.nn.cap_conv import CapConv2d, CapFC
from fastcaps.nn.capsnet import CapsNet
from fastcaps.nn.convert import Conversion, ConversionReport, convert
from fastcaps.nn.dynamic import DynamicRouting
from fastcaps.nn.em import EMRouting
from fastcaps.nn.equilibrium import EquilibriumRouting
from fastcaps.nn.feedback import FeedbackAgreement
from fastcaps.nn.head import ClassHead
from fastcaps.nn.heinsen import HeinsenRouting
from fastcaps.nn.inverted_attention import InvertedAttentionRouting
from fastcaps.nn.layer import RoutingLayer
from fastcaps.nn.primary import PrimaryCapsules
from fastcaps.nn.routing_pool import RoutingPool, RoutingPool2d
from fastcaps.nn.stack import CapsuleSpec, RoutingStack, RoutingTrace

__all__ = [
    "CapConv2d",
    "CapFC",
    "CapsNet",
    "CapsuleSpec",
    "ClassHead",
    "Conversion",
    "ConversionReport",
    "DynamicRouting",
    "EMRouting",
    "EquilibriumRouting",
    "FeedbackAgreement",
    "HeinsenRouting",
    "InvertedAttentionRouting",
    "PrimaryCapsules",
    "RoutingLayer",
    "RoutingPool",
    "RoutingPool2d",
    "RoutingStack",
    "RoutingTrace",
    "convert",
]
