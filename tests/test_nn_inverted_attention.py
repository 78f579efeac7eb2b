"""The routing layer: against Procedure 1 as einsums, its start, its ablations, and what else one does with a module."""

from __future__ import annotations

import copy
import io
import math
import pickle

import pytest
import torch
import torch.nn.functional as F
from nn_oracle import procedure

import fastcaps
from fastcaps import InvertedAttentionRouting
from fastcaps import functional as routing

CASES = {
    "set-matrix": {"sizes": (7, 5, 9, 9)},
    "set-vector": {"sizes": (7, 5, 3, 4), "pose": "vector"},
    "set-bias": {"sizes": (6, 3, 4, 4), "bias": True},
    "set-share": {"sizes": (6, 3, 4, 4), "share": True, "bias": True},
    "set-one-number": {"sizes": (6, 3, 1, 1)},
    "set-no-norm": {"sizes": (6, 3, 4, 4), "layer_norm": False},
    "grid-matrix": {"sizes": (3, 4, 4, 4), "kernel_size": 3, "stride": 2},
    "grid-vector": {"sizes": (2, 3, 5, 2), "pose": "vector", "kernel_size": (2, 3), "stride": (1, 2)},
    "grid-padded": {"sizes": (2, 3, 4, 4), "kernel_size": 3, "padding": (1, 2), "dilation": (2, 1), "bias": True},
    "grid-share": {"sizes": (2, 3, 4, 4), "kernel_size": 3, "padding": 1, "share": True, "bias": True},
}


def make(name: str, **changes) -> InvertedAttentionRouting:
    """The case's layer in float64, every parameter random so that none is invisible."""
    options = {**CASES[name], **changes}
    torch.manual_seed(0)
    layer = InvertedAttentionRouting(*options.pop("sizes"), dtype=torch.float64, **options)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn_like(parameter))
    return layer


def draw(layer: InvertedAttentionRouting, batch: int = 2, size: tuple[int, int] = (7, 6)) -> torch.Tensor:
    grid = () if layer.window is None else size
    return torch.randn(batch, layer.in_capsules, *grid, layer.in_dim, dtype=torch.float64)


def oracle(layer, children, parents=None, gate=None):
    spec = None
    if layer.window is not None:
        s = layer.window.spec
        spec = (s[:2], s[2:4], s[4:6], s[6:])
    norm = None if layer.norm is None else (layer.norm.weight, layer.norm.bias)
    return procedure(
        children, layer.weight, parents, rows=layer.pose_shape[0], bias=layer.bias, gate=gate, norm=norm, window=spec
    )


@pytest.mark.parametrize("name", CASES)
def test_two_iterations_are_procedure_1(name):
    layer = make(name)
    children = draw(layer)
    first, spread = layer(children, return_coefficients=True)
    want, share = oracle(layer, children)
    torch.testing.assert_close(first, want)
    torch.testing.assert_close(spread, share)
    second, spread = layer(children, first, return_coefficients=True)
    want, share = oracle(layer, children, first)
    torch.testing.assert_close(second, want)
    torch.testing.assert_close(spread, share)
    assert not spread.requires_grad


