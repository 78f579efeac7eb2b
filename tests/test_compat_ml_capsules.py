"""The authors' layers under their own names, against the same procedure with stored votes; checkpoints."""

from __future__ import annotations

import copy
import inspect
import io
import math
import pickle

import nn_plain
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fastcaps.compat.ml_capsules import CapsuleCONV, CapsuleFC

FC = {
    name: {
        "in_n_capsules": 12,
        "in_d_capsules": numbers,
        "out_n_capsules": 5,
        "out_d_capsules": out,
        "matrix_pose": name == "matrix",
        "dp": 0.0,
    }
    for name, numbers, out in (("matrix", 9, 9), ("vector", 3, 4), ("to-one", 3, 1))
}
CONV = {name: {**case, "in_n_capsules": 3, "kernel_size": 3, "stride": 2} for name, case in FC.items()}
CONV["wide-step"] = {**CONV["matrix"], "kernel_size": 2, "stride": 3}
CONV["mixed"] = {**CONV["vector"], "mixed_windows": True}
CONV["mixed-wide-step"] = {**CONV["wide-step"], "mixed_windows": True}
EVERY = [(CapsuleFC, name) for name in FC] + [(CapsuleCONV, name) for name in CONV]


def pair(kind, name, **changes):
    """Our layer and the plain one with the same random parameters, in float64."""
    arguments = {**(FC if kind is CapsuleFC else CONV)[name], **changes}
    torch.manual_seed(0)
    plain = getattr(nn_plain, kind.__name__)(**arguments).double()
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.copy_(torch.randn_like(parameter))
    ours = kind(**arguments).double()
    ours.load_state_dict(plain.state_dict())
    return ours, plain


def children_of(layer, batch=2):
    grid = (7, 5) if isinstance(layer, CapsuleCONV) else ()
    return torch.randn(batch, layer.in_n_capsules, *grid, layer.in_d_capsules, dtype=torch.float64)


@pytest.mark.parametrize(("kind", "name"), EVERY)
def test_two_iterations_and_their_gradients(kind, name):
    ours, plain = pair(kind, name)
    children = children_of(ours).requires_grad_()
    results = []
    for layer in (ours, plain):
        first = layer(children, 0)
        second = layer(children, 1, first)
        weights = torch.linspace(-1, 1, second.numel(), dtype=torch.float64).view(second.shape)
        used = [p for n, p in layer.named_parameters() if n == "w" or layer.out_d_capsules > 1]
        results.append([first, second, *torch.autograd.grad((second * weights).sum(), [children, *used])])
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(
            got, want, rtol=1e-7, atol=1e-8
        )  # the authors' 1e-10 in float64, times what LayerNorm does


def test_no_window_is_copied():
    class Largest(TorchDispatchMode):
        numbers = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            found = func(*args, **(kwargs or {}))
            for tensor in found if isinstance(found, (tuple, list)) else [found]:
                if isinstance(tensor, torch.Tensor):
                    self.numbers = max(self.numbers, tensor.numel())
            return found

    layer = CapsuleCONV(7, 4, 2, 4, kernel_size=3, stride=1, matrix_pose=True, dp=0.0)
    children = torch.randn(2, 7, 9, 8, 4)
    with torch.no_grad(), Largest() as seen:
        layer(children, 1, layer(children, 0))
    assert seen.numbers == children.numel()  # in windows there are five times as many


def test_a_grid_into_fc_is_flattened_n_h_w():
    ours, plain = pair(CapsuleFC, "matrix")
    grid = torch.randn(2, 3, 2, 2, 9, dtype=torch.float64)
    rows = torch.stack([grid[:, n, h, w] for n in range(3) for h in range(2) for w in range(2)], 1)
    torch.testing.assert_close(ours(grid, 0), ours(rows, 0))
    torch.testing.assert_close(ours(grid, 0), plain(grid, 0))


@pytest.mark.parametrize("kind", [CapsuleFC, CapsuleCONV])
def test_matrix_poses_of_one_number_stay_unflattened(kind):
    case = {**(FC if kind is CapsuleFC else CONV)["matrix"], "in_d_capsules": 1, "out_d_capsules": 1}
    layer = kind(**case)
    grid = () if kind is CapsuleFC else (7, 5)
    children = torch.randn(2, layer.in_n_capsules, *grid, 1)
    first = layer(children, 0)
    assert first.shape[-2:] == (1, 1) and first.dim() == children.dim() + 1
    assert layer(children, 1, first).shape == first.shape
    above = kind(**{**case, "in_n_capsules": layer.out_n_capsules, **({} if kind is CapsuleFC else {"kernel_size": 1})})
    assert above(first, 0).shape[:2] == (2, layer.out_n_capsules)


