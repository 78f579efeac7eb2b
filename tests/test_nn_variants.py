"""What the papers vary: where parents and logits start, gradients through coefficients, EM's cost, routing to a fixed
point, capsules without a convolution, sets read as grids."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint

from fastcaps import PrimaryCapsules, RoutingPool, RoutingPool2d, RoutingStack, explain
from fastcaps.functional import coordinate_bias, em_routing, routing_pool
from fastcaps.nn import CapsuleSpec, DynamicRouting, EMRouting, EquilibriumRouting, InvertedAttentionRouting

DOUBLE = {"dtype": torch.float64}


def draw(*shape):
    return torch.randn(*shape, dtype=torch.float64)


# ---- where parents start ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("start", ["random", "learned"])
@pytest.mark.parametrize("kind", ["set", "grid", "all"])
def test_parents_start_where_the_layer_says(start, kind):
    options = {"set": {}, "grid": {"kernel_size": 3, "stride": 2}, "all": {"kernel_size": "all", "share": True}}[kind]
    layer = InvertedAttentionRouting(5, 3, 4, 4, start=start, **options, **DOUBLE)
    plain = InvertedAttentionRouting(5, 3, 4, 4, **options, **DOUBLE)
    plain.load_state_dict({k: v for k, v in layer.state_dict().items() if k != "first_poses"})
    children = draw(2, 5, 4) if kind == "set" else draw(2, 5, 7, 9, 4)
    grid = (3, 4) if kind == "grid" else ()
    given = layer.first_poses.view(1, 3, *(1 for _ in grid), 4).expand(2, 3, *grid, 4)
    for turns in (1, 3):
        found = layer(children, iterations=turns)
        torch.testing.assert_close(found, plain(children, given, iterations=turns))
        assert not torch.allclose(found, plain(children, iterations=turns))
    torch.testing.assert_close(layer(children, found), plain(children, found))  # a further turn is a further turn
    assert ("first_poses" in dict(layer.named_parameters())) == (start == "learned")
    assert "first_poses" in layer.state_dict()
    if start == "learned":
        assert torch.autograd.grad(found.square().sum(), layer.first_poses)[0].any()


def test_starts_are_drawn_anew_and_kept():
    layer = InvertedAttentionRouting(None, None, 4, 4, start="random")
    assert layer.first_poses.shape == (1, 4)
    children = torch.randn(2, 6, 4)
    before = layer(children, out_capsules=3)
    assert torch.equal(before, layer(children, out_capsules=3))
    again = copy.deepcopy(layer)
    again.reset_parameters()
    assert not torch.equal(again.first_poses, layer.first_poses)
    assert InvertedAttentionRouting(4, 3, 4, 4).first_poses is None
    with pytest.raises(ValueError, match="start must be one of 'zero', 'random', 'learned', got 'one'"):
        InvertedAttentionRouting(4, 3, 4, 4, start="one")


@pytest.mark.parametrize("routing", ["concurrent", "sequential"])
def test_a_stack_starts_where_its_layers_say(routing):
    specs = [CapsuleSpec(4, kernel_size=2), CapsuleSpec(3)]
    stack = RoutingStack.build(specs, in_capsules=2, in_dim=4, size=(4, 4), routing=routing, start="learned", **DOUBLE)
    children = draw(2, 2, 4, 4, 4)
    first, last = stack.layers
    below, turns = None, 1 if routing == "concurrent" else 2
    below = first(children, iterations=turns)
    expected = last(below, iterations=turns)
    expected = last(below, expected) if routing == "concurrent" else expected
    torch.testing.assert_close(stack(children), expected)
    stack(children).square().sum().backward()
    assert all(layer.first_poses.grad.any() for layer in stack.layers)


# ---- where logits start ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("compete", ["parents", "children"])
def test_priors_are_zero_learned_or_random(compete):
    layers = {
        prior: DynamicRouting(6, 3, 4, 4, prior=prior, compete=compete, **DOUBLE)
        for prior in ("zero", "learned", "random")
    }
    children = draw(2, 6, 4)
    for layer in layers.values():
        layer.load_state_dict({"weight": layers["zero"].weight}, strict=False)
    torch.testing.assert_close(layers["learned"](children), layers["zero"](children))  # before anything is learned
    prior = layers["random"].prior
    assert prior.shape == (6, 3) and prior.any() and not isinstance(prior, torch.nn.Parameter)
    assert "prior" in layers["random"].state_dict() and layers["zero"].prior is None
    with torch.no_grad():
        layers["learned"].prior.copy_(prior)
    torch.testing.assert_close(layers["random"](children), layers["learned"](children))
    assert not torch.allclose(layers["random"](children), layers["zero"](children))
    _, first = layers["random"](children, iterations=1, return_coefficients=True)
    torch.testing.assert_close(first, prior.softmax(-1 if compete == "parents" else 0).expand(2, 6, 3))
    with pytest.raises(ValueError, match="prior must be one of"):
        DynamicRouting(6, 3, 4, 4, prior="one")


@pytest.mark.parametrize("options", [{"kernel_size": "all"}, {"kernel_size": 2, "stride": 2}])
def test_types_that_share_matrices_share_logits(options):
    layer = DynamicRouting(2, 3, 4, 4, share=True, prior="random", compete="children", **options, **DOUBLE)
    assert layer.prior.shape == (2, 3)
    children = draw(1, 2, 2, 2, 4)
    _, shares = layer(children, iterations=1, return_coefficients=True)
    wanted = torch.stack([layer.prior[i % 2] for i in range(8)]).softmax(0)  # i = (y, x, n), n fastest
    torch.testing.assert_close(shares.view(8, 3), wanted)
    learned = DynamicRouting(2, 3, 4, 4, share=True, prior="learned", compete="children", **options, **DOUBLE)
    assert torch.autograd.grad(learned(children).square().sum(), learned.prior)[0].any()


# ---- pooling without a gradient through its coefficients -------------------------------------------------------------


def test_pooling_detaches_its_coefficients():
    children, weight, bias = draw(2, 6, 1, 4).requires_grad_(), draw(6, 3, 4, 5).requires_grad_(), draw(1, 3, 1, 5)
    options = {"weight": weight, "bias": bias, "sharpness": 2.0}
    poses, shares = routing_pool(children, detach=True, return_coefficients=True, **options)
    torch.testing.assert_close(poses, routing_pool(children, **options))
    votes = torch.einsum("bicd,imde->bimce", children, weight) + bias
    expected = torch.einsum("bim,bimce->bmce", shares, votes)
    torch.testing.assert_close(poses, expected)
    head = draw(*poses.shape)
    found, wanted = (torch.autograd.grad((p * head).sum(), (children, weight)) for p in (poses, expected))
    torch.testing.assert_close(found, wanted)
    through = torch.autograd.grad((routing_pool(children, **options) * head).sum(), children)[0]
    assert not torch.allclose(through, wanted[0])


def test_pooling_layers_detach():
    features = draw(2, 8, 5, 5).requires_grad_()
    for size in (None, 2):
        pool, free = (RoutingPool2d(4, sharpness=3.0, kernel_size=size, detach=detach) for detach in (True, False))
        (a,), (b,) = (torch.autograd.grad(p(features).square().sum(), features) for p in (pool, free))
        torch.testing.assert_close(pool(features), free(features))
        assert not torch.allclose(a, b)
    layer = RoutingPool(6, 3, 4, 4, detach=True, sharpness=3.0, **DOUBLE)
    other = copy.deepcopy(layer)
    other.detach = False
    children = draw(2, 6, 4)
    (a,), (b,) = (torch.autograd.grad(each(children).square().sum(), each.weight) for each in (layer, other))
    assert not torch.allclose(a, b)
    assert repr(pool) == "RoutingPool2d(4, sharpness=3.0, kernel_size=2, detach=True)"


# ---- EM with its cost normalised -------------------------------------------------------------------------------------


def normalized_em(votes, gate, beta_u, beta_a, temperatures, eps):
    """Hinton et al.'s procedure on votes ``[B, I, M, d]``, the sigmoid's argument normalised over the parents."""
    batch, count, parents, _ = votes.shape
    shares = votes.new_full((batch, count, parents), 1 / parents)
    for turn, temperature in enumerate(temperatures):
        if turn:
            distance = ((votes - means[:, None]).square() / (2 * variances[:, None])).sum(-1)  # noqa: F821
            shares = (active.log()[:, None] - 0.5 * variances.log().sum(-1)[:, None] - distance).softmax(-1)  # noqa: F821
        used = gate[:, :, None] * shares
        total = used.sum(1)
        means = torch.einsum("bim,bimd->bmd", used, votes) / (total + eps)[..., None]
        spread = (votes - means[:, None]).square()
        variances = torch.einsum("bim,bimd->bmd", used, spread) / (total + eps)[..., None] + eps
        cost = (beta_u[:, None] + 0.5 * variances.log()).sum(-1) * total
        benefit = beta_a - cost
        off = benefit - benefit.mean(-1, keepdim=True)
        active = (temperature * off / (off.square().mean(-1, keepdim=True) + 1e-5).sqrt()).sigmoid()
    return means, active, shares


@pytest.mark.parametrize("temperatures", [None, [0.5, 1.0, 2.0]])
def test_normalized_cost_against_the_procedure(temperatures):
    layer = EMRouting(7, 4, 6, 6, pose=2, normalize_cost=True, bias=True, **DOUBLE)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter)
    children, gate = draw(2, 7, 6), torch.rand(2, 7, dtype=torch.float64)
    votes = (torch.einsum("bicd,imde->bimce", children.unflatten(-1, (2, 3)), layer.weight) + layer.bias).flatten(-2)
    found = layer(children, gate, inverse_temperature=temperatures, return_coefficients=True)
    wanted = normalized_em(votes, gate, layer.beta_u, layer.beta_a, temperatures or [1.0] * 3, layer.eps)
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b)
    got = torch.autograd.grad(sum(t.square().sum() for t in found[:2]), layer.parameters())
    for a, b in zip(
        got, torch.autograd.grad(sum(t.square().sum() for t in wanted[:2]), layer.parameters()), strict=True
    ):
        torch.testing.assert_close(a, b)


def test_one_parent_has_nobody_to_be_compared_with():
    with pytest.raises(ValueError, match="normalize_cost must be False for one parent"):
        EMRouting(3, 1, 4, 4, normalize_cost=True)


def test_normalized_cost_on_grids_and_in_half_precision():
    layer = EMRouting(3, 5, 4, 4, kernel_size="all", share=True, coordinates=True, normalize_cost=True)
    children, gate = torch.randn(2, 3, 4, 5, 4), torch.rand(2, 3, 4, 5)
    poses, active = layer(children, gate)
    assert poses.shape == (2, 5, 4) and active.shape == (2, 5)
    assert active.std(-1).min() > 0.1  # neither all 0 nor all 1
    place = coordinate_bias(4, 5, 3, 2, 2)
    votes = torch.einsum("bnhwcd,nmde->bhwnmce", children.unflatten(-1, (2, 2)), layer.weight).flatten(1, 3) + place
    wanted = normalized_em(
        votes.flatten(-2), gate.permute(0, 2, 3, 1).flatten(1), layer.beta_u, layer.beta_a, [1.0] * 3, layer.eps
    )
    torch.testing.assert_close(poses, wanted[0], rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(active, wanted[1], rtol=1e-3, atol=1e-4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        halves = layer(children, gate)
    assert {tensor.dtype for tensor in halves} == {torch.bfloat16}
    torch.testing.assert_close(halves.poses.float(), poses, rtol=0.1, atol=0.1)
    window = EMRouting(3, 5, 4, 4, kernel_size=3, normalize_cost=True)
    found = window(children, gate, iterations=1, return_coefficients=True)
    plain = em_routing(
        children.unflatten(-1, (2, 2)), gate, window.weight, window.beta_u, window.beta_a, iterations=1,
        window=window.window, return_coefficients=True,
    )  # fmt: skip
    torch.testing.assert_close(found.poses, plain.poses.flatten(-2))  # the first turn's poses know no cost
    torch.testing.assert_close(found.coefficients, plain.coefficients)
    assert found.activations.shape == plain.activations.shape


# ---- routing to a fixed point ----------------------------------------------------------------------------------------


def pair(**options):
    """An equilibrium layer that goes as far as double precision does, and the layer whose turns it makes."""
    kinds = (EquilibriumRouting, InvertedAttentionRouting)
    limits = ({"iterations": 500, "tolerance": 1e-14}, {})
    endless, plain = (
        kind(6, 5, 8, 8, pose=2, **limit, **options, **DOUBLE) for kind, limit in zip(kinds, limits, strict=True)
    )
    plain.load_state_dict(endless.state_dict())
    endless.scale = plain.scale = 0.2 * plain.scale  # so that turns come to rest soon
    return endless, plain


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"kernel_size": 3, "stride": 2},
        {"kernel_size": 3, "padding": 1, "share": True, "bias": True},
        {"kernel_size": "all", "share": True, "start": "random"},
        {"layer_norm": False},
        {"matrices": False, "bias": True},
    ],
    ids=str,
)
def test_the_fixed_point_is_what_many_turns_come_to(options):
    endless, plain = pair(**options)
    with torch.no_grad():
        for layer in (endless, plain):
            if layer.bias is not None:
                layer.bias.copy_(torch.linspace(-1, 1, layer.bias.numel(), **DOUBLE).view_as(layer.bias))
            if not layer.layer_norm:
                layer.weight.mul_(0.3)
    grid = (5, 5) if "kernel_size" in options else ()
    children, gate = draw(2, 6, *grid, 8).requires_grad_(), torch.rand(2, 6, *grid, **DOUBLE).requires_grad_()
    found, shares = endless(children, gate, return_coefficients=True)
    wanted = plain(children, None, gate, iterations=300)
    torch.testing.assert_close(wanted, plain(children, None, gate, iterations=301), rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-11)
    torch.testing.assert_close(shares, plain(children, wanted, gate, return_coefficients=True)[1])
    head = draw(*found.shape)
    got = torch.autograd.grad((found * head).sum(), (children, gate, *endless.parameters()))
    unrolled = torch.autograd.grad((wanted * head).sum(), (children, gate, *plain.parameters()))
    for a, b in zip(got, unrolled, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-9)


def kept(layer, *arguments, **options):
    """How many numbers autograd keeps of a call."""
    sizes = {}

    def keep(tensor):
        sizes[tensor.data_ptr()] = tensor.numel()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        result = layer(*arguments, **options)
    assert result.requires_grad
    return sum(sizes.values())


def test_memory_does_not_depend_on_turns():
    children = torch.randn(3, 20, 16, requires_grad=True)
    endless = EquilibriumRouting(20, 5, 16, 16, tolerance=0.0)
    sizes = {kept(endless, children, iterations=turns) for turns in (3, 20, 40)}
    assert len(sizes) == 1 and sizes.pop() > 0
    plain = InvertedAttentionRouting(20, 5, 16, 16)
    assert kept(plain, children, iterations=40) > kept(plain, children, iterations=20)


def test_it_stops_where_it_stands():
    layer, children = EquilibriumRouting(20, 5, 16, 16, iterations=500, tolerance=1e-3), torch.randn(3, 20, 16)
    counted = []
    solve = torch.Tensor.amax

    def count(self, *arguments):
        counted.append(1)
        return solve(self, *arguments)

    torch.Tensor.amax = count
    try:
        layer(children).sum().backward()
    finally:
        torch.Tensor.amax = solve
    assert 4 <= len(counted) < 200


def test_equilibria_compile_autocast_stack_and_explain():
    torch._dynamo.reset()
    layer = EquilibriumRouting(6, 5, 16, 16, activations=True)
    layer.scale *= 0.5
    children = torch.randn(2, 6, 16)
    run = torch.compile(layer, fullgraph=True, backend="aot_eager")
    found, wanted = run(children), layer(children)
    torch.testing.assert_close(tuple(found), tuple(wanted), rtol=1e-3, atol=1e-3)
    got, exact = (torch.autograd.grad(p.poses.square().mul(p.poses).sum(), layer.weight)[0] for p in (found, wanted))
    torch.testing.assert_close(got, exact, rtol=1e-2, atol=1e-2 * exact.abs().max().item())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        halves = layer(children).poses
    assert halves.dtype == torch.bfloat16
    torch.testing.assert_close(halves.float(), wanted.poses, rtol=0.1, atol=0.1)
    (half,) = torch.autograd.grad(halves.float().square().mul(halves.float()).sum(), layer.weight)
    assert (half - exact).norm() < 0.2 * exact.norm()
    assert layer(children[:0]).poses.shape == (0, 5, 16)
    assert "30 turns" in str(explain(layer, children))
    specs = [CapsuleSpec(4, kernel_size=2), CapsuleSpec(3)]
    options = {"in_capsules": 2, "in_dim": 4, "size": (4, 4), "iterations": 3}
    stack = RoutingStack.build(specs, layer=EquilibriumRouting, **options)
    grid = torch.randn(2, 2, 4, 4, 4)
    first, last = stack.layers
    torch.testing.assert_close(stack(grid), last(first(grid)))


def test_equilibria_halves_checkpoints_and_second_derivatives():
    layer, children = EquilibriumRouting(8, 3, 4, 4), torch.randn(2, 8, 4, requires_grad=True)
    (wanted,) = torch.autograd.grad(layer(children).sum(), children)
    (found,) = torch.autograd.grad(checkpoint(layer, children, use_reentrant=False).sum(), children)
    torch.testing.assert_close(found, wanted)
    with pytest.raises(RuntimeError, match="EquilibriumRouting has no second derivatives"):
        torch.autograd.grad(layer(children).sum(), children, create_graph=True)
    half = EquilibriumRouting(8, 3, 4, 4, dtype=torch.bfloat16)
    half(children.bfloat16()).float().sum().backward()
    assert half.weight.grad.isfinite().all()


def test_equilibria_refuse_transforms_and_gradients_of_dtensors_by_name():
    layer, children = EquilibriumRouting(8, 3, 4, 4), torch.randn(2, 8, 4)
    for transform in (lambda f: torch.func.grad(lambda x: f(x).sum()), torch.func.jacrev, torch.func.jacfwd):
        with pytest.raises(RuntimeError, match=r"fastcaps\.EquilibriumRouting has no rule for torch\.func"):
            transform(layer)(children)
    with pytest.raises(RuntimeError, match=r"fastcaps\.EquilibriumRouting has no rule for torch\.func"):
        torch.func.vmap(layer)(children[None])
    torch.distributed.init_process_group("fake", rank=0, world_size=1)
    try:
        spread = distribute_tensor(children, init_device_mesh("cpu", (1,)), [Shard(0)])
        with pytest.raises(RuntimeError, match=r"fastcaps\.EquilibriumRouting has no gradients for DTensors"):
            layer(spread)
        with torch.no_grad():
            torch.testing.assert_close(layer(spread).full_tensor(), layer(children))
    finally:
        torch.distributed.destroy_process_group()


def test_equilibria_refuse_what_has_no_fixed_point():
    with pytest.raises(ValueError, match="dropout must be 0"):
        EquilibriumRouting(4, 3, 4, 4, dropout=0.1)
    with pytest.raises(ValueError, match="start must not be 'learned'"):
        EquilibriumRouting(4, 3, 4, 4, start="learned")
    with pytest.raises(ValueError, match="tolerance must be a finite number >= 0"):
        EquilibriumRouting(4, 3, 4, 4, tolerance=-1)
    layer = EquilibriumRouting(4, 3, 4, 4)
    one = layer(torch.ones(1, 4, 4), iterations=1)
    torch.testing.assert_close(one, layer(torch.ones(1, 4, 4), iterations=2), rtol=10, atol=10)
    assert one.shape == (1, 3, 4)


# ---- primary capsules, and sets read as grids ------------------------------------------------------------------------


def test_channels_are_capsules_already():
    features = torch.randn(2, 12, 3, 5)
    primary = PrimaryCapsules(12, 3, 4, kernel_size=None, normalize=None)
    poses = primary(features)
    assert poses.shape == (2, 3, 3, 5, 4) and not list(primary.parameters()) and primary.output_size((3, 5)) == (3, 5)
    torch.testing.assert_close(poses, features.unflatten(1, (3, 4)).movedim(2, -1))
    primary = PrimaryCapsules(12, 3, 3, kernel_size=None, activations=True)
    poses, active = primary(features)
    wanted = F.layer_norm(features[:, :9].unflatten(1, (3, 3)).movedim(2, -1), (3,))
    torch.testing.assert_close(poses, wanted, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(active, features[:, 9:].sigmoid())
    assert repr(primary).startswith("PrimaryCapsules(\n  12, 3, 3, kernel_size=None, activations=True\n")
    for message, options in [
        ("in_channels must be 9 with kernel_size=None", {}),
        ("in_channels must be 12 .* and their activations; got 13", {"activations": True}),
        ("need a kernel_size", {"bias": False}),
        ("need a kernel_size", {"padding": 1}),
        ("scores must be False", {"scores": True}),
    ]:
        with pytest.raises(ValueError, match=message):
            PrimaryCapsules(13 if "activations" in options else 12, 3, 3, **{"kernel_size": None, **options})


def test_primary_capsules_after_batch_norm_with_scores():
    primary = PrimaryCapsules(6, 3, 4, activations=True, scores=True, batch_norm=True, normalize=None)
    features = torch.randn(5, 6, 3, 2) * 3 + 1
    poses, scores = primary(features)
    normal = F.batch_norm(features, None, None, training=True)
    wanted = F.conv2d(normal, primary.conv.weight, primary.conv.bias).unflatten(1, (3, 4)).movedim(2, -1)
    torch.testing.assert_close(poses, wanted, rtol=1e-4, atol=1e-5)
    wanted = F.conv2d(normal, primary.activation_conv.weight, primary.activation_conv.bias)
    torch.testing.assert_close(scores, wanted, rtol=1e-4, atol=1e-5)
    assert primary.batch_norm is not primary.activation_batch_norm
    primary.scores = False
    primary.eval(), primary.batch_norm.reset_running_stats(), primary.activation_batch_norm.reset_running_stats()
    _, active = primary(features)
    assert active.min() > 0 and active.max() < 1


def test_a_set_is_read_as_types_at_places():
    specs = [CapsuleSpec(6, kernel_size="all", share=True), CapsuleSpec(4, kernel_size="all", share=True, types=2)]
    options = {"in_capsules": 3, "in_dim": 4, "size": (3, 5), "layer": EMRouting, **DOUBLE}
    stack = RoutingStack.build(specs, **options)
    first, last = stack.layers
    assert last.weight.shape == (2, 4, 2, 2)
    children, gate = draw(2, 3, 3, 5, 4), torch.rand(2, 3, 3, 5, **DOUBLE)
    poses, active = first(children, gate)
    wanted = last(poses.view(2, 2, 1, 3, 4), active.view(2, 2, 1, 3))
    torch.testing.assert_close(tuple(stack(children, gate)), tuple(wanted))
    own = DynamicRouting(6, 4, 4, 4, **DOUBLE)  # the same matrices for capsules 0 to 2, and for 3 to 5
    shared = DynamicRouting(2, 4, 4, 4, kernel_size="all", share=True, **DOUBLE)
    with torch.no_grad():
        own.weight.copy_(shared.weight.repeat_interleave(3, 0))
    below = DynamicRouting(3, 6, 4, 4, **DOUBLE)
    children = draw(2, 3, 4)
    torch.testing.assert_close(RoutingStack([below, shared])(children), own(below(children)))
    for message, spec in [
        ("types, 4, must divide the 6 capsules", CapsuleSpec(4, kernel_size="all", share=True, types=4)),
        ("wants a grid", CapsuleSpec(4, kernel_size="all", share=True)),
        ("wants a grid", CapsuleSpec(4, kernel_size=2, types=2)),
    ]:
        with pytest.raises(ValueError, match=message):
            RoutingStack.build([specs[0], spec], **options)
    with pytest.raises(ValueError, match="must divide the 6 capsules below"):
        RoutingStack([below, DynamicRouting(4, 4, 4, 4, kernel_size="all", share=True, **DOUBLE)])
