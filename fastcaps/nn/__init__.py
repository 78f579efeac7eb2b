"""Modules: routing layers, stacks of them, primary capsules and heads."""

from fastcaps.nn.capsnet import CapsNet
from fastcaps.nn.convert import Conversion, ConversionReport, convert
from fastcaps.nn.head import ClassHead
from fastcaps.nn.inverted_attention import InvertedAttentionRouting
from fastcaps.nn.primary import PrimaryCapsules
from fastcaps.nn.stack import CapsuleSpec, RoutingStack, RoutingTrace

__all__ = [
    "CapsNet",
    "CapsuleSpec",
    "ClassHead",
    "Conversion",
    "ConversionReport",
    "InvertedAttentionRouting",
    "PrimaryCapsules",
    "RoutingStack",
    "RoutingTrace",
    "convert",
]
