"""Routing by agreement as functions of tensors.

Every tensor may have any strides, and nothing of size children x parents x pose is ever stored. A wrong argument raises
before anything runs: TypeError for what is not a tensor or has a dtype that cannot be taken, ValueError for shapes,
counts, devices and windows.
"""

from fastcaps.explanation import Explanation, Explanations
from fastcaps.functional.explaining import explain
from fastcaps.functional.inverted_attention import inverted_attention_routing
from fastcaps.functional.uniform import uniform_pass
from fastcaps.geometry import Window

__all__ = [
    "Explanation",
    "Explanations",
    "Window",
    "explain",
    "inverted_attention_routing",
    "uniform_pass",
]
