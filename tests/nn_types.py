"""What a type checker knows of the results of the layers; run by mypy (make lint)."""

from __future__ import annotations

import torch
from torch import Tensor
from typing_extensions import assert_type

from fastcaps import nn
from fastcaps.results import Capsules, Gaussians, Routed, RoutedCapsules, RoutedGaussians

children = torch.randn(2, 6, 4)

attention = nn.InvertedAttentionRouting(6, 3, 4, 4, dropout=0.1, iterations=2)
assert_type(attention(children), Tensor)
assert_type(attention(children, torch.randn(2, 3, 4), iterations=2), Tensor)
assert_type(attention(children, return_coefficients=True), Routed)
active = nn.InvertedAttentionRouting(6, 3, 4, 4, activations=True, share=True)
assert_type(active(children), Capsules)
assert_type(active(children, return_coefficients=True), RoutedCapsules)
dynamic = nn.DynamicRouting(6, 3, 4, 4, leaky=True, bias=True)
assert_type(dynamic(children), Tensor)
assert_type(dynamic(children, return_coefficients=True).coefficients, Tensor)
assert_type(nn.EMRouting(6, 3, 4, 4)(children), Capsules)
assert_type(nn.EMRouting(6, 3, 4, 4)(children, inverse_temperature=0.1, return_coefficients=True), RoutedCapsules)
assert_type(nn.HeinsenRouting(None, None, 4, 4)(children, out_capsules=2), Gaussians)
assert_type(nn.HeinsenRouting(6, 3, 4, 4)(children, return_coefficients=True), RoutedGaussians)
assert_type(nn.RoutingPool(6, 3, 4, 4)(children), Tensor)