@pytest.mark.parametrize("name", ["set-matrix", "set-share", "grid-padded", "grid-share"])
def test_gradients_are_procedure_1s(name):
    layer = make(name)
    children = draw(layer).requires_grad_()
    weights = torch.randn_like(layer(children, layer(children)))

    def gradients(run):
        loss = (run(children, run(children)) * weights).sum()
        return torch.autograd.grad(loss, [children, *layer.parameters()])

    ours = gradients(lambda c, p=None: layer(c, p))
    theirs = gradients(lambda c, p=None: oracle(layer, c, p)[0])
    for got, want in zip(ours, theirs, strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("name", ["set-bias", "grid-padded"])
def test_activations_gate_the_children(name):
    layer = make(name)
    children = draw(layer)
    gate = torch.rand(children.shape[:-1], dtype=torch.float64)
    parents = layer(children)
    torch.testing.assert_close(layer(children, None, gate), oracle(layer, children, None, gate)[0])
    torch.testing.assert_close(layer(children, parents, gate), oracle(layer, children, parents, gate)[0])


def test_a_child_with_activation_0_is_not_there():
    layer = make("set-share")
    children = draw(layer)
    gate = torch.tensor([1.0, 1.0, 1.0, 1.0, 0.0, 0.0], dtype=torch.float64).expand(2, 6)
    parents = torch.randn(2, 3, 4, dtype=torch.float64)
    torch.testing.assert_close(layer(children, parents, gate), layer(children[:, :4], parents))


def test_shared_set_takes_any_number_of_children():
    layer = make("set-share")
    assert layer.groups == 1
    for count in (1, 6, 19):
        children = torch.randn(2, count, 4, dtype=torch.float64)
        torch.testing.assert_close(layer(children), oracle(layer, children)[0])


@pytest.mark.parametrize(
    ("options", "contracted", "seen"),
    [
        ({"sizes": (800, 10, 16, 16)}, 4, 800),
        ({"sizes": (300, 12, 8, 16), "pose": "vector"}, 8, 300),
        ({"sizes": (32, 32, 16, 16), "kernel_size": 3}, 4, 288),
        ({"sizes": (64, 64, 16, 16), "kernel_size": 3, "share": True}, 4, 576),
    ],
)
def test_initialisation_is_the_authors(options, contracted, seen):
    torch.manual_seed(1)
    options = dict(options)
    layer = InvertedAttentionRouting(*options.pop("sizes"), **options)
    std = math.sqrt(layer.out_capsules / (contracted * seen))
    count = layer.weight.numel()
    assert abs(layer.weight.std().item() / std - 1) < 5 / math.sqrt(2 * count)  # five standard errors
    assert abs(layer.weight.mean().item()) < 5 * std / math.sqrt(count)
    assert layer.scale == pytest.approx(layer.out_dim**-0.5)
    assert layer.norm is not None and layer.norm.eps == 1e-5
    assert torch.equal(layer.norm.weight, torch.ones(layer.out_dim))


def test_scale_can_be_set():
    layer = make("set-no-norm")
    children, parents = draw(layer), torch.randn(2, 3, 4, dtype=torch.float64)
    layer.scale = 1.0  # the paper's, which writes none
    torch.testing.assert_close(layer(children, parents), oracle(layer, children, parents * layer.out_dim**0.5)[0])


def test_dropout_stands_between_sum_and_layer_norm():
    layer = make("set-matrix", dropout=0.4)
    children, parents = draw(layer, batch=16), torch.randn(16, 5, 9, dtype=torch.float64)
    torch.manual_seed(5)
    got = layer(children, parents)
    sums = routing.inverted_attention_routing(
        children.unflatten(-1, (3, 3)), layer.weight, parents.unflatten(-1, (3, 3)), normalize=False
    ).flatten(-2)
    torch.manual_seed(5)
    dropped = F.dropout(sums, 0.4)
    assert 0.25 < (dropped == 0).double().mean() < 0.55
    torch.testing.assert_close(got, F.layer_norm(dropped, (9,), layer.norm.weight, layer.norm.bias))
    layer.eval()
    torch.testing.assert_close(layer(children, parents), oracle(layer, children, parents)[0])


def test_dropout_on_a_grid_keeps_the_memory_order():
    layer = make("grid-matrix", dropout=0.5)
    parents = layer(draw(layer))
    assert parents.permute(0, 2, 3, 1, 4).is_contiguous()


def test_without_layer_norm_dropout_is_the_last_step():
    layer = make("set-no-norm", dropout=0.5)
    children = draw(layer)
    torch.manual_seed(2)
    got = layer(children)
    want = oracle(layer, children)[0]
    kept = got != 0
    assert kept.any() and not kept.all()
    torch.testing.assert_close(got[kept], 2 * want[kept])


@pytest.mark.parametrize("name", ["set-matrix", "grid-matrix"])
def test_activations_option_returns_poses_and_activations(name):
    layer = make(name, activations=True)
    children = draw(layer)
    poses, activations, spread = layer(children, return_coefficients=True)
    want, _ = oracle(layer, children)
    torch.testing.assert_close(poses, want)
    logits = torch.einsum("bm...d,md->bm...", want, layer.activation_weight)
    bias = layer.activation_bias.view(-1, *[1] * (logits.dim() - 2))
    torch.testing.assert_close(activations, torch.sigmoid(logits + bias))
    assert spread.shape[-1] == layer.out_capsules
    with pytest.raises(ValueError, match="activations=True"):
        make(name).read_activations(poses)


def test_a_set_layer_flattens_a_grid_in_the_order_n_h_w():
    layer = InvertedAttentionRouting(24, 5, 4, 4, activations=True)
    grid, gate = torch.randn(2, 2, 3, 4, 4), torch.rand(2, 2, 3, 4)
    rows = [grid[:, n, h, w] for n in range(2) for h in range(3) for w in range(4)]
    gates = [gate[:, n, h, w] for n in range(2) for h in range(3) for w in range(4)]
    poses, _ = layer(grid, None, gate)
    torch.testing.assert_close(poses, layer(torch.stack(rows, 1), None, torch.stack(gates, 1))[0])


def test_grid_results_lie_position_by_position_and_chain_without_a_copy():
    layer = make("grid-matrix")
    parents = layer(draw(layer))
    assert parents.shape == (2, 4, 3, 2, 4)
    assert parents.permute(0, 2, 3, 1, 4).is_contiguous()
    assert layer.output_size((7, 6)) == (3, 2)
    assert make("set-matrix").output_size((7, 6)) is None


@pytest.mark.parametrize("name", ["set-matrix", "set-vector", "grid-matrix", "grid-padded"])
@pytest.mark.parametrize("batch", [0, 1])
def test_batch_of_one_and_of_none(name, batch):
    layer = make(name)
    children = draw(layer, batch=batch).requires_grad_()
    parents = layer(children, layer(children))
    assert parents.shape[:2] == (batch, layer.out_capsules)
    parents.sum().backward()
    assert children.grad.shape == children.shape
    assert layer.weight.grad.shape == layer.weight.shape


@pytest.mark.parametrize("name", ["set-matrix", "grid-share"])
def test_strided_and_expanded_children(name):
    layer = make(name)
    children = draw(layer, batch=1)
    wide = torch.randn(*children.shape[:-1], 2 * children.shape[-1], dtype=torch.float64)
    torch.testing.assert_close(layer(wide[..., ::2]), layer(wide[..., ::2].clone()))
    expanded = children.expand(3, *children.shape[1:])
    parents = layer(expanded, layer(expanded))
    torch.testing.assert_close(parents, layer(children, layer(children)).expand_as(parents))


@pytest.mark.parametrize("name", ["set-bias", "grid-share"])
def test_state_dict_deepcopy_and_pickle(name):
    layer = make(name, activations=True)
    children = draw(layer)
    want = layer(children)[0]
    other = make(name, activations=True)
    with torch.no_grad():
        other.weight.zero_()
    buffer = io.BytesIO()
    torch.save(layer.state_dict(), buffer)
    buffer.seek(0)
    other.load_state_dict(torch.load(buffer))
    for copied in (other, copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        torch.testing.assert_close(copied(children)[0], want)
        assert copied.weight is not layer.weight


def test_parameter_names_are_stable():
    layer = InvertedAttentionRouting(6, 3, 4, 4, bias=True, activations=True)
    names = {"weight", "bias", "norm.weight", "norm.bias", "activation_weight", "activation_bias"}
    assert set(layer.state_dict()) == names
    assert layer.weight.shape == (6, 3, 2, 2) and layer.bias.shape == (6, 3, 2, 2)
    assert set(InvertedAttentionRouting(6, 3, 1, 1).state_dict()) == {"weight"}


@pytest.mark.parametrize("name", ["set-matrix", "grid-matrix"])
def test_compiled_whole(name):
    torch._dynamo.reset()
    layer = make(name)

    def twice(children):
        return layer(children, layer(children))

    compiled = torch.compile(twice, fullgraph=True, backend="aot_eager")
    for batch in (2, 3):
        children = draw(layer, batch=batch).requires_grad_()
        got, want = compiled(children), twice(children)
        torch.testing.assert_close(got, want)
        torch.testing.assert_close(
            torch.autograd.grad(got.sum(), children)[0], torch.autograd.grad(want.sum(), children)[0]
        )


@pytest.mark.parametrize("name", ["set-bias", "grid-padded"])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_bfloat16_autocast(name, dropout):
    layer = make(name, dropout=dropout, activations=True).float()
    children = draw(layer).float().requires_grad_()
    gate = torch.rand(children.shape[:-1])
    with torch.autocast("cpu", torch.bfloat16):
        parents, activations = layer(children, None, gate)
        parents, activations = layer(children, parents, gate)
    assert parents.isfinite().all() and activations.isfinite().all()
    (parents.float().sum() + activations.float().sum()).backward()
    assert layer.weight.grad.dtype == torch.float32 and layer.weight.grad.isfinite().all()
    if dropout == 0.0:
        exact = layer(children, layer(children, None, gate)[0], gate)[0]
        assert (parents.float() - exact).abs().mean() < 0.05 * exact.abs().mean()


def test_bfloat16_module():
    layer = make("set-matrix").to(torch.bfloat16)
    children = draw(layer).to(torch.bfloat16)
    assert layer(children, layer(children)).dtype == torch.bfloat16


def test_meta_device_and_dtype_arguments():
    layer = InvertedAttentionRouting(6, 3, 4, 4, bias=True, activations=True, device="meta", dtype=torch.float64)
    assert {(p.device.type, p.dtype) for p in layer.parameters()} == {("meta", torch.float64)}


def test_nan_stays_in_its_sample():
    layer = make("set-matrix")
    children = draw(layer)
    children[0, 0, 0] = math.nan
    parents = layer(children, layer(children))
    assert parents[0].isnan().any() and parents[1].isfinite().all()


def test_extra_repr_names_what_is_not_default():
    plain = repr(InvertedAttentionRouting(6, 3, 4, 4, layer_norm=False, dropout=0.5))
    assert "(6, 3, 4, 4, dropout=0.5, layer_norm=False)" in plain.splitlines()[0] + ")"
    grid = repr(InvertedAttentionRouting(6, 3, 4, 4, kernel_size=3, stride=2, share=True, activations=True))
    for part in ("kernel_size=(3, 3)", "stride=(2, 2)", "share=True", "activations=True"):
        assert part in grid
    assert "padding" not in grid


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        ((6, 3, 15, 15), {}, ValueError, "in_dim must be a square number.*15"),
        ((6, 3, 16, 25), {}, ValueError, "out_dim must be a multiple of the 4 rows.*25"),
        ((6, 3, 16, 16), {"pose": "tensor"}, ValueError, "pose must be one of 'matrix', 'vector'"),
        ((0, 3, 16, 16), {}, ValueError, "in_capsules must be an int >= 1"),
        ((6, -1, 16, 16), {}, ValueError, "out_capsules must be an int >= 1"),
        ((6, 3, 0, 16), {}, ValueError, "in_dim must be an int >= 1"),
        ((6, 3.0, 16, 16), {}, TypeError, "out_capsules must be an int"),
        ((6, 3, 16, 16), {"dropout": 1.0}, ValueError, r"dropout must lie in \[0, 1\)"),
        ((6, 3, 16, 16), {"dropout": "a"}, TypeError, "dropout must be a number, got 'a'"),
        ((6, 3, 16, 16), {"dtype": torch.int32}, TypeError, "dtype must be a floating-point type, got torch.int32"),
        ((6, 3, 16, 16), {"stride": 2}, ValueError, "stride.*kernel_size"),
        ((6, 3, 16, 16), {"kernel_size": 0}, ValueError, "kernel_size"),
        ((6, 3, 16, 16), {"kernel_size": 2, "padding": -1}, ValueError, "padding"),
    ],
)
def test_wrong_constructor_arguments(arguments, options, error, message):
    with pytest.raises(error, match=message):
        InvertedAttentionRouting(*arguments, **options)


