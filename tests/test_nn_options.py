"""Options of single routing layers: parents to go on from, priors, schedules, coordinates, symmetry."""

from __future__ import annotations

import copy
import math
import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from nn_layers import FORMS, LAYERS, draw
from nn_layers import draw_for as given

from fastcaps import DynamicRouting, EMRouting, HeinsenRouting, InvertedAttentionRouting, functional, losses

DOUBLE: dict[str, Any] = {"dtype": torch.float64}
WHOLE: dict[str, Any] = {"kernel_size": "all", "share": True}


def make(form: str = "set", **options: Any) -> InvertedAttentionRouting:
    return LAYERS[0].make(form, **{"iterations": 1, **options})


@pytest.mark.parametrize("form", [*FORMS, "dropout"])
@pytest.mark.parametrize("start", [False, True])
def test_several_iterations_are_a_loop_of_calls(form: str, start: bool) -> None:
    layer = make(dropout=0.4) if form == "dropout" else make(form)
    children, gate = (tensor.requires_grad_() for tensor in given(layer))
    parents = torch.randn_like(layer(children)).requires_grad_() if start else None
    results = []
    for together in (True, False):
        torch.manual_seed(5)
        before = parents
        if not together:
            for _ in range(2):
                before = layer(children, before, gate)
        poses = layer(children, before, gate, iterations=3 if together else 1)
        leaves = [children, gate, *layer.parameters(), *([parents] if start else [])]
        weights = torch.linspace(-1, 1, poses.numel(), dtype=poses.dtype).view(poses.shape)
        results.append([poses, *torch.autograd.grad((poses * weights).sum(), leaves, allow_unused=True)])
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("norm", [True, False])
def test_dropout_stands_between_sum_and_layer_norm(norm: bool) -> None:
    layer, plain = make(dropout=0.4, layer_norm=norm), make(layer_norm=False)
    plain.load_state_dict(layer.state_dict(), strict=False)
    children, parents = draw(16, 6, 4), draw(16, 3, 4)
    torch.manual_seed(5)
    found = layer(children, parents)
    torch.manual_seed(5)
    dropped = F.dropout(plain(children, parents), 0.4)
    assert 0.25 < (dropped == 0).double().mean() < 0.55
    if norm:
        dropped = F.layer_norm(dropped, (4,), layer.norm.weight, layer.norm.bias)
    torch.testing.assert_close(found, dropped)
    layer.eval()
    whole = make(layer_norm=norm)
    whole.load_state_dict(layer.state_dict())
    torch.testing.assert_close(layer(children, parents), whole(children, parents))


@pytest.mark.parametrize("form", ["set", "grid", "all"])
def test_activations_option_returns_poses_and_activations(form: str) -> None:
    layer, plain = make(form, activations=True), make(form)
    plain.load_state_dict(layer.state_dict(), strict=False)
    children, gate = given(layer)
    poses, activations, _ = layer(children, None, gate, return_coefficients=True)
    torch.testing.assert_close(poses, plain(children, None, gate))
    logits = torch.einsum("bm...d,md->bm...", poses, layer.activation_weight)
    bias = layer.activation_bias.view(-1, *[1] * (logits.dim() - 2))
    torch.testing.assert_close(activations, torch.sigmoid(logits + bias))
    torch.testing.assert_close(tuple(layer(children, None, gate)), (poses, activations))
    with pytest.raises(ValueError, match="activations=True"):
        plain.read_activations(poses)


def test_the_scale_may_be_set() -> None:
    layer = make()
    children, parents = draw(2, 6, 4), draw(2, 3, 4)
    assert layer.scale == 0.5
    wanted = layer(children, 2 * parents)
    layer.scale = 1.0  # the paper's, which writes none
    torch.testing.assert_close(layer(children, parents), wanted)


def test_queries_tell_the_number_of_parents() -> None:
    keys = InvertedAttentionRouting(None, None, 4, 4, pose="vector", matrices=False, break_symmetry=False, **DOUBLE)
    assert keys.weight is None and list(dict(keys.named_parameters())) == ["norm.weight", "norm.bias"]
    queries, children = draw(2, 3, 4), draw(2, 7, 4, seed=1)
    poses, shares = keys(children, queries, return_coefficients=True)
    wanted = (torch.einsum("bmd,bid->bim", queries, children) / 2).softmax(-1)
    torch.testing.assert_close(shares, wanted)
    torch.testing.assert_close(poses, F.layer_norm(torch.einsum("bim,bid->bmd", wanted, children), (4,)))


def test_wrong_parents_are_named() -> None:
    layer, grid = InvertedAttentionRouting(6, 3, 4, 4), InvertedAttentionRouting(2, 3, 4, 4, kernel_size=3)
    good, board = torch.randn(2, 6, 4), torch.randn(2, 2, 5, 5, 4)
    for error, message, call in [
        (ValueError, r"parents must be \[B, 3, 4\], got \[2, 4, 4\]", lambda: layer(good, torch.randn(2, 4, 4))),
        (ValueError, r"parents must be \[B, 3, Ho, Wo, 4\]", lambda: grid(board, torch.randn(2, 3, 4))),
        (ValueError, "parents", lambda: layer(good, torch.randn(3, 3, 4))),
        (ValueError, "parents", lambda: grid(board, torch.randn(2, 3, 3, 2, 4))),
        (TypeError, "parents", lambda: layer(good, torch.randn(2, 3, 4, dtype=torch.float64))),
    ]:
        with pytest.raises(error, match=message):
            call()


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("prior", lambda start: DynamicRouting(6, 3, 4, 4, prior=start)),
        ("first_poses", lambda start: make(start=start)),
    ],
)
def test_starts(name: str, make: Any) -> None:
    zero, learned, random = (make(start) for start in ("zero", "learned", "random"))
    start = getattr(random, name)
    assert getattr(zero, name) is None and name in dict(learned.named_parameters())
    assert name in random.state_dict() and not isinstance(start, torch.nn.Parameter)
    before = start.clone()
    random.reset_parameters()
    assert start.any() and not torch.equal(start, before)
    (grad,) = torch.autograd.grad(learned(given(learned)[0].to(learned.weight)).square().sum(), getattr(learned, name))
    assert grad.any()


