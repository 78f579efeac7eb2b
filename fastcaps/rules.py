"""The step between two iterations, by number; the native libraries use the same numbers."""

from __future__ import annotations

from enum import IntEnum


class Rule(IntEnum):
    """What a routing computes between one iteration and the next."""

    LAYER_NORM = 0  # parents are LayerNorm(S), and the next query
    PLAIN = 1  # parents are S, and the next query
    SQUASH = 2  # parents are squash(S), and are added to the query
    UNIT = 3  # parents are S, and S / |S| is added to the query
    EM = 4  # parents' activations by description length (Hinton et al. 2018)
    HEINSEN = 5  # parents' scores by evidence (Heinsen 2019)
    KMEANS = 6  # the same without variances


DETACH = 1 << 30
"""A bit of ``needs`` besides those of the gradients: coefficients are constants, no gradient flows through them."""
