"""Classes of published capsule code on fastcaps' kernels.

Each has that code's constructor, ``forward`` and parameters: a script runs after one changed import, and checkpoints
load both ways. :func:`convert` swaps the layers of a live model. A twin's module says what differs, docs/relation.md
which version of that code it follows.

======================= =============================================================
``ml_capsules``         ``CapsuleFC``, ``CapsuleCONV`` of Tsai et al. (2020)
``dense_capsule``       ``DenseCapsule`` of CapsNet-Pytorch: dynamic routing
``routing_capsules``    ``RoutingCapsules`` of capsule-network (D. Havir): dynamic routing
``caps_layer``          ``CapsLayer``, ``AgreementRouting`` of CapsNet-pytorch (A. Bielski): dynamic routing
``capsule_network``     ``CapsuleLayer`` of gram-ai's capsule-networks: dynamic routing
``digit_caps``          ``DigitCaps`` of capsule_net_pytorch (cezannec): dynamic routing
``matrix_capsules``     ``ConvCaps`` of Matrix-Capsules-EM-PyTorch: EM routing
``heinsen_routing``     ``GenerativeMatrixRouting`` of Heinsen (2019)
======================= =============================================================
"""

from fastcaps.compat import (
    caps_layer,
    capsule_network,
    dense_capsule,
    digit_caps,
    heinsen_routing,
    matrix_capsules,
    ml_capsules,
    routing_capsules,
)
from fastcaps.compat.caps_layer import AgreementRouting, CapsLayer
from fastcaps.compat.capsule_network import CapsuleLayer
from fastcaps.compat.convert import Conversion, ConversionReport, convert
from fastcaps.compat.dense_capsule import DenseCapsule
from fastcaps.compat.digit_caps import DigitCaps
from fastcaps.compat.matrix_capsules import ConvCaps
from fastcaps.compat.routing_capsules import RoutingCapsules

__all__ = [
    "AgreementRouting",
    "CapsLayer",
    "CapsuleLayer",
    "ConvCaps",
    "Conversion",
    "ConversionReport",
    "DenseCapsule",
    "DigitCaps",
    "RoutingCapsules",
    "caps_layer",
    "capsule_network",
    "convert",
    "dense_capsule",
    "digit_caps",
    "heinsen_routing",
    "matrix_capsules",
    "ml_capsules",
    "routing_capsules",
]