def test_signatures_are_the_authors():
    fc = ["in_n_capsules", "in_d_capsules", "out_n_capsules", "out_d_capsules", "matrix_pose", "dp"]
    conv = [*fc[:4], "kernel_size", "stride", "matrix_pose", "dp", "coordinate_add", "mixed_windows"]
    assert list(inspect.signature(CapsuleFC).parameters) == fc
    assert list(inspect.signature(CapsuleCONV).parameters) == conv
    assert inspect.signature(CapsuleCONV).parameters["coordinate_add"].default is False
    for kind in (CapsuleFC, CapsuleCONV):
        assert list(inspect.signature(kind.forward).parameters) == ["self", "input", "num_iter", "next_capsule_value"]


def test_parameters_and_attributes_are_the_authors():
    shapes = {
        (CapsuleFC, "matrix"): (12, 3, 3, 5),
        (CapsuleFC, "vector"): (12, 3, 5, 4),
        (CapsuleCONV, "matrix"): (3, 3, 3, 3, 3, 5),
        (CapsuleCONV, "vector"): (3, 3, 3, 3, 5, 4),
    }
    for (kind, name), shape in shapes.items():
        ours, plain = pair(kind, name)
        assert tuple(ours.w.shape) == shape
        assert (
            list(ours.state_dict()) == list(plain.state_dict()) == ["w", "nonlinear_act.weight", "nonlinear_act.bias"]
        )
        for attribute in ("weight_init_const", "scale", "dropout_rate", "matrix_pose", "out_d_capsules"):
            assert getattr(ours, attribute) == pytest.approx(getattr(plain, attribute)), attribute
        assert hasattr(ours, "sqrt_d") == (name == "matrix")
    conv = CapsuleCONV(**CONV["matrix"], coordinate_add=True)
    assert (conv.kernel_size, conv.stride, conv.coordinate_add) == (3, 2, True)
    assert "coordinate_add=True" in repr(conv) and "in_n_capsules=12" in repr(CapsuleFC(**FC["matrix"]))


@pytest.mark.parametrize(("kind", "name"), EVERY)
def test_initialisation(kind, name):
    arguments = {**(FC if kind is CapsuleFC else CONV)[name], "in_n_capsules": 200}
    torch.manual_seed(3)
    layer = kind(**arguments)
    inner = 3  # the length that a vote sums over, in every case here
    seen = 200 * (layer.kernel_size**2 if kind is CapsuleCONV else 1)
    assert layer.weight_init_const == pytest.approx(math.sqrt(5 / (inner * seen)))
    assert abs(layer.w.std().item() / layer.weight_init_const - 1) < 5 / math.sqrt(2 * layer.w.numel())
    torch.manual_seed(3)
    plain = getattr(nn_plain, kind.__name__)(**arguments)
    assert torch.equal(layer.w, plain.w)  # the same seed gives the same start


def test_num_iter_and_coordinate_add_change_nothing():
    ours, _ = pair(CapsuleCONV, "matrix")
    other = CapsuleCONV(**CONV["matrix"], coordinate_add=True).double()
    other.load_state_dict(ours.state_dict())
    children = children_of(ours)
    assert torch.equal(ours(children, 0), ours(children, 7))
    assert torch.equal(ours(children, 0), other(children, 0))


@pytest.mark.parametrize(("kind", "name"), EVERY)
def test_checkpoints_load_both_ways(kind, name):
    ours, plain = pair(kind, name)
    for source, target in ((ours, plain), (plain, ours)):
        with torch.no_grad():
            source.w.normal_()
        buffer = io.BytesIO()
        torch.save(source.state_dict(), buffer)
        buffer.seek(0)
        target.load_state_dict(torch.load(buffer))
        assert torch.equal(source.w, target.w)


