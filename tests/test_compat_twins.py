"""Published layers under their own names: each against the same procedure with stored votes, and converted to ours."""

from __future__ import annotations

import copy
import inspect
import pickle
from collections.abc import Sequence
from typing import Any

import nn_plain
import pytest
import torch
from features import Largest, number
from suite import refusals
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import fastcaps
from fastcaps import compat
from fastcaps.compat import (
    AgreementRouting,
    CapsLayer,
    CapsuleLayer,
    ConvCaps,
    DenseCapsule,
    batch_averaged,
    slim_capsules,
)
from fastcaps.compat.heinsen_routing import GenerativeMatrixRouting
from fastcaps.compat.ml_capsules import CapsuleCONV, CapsuleFC

FOUR = ("in_n_capsules", "in_d_capsules", "out_n_capsules", "out_d_capsules")
MATRIX = {**dict(zip(FOUR, (12, 9, 5, 9), strict=True)), "matrix_pose": True, "dp": 0}
VECTOR = {**MATRIX, "in_d_capsules": 3, "out_d_capsules": 4, "matrix_pose": False}
WINDOW = {"in_n_capsules": 3, "kernel_size": 3, "stride": 2}
DIGITS = {"num_capsules": 5, "in_channels": 3, "out_channels": 4}
GRAM_AI = {"num_route_nodes": 12, **DIGITS}
BIELSKI = {"input_caps": 12, "input_dim": 3, "output_caps": 5, "output_dim": 4}
SHARED = {"B": 3, "C": 4, "K": 1, "P": 2, "stride": 1, "w_shared": True}
HEINSEN = {"n_inp": 6, "n_out": 3, "d_cov": 2, "d_inp": 3, "d_out": 4}
AVERAGED = {"in_unit": 3, "in_channel": 12, "num_unit": 5, "unit_size": 4, "use_routing": True}
SLIM = {"kernel_size": 3, "input_dim": 3, "output_dim": 4, "input_atoms": 5, "output_atoms": 2}
HAVIR = {"in_dim": 3, "in_caps": 12, "num_caps": 5, "dim_caps": 4, "num_routing": 3}
PLAIN = {batch_averaged.DigitCaps: nn_plain.AveragedDigits, batch_averaged.CapsuleLayer: nn_plain.AveragedUnits,
         batch_averaged.RoutedCapsuleLayer: nn_plain.AveragedLayer}  # fmt: skip
GRID, POSES = (2, 3, 7, 5), [(2, 6), (2, 6, 2, 3)]

