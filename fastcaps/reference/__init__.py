"""The reference backend: one iteration of every routing by the verbs, in plain, eager, differentiable PyTorch.

It runs on every device of torch. Arguments and results are those of the ops (:mod:`fastcaps.ops`), except that the
first six arguments are one :class:`~fastcaps.votes.VoteInputs`. Votes are computed a block of children at a time
(:mod:`fastcaps.reference.verbs`), and only a few values for each child and parent are stored. Every backend is tested
against the reference, and the reference against the papers' procedures over stored votes.

A backward returns the gradients of the op's tensors, in their order. A gradient is an empty tensor if its bit in
``needs`` is not set (``1 << k`` for the k-th), or its input is None. With the bit ``DETACH`` the coefficients are
constants.

Half-precision inputs are computed in float32 and rounded once, at the end; float32 and float64 in their own precision.
"""

from fastcaps.reference.attention import attention_coefficients, attention_routing, attention_routing_backward
from fastcaps.reference.gaussian import gaussian_coefficients, gaussian_routing, gaussian_routing_backward
from fastcaps.reference.pooling import pooling_coefficients, pooling_routing, pooling_routing_backward

__all__ = [
    "attention_coefficients", "attention_routing", "attention_routing_backward", "gaussian_coefficients",
    "gaussian_routing", "gaussian_routing_backward", "pooling_coefficients", "pooling_routing",
    "pooling_routing_backward",
]  # fmt: skip
