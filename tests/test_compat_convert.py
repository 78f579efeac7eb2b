"""Conversion of live models: what is swapped, what is shared, what is left alone and why."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor

import nn_plain
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

import fastcaps
from fastcaps.compat import ConversionReport, ml_capsules

SIZES = {"in_n_capsules": 6, "in_d_capsules": 4, "out_n_capsules": 3, "out_d_capsules": 4}


def fc(dp=0.0):
    return nn_plain.CapsuleFC(**SIZES, matrix_pose=True, dp=dp)


def other_fc(forward):
    """A layer of a user's copy of the code, whose class computes something else."""
    kind = type("CapsuleFC", (nn_plain.CapsuleFC,), {"forward": lambda self, *arguments: forward(*arguments)})
    return kind(**SIZES, matrix_pose=True, dp=0.0)


def test_a_layer_stays_the_object_it_was(capsys):
    """Mode, hooks, rates, parameters, who holds it and who compiled it."""
    layer, seen, loaded = fc(dp=0.25), [], []
    layer.drop.eval()
    layer.scale = 0.125
    handle = layer.register_forward_hook(lambda *_: seen.append(1))
    layer.register_load_state_dict_pre_hook(lambda module, *_: loaded.append(module))
    inside, other, state = torch.compile(fc(), backend="eager"), fc(), torch.get_rng_state()
    other.compile(backend="eager")
    model = nn.ModuleDict({"a": layer, "b": nn.ModuleList([layer, inside, other])})
    children, parameters = torch.randn(1, 6, 4), list(model.parameters())
    torch.set_rng_state(state)
    want = inside(children, 0)
    report = fastcaps.convert(model)
    assert capsys.readouterr().out == ""
    assert report.converted == ["a", "b.1._orig_mod", "b.2"] and report.model is model
    assert torch.equal(state, torch.get_rng_state()) and seen == []
    assert model["a"] is layer is model["b"][0] and type(layer) is ml_capsules.CapsuleFC
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    assert layer.training and layer.nonlinear_act.training and not layer.drop.training
    assert layer.drop.p == 0.25 and layer.scale == 0.125 and layer.dropout_rate == 0.25
    torch.testing.assert_close(inside(children, 0), want)
    layer(children, 0)
    handle.remove()
    layer(children, 0)
    assert seen == [1]
    layer.load_state_dict(layer.state_dict())
    assert len(loaded) == 1 and loaded[0] is layer


def test_models_of_every_kind():
    layer = fc()
    report = fastcaps.convert(layer)  # the model itself is one
    assert report.model is layer and isinstance(layer, ml_capsules.CapsuleFC)
    assert report.layers[0].path == "(the model)"
    with torch.device("meta"):  # a default device does not matter
        model = nn.Sequential(fc().to(torch.bfloat16), fc().to("meta"), fc().double())
        report = fastcaps.convert(model)
    assert report.converted == ["0", "1", "2"] and "no values yet" in report.layers[1].why
    again = fastcaps.convert(nn.Sequential(layer, *model))
    assert str(again).startswith("fastcaps.convert: nothing to convert, 4 ran on fastcaps before\n") and not again.left
    report = fastcaps.convert(nn.Linear(2, 2))
    assert isinstance(report, ConversionReport) and report.layers == []
    assert str(report).startswith("fastcaps.convert: found no layer by its class's name; for another class pass as_={")
    with pytest.raises(TypeError, match=r"model must be a torch.nn.Module, got dict"):
        fastcaps.convert({})