CASES: dict[str, tuple[Any, dict[str, Any], list[tuple[int, ...]]]] = {
    "fc-matrix": (CapsuleFC, MATRIX, [(2, 12, 9)]),
    "fc-dropout": (CapsuleFC, {**MATRIX, "dp": 0.5}, [(2, 12, 9)]),
    "fc-grid": (CapsuleFC, MATRIX, [(2, 3, 2, 2, 9)]),  # which is flattened in the order n, h, w
    "fc-vector": (CapsuleFC, VECTOR, [(2, 12, 3)]),
    "conv-matrix": (CapsuleCONV, {**MATRIX, **WINDOW}, [(*GRID, 9)]),
    "conv-to-one": (CapsuleCONV, {**VECTOR, **WINDOW, "out_d_capsules": 1}, [(*GRID, 3)]),
    "conv-mixed": (CapsuleCONV, {**VECTOR, **WINDOW, "mixed_windows": True}, [(*GRID, 3)]),
    "conv-mixed-wide-step": (
        CapsuleCONV, {**MATRIX, **WINDOW, "kernel_size": 2, "stride": 3, "mixed_windows": True}, [(*GRID, 9)]),
    "dense": (DenseCapsule, dict(zip(DenseCapsule._known_by, (6, 3, 4, 5, 3), strict=True)), [(3, 6, 3)]),
    "dense-one-parent": (DenseCapsule, dict(zip(DenseCapsule._known_by, (5, 4, 1, 1, 1), strict=True)), [(3, 5, 4)]),
    "havir": (compat.RoutingCapsules, HAVIR, [(2, 12, 3)]),
    "cezannec": (compat.DigitCaps, {"previous_layer_nodes": 12, **DIGITS}, [(2, 12, 3)]),
    "gram-ai": (CapsuleLayer, {**GRAM_AI, "num_iterations": 2}, [(2, 12, 3)]),
    "bielski": (CapsLayer, {**BIELSKI, "routing_module": (12, 5, 2)}, [(2, 12, 3)]),
    "em": (ConvCaps, {"B": 3, "C": 4, "K": 3, "P": 2, "stride": 2, "iters": 2}, [(2, 7, 5, 15)]),
    "em-place": (ConvCaps, {**SHARED, "coor_add": True}, [(2, 4, 3, 15)]),
    "heinsen": (GenerativeMatrixRouting, {**HEINSEN, "eps": 1e-2, "n_iters": 4}, POSES),
    "heinsen-variable": (GenerativeMatrixRouting, {**HEINSEN, "n_inp": -1}, [(2, 3, 6), (2, 3, 6, 2, 3)]),
    "heinsen-skm": (GenerativeMatrixRouting, {**HEINSEN, "p_model": "skm"}, POSES),
    "higgsfield": (batch_averaged.DigitCaps, {"num_routes": 12, **DIGITS}, [(3, 12, 3)]),
    "timomernick": (batch_averaged.CapsuleLayer, {"in_units": 3, "in_channels": 12, "num_units": 5, "unit_size": 4,
                                                  "use_routing": True}, [(3, 3, 12)]),
    "cedrickchee": (batch_averaged.RoutedCapsuleLayer, {**AVERAGED, "num_routing": 2, "cuda_enabled": False},
                    [(3, 3, 12)]),
    "slim2": (compat.ConvSlimCapsule2D, SLIM, [(2, 3, 5, 7, 6)]),
    "slim2-own": (compat.ConvSlimCapsule2D, {**SLIM, "stride": (1, 2), "dilation": 2, "padding": 2,
                                             "share_weight": False}, [(2, 3, 5, 7, 6)]),
    "slim3": (compat.ConvSlimCapsule3D, {**SLIM, "stride": 1, "padding": 1}, [(2, 3, 5, 7, 3, 4)]),
    "slim3-uniform": (compat.ConvSlimCapsule3D, {**SLIM, "num_routing": 1, "share_weight": False},
                      [(2, 3, 5, 7, 3, 4)]),
    "slim3-one": (compat.ConvSlimCapsule3D, {**SLIM, "num_routing": 1, "input_dim": 1}, [(2, 1, 5, 3, 3, 4)]),
    "unslim2": (compat.DeconvSlimCapsule2D, {**SLIM, "kernel_size": 4, "padding": 1, "num_routing": 2},
                [(2, 3, 5, 4, 3)]),
    "unslim2-uniform": (compat.DeconvSlimCapsule2D, {**SLIM, "num_routing": 1}, [(2, 3, 5, 4, 3)]),
    "unslim3": (compat.DeconvSlimCapsule3D, {**SLIM, "stride": 3, "share_weight": False}, [(1, 3, 5, 3, 2, 2)]),
    "heinsen-single-beta": (GenerativeMatrixRouting, {**HEINSEN, "single_beta": True, "d_cov": 1}, [(6,), (6, 1, 3)]),
}  # fmt: skip


@pytest.mark.parametrize("name", [name for name in CASES if "-" not in name or name in ("fc-matrix", "conv-matrix")])
def test_arguments_and_attributes_are_the_authors(name: str) -> None:
    ours, plain = build(name), build(name, plain=True)
    ours_by_name, theirs = (inspect.signature(type(layer)).parameters for layer in (ours, plain))
    assert [argument for argument in ours_by_name if argument in theirs] == list(theirs)
    for argument in theirs:
        if type(ours) is not ConvCaps or argument in ("iters", "coor_add", "w_shared"):  # whose sizes have defaults
            assert ours_by_name[argument].default == theirs[argument].default
        assert argument == "routing_module" or f"{argument}={getattr(ours, argument)}" in repr(ours)
    for attribute in ("weight_init_const", "scale", "dropout_rate", "sqrt_d"):
        assert getattr(ours, attribute, None) == pytest.approx(getattr(plain, attribute, None)), attribute


every_case = pytest.mark.parametrize("name", CASES)