def test_wrong_inputs_are_named():
    layer = InvertedAttentionRouting(6, 3, 4, 4)
    grid = InvertedAttentionRouting(2, 3, 4, 4, kernel_size=3)
    good, board = torch.randn(2, 6, 4), torch.randn(2, 2, 5, 5, 4)
    cases = [
        (ValueError, r"children must be \[B, I, 4\], got \[2, 6, 5\]", lambda: layer(torch.randn(2, 6, 5))),
        (ValueError, r"children must be \[B, I, 4\], got \[6, 4\]", lambda: layer(good[0])),
        (ValueError, "children must hold the 6 children.*got 7", lambda: layer(torch.randn(2, 7, 4))),
        (ValueError, "must hold the 2 child types.*got 3", lambda: grid(torch.randn(2, 3, 5, 5, 4))),
        (ValueError, r"children must be \[B, 2, H, W, 4\]", lambda: grid(good)),
        (ValueError, r"parents must be \[B, 3, 4\], got \[2, 4, 4\]", lambda: layer(good, torch.randn(2, 4, 4))),
        (ValueError, r"parents must be \[B, 3, Ho, Wo, 4\]", lambda: grid(board, torch.randn(2, 3, 4))),
        (ValueError, "parents", lambda: layer(good, torch.randn(3, 3, 4))),
        (ValueError, "parents", lambda: grid(board, torch.randn(2, 3, 3, 2, 4))),
        (ValueError, "window", lambda: grid(torch.randn(2, 2, 5, 2, 4))),
        (ValueError, "gate", lambda: layer(good, None, torch.rand(2, 5))),
        (TypeError, "children must be a tensor, got list", lambda: layer([1.0])),
        (TypeError, "parents must be a tensor, got int", lambda: layer(good, 3)),
        (TypeError, "dtype", lambda: layer(good.double())),
        (TypeError, "parents", lambda: layer(good, torch.randn(2, 3, 4, dtype=torch.float64))),
        (ValueError, "device", lambda: layer(good.to("meta"))),
    ]
    for error, message, call in cases:
        with pytest.raises(error, match=message):
            call()


