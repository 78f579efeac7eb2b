"""Classes of published capsule code, by their own names and arguments, on fastcaps' kernels."""

from fastcaps.compat import dense_capsule, heinsen_routing, ml_capsules
from fastcaps.compat.dense_capsule import DenseCapsule

__all__ = ["DenseCapsule", "dense_capsule", "heinsen_routing", "ml_capsules"]