def build(name: str, plain: bool = False, **changes: Any) -> Any:
    """Return our layer, or the plain one."""
    kind, arguments, _ = CASES[name]
    arguments = {**arguments, **changes}
    if "routing_module" in arguments:
        routing = nn_plain.AgreementRouting if plain else AgreementRouting
        arguments["routing_module"] = routing(*arguments["routing_module"])
    return (PLAIN.get(kind, getattr(nn_plain, kind.__name__, None)) if plain else kind)(**arguments)


def pair(name: str, spread: float = 1.0, **changes: Any) -> tuple[Any, Any]:
    """Return our layer and the plain one with the same random parameters in float64; their checkpoint loads in ours."""
    torch.manual_seed(0)
    plain, ours = build(name, plain=True, **changes).double(), build(name, **changes).double()
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.copy_(spread * torch.randn_like(parameter))
    ours.load_state_dict(plain.state_dict())
    assert list(ours.state_dict()) == list(plain.state_dict())
    return ours, plain


def draw(name: str, seed: int = 1) -> list[Tensor]:
    kind, arguments, shapes = CASES[name]
    generator = torch.Generator().manual_seed(seed)
    given = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    if kind is ConvCaps:
        given[0][..., -arguments["B"] :] = given[0][..., -arguments["B"] :].sigmoid()
    return given


def results(layer: Any, given: Sequence[Tensor]) -> list[Tensor]:
    """Return all that a layer makes; of the layers whose call is one iteration, the results of two."""
    torch.manual_seed(1)  # the same dropout
    if hasattr(layer, "nonlinear_act"):
        first = layer(*given, 0)
        return [first, layer(*given, 1, first)]
    found = layer(*given)
    found = [found[key] for key in sorted(found)] if isinstance(found, dict) else found
    return list(found) if isinstance(found, (tuple, list)) else [found]


@pytest.mark.parametrize("name", [*CASES, "routing"])
def test_the_same_seed_gives_the_authors_start_and_reset_draws_it_again(name: str) -> None:
    make = (lambda: AgreementRouting(6, 3, 2)) if name == "routing" else (lambda: build(name))
    torch.manual_seed(3)
    fresh = make()
    twin = copy.deepcopy(fresh)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.fill_(7.0)
    torch.manual_seed(3)
    twin.reset_parameters()
    kept = [each for each, _ in twin.named_parameters() if not each.startswith("routing_module.")]
    assert all(torch.equal(twin.get_parameter(each), fresh.get_parameter(each)) for each in kept)
    if name not in ("routing", "havir", "cezannec", "bielski"):  # whose plain twins draw more, or else
        torch.manual_seed(3)
        plain = build(name, plain=True)
        assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), fresh.parameters(), strict=True))


# ---- Tsai et al. -----------------------------------------------------------------------------------------------------


def test_no_window_is_copied() -> None:
    layer = CapsuleCONV(7, 4, 2, 4, kernel_size=3, stride=1, matrix_pose=True, dp=0.0)
    children = torch.randn(2, 7, 9, 8, 4)
    with torch.no_grad(), Largest() as seen:
        results(layer, [children])
    assert seen.numbers == children.numel()  # in windows there are five times as many


def test_a_replaced_nonlinear_act_is_honoured() -> None:
    ours, plain = pair("fc-matrix")
    ours.nonlinear_act = plain.nonlinear_act = torch.nn.Tanh()
    torch.testing.assert_close(results(ours, draw("fc-matrix")), results(plain, draw("fc-matrix")))


# ---- dynamic routing and Heinsen's -----------------------------------------------------------------------------------


@pytest.mark.parametrize("spread", [1e-4, 1e-12])
def test_the_1e_8_of_guos_squash_counts_for_tiny_capsules(spread: float) -> None:
    ours, plain = pair("dense", spread)
    parents = plain(*draw("dense"))
    torch.testing.assert_close(ours(*draw("dense")), parents, rtol=1e-7, atol=0)
    size = torch.linalg.vector_norm(parents, dim=-1)
    assert (size > 0).all() and size.max() < 1e-6
    children = torch.zeros(2, 6, 3, dtype=torch.float64, requires_grad=True)
    parents = ours(children)
    assert (parents == 0).all()
    assert all((g == 0).all() for g in torch.autograd.grad(parents.sum(), [children, ours.weight]))


