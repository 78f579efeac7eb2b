"""Classes of published capsule code, by their own names and arguments, on fastcaps' kernels.

======================= =============================================================
``ml_capsules``         ``CapsuleFC``, ``CapsuleCONV`` of Tsai et al. (2020)
``dense_capsule``       ``DenseCapsule`` of CapsNet-Pytorch: dynamic routing
``capsule_network``     ``CapsuleLayer`` of gram-ai's capsule-networks: dynamic routing
``matrix_capsules``     ``ConvCaps`` of Matrix-Capsules-EM-PyTorch: EM routing
``heinsen_routing``     ``GenerativeMatrixRouting`` of Heinsen (2019)
======================= =============================================================
"""

from fastcaps.compat import capsule_network, dense_capsule, heinsen_routing, matrix_capsules, ml_capsules
from fastcaps.compat.capsule_network import CapsuleLayer
from fastcaps.compat.dense_capsule import DenseCapsule
from fastcaps.compat.matrix_capsules import ConvCaps

__all__ = [
    "CapsuleLayer",
    "ConvCaps",
    "DenseCapsule",
    "capsule_network",
    "dense_capsule",
    "heinsen_routing",
    "matrix_capsules",
    "ml_capsules",
]
