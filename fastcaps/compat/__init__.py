"""Twins: classes of published capsule code on fastcaps' kernels.

Each has the published constructor, ``forward`` and parameters, so a script needs one changed import, and checkpoints
load both ways. :func:`convert` swaps the layers of an existing model. A twin's docstring says what differs,
docs/relation.md which version of the code it follows.

=================== ========================================================================================
``ml_capsules``     ``CapsuleFC``, ``CapsuleCONV`` of Tsai et al. (2020)
``dynamic``         ``DenseCapsule``, ``RoutingCapsules``, ``DigitCaps``, ``CapsuleLayer``, ``CapsLayer``
``matrix_capsules`` ``ConvCaps``: EM routing
``heinsen_routing`` ``GenerativeMatrixRouting`` of Heinsen (2019)
``batch_averaged``  ``DigitCaps``, ``CapsuleLayer``, ``RoutedCapsuleLayer``: logits averaged over the batch
``slim_capsules``   ``ConvSlimCapsule2D``, ``-3D``, ``DeconvSlimCapsule2D``, ``-3D`` of 3D-UCaps and SegCaps
=================== ========================================================================================
"""

from fastcaps.checks import suggest
from fastcaps.compat import batch_averaged, heinsen_routing, matrix_capsules, ml_capsules
from fastcaps.compat.convert import ConversionReport, convert
from fastcaps.compat.dynamic import AgreementRouting, CapsLayer, CapsuleLayer, DenseCapsule, DigitCaps, RoutingCapsules
from fastcaps.compat.matrix_capsules import ConvCaps
from fastcaps.compat.slim_capsules import ConvSlimCapsule2D, ConvSlimCapsule3D, DeconvSlimCapsule2D, DeconvSlimCapsule3D

__all__ = [
    "AgreementRouting", "CapsLayer", "CapsuleLayer", "ConvCaps", "ConvSlimCapsule2D", "ConvSlimCapsule3D",
    "ConversionReport", "DeconvSlimCapsule2D", "DeconvSlimCapsule3D", "DenseCapsule", "DigitCaps",
    "RoutingCapsules", "batch_averaged", "convert", "heinsen_routing", "matrix_capsules", "ml_capsules",
]  # fmt: skip
suggest(__name__)
