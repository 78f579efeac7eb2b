"""What ``fastcaps_lab.diagnose`` finds, against its equations, and that it leaves no trace."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fastcaps
import fastcaps_lab
from fastcaps_lab.diagnosis import Diagnosis, LayerDiagnosis


def digits() -> tuple[Any, tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(0)
    return fastcaps_lab.models.create("digits"), (torch.randn(3, 1, 8, 8), torch.tensor([1, 2, 3]))


def entropy(shares: torch.Tensor, dim: int) -> torch.Tensor:
    return -(shares * shares.log()).sum(dim) / math.log(shares.shape[dim])


def test_strengths_and_entropies_by_their_equations() -> None:
    def look(layer: nn.Module, *inputs: torch.Tensor | None) -> LayerDiagnosis:
        (found,) = fastcaps_lab.diagnose(layer, (inputs, None)).layers
        assert found.weight_gradient is None
        return found

    layer: Any = fastcaps.InvertedAttentionRouting(6, 4, 16, 16, iterations=3)
    children = torch.randn(2, 6, 16)
    for gates in (torch.rand(2, 6), None):
        found, g = look(layer, children, None, gates), torch.ones(2, 6) if gates is None else gates
        r = layer(children, None, gates, return_coefficients=True).coefficients
        assert (found.measured_by, found.compete) == ("share", "parents")
        share = 4 * (g[..., None] * r).sum(1) / g.sum(1, keepdim=True)
        torch.testing.assert_close(torch.tensor(found.strengths), share.amax(0))
        assert found.entropy == pytest.approx(float((entropy(r, -1) * g).sum() / g.sum()), rel=1e-5)

    layer, children = fastcaps.HeinsenRouting(None, 5, 4, 4, bias=True), torch.randn(2, 7, 4)
    scores = torch.zeros(2, 7)
    scores[0, 3:] = -torch.inf  # not there: they must not count
    r, g = layer(children, scores, return_coefficients=True).coefficients.clamp_min(1e-38), scores.sigmoid()
    assert look(layer, children, scores).entropy == pytest.approx(float((entropy(r, -1) * g).sum() / g.sum()), rel=1e-4)
    assert look(fastcaps.HeinsenRouting(3, 1, 4, 4), torch.randn(2, 3, 4)).entropy is None  # one parent

    layer = fastcaps.RoutingPool(2, 3, 4, 4, kernel_size=3, padding=1, sharpness=4.0)
    children = torch.randn(2, 2, 4, 4, 4)
    found, r = look(layer, children), layer(children, return_coefficients=True).coefficients  # [B, Ho, Wo, I, M]
    there = (r > 0).sum(-2)  # not those in the padding
    wanted = (-torch.special.xlogy(r, r).sum(-2) / there.log()).mean()
    assert (found.compete, found.measured_by) == ("children", "relative length") and int(there.min()) == 8
    assert found.entropy == pytest.approx(float(wanted), rel=1e-5) and max(found.strengths) == pytest.approx(1.0)


def test_dead_capsules_are_found_by_length_and_activation() -> None:
    dynamic = fastcaps.DynamicRouting(6, 4, 8, 8, pose="vector")
    em, pool = fastcaps.EMRouting(6, 4, 4, 4, iterations=1), fastcaps.RoutingPool(5, 3, 4, 4)
    with torch.no_grad():
        pool.weight[0, 0, 0] = torch.nan
        dynamic.weight[:, 2] = 0  # type: ignore[index]
        em.beta_a[1] = -1e6  # costs more than it can be worth
    (found,) = fastcaps_lab.diagnose(dynamic, torch.randn(2, 6, 8)).layers
    assert (found.measured_by, found.dead, found.strengths[2]) == ("length", (2,), 0.0)
    (found,) = fastcaps_lab.diagnose(em, ((torch.randn(2, 6, 4), torch.rand(2, 6)), None), threshold=0.001).layers
    assert (found.measured_by, found.dead) == ("activation", (1,))
    (found,) = fastcaps_lab.diagnose(pool, torch.randn(2, 5, 4)).layers  # NaN shows, and its parents count as dead
    assert found.dead and found.entropy is not None and math.isnan(found.entropy)


def test_gradients_are_those_of_the_loss() -> None:
    net, (images, labels) = digits()
    found = fastcaps_lab.diagnose(net, (images, labels))
    net.eval()
    loss = F.cross_entropy(net(images), labels)
    loss.backward()
    for layer in found.layers:
        grads = torch.cat([each.grad.flatten() for each in net.get_submodule(layer.path).parameters()])
        assert layer.weight_gradient == pytest.approx(float(grads.norm()), rel=1e-5)
        assert layer.parent_gradient is not None and layer.parent_gradient > 0
    assert found.loss == pytest.approx(loss.item())


def test_it_leaves_no_trace() -> None:
    net, (images, labels) = digits()
    net.train()
    net.routing.eval()
    for parameter in net.parameters():
        parameter.grad = torch.ones_like(parameter)
    before, state = copy.deepcopy(net.state_dict()), torch.get_rng_state()
    fastcaps_lab.diagnose(net, (images, labels))
    with pytest.raises(ValueError):  # which does not fit
        fastcaps_lab.diagnose(net, (images, labels[:1]))
    assert net.training and not net.routing.training and not net.routing.layers[0].training
    assert not any(module._forward_hooks for module in net.modules())
    assert all(bool((each.grad == 1).all()) for each in net.parameters())
    assert all(torch.equal(before[name], tensor) for name, tensor in net.state_dict().items())
    assert torch.equal(state, torch.get_rng_state())


def test_a_layer_of_ones_own_without_coefficients() -> None:
    class Sums(fastcaps.nn.RoutingLayer[Any, Any]):
        def route(self, votes: fastcaps.Votes) -> torch.Tensor:
            return votes.sum(1.0)

    (found,) = fastcaps_lab.diagnose(Sums(6, 3, 16, 16), torch.randn(2, 6, 16)).layers
    assert found.entropy is None and found.measured_by == "relative length"


@pytest.mark.parametrize(
    ("name", "kinds"), [("zhao-cnn-routing", ["RoutingPool2d"]), ("heinsen-sst2", ["HeinsenRouting"] * 2)]
)
def test_networks_of_other_kinds(name: str, kinds: list[str]) -> None:
    net = fastcaps_lab.models.create(name, **({"layers": 3, "embedding": 16} if "sst" in name else {}))
    size = (5, 3, 16) if "sst" in name else (net.in_channels, *net.image_size)
    found = fastcaps_lab.diagnose(net, (torch.randn(2, *size), torch.tensor([0, 1])))
    assert [layer.layer for layer in found.layers] == kinds
    assert all(layer.entropy is not None and 0 <= layer.entropy <= 1.000001 for layer in found.layers)


def test_wrong_calls_are_told() -> None:
    net, (images, labels) = digits()
    with pytest.raises(ValueError, match=r"must have a capsule layer .*, got Lin"):
        fastcaps_lab.diagnose(nn.Linear(8, 3), torch.randn(2, 8))
    with pytest.raises(ValueError, match="batch must hold a sample, got none"):
        fastcaps_lab.diagnose(net, (images[:0], labels[:0]))


def test_it_is_shown_as_table_and_dict() -> None:
    dying = LayerDiagnosis("below", "DynamicRouting", "length", (0.5, 0.001), (1,), "children", 0.25, 0.0, 1e-3)
    plain = LayerDiagnosis("above", "CapFC", "length", (0.5,), (), "", None, None, None)
    found = Diagnosis((dying, plain), 3, 0.01, 1.25)
    assert str(found).splitlines()[0] == "3 samples, loss 1.2500; dead: below 0.01"
    shown = "below DynamicRouting 2 1 length 0.250 0.00e+00 1.00e-03"
    assert str(found).splitlines()[2].split() == shown.split()
    assert json.loads(json.dumps(dataclasses.asdict(found)))["layers"][0]["dead"] == [1]
