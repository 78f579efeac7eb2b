"""Conversion of live models: what is swapped, what is shared, what is left alone and why."""

from __future__ import annotations

import copy
import functools
import gc

import nn_plain
import nn_plain_routings
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

import fastcaps
from fastcaps.compat import DenseCapsule, ml_capsules
from fastcaps.compat.heinsen_routing import GenerativeMatrixRouting
from fastcaps.nn import ConversionReport

SIZES = {"in_n_capsules": 6, "in_d_capsules": 4, "out_n_capsules": 3, "out_d_capsules": 4}


def fc(dp=0.0):
    return nn_plain.CapsuleFC(**SIZES, matrix_pose=True, dp=dp)


def other_fc(forward):
    """A layer of somebody's copy of the code, whose class computes something else."""
    kind = type("CapsuleFC", (nn_plain.CapsuleFC,), {"forward": lambda self, *arguments: forward(*arguments)})
    return kind(**SIZES, matrix_pose=True, dp=0.0)


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("matrix_pose", [True, False])
def test_a_networks_layers_are_swapped_and_its_results_kept(matrix_pose, mixed, capsys):
    """Of both public versions of the code, whose convolutional layers make windows in different ways."""
    torch.manual_seed(0)
    conv = functools.partial(nn_plain.CapsuleCONV, mixed_windows=mixed)
    net = nn_plain.Network(conv, matrix_pose=matrix_pose, num_routing=3)
    images = torch.randn(2, 1, 14, 14)
    want = net(images)
    keys, parameters = list(net.state_dict()), list(net.parameters())
    report = fastcaps.convert(net)
    assert isinstance(report, ConversionReport) and report.model is net
    assert report.converted == ["capsule_layers.0", "capsule_layers.1", "capsule_layers.2"] and report.left == []
    assert [type(layer) for layer in net.capsule_layers] == [
        ml_capsules.CapsuleCONV,
        ml_capsules.CapsuleFC,
        ml_capsules.CapsuleFC,
    ]
    assert net.capsule_layers[0].mixed_windows is mixed and ("mixed_windows=True" in report.layers[0].why) is mixed
    torch.testing.assert_close(net(images), want, rtol=1e-4, atol=1e-5)
    assert list(net.state_dict()) == keys
    assert all(a is b for a, b in zip(net.parameters(), parameters, strict=True))
    assert capsys.readouterr().out == ""
    printed = str(report)
    assert "3 of 3 capsule layers converted" in printed and "nn_plain.CapsuleCONV" in printed
    assert "results agree" in printed


@pytest.mark.parametrize("name", ["nonlinear_act", "drop"])
def test_hooks_of_what_the_twin_does_not_call(name):
    layer = fc()
    getattr(layer, name).register_forward_hook(lambda *_: None)
    report = fastcaps.convert(nn.Sequential(layer))
    assert report.left == ["0"] and f"{name} has hooks" in report.layers[0].why


def test_what_was_compiled_goes_on_calling_the_old_layer():
    layer = fc()
    report = fastcaps.convert(nn.ModuleList([layer, torch.compile(layer, backend="eager")]))
    assert report.converted == ["0"] and "then compile" in report.layers[1].why


def test_an_optimizer_goes_on_working():
    torch.manual_seed(0)
    net = nn_plain.Network().double()
    twin = copy.deepcopy(net)
    steps = []
    for model, swap in ((net, True), (twin, False)):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for turn in range(3):
            if swap and turn == 1:
                fastcaps.convert(model)
            optimizer.zero_grad()
            model(torch.linspace(-1, 1, 2 * 196, dtype=torch.float64).view(2, 1, 14, 14)).square().sum().backward()
            optimizer.step()
        steps.append([p.detach().clone() for p in model.parameters()])
    for got, want in zip(*steps, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-5)


def test_mode_hooks_rate_and_random_state_are_kept():
    layer = fc(dp=0.25).eval()
    layer.scale = 0.125
    seen = []
    handle = layer.register_forward_hook(lambda *_: seen.append(1))
    model = nn.Sequential(layer)
    state = torch.get_rng_state()
    fastcaps.convert(model)
    assert torch.equal(state, torch.get_rng_state())
    assert model[0].training is False and model[0].drop.training is False
    assert model[0].drop.p == 0.25 and model[0].scale == 0.125 and model[0].dropout_rate == 0.25
    assert seen == []
    model[0](torch.randn(1, 6, 4), 0)
    assert seen == [1]
    handle.remove()
    model[0](torch.randn(1, 6, 4), 0)
    assert seen == [1]


def test_hooks_before_load_state_dict_get_the_new_layer():
    layer, seen = fc(), []
    handle = layer.register_load_state_dict_pre_hook(lambda module, *_: seen.append(module))
    checkpoint = layer.state_dict()
    model = nn.Sequential(layer)
    fastcaps.convert(model)
    assert model[0] is not layer
    del layer
    gc.collect()
    model[0].load_state_dict(checkpoint)
    assert len(seen) == 1 and seen[0] is model[0]
    handle.remove()
    model[0].load_state_dict(checkpoint)
    assert len(seen) == 1


