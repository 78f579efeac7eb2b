"""The oracle: one iteration of every routing as a loop of verbs in plain, eager, differentiable PyTorch.

It is a backend like the others, and serves every device that torch has: arguments and results are those of the ops
(:mod:`fastcaps.ops`), whose leading six come as one :class:`~fastcaps.votes.VoteInputs`. Votes are made a block of
children at a time (:mod:`fastcaps.reference.verbs`); what is stored are a few numbers for each child and parent. Every
backend is tested against it, and it against the papers' procedures as plain loops.

A backward returns the gradients of the op's tensors, in their order; one whose bit in ``needs`` is not set (``1 << k``
for the k-th), or whose input is absent, is an empty tensor. With the bit ``DETACH`` the coefficients are constants.

Half-precision inputs are computed in float32 and rounded once, at the end; float32 and float64 in themselves.
"""

from fastcaps.reference.attention import attention_coefficients, attention_routing, attention_routing_backward
from fastcaps.reference.gaussian import gaussian_coefficients, gaussian_routing, gaussian_routing_backward
from fastcaps.reference.pooling import pooling_coefficients, pooling_routing, pooling_routing_backward

__all__ = [
    "attention_coefficients",
    "attention_routing",
    "attention_routing_backward",
    "gaussian_coefficients",
    "gaussian_routing",
    "gaussian_routing_backward",
    "pooling_coefficients",
    "pooling_routing",
    "pooling_routing_backward",
]