def test_primary_capsules_by_name() -> None:
    layer = CapsuleLayer(3, -1, 2, 4, kernel_size=3, stride=2)
    images = torch.randn(2, 2, 9, 7)
    maps = torch.stack([convolution(images).flatten(1) for convolution in layer.capsules], -1)
    square = maps.square().sum(-1, keepdim=True)
    torch.testing.assert_close(layer(images), maps * square.sqrt() / (1 + square))
    before = layer.capsules[0].weight.clone()
    layer.reset_parameters()
    assert not torch.equal(layer.capsules[0].weight, before)


def test_any_number_of_heinsens_children_and_masks() -> None:
    ours, plain = pair("heinsen-variable")
    scores, poses = draw("heinsen-variable")
    for count in (1, 4):
        few = ours(scores[..., :count], poses[..., :count, :, :])
        torch.testing.assert_close(few, plain(scores[..., :count], poses[..., :count, :, :]))
    scores[..., 4:], poses[..., 4:, :, :] = -torch.inf, torch.nan
    torch.testing.assert_close(ours(scores, poses), few)


# ---- 3D-UCaps and SegCaps --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in CASES if "slim" in name])
def test_a_slab_at_a_time(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One row at a time as all at once."""
    layer, _ = pair(name)
    found = []
    for size in (1 << 18, 1):
        monkeypatch.setattr(slim_capsules, "SLAB", size)
        given = draw(name)[0].requires_grad_()
        made = layer(given)
        found.append([made, *torch.autograd.grad(number([made]), [given, *layer.parameters()])])
    torch.testing.assert_close(found[1], found[0], rtol=1e-10, atol=1e-12)
    assert layer(given[:0]).shape == (0, *made.shape[1:])


@pytest.mark.parametrize("kind", [compat.ConvSlimCapsule2D, compat.DeconvSlimCapsule2D])
def test_no_votes_of_the_whole_grid(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the way back neither, nor a number for each child and parent."""
    monkeypatch.setattr(slim_capsules, "SLAB", 1 << 14)
    layer = kind(3, 16, 8, input_atoms=2, output_atoms=4, stride=1, padding=1)
    given = torch.randn(1, 16, 2, 66, 8, requires_grad=True)
    with Largest() as seen:
        made = layer(given)
        made.sum().backward()
    assert seen.numbers < 0.7 * (16 * made.numel() // 4)


class Makes(TorchDispatchMode):
    """Counts the tensors of a size that ops allocate."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size, self.count = size, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        result = func(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            if isinstance(x, Tensor) and x.numel() == self.size and x.untyped_storage()._cdata not in known:
                self.count += 1
        return result


def test_a_step_of_a_slab_makes_few_tensors_of_the_size_of_its_votes() -> None:
    """Votes forward, votes backward, and their gradient; not one for each product."""
    layer = compat.ConvSlimCapsule3D(3, 5, 7, 4, 3, stride=1, padding=1)
    given = torch.randn(1, 5, 4, 4, 5, 6, requires_grad=True)
    with Makes(5 * 7 * 3 * 4 * 5 * 6) as made:
        layer(given).sum().backward()
    assert made.count == 3


# ---- errors ----------------------------------------------------------------------------------------------------------


def given_to(name: str, *shapes: tuple[int, ...] | None, **changes: Any) -> Any:
    """Return a call of a case's layer with tensors of these shapes."""
    call = [None if shape is None else torch.randn(shape) for shape in shapes]
    layer = build(name, **changes)
    return lambda: layer(call[0], 0, *call[1:]) if hasattr(layer, "nonlinear_act") else layer(*call)


test_wrong_arguments_are_named = refusals(
    (ValueError, "in_dim must be a square number", lambda: CapsuleFC(4, 8, 3, 8, matrix_pose=True, dp=0.0)),
    (ValueError, "out_d_capsules must equal in_d_capsules", lambda: CapsuleFC(4, 16, 3, 9, True, dp=0.0)),
    (ValueError, r"input must be \[b, 12, 9\]", given_to("fc-matrix", (2, 12, 8))),
    (ValueError, r"next_capsule_value must be \[b, 5, 9\]", given_to("fc-matrix", (2, 12, 9), (2, 5, 8))),
    (ValueError, "window", given_to("conv-matrix", (2, 3, 2, 7, 9))),
    (ValueError, r"grid no smaller than the window, 3 x 3, got \[2, 3, 7, 2, 3\]",
     given_to("conv-mixed", (2, 3, 7, 2, 3))),
    (ValueError, r"x must be \[batch, 6, 3\], got \[2, 3, 6\]", given_to("dense", (2, 3, 6))),
    (ValueError, r"routing_module must have b of shape \(12, 5\), got \(12, 4\)",
     lambda: CapsLayer(12, 3, 5, 4, AgreementRouting(12, 4, 2))),
    (ValueError, r"u_predict must be \[batch, 12, 5, numbers\]",
     lambda: AgreementRouting(12, 5, 2)(torch.ones(2, 5, 12, 4))),
    (ValueError, "K and stride must be 1 with w_shared=True, got 3 and 2", lambda: ConvCaps(w_shared=True)),
    (ValueError, r"x must be \[b, h, w, 15\]", given_to("em", (2, 7, 5, 14))),
    (ValueError, r"x must be \[batch, 12, 3\], got \[3, 3, 12\]", given_to("higgsfield", (3, 3, 12))),
    (ValueError, "use_routing must be True", lambda: build("timomernick", use_routing=False)),
    (ValueError, r"input_tensor must be \[batch, 3, 5, h, w\], got \[2, 5, 3, 7, 6\]",
     given_to("slim2", (2, 5, 3, 7, 6))),
    (ValueError, "no smaller than the kernel", given_to("slim2", (2, 3, 5, 7, 2))),
    (ValueError, "padding must be whole numbers, got 'same'", lambda: build("slim2", padding="same", stride=1)),
    (ValueError, r"stride must be no larger than the kernel, got \(4, 5\)", lambda: build("unslim2", stride=(4, 5))),
    (TypeError, "no argument num_routes.*; compat.batch_averaged.Digit", lambda: compat.DigitCaps(num_routes=3)),
    (TypeError, "no argument routes .*; compat.DigitCaps is", lambda: compat.batch_averaged.DigitCaps(routes=3)),
    (ValueError, "n_out must be at least 2", lambda: build("heinsen", n_out=1)),
    (ValueError, "return_dict must be False", lambda: build("heinsen", return_dict=True)),
    (ValueError, r"mu_inp must be \[2, 6, 2, 3\] with a_inp \[2, 6\], got \[2, 6, 3, 2\]",
     given_to("heinsen", (2, 6), (2, 6, 3, 2))),
)  # fmt: skip


@every_case
def test_results_gradients_and_conversion(name: str) -> None:
    """Of our layer, of the plain one, and of that made ours."""
    ours, plain = pair(name)
    model = nn.ModuleList([copy.deepcopy(plain)])
    keys, parameters = list(plain.state_dict()), list(model.parameters())
    report = fastcaps.convert(model)
    converted = report.model[0]
    assert [*report.converted] == ["0"] and "results agree" in str(report), report
    assert ("mixed_windows=True" in report.converted["0"]) == (getattr(ours, "mixed_windows", False) is True)
    assert type(converted) is CASES[name][0] and list(converted.state_dict()) == keys
    assert {*map(id, converted.parameters())} == {*map(id, parameters)}
    found = []
    assert name.startswith("heinsen") or all(result.is_contiguous() for result in results(ours, draw(name)))
    for layer in (plain, ours, converted):
        given = [tensor.requires_grad_() for tensor in draw(name)]
        made = results(layer, given)
        gradients = torch.autograd.grad(number(made), [*given, *layer.parameters()], allow_unused=True)
        found.append([*made, *(torch.zeros(()) if one is None else one for one in gradients)])
    for want, *gots in zip(*found, strict=True):  # their 1e-8 and 1e-10 move results by as much
        for got in gots:
            torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-8, check_dtype=False)
    for copied in (copy.deepcopy(converted), pickle.loads(pickle.dumps(converted))):
        assert all(map(torch.equal, results(copied, draw(name)), results(converted, draw(name))))