def test_exported_at_the_top():
    assert fastcaps.InvertedAttentionRouting is fastcaps.nn.InvertedAttentionRouting


@pytest.mark.parametrize("name", ["set-matrix", "grid-matrix"])
def test_exports_with_a_dynamic_batch(name):
    layer = make(name)
    children = draw(layer)
    parents = layer(children).detach()
    batch = torch.export.Dim("batch")
    shapes = {"children": {0: batch}, "parents": {0: batch}}
    program = torch.export.export(layer, (children, parents), dynamic_shapes=shapes)
    more = [torch.cat([tensor, tensor, tensor]) for tensor in (children, parents)]
    torch.testing.assert_close(program.module()(*more), layer(*more))


@pytest.mark.parametrize("name", [*CASES, "dropout"])
@pytest.mark.parametrize("start", [False, True])
def test_several_iterations_are_a_loop_of_calls(name: str, start: bool) -> None:
    layer = make("set-matrix", dropout=0.4) if name == "dropout" else make(name)
    children = draw(layer).requires_grad_()
    parents = torch.randn_like(layer(children)).requires_grad_() if start else None
    results = []
    for together in (True, False):
        torch.manual_seed(5)
        before = parents
        if not together:
            for _ in range(2):
                before = layer(children, before)
        poses, spread = layer(children, before, iterations=3 if together else 1, return_coefficients=True)
        torch.manual_seed(5)
        alone = layer(children, before, iterations=3) if together else poses
        leaves = [children, *layer.parameters()] + ([parents] if start else [])
        weights = torch.linspace(-1, 1, poses.numel(), dtype=poses.dtype).view(poses.shape)
        gradients = torch.autograd.grad((alone * weights).sum(), leaves, allow_unused=True, materialize_grads=True)
        results.append([poses, spread, alone, *gradients])
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want)


def test_iterations_must_be_a_count() -> None:
    layer = InvertedAttentionRouting(6, 3, 4, 4)
    with pytest.raises(ValueError, match="iterations must be an int >= 1, got 0"):
        layer(torch.randn(2, 6, 4), iterations=0)
    with fastcaps.backend("reference"):
        torch.testing.assert_close(
            layer(torch.ones(2, 6, 4), iterations=2), layer(torch.ones(2, 6, 4), layer(torch.ones(2, 6, 4)))
        )
