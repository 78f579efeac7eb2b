"""Classes of published capsule code, by their own names and arguments, on fastcaps' kernels."""

from fastcaps.compat import ml_capsules

__all__ = ["ml_capsules"]