def test_training_mode_survives_the_comparison():
    model = nn.Sequential(fc(dp=0.5))
    fastcaps.convert(model)
    assert model[0].training and model[0].drop.training and model[0].nonlinear_act.training


def test_a_layer_used_twice_stays_one_layer():
    layer = fc()
    model = nn.ModuleDict({"a": layer, "b": nn.ModuleList([layer])})
    report = fastcaps.convert(model)
    assert report.converted == ["a", "b.0"]
    assert model["a"] is model["b"][0] and isinstance(model["a"], ml_capsules.CapsuleFC)
    assert "same layer" in report.layers[1].why


def test_the_model_itself_may_be_a_layer():
    layer = fc()
    report = fastcaps.convert(layer)
    assert isinstance(report.model, ml_capsules.CapsuleFC) and report.model.w is layer.w
    assert report.layers[0].path == "(the model)"


def test_what_is_left_says_why(capsys):
    class Halved(nn.Module):
        """Stands for other people's layer of the same name."""

        def forward(self, x):
            return x / 2

    Halved.__name__ = "CapsuleFC"

    patched = fc()
    patched.forward = lambda input, num_iter, next_capsule_value=None: torch.zeros(2, 3, 4)
    redrawn, compiled = fc(), fc()
    redrawn.reset_parameters = lambda: nn.init.zeros_(redrawn.w)
    compiled.compile(backend="eager")
    unready = other_fc(lambda *_: torch.zeros(2, 3, 4))
    type(unready).in_n_capsules = property(lambda self: 1 // 0)
    buffered = fc()
    buffered.register_buffer("seen", torch.zeros(1))
    wrong = fc()
    wrong.in_n_capsules = 7
    act = fc()
    act.nonlinear_act = nn.Identity()
    normed = fc()
    parametrize.register_parametrization(normed, "w", nn.Identity())
    model = nn.ModuleDict(
        {
            "other": Halved(),
            "changed": other_fc(lambda *_: torch.zeros(2, 3, 4)),
            "patched": patched,
            "redrawn": redrawn,
            "compiled": compiled,
            "unready": unready,
            "buffered": buffered,
            "wrong": wrong,
            "act": act,
            "normed": normed,
            "shape": other_fc(lambda *_: torch.zeros(2, 4)),
            "nan": other_fc(lambda *_: torch.full((2, 3, 4), torch.nan)),
            "ours": ml_capsules.CapsuleFC(6, 4, 3, 4, True, 0.0),
            "linear": nn.Linear(2, 2),
            "good": fc(),
        }
    )
    before = dict(model.items())
    report = fastcaps.convert(model, verbose=True)
    assert report.converted == ["good"]
    assert all(model[name] is before[name] for name in before if name != "good")
    why = {layer.path: layer.why for layer in report.layers}
    assert "has no attribute in_n_capsules" in why["other"]
    assert "differ" in why["changed"]
    assert why["patched"] == "its forward was replaced on the layer itself"
    assert why["redrawn"] == "its reset_parameters was replaced on the layer itself"
    assert why["compiled"] == "it was compiled: convert first, then compile"
    assert why["unready"] == "reading or running it failed with ZeroDivisionError: integer division or modulo by zero"
    assert "NaN" in why["nan"]
    assert "holds seen" in why["buffered"]
    assert "w has shape (6, 2, 2, 3) where its attributes say (7, 2, 2, 3)" in why["wrong"]
    assert "nonlinear_act must be a LayerNorm" in why["act"]
    assert "parametrized" in why["normed"]
    assert "another shape" in why["shape"]
    assert "already" in why["ours"]
    assert "linear" not in why
    assert "1 of 14 capsule layers converted" in capsys.readouterr().out


def test_check_can_be_left_out_and_a_broken_layer_is_repaired():
    def fail(*_):
        raise TypeError("of another torch")

    broken = other_fc(fail)
    report = fastcaps.convert(nn.Sequential(broken))
    assert report.converted == ["0"] and "failed with TypeError" in report.layers[0].why
    changed = other_fc(lambda *_: torch.zeros(2, 3, 4))
    report = fastcaps.convert(nn.Sequential(changed), check=False)
    assert report.converted == ["0"] and "not compared" in report.layers[0].why


def test_half_precision_and_meta_layers():
    report = fastcaps.convert(nn.Sequential(fc().to(torch.bfloat16), fc().to("meta"), fc().double()))
    assert report.converted == ["0", "1", "2"]
    assert "no numbers yet" in report.layers[1].why


def test_nothing_to_convert_and_wrong_argument(capsys):
    report = fastcaps.convert(nn.Linear(2, 2))
    assert report.layers == [] and "this model has none of" in str(report) and capsys.readouterr().out == ""
    with pytest.raises(TypeError, match=r"model must be a torch.nn.Module, got dict"):
        fastcaps.convert({})


class Guo(nn.Module):
    """A network as a script of that code builds it."""

    def __init__(self, capsule=nn_plain_routings.DenseCapsule):
        super().__init__()
        self.conv = nn.Conv2d(1, 8, 3, 2)
        self.digitcaps = capsule(18, 4, 5, 6, routings=3)

    def forward(self, images):
        return self.digitcaps(self.conv(images).reshape(len(images), 18, 4)).norm(dim=-1)


def test_guos_layer_is_swapped():
    torch.manual_seed(0)
    net = Guo()
    net.digitcaps.weight.data.mul_(30)
    images = torch.randn(2, 1, 7, 7)
    want, weight = net(images), net.digitcaps.weight
    report = fastcaps.convert(net)
    assert report.converted == ["digitcaps"] and "results agree" in report.layers[0].why
    assert isinstance(net.digitcaps, DenseCapsule) and net.digitcaps.weight is weight
    torch.testing.assert_close(net(images), want, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("change", ["turns", "gradient"])
def test_copies_that_only_large_children_or_gradients_tell_apart_are_left_alone(change):
    """Of 18 children with a young layer's weights, routed a turn more or through every turn's gradient."""

    class Other(nn_plain_routings.DenseCapsule):
        def forward(self, x):
            votes = torch.einsum("bid,jied->bjie", x, self.weight)
            kept = votes if change == "gradient" else votes.detach()
            logits = torch.zeros_like(votes[..., :1])
            for _ in range(self.routings - (change == "gradient")):
                sums = (logits.softmax(1) * kept).sum(2, keepdim=True)
                size = sums.norm(dim=-1, keepdim=True)
                logits = logits + (kept * sums * size / (1 + size**2)).sum(-1, keepdim=True)
            sums = (logits.softmax(1) * votes).sum(2)
            size = sums.norm(dim=-1, keepdim=True)
            return sums * size / (1 + size**2)

    Other.__name__ = "DenseCapsule"
    torch.manual_seed(0)
    net = Guo(Other)
    nn.init.normal_(net.digitcaps.weight, std=0.01)
    report = fastcaps.convert(net)
    what = "gradients" if change == "gradient" else "results"
    assert report.left == ["digitcaps"] and report.layers[0].why.startswith(f"its {what} differ")


def test_what_a_class_made_from_a_published_one_adds():
    class Named(nn_plain.CapsuleFC):
        def __init__(self):
            super().__init__(**SIZES, matrix_pose=True, dp=0.0)
            self.task, self.last = "digits", torch.zeros(1)

    class Called(Named):
        def __call__(self, *arguments):
            return super().__call__(*arguments) * 2

    model = nn.Sequential(Named(), Called())
    report = fastcaps.convert(model)
    assert report.converted == ["0"] and "has __call__ of its own" in report.layers[1].why
    assert model[0].task == "digits" and not hasattr(model[0], "last")  # a tensor may be what a forward left there


def test_a_default_device_does_not_matter():
    model = nn.Sequential(fc())
    with torch.device("meta"):
        report = fastcaps.convert(model)  # whose plain layer makes its zeros there, and fails
    assert report.converted == ["0"]


@pytest.mark.parametrize("options", [{}, {"single_beta": True, "p_model": "skm"}, {"n_inp": -1}, {"return_dict": True}])
def test_heinsens_layer_is_swapped(options):
    torch.manual_seed(0)
    arguments = {"n_inp": 6, "n_out": 3, "d_cov": 2, "d_inp": 3, "d_out": 4, **options}
    if_dict = arguments.pop("return_dict", False)

    class Published(nn_plain_routings.GenerativeMatrixRouting):
        def forward(self, a_inp, mu_inp):
            found = super().forward(a_inp, mu_inp)
            return found if if_dict else (found["a_out"], found["mu_out"], found["sig2_out"])

    Published.__name__ = "GenerativeMatrixRouting"
    layer = Published(**arguments)
    layer.return_dict = if_dict
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_()
    given = torch.randn(2, 6), torch.randn(2, 6, 2, 3)
    want, keys = layer(*given), list(layer.state_dict())
    report = fastcaps.convert(layer)
    new = report.model
    assert isinstance(new, GenerativeMatrixRouting) and "results agree" in report.layers[0].why
    assert new.W is layer.W and (new.beta_ign is new.beta_use) == ("single_beta" in options)
    assert list(new.state_dict()) == keys
    found = new(*given)
    for got, wanted in zip(
        found.values() if if_dict else found, [want[key] for key in found] if if_dict else want, strict=True
    ):
        torch.testing.assert_close(got, wanted, rtol=1e-3, atol=1e-4)