@pytest.mark.parametrize("matrix_pose", [True, False])
@pytest.mark.parametrize("num_routing", [1, 3])
def test_a_script_runs_after_one_changed_import(matrix_pose, num_routing):
    torch.manual_seed(0)
    plain = nn_plain.Network(num_routing=num_routing, matrix_pose=matrix_pose)
    ours = nn_plain.Network(CapsuleCONV, CapsuleFC, num_routing=num_routing, matrix_pose=matrix_pose)
    ours.load_state_dict(plain.state_dict())
    images = torch.randn(3, 1, 14, 14)
    want, got = plain(images), ours(images)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    got.square().sum().backward()
    want.square().sum().backward()
    for (name, p), q in zip(ours.named_parameters(), plain.parameters(), strict=True):
        if p.grad is None or q.grad is None:
            assert p.grad is None and q.grad is None, name
        else:
            torch.testing.assert_close(p.grad, q.grad, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("kind", [CapsuleFC, CapsuleCONV])
def test_dropout_before_layer_norm(kind):
    ours, _ = pair(kind, "matrix", dp=0.5)
    children = children_of(ours)
    torch.manual_seed(1)
    a = ours(children, 0)
    torch.manual_seed(2)
    assert not torch.equal(a, ours(children, 0))
    normal = (a - ours.nonlinear_act.bias) / ours.nonlinear_act.weight
    spread = normal.var(-1, correction=0)
    torch.testing.assert_close(spread[spread > 0.5], torch.ones_like(spread[spread > 0.5]), rtol=1e-2, atol=1e-2)
    assert torch.equal(ours.eval()(children, 0), ours(children, 0))
    ours.train().drop.p = 0.0  # users change the rate on a schedule
    torch.testing.assert_close(ours(children, 0), ours.eval()(children, 0))


def test_a_replaced_nonlinear_act_is_honoured():
    ours, plain = pair(CapsuleFC, "matrix")
    ours.nonlinear_act = plain.nonlinear_act = torch.nn.Tanh()
    children = children_of(ours)
    parents = ours(children, 0)
    torch.testing.assert_close(parents, plain(children, 0))
    torch.testing.assert_close(ours(children, 1, parents), plain(children, 1, parents), rtol=1e-7, atol=1e-8)


@pytest.mark.parametrize(("kind", "name"), EVERY)
@pytest.mark.parametrize("batch", [0, 1])
def test_batch_of_one_and_of_none(kind, name, batch):
    ours, _ = pair(kind, name)
    children = children_of(ours, batch)
    first = ours(children, 0)
    assert ours(children, 1, first).shape == first.shape and first.shape[0] == batch


@pytest.mark.parametrize("kind", [CapsuleFC, CapsuleCONV])
def test_deepcopy_pickle_and_compile(kind):
    torch._dynamo.reset()
    ours, _ = pair(kind, "matrix")
    children = children_of(ours)
    want = ours(children, 0)
    assert torch.equal(copy.deepcopy(ours)(children, 0), want)
    assert torch.equal(pickle.loads(pickle.dumps(ours))(children, 0), want)
    compiled = torch.compile(lambda c: ours(c, 1, ours(c, 0)), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(children), ours(children, 1, want))


def test_bfloat16_autocast():
    ours, _ = pair(CapsuleCONV, "matrix")
    ours = ours.float()
    children = children_of(ours).float()
    with torch.autocast("cpu", torch.bfloat16):
        parents = ours(children, 1, ours(children, 0))
    exact = ours(children, 1, ours(children, 0))
    assert (parents.float() - exact).abs().mean() < 0.05 * exact.abs().mean()


def test_wrong_arguments_are_named():
    with pytest.raises(ValueError, match="in_dim must be a square number"):
        CapsuleFC(4, 8, 3, 8, matrix_pose=True, dp=0.0)
    with pytest.raises(ValueError, match="out_d_capsules must equal in_d_capsules"):
        CapsuleFC(4, 16, 3, 9, matrix_pose=True, dp=0.0)
    with pytest.raises(ValueError, match="in_n_capsules must be an int >= 1"):
        CapsuleFC(0, 16, 3, 16, matrix_pose=True, dp=0.0)
    fc, conv = CapsuleFC(**FC["matrix"]), CapsuleCONV(**CONV["matrix"])
    for error, message, call in [
        (ValueError, r"input must be \[b, 12, 9\]", lambda: fc(torch.randn(2, 12, 8), 0)),
        (ValueError, "in_n_capsules = 12 capsules, got 11", lambda: fc(torch.randn(2, 11, 9), 0)),
        (
            ValueError,
            r"next_capsule_value must be \[b, 5, 9\]",
            lambda: fc(torch.randn(2, 12, 9), 0, torch.randn(2, 5, 8)),
        ),
        (ValueError, "parents", lambda: fc(torch.randn(2, 12, 9), 0, torch.randn(2, 4, 9))),
        (ValueError, r"input must be \[b, 3, h, w, 9\]", lambda: conv(torch.randn(2, 3, 9), 0)),
        (ValueError, "window", lambda: conv(torch.randn(2, 3, 2, 7, 9), 0)),
        (
            ValueError,
            r"input must have a grid no smaller than the window, 3 x 3, got \[2, 3, 7, 2, 3\]",
            lambda: CapsuleCONV(**CONV["mixed"])(torch.randn(2, 3, 7, 2, 3), 0),
        ),
        (ValueError, "next_capsule_value", lambda: conv(torch.randn(2, 3, 7, 7, 9), 0, torch.randn(2, 5, 9))),
        (TypeError, "input must be a tensor", lambda: fc(None, 0)),
        (TypeError, "next_capsule_value must be a tensor", lambda: fc(torch.randn(2, 12, 9), 0, 1)),
    ]:
        with pytest.raises(error, match=message):
            call()