def left() -> dict[str, tuple[nn.Module, str]]:
    """Layers that must stay what they are, and why the report says that they do."""

    class Stranger(nn.Module):
        pass

    class Called(nn_plain.CapsuleFC):
        def __call__(self, *arguments):
            return super().__call__(*arguments) * 2

    class Early(nn_plain.ConvCaps):
        """As the first versions, which count a window too few where the stride does not divide the rest, and fail;
        some of them mix windows too."""

        def forward(self, x):
            room = x.shape[1] - self.K
            if (room + 1) // self.stride != room // self.stride + 1:
                raise RuntimeError("shape is invalid")
            return super().forward(x).flip(1, 2)

    class Untrained(nn_plain.ConvCaps):
        """Another formula of a parameter that is 0 before training."""

        def forward(self, x):
            value, self.beta_u.data = self.beta_u.data, 2 * self.beta_u.data
            found = super().forward(x)
            self.beta_u.data = value
            return found

    Stranger.__name__, Early.__name__, Untrained.__name__ = "CapsuleFC", "ConvCaps", "ConvCaps"
    zeros = torch.zeros(2, 3, 4)
    patched, buffered, wrong, act, normed, hooked = (fc() for _ in range(6))
    patched.forward = lambda *_: zeros
    unready = other_fc(lambda *_: zeros)
    type(unready).in_n_capsules = property(lambda self: 1 // 0)
    buffered.register_buffer("seen", torch.zeros(1))
    wrong.in_n_capsules = 7
    act.nonlinear_act = nn.Identity()
    parametrize.register_parametrization(normed, "w", nn.Identity())
    hooked.nonlinear_act.register_forward_hook(lambda *_: None)
    rerouted = nn_plain.CapsLayer(12, 3, 5, 4, nn_plain.AgreementRouting(12, 5, 2))
    rerouted.routing_module = nn.Identity()
    primary = nn_plain.CapsuleLayer(3, 6, 4, 4)
    primary.num_route_nodes = -1
    del primary.route_weights
    return {
        "stranger": (Stranger(), "has no attribute in_n_capsules"),
        "changed": (other_fc(lambda *_: zeros), "its results differ"),
        "patched": (patched, "its forward was replaced on the layer itself"),
        "unready": (unready, "reading or running it failed with ZeroDivisionError: integer division or modulo by zero"),
        "buffered": (buffered, "holds seen"),
        "wrong": (wrong, "w has shape (6, 2, 2, 3) where its attributes say (7, 2, 2, 3)"),
        "act": (act, "nonlinear_act must be a LayerNorm"),
        "normed": (normed, "parametrized"),
        "shape": (
            other_fc(lambda *_: torch.zeros(2, 4)),
            "its result has shape [2, 4], that of the authors' layer [2, ",
        ),
        "nan": (other_fc(lambda *_: torch.full((2, 3, 4), torch.nan)), "NaN"),
        "hooked": (hooked, "nonlinear_act has hooks"),
        "called": (Called(**SIZES, matrix_pose=True, dp=0.0), "has __call__ of its own"),
        "ours": (ml_capsules.CapsuleFC(6, 4, 3, 4, True, 0.0), "already"),
        "rerouted": (rerouted, "routing_module must be an AgreementRouting, got Identity"),
        "primary": (primary, "computes primary capsules by convolutions, routes nothing"),
        "early": (Early(3, 4, 3, 2, 2), "its results differ"),
        "untrained": (Untrained(3, 4, 3, 2, 2), "its results differ"),
    }


def test_what_is_left_says_why(capsys):
    cases = left()
    model = nn.ModuleDict({name: layer for name, (layer, _) in cases.items()} | {"good": fc()})
    report = fastcaps.convert(model, verbose=True)
    unchanged = [name for name in cases if name not in ("ours", "primary")]  # these are no layers to convert
    assert report.converted == ["good"] and report.left == unchanged
    assert all(model[name] is layer for name, (layer, _) in cases.items())
    assert not model["untrained"].beta_u.any()  # the noise of the comparison is gone
    said = {layer.path: layer.why for layer in report.layers}
    for name, (_, why) in cases.items():
        assert why in said[name], name
    printed = capsys.readouterr().out
    assert "1 of 16 capsule layers converted, 1 ran on fastcaps before, 1 without routing\n" in printed
    assert re.search(r"primary +no routing +nn_plain.CapsuleLayer: computes primary capsules", printed)
    assert "nn_plain.CapsuleFC: results agree to " in printed


def test_one_name_of_several_codes():
    """``DigitCaps`` is cezannec's, or Havir's under another name."""
    kind = type("DigitCaps", (nn_plain.RoutingCapsules,), {})
    model = nn.Sequential(nn_plain.DigitCaps(5, 12, 3, 4), kind(3, 12, 5, 4, 3))
    assert fastcaps.convert(model).converted == ["0", "1"]
    assert [type(layer) for layer in model] == [fastcaps.compat.DigitCaps, fastcaps.compat.RoutingCapsules]


def test_check_can_be_left_out_and_a_broken_layer_is_repaired():
    def fail(*_):
        raise TypeError("of another torch")

    broken = other_fc(fail)
    report = fastcaps.convert(nn.Sequential(broken))
    failed = "not compared: its forward failed with TypeError: of another torch, on [2, 6, 4]"
    assert report.converted == ["0"] and report.layers[0].why.startswith(failed), report.layers[0].why
    assert "1 of 1 capsule layers converted, 1 of them not compared\n" in str(report)
    changed = other_fc(lambda *_: torch.zeros(2, 3, 4))
    report = fastcaps.convert(nn.Sequential(changed), check=False)
    assert report.converted == ["0"] and "not compared" in report.layers[0].why


def test_a_layer_is_left_if_only_its_gradients_differ_and_random_numbers_go_on():
    """Also under autocast, which must not make a right layer differ."""
    plain = nn_plain.DenseCapsule(5, 4, 3, 6)

    class Other(nn_plain.DenseCapsule):
        keeps = True

        def forward(self, x):
            torch.manual_seed(3)
            weight = self.weight if self.keeps else self.weight.detach()
            return torch.func.functional_call(plain, {"weight": weight}, (x,))

    Other.__name__ = "DenseCapsule"
    for Other.keeps, outcome in ((True, "compared"), (False, "differs")):
        other, state = Other(5, 4, 3, 6), torch.get_rng_state()
        with torch.autocast("cpu", torch.bfloat16):
            (layer,) = fastcaps.convert(other).layers
        assert layer.outcome == outcome, layer.why
        assert torch.equal(torch.get_rng_state(), state)


def test_models_are_converted_in_threads():
    """One at a time: comparing changes modes, which all layers get back."""
    before = torch.Tensor.cuda
    for _ in range(10):
        one, other = (nn_plain.DenseCapsule(5, 4, 3, 6) for _ in range(2))
        one.weight.register_hook(lambda gradient: pytest.fail("no training"))
        with ThreadPoolExecutor(3) as pool:
            found = [report.layers[0].outcome for report in pool.map(fastcaps.convert, [one, one, other])]
        assert sorted(found) == ["compared", "compared", "ours"]
        assert torch.Tensor.cuda is before and one.training and other.training and one.weight._backward_hooks


def test_a_layer_that_calls_cuda_is_compared_without_a_gpu():
    """And is left if it returns something else; afterwards ``cuda`` is torch's own again."""

    class Other(nn_plain.DenseCapsule):
        part = 1

        def forward(self, x):
            return super().forward(x.cuda()) * self.part

    Other.__name__ = "DenseCapsule"
    before = torch.Tensor.cuda
    for Other.part, outcome in ((1, "compared"), (2, "differs")):
        (layer,) = fastcaps.convert(Other(5, 4, 3, 6)).layers
        assert layer.outcome == outcome, layer.why
    assert torch.Tensor.cuda is before


KINDS = ["float32", "bfloat16", "float16", "inference"]


def of_kind(kind, make):
    """Return a layer with parameters of a dtype, or with inference tensors."""
    with torch.inference_mode(kind == "inference"):
        return make().to(getattr(torch, kind, None))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("change", ["iterations", "gradient"])
def test_copies_that_only_large_children_or_gradients_tell_apart_are_left_alone(change, kind):
    """Of 18 children with a young layer's weights, routed an iteration more or through every iteration's gradient."""

    class Other(nn_plain.DenseCapsule):
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
    (layer,) = fastcaps.convert(of_kind(kind, lambda: Other(18, 4, 5, 6))).layers
    assert not layer.converted
    assert layer.why.startswith(f"its {'gradients' if change == 'gradient' else 'results'} differ")


def test_what_a_class_made_from_a_published_one_adds():
    class Named(nn_plain.DenseCapsule):
        def __init__(self):
            super().__init__(6, 4, 3, 4)
            self.task = "digits"

    class Louder(Named):
        def loudest(self):
            return self.weight.abs().max()

    model = nn.Sequential(Named(), Louder())
    report = fastcaps.convert(model)
    assert report.converted == ["0"] and "has loudest of its own" in report.layers[1].why
    assert model[0].task == "digits"


@pytest.mark.parametrize("kind", KINDS)
def test_a_class_named_by_hand(kind):
    """Copies of one formula under other names, with their matrices in another order, in another shape."""

    class Copy(nn.Module):
        def __init__(self, axes, returned="bme", detach=True, iterations=3):
            super().__init__()
            self.axes, self.returned, self.detach, self.num_iterations = axes, returned, detach, iterations
            sizes = {"1": 1, "i": 7, "m": 3, "d": 4, "e": 5}
            self.W = nn.Parameter(0.3 * torch.randn([sizes[axis] for axis in axes]))

        def forward(self, x):
            votes = torch.einsum(f"bid,{self.axes.strip('1')}->bime", x, self.W.view(self.W.shape[-4:]))
            kept = votes.detach() if self.detach else votes
            parents = nn_plain.agree(votes, torch.zeros_like(votes[..., 0]), self.num_iterations, 2, 1e-9, kept)
            return parents[:, None, ..., None] if self.returned == "b1me1" else parents

    class Other(Copy):
        def forward(self, x):
            return super().forward(x) * 2

    class Lengths(Copy):
        def forward(self, x):
            return super().forward(x).norm(dim=-1)

    class Dropped(Copy):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            self.drop = nn.Dropout(0.5)

    class Shared(Copy):  # one child's matrices serve all children: with one child alone it would agree
        def forward(self, x):
            votes = torch.einsum("bid,mde->bime", x, self.W[0])
            return nn_plain.agree(votes, torch.zeros_like(votes[..., 0]), 3, 2, 1e-9, votes)

    torch.manual_seed(0)
    model = of_kind(kind, lambda: nn.ModuleDict({
        "beta": Copy("mied"), "hula": Copy("1imed", "b1me1", iterations=2), "laubong": Copy("1imde", detach=False),
        "other": Other("mied"),
    }))  # fmt: skip
    children, keys = torch.randn(2, 7, 4).to(model["beta"].W), list(model.state_dict())
    want = {name: layer(children) for name, layer in model.items()}
    by_hand = {Copy: fastcaps.compat.DenseCapsule, Other: fastcaps.compat.DenseCapsule}
    assert fastcaps.convert(model).layers == []
    report = fastcaps.convert(model, as_=by_hand, check=False)  # a guess is compared all the same
    assert report.converted == ["beta", "hula", "laubong"] and "results differ" in report.layers[3].why
    assert "routings=2" in report.layers[1].why and "detach=False" in report.layers[2].why
    assert list(model.state_dict()) == keys
    for name, layer in model.items():
        assert name == "other" or type(layer) is fastcaps.compat.DenseCapsule
        wide = {"rtol": 0.05, "atol": 2e-3} if "float16" in kind else {}
        torch.testing.assert_close(layer(children), want[name], **wide)
    shared = Shared("imde")
    shared.W = nn.Parameter(shared.W[:1].detach())
    odd = nn.ModuleDict({"lengths": Lengths("imde"), "dropped": Dropped("mied"), "shared": shared})
    report = fastcaps.convert(odd, as_=dict.fromkeys((Lengths, Dropped, Shared), fastcaps.compat.DenseCapsule))
    said = [layer.why for layer in report.layers]
    assert report.left == [*odd] and "shape [2, 3], that of" in said[0] and "holds drop: dropout" in said[1], said
    biased, flat = Copy("mied"), Copy("mied")
    biased.routing_bias, flat.W = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(7, 3))
    odd = nn.ModuleDict({"biased": biased, "flat": flat, "order": Copy("demi"), "bare": Copy("mied")})
    del odd["bare"].W
    report = fastcaps.convert(odd, as_=by_hand)
    order, tried = odd["order"], "none of the orders mied, imed, imde, mide fits its W [4, 5, 3, 7]"
    for layer, why in zip(report.layers, (
        "has 2 parameters, W [3, 7, 5, 4] and routing_bias [3]; DenseCapsule has one",
        "its W has shape [7, 3], want four dimensions, for i children, m parents, d and e numbers of their poses",
        f"{tried} (i children, m parents, d and e numbers of their poses): ",
        "has no parameters; DenseCapsule has one",
    ), strict=True):  # fmt: skip
        assert not layer.converted and layer.why.startswith(why), layer.why
    assert type(order) is Copy and "its forward failed with RuntimeError" in report.layers[2].why
    with pytest.raises(TypeError, match=r"as_ must map classes to classes of fastcaps.compat, got <class"):
        fastcaps.convert(model, as_={Copy: nn.Linear})


def test_versions_of_batch_averaged_capsules():
    """A copy may repair the softmax's side or the squash's vectors."""
    torch.manual_seed(0)
    repaired = nn_plain.AveragedDigits(5, 12, 3, 4)
    repaired.side, repaired.vector = 2, 2
    primary = nn_plain.AveragedLayer(3, 12, 5, 4, True, 3, False)
    primary.use_routing = False
    report = fastcaps.convert(nn.Sequential(repaired, primary))
    assert report.converted == ["0"] and "compete=parents, squashed=pose" in report.layers[0].why
    assert "computes primary capsules" in report.layers[1].why
