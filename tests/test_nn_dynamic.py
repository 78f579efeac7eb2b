"""What the layer of dynamic routing has of its own: logits to start from, gradients through coefficients, its start."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from functional_cases import draw

from fastcaps import DynamicRouting

DOUBLE: dict[str, Any] = {"dtype": torch.float64}


def test_starts() -> None:
    chosen = DynamicRouting(32, 32, 16, 16, kernel_size=3, std=0.05)
    assert abs(chosen.weight.std().item() / 0.05 - 1) < 5 / (2 * chosen.weight.numel()) ** 0.5
    layers = {prior: DynamicRouting(6, 3, 4, 4, prior=prior) for prior in ("zero", "learned", "random")}
    assert layers["zero"].prior is None and not layers["learned"].prior.any()
    random = layers["random"]
    assert random.prior.shape == (6, 3) and random.prior.any() and not isinstance(random.prior, torch.nn.Parameter)
    before = random.prior.clone()
    random.reset_parameters()
    assert "prior" in random.state_dict() and not torch.equal(random.prior, before)


@pytest.mark.parametrize("options", [{"kernel_size": "all"}, {"kernel_size": 2, "stride": 2}])
def test_types_that_share_matrices_share_logits(options: dict[str, Any]) -> None:
    layer = DynamicRouting(2, 3, 4, 4, share=True, prior="learned", compete="children", **options, **DOUBLE)
    assert layer.prior.shape == (2, 3)
    torch.nn.init.normal_(layer.prior)
    found, shares = layer(draw(1, 2, 2, 2, 4), iterations=1, return_coefficients=True)
    wanted = torch.stack([layer.prior[i % 2] for i in range(8)]).softmax(0)  # i = (y, x, n), n fastest
    torch.testing.assert_close(shares.view(8, 3), wanted)
    assert torch.autograd.grad(found.square().sum(), layer.prior)[0].any()


def test_wrong_options() -> None:
    for message, options in [
        ("compete must be one of 'parents', 'children', got 'all'", {"compete": "all"}),
        ("leaky must be False with compete='children'", {"compete": "children", "leaky": True}),
        ("leaky must be False with prior='learned'", {"prior": True, "leaky": True}),
        ("prior must be one of", {"prior": "one"}),
    ]:
        with pytest.raises(ValueError, match=message):
            DynamicRouting(6, 3, 4, 4, **options)


def test_detach_cuts_the_gradient_alone() -> None:
    kept = DynamicRouting(6, 3, 4, 4, **DOUBLE)
    cut = copy.deepcopy(kept)
    cut.detach = True
    children = draw(2, 6, 4)
    torch.testing.assert_close(kept(children), cut(children))
    for layer in (kept, cut):
        layer(children).square().sum().backward()
    assert not torch.allclose(kept.weight.grad, cut.weight.grad)
