"""Routing functions of tensors.

Tensors may have any strides. Kernels store nothing of size batch x children x parents; the reference does, but no
votes. Invalid arguments raise before anything runs, with a message that names the argument: TypeError for a wrong type
or dtype, ValueError for wrong shapes, counts, devices and windows, :class:`~fastcaps.BackendError` if a forced backend
cannot take the call.
"""

from fastcaps.checks import suggest
from fastcaps.functional.dynamic import dynamic_routing
from fastcaps.functional.em import coordinate_bias, em_routing
from fastcaps.functional.explanation import Explanation, Explanations, explain
from fastcaps.functional.heinsen import heinsen_routing
from fastcaps.functional.inverted_attention import inverted_attention_routing
from fastcaps.functional.pooling import routing_pool
from fastcaps.functional.verbs import Votes
from fastcaps.results import Capsules, Gaussians, Routed, RoutedCapsules, RoutedGaussians
from fastcaps.vectors import length, softmax, squash, unit
from fastcaps.votes import Window

__all__ = [
    "Capsules", "Explanation", "Explanations", "Gaussians", "Routed", "RoutedCapsules", "RoutedGaussians", "Votes",
    "Window", "coordinate_bias", "dynamic_routing", "em_routing", "explain", "heinsen_routing",
    "inverted_attention_routing", "length", "routing_pool", "softmax", "squash", "unit",
]  # fmt: skip
suggest(__name__)