def test_detach_cuts_the_gradient_alone() -> None:
    kept = DynamicRouting(6, 3, 4, 4, std=0.5, **DOUBLE)
    assert abs(kept.weight.std().item() / 0.5 - 1) < 5 / (2 * kept.weight.numel()) ** 0.5
    cut = copy.deepcopy(kept)
    cut.detach = True
    children = draw(2, 6, 4)
    torch.testing.assert_close(kept(children), cut(children))
    for layer in (kept, cut):
        layer(children).square().sum().backward()
    assert not torch.allclose(kept.weight.grad, cut.weight.grad)


def test_coordinates_and_a_bias() -> None:
    layer = EMRouting(2, 3, 4, 4, coordinates=True, bias=True, **WHOLE, **DOUBLE)
    other = EMRouting(2, 3, 4, 4, bias=True, **WHOLE, **DOUBLE)
    other.load_state_dict(layer.state_dict())
    place, children = functional.coordinate_bias(3, 4, 2, 2, 2, **DOUBLE), draw(2, 2, 3, 4, 4)
    torch.testing.assert_close(tuple(layer(children)), tuple(other(children, bias=place)))
    more = draw(*place.shape, seed=3)
    torch.testing.assert_close(tuple(layer(children, bias=more)), tuple(other(children, bias=more + place)))


def hot(iteration: int) -> float:
    return 0.1 * (iteration + 1)


def test_schedules_may_change_and_travel() -> None:
    children = draw(2, 6, 4)
    layer = EMRouting(6, 3, 4, 4, **DOUBLE)
    before = layer(children)[1]
    for schedule in (0.5, [0.1, 0.1, 5.0], hot):
        wanted = layer(children, inverse_temperature=schedule)
        assert not torch.allclose(wanted[1], before)
        layer.inverse_temperature = schedule
        again = pickle.loads(pickle.dumps(layer))
        assert again.inverse_temperature == schedule and torch.equal(again(children)[1], wanted[1])
        layer.inverse_temperature = None


def test_normalized_cost_leaves_activations_apart() -> None:
    whole = EMRouting(3, 5, 4, 4, coordinates=True, normalize_cost=True, **WHOLE)
    assert whole(torch.randn(2, 3, 4, 5, 4), torch.rand(2, 3, 4, 5)).activations.std(-1).min() > 0.1


def heinsen(*sizes, **options) -> HeinsenRouting:
    layer = HeinsenRouting(*sizes, 4, 4, bias=True, dtype=torch.float64, **options)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter)
    return layer


def test_what_tells_parents_apart() -> None:
    equal = heinsen(None, None, break_symmetry=False)(draw(2, 5, 4)).poses
    torch.testing.assert_close(equal, equal[:, :1].expand_as(equal))
    broken = heinsen(None, None)
    poses = broken(draw(2, 5, 4)).poses
    assert (poses[:, 0] - poses[:, 1]).abs().min() > 1e-4
    poses.square().sum().backward()
    assert broken.bias_step.grad.abs().sum() > 0
    for name, parameter in broken.named_parameters():
        assert parameter.shape == ((1, 1) if name.startswith("beta") else (1, 1, 2, 2))
    assert set(HeinsenRouting(6, 3, 4, 4, single_beta=True).state_dict()) == {"weight", "beta_use"}


STACKS: dict[str, tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]] = {
    "vectors": ((64, 16, 16, 10), (8, 8, 8, 16), {"pose": "vector"}),
    "many": ((512, 32, 32, 10), (8, 8, 8, 16), {"pose": "vector"}),
    "matrices": ((64, 16, 16, 10), (16, 16, 16, 16), {"pose": "matrix"}),
    "deep": ((64, 16, 16, 16, 16, 10), (8, 8, 8, 8, 8, 16), {"pose": "vector"}),
    "children": ((64, 16, 16, 10), (8, 8, 8, 16), {"pose": "vector", "compete": "children"}),
}


@pytest.mark.parametrize("name", STACKS)
def test_stacks_of_dynamic_routing_train_with_the_std_of_the_docstring(name: str) -> None:
    counts, dims, options = STACKS[name]
    torch.manual_seed(0)
    poses = functional.unit(torch.randn(32, counts[0], dims[0])) * 0.2
    mean, weights = 0.2, []
    for children, parents, in_dim, out_dim in zip(counts, counts[1:], dims, dims[1:], strict=False):
        layer = DynamicRouting(children, parents, in_dim, out_dim, **options)
        top = children if layer.compete == "children" else parents
        layer.std = 0.75 * top / (mean * math.sqrt(children * layer.pose_shape[2]))
        layer.reset_parameters()
        poses, mean = layer(poses), 0.5
        assert 0.5 < poses.norm(dim=-1).mean() < 0.98
        weights.append(layer.weight)
    loss = losses.margin_loss(functional.length(poses), torch.arange(32) % 10)
    first, *_, last = (gradient.norm() for gradient in torch.autograd.grad(loss, weights))
    assert last / 10 < first < 10 * last
