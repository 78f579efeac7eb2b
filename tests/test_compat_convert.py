"""Conversion of live models: what is swapped, what is shared, what is left alone and why."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import nn_plain
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

import fastcaps
from fastcaps.compat import CapsuleLayer, ConversionReport, DenseCapsule, ml_capsules

SIZES = {"in_n_capsules": 6, "in_d_capsules": 4, "out_n_capsules": 3, "out_d_capsules": 4}


def fc(dp: float = 0.0) -> Any:
    return nn_plain.CapsuleFC(**SIZES, matrix_pose=True, dp=dp)


def changed(layer: Any, forward: Callable[..., Any] | None = None, name: str = "", **members: Any) -> Any:
    """Return a layer with a class of the same name, made from its class, with another ``forward``: a user's copy."""
    members |= {"forward": forward} if forward else {}
    layer.__class__ = type(name or type(layer).__name__, (type(layer),), members)
    return layer


def dense(forward: Callable[..., Any] | None = None, **members: Any) -> Any:
    return changed(nn_plain.DenseCapsule(6, 4, 4, 4), forward, **members)


def routed(iterations: int = 3, compete: int = 2, detach: bool = True) -> Any:
    """Return a copy of Guo's layer with numbers written into its ``forward``."""

    def forward(self: Any, x: Tensor) -> Tensor:
        votes = torch.einsum("jied,bid->bije", self.weight, x)
        kept = votes.detach() if detach else votes
        return nn_plain.agree(votes, torch.zeros_like(votes[..., 0]), iterations, compete, 1e-8, kept)

    return dense(forward)


def with_(layer: Any, **attributes: Any) -> Any:
    for name, value in attributes.items():
        setattr(layer, name, value)
    return layer


def hooked() -> Any:
    layer = fc()
    layer.nonlinear_act.register_forward_hook(lambda *_: None)
    return layer


def primary() -> Any:
    layer = with_(nn_plain.CapsuleLayer(3, 6, 4, 4), num_route_nodes=-1)
    del layer.route_weights
    return layer


def averaged(**attributes: Any) -> Any:
    return with_(nn_plain.AveragedDigits(5, 12, 3, 4), **attributes)


def called_with(self: Any, x: Tensor, **parameters: Tensor) -> Any:
    """Return what the published class makes of a copy's parameters, some of them replaced."""
    published = type(self).__base__.__new__(type(self).__base__)
    vars(published).update(vars(self))
    return torch.func.functional_call(published, parameters, (x,))


def em(forward: Callable[..., Any]) -> Any:
    return changed(nn_plain.ConvCaps(3, 4, 3, 2, 2), forward)


plain, convolved = nn_plain.DenseCapsule.forward, nn_plain.ConvCaps.forward

LEFT: dict[str, tuple[Callable[[], Any], str]] = {
    # what the layer holds
    "stranger": (lambda: type("CapsLayer", (nn.Linear,), {})(2, 2), "has no attribute input_caps, input_dim"),
    "nearest": (lambda: type("DigitCaps", (nn.Linear,), {"num_routes": 3, "W": 0})(2, 2),
                "has no attribute num_capsules, in_channels: not the layer that DigitCaps follows"),
    "unready": (lambda: changed(fc(), in_n_capsules=property(lambda self: 1 // 0)), "reading it failed with Zero"),
    "sizes": (lambda: with_(fc(), in_n_capsules=7), "shape of w is [6, 2, 2, 3], where its attributes say [7, 2,"),
    "counts": (lambda: with_(fc(), out_n_capsules="3"), "its attributes do not fit a layer: out_n_capsules must"),
    "buffer": (lambda: with_(fc(), seen=nn.Buffer(torch.zeros(1))), "it holds seen, which the published layer"),
    "bias": (lambda: with_(dense(), routing_bias=nn.Parameter(torch.zeros(4))), "it holds routing_bias, which"),
    "logits": (lambda: nn_plain.CapsuleLayer(3, 6, 4, 4, learned_logits=True), "it holds route_logits, which the"),
    "absent": (lambda: parametrize.register_parametrization(fc(), "w", nn.Identity()), "parameter w is absent"),
    "patched": (lambda: with_(fc(), forward=lambda *_: None), "it has forward of its own, which would hide the twin's"),
    "hidden": (lambda: with_(nn_plain.DigitCaps(5, 12, 3, 4), iterations=9), "it has iterations of its own"),
    "hooked": (hooked, "its nonlinear_act has hooks, which the twin would not call"),
    "called": (lambda: changed(fc(), name="Mine", __call__=lambda *_: None), "its class adds __call__, which the twin"),
    "louder": (lambda: changed(fc(), name="Mine", loudest=lambda self: 1), "its class adds loudest, which the twin"),
    "rerouted": (lambda: nn_plain.CapsLayer(12, 3, 5, 4, nn.Identity()), "routing_module must be an AgreementRouting"),
    # what it computes
    "iterations": (lambda: routed(4), "computes what the twin does with routings=4, not "),
    "compete": (lambda: routed(compete=1), "computes what the twin does with compete='children', not "),
    "gradient": (lambda: routed(detach=False), "computes what the twin does with detach=False, not "),
    "side": (lambda: averaged(side=2), "computes what the twin does with compete='parents', not "),
    "squash": (lambda: averaged(vector=2), "computes what the twin does with squashed='pose', not "),
    "twice": (lambda: dense(lambda self, x: 2 * plain(self, x)), "its result is 2 times the published layer's"),
    "axes": (lambda: dense(lambda self, x: plain(self, x).mT), "its result holds the published layer's values in"),
    "windows": (lambda: em(lambda self, x: convolved(self, x).flip(1, 2)), "in another order"),
    "shape": (lambda: dense(lambda self, x: plain(self, x).norm(dim=-1)),
              "its results have shapes [[2, 4]], those of the published layer [[2, 4, 4]]"),
    "more": (lambda: dense(lambda self, x: (plain(self, x), x)), "its results have shapes [[2, 4, 4], [2, 6, 4]]"),
    "other": (lambda: dense(lambda self, x: plain(self, x + 0.1)), "its result differs by up to "),
    "beta": (lambda: em(lambda self, x: called_with(self, x, beta_u=2 * self.beta_u)), "its result differs by up to "),
    "nan": (lambda: dense(lambda self, x: plain(self, x) * torch.nan), "hold NaN or infinity: nothing to compare"),
    "dropout": (lambda: dense(lambda self, x: nn.functional.dropout(plain(self, x), 0.5, self.training)),
                "agrees in evaluation mode only: does it drop values in training?"),
    "scaled": (lambda: dense(lambda self, x: plain(self, x) * (1 if self.training else 2)),
               "agrees in training mode only: in evaluation mode its result is 2 times the published layer's"),
    "cut": (lambda: dense(lambda self, x: plain(self, x.detach())), "its gradient of x is 0 times the published"),
    "frozen": (lambda: dense(lambda self, x: called_with(self, x, weight=self.weight.detach())),
               "its gradient of weight is 0 times"),
    "string": (lambda: dense(lambda self, x: "parents"), "running it on shapes [[2, 6, 4]] failed with "),
    "old": (lambda: dense(lambda self, x: 1 // 0), "failed with ZeroDivisionError('integer division or modulo by zero')"
                                                   "; check=False converts it without a comparison"),
}  # fmt: skip
"""Layers that must stay what they are, and why the report says that they do."""


def test_what_is_left_says_why() -> None:
    torch.manual_seed(0)
    cases: dict[str, Any] = {name: make() for name, (make, _) in LEFT.items()}
    model = nn.ModuleDict(cases | {"good": fc(), "ours": DenseCapsule(6, 4, 3, 4), "primary": primary()})
    before, kinds, random = copy.deepcopy(model.state_dict()), [*map(type, model.values())], torch.get_rng_state()
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        report = fastcaps.convert(model)
    for name, (_, why) in LEFT.items():
        assert why in report.left.get(name, ""), (name, str(report))
    assert [*report.left] == [*LEFT] and [*report.converted] == ["good"] and [*report.needless] == ["ours", "primary"]
    assert [kind for name, kind in zip(model, kinds, strict=True) if type(model[name]) is not kind] == [
        nn_plain.CapsuleFC
    ]
    after = model.state_dict()
    assert before.keys() == after.keys() and all(torch.equal(before[key], after[key]) for key in before)
    assert torch.equal(torch.get_rng_state(), random) and all(each.training for each in model.modules())
    assert "primary capsules" in report.needless["primary"] and "already" in report.needless["ours"]
    said = str(report).splitlines()
    assert said[0] == f"fastcaps.convert: 1 of {len(LEFT) + 1} layers converted" and len(said) == len(model) + 1
    assert said[1].split(maxsplit=2)[:2] == ["good", "converted"] and "nn_plain.CapsuleFC: results agree to " in said[1]


def test_a_layer_stays_the_object_it_was() -> None:
    """Mode, hooks, rates, parameters, who holds it and who compiled it."""
    layer, seen, loaded = fc(dp=0.25), [], []
    layer.drop.eval()
    layer.scale = 0.125
    handle = layer.register_forward_hook(lambda *_: seen.append(1))
    layer.register_load_state_dict_pre_hook(lambda module, *_: loaded.append(module))
    layer.w.register_hook(lambda _: pytest.fail("no training"))
    inside, other = torch.compile(fc(), backend="eager"), fc()
    other.compile(backend="eager")
    model = nn.ModuleDict({"a": layer, "b": nn.ModuleList([layer, inside, other]), "c": nn.DataParallel(dense())})
    children, parameters = torch.randn(1, 6, 4), list(model.parameters())
    want = [each(children, 0) for each in (inside, other)]
    report = fastcaps.convert(model)
    assert [*report.converted] == ["a", "b.1._orig_mod", "b.2", "c.module"] and report.model is model and seen == []
    assert model["a"] is layer is model["b"][0] and type(layer) is ml_capsules.CapsuleFC
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    assert layer.training and layer.nonlinear_act.training and not layer.drop.training
    assert layer.drop.p == 0.25 and layer.scale == 0.125 and layer.dropout_rate == 0.25
    torch.testing.assert_close([each(children, 0) for each in (inside, other)], want)
    layer(children, 0)
    handle.remove()
    layer(children, 0)
    assert seen == [1]
    layer.load_state_dict(layer.state_dict())
    assert len(loaded) == 1 and loaded[0] is layer


def test_models_of_every_kind() -> None:
    layer = dense()
    assert [*fastcaps.convert(layer).converted] == ["(the model)"] and type(layer) is DenseCapsule
    again = fastcaps.convert(nn.Sequential(layer, DenseCapsule(6, 4, 3, 4)))
    assert (
        str(again).startswith("fastcaps.convert: nothing to convert\n") and not again.left and len(again.needless) == 2
    )
    report = fastcaps.convert(nn.Linear(2, 2))
    assert isinstance(report, ConversionReport) and "to convert; as_={Class: its twin} adds a class to " in str(report)
    empty = nn.Sequential(dense().to("meta"), dense(lambda self, x: 1 // 0))
    report = fastcaps.convert(empty)
    assert not report.converted and "no values yet; check=False converts it" in report.left["0"]
    report = fastcaps.convert(empty, check=False)
    assert str(report).count("not compared") == 2 and all(type(each) is DenseCapsule for each in empty)
    with pytest.raises(TypeError, match=r"model must be a torch.nn.Module, got dict"):
        fastcaps.convert({})  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["float64", "bfloat16", "float16", "inference"])
def test_dtypes_and_inference_tensors(kind: str) -> None:
    """Of young layers, of whose weights only large children tell the copies apart."""
    torch.manual_seed(0)
    with torch.inference_mode(kind == "inference"):
        model = nn.ModuleList([dense(), routed(2), routed(detach=False)]).to(getattr(torch, kind, None))
    report = fastcaps.convert(model)
    assert (
        [*report.converted] == ["0"] and [*report.left] == ["1", "2"] and model[0].weight.dtype == model[1].weight.dtype
    )


def test_a_class_named_by_hand() -> None:
    class Digits(nn_plain.DenseCapsule):
        pass

    Mine, Absent = (
        type("Mine", (nn.Module,), vars(nn_plain.DenseCapsule) | {"__init__": None}),
        type("Absent", (nn.Linear,), {}),
    )
    alike = dense()
    alike.__class__ = Mine
    model = nn.ModuleDict({"alike": alike, "made": Digits(6, 4, 4, 4), "less": nn.Linear(2, 2)})
    report = fastcaps.convert(copy.deepcopy(model))
    assert [*report.converted] == ["made"] and not report.left
    report = fastcaps.convert(model, as_={Mine: DenseCapsule, nn.Linear: DenseCapsule, Absent: CapsuleLayer})
    assert [*report.converted] == ["alike", "made"] and "has no attribute in_num_caps, " in report.left["less"]
    assert report.absent == ["Absent"]
    assert str(report).endswith("\n  as_ names Absent, but the model holds no layer of this class")
    for wrong in ({Mine: nn.Linear}, {"Mine": DenseCapsule}, DenseCapsule):
        with pytest.raises(TypeError, match=r"as_ must map classes to classes of fastcaps.compat, got "):
            fastcaps.convert(model, as_=wrong)  # type: ignore[arg-type]


def test_one_name_of_several_codes() -> None:
    """``DigitCaps`` is cezannec's, Havir's under another name, or higgsfield's."""
    havir = changed(nn_plain.RoutingCapsules(3, 12, 5, 4, 3), name="DigitCaps")
    model = nn.Sequential(nn_plain.DigitCaps(5, 12, 3, 4), havir, averaged())
    assert [*fastcaps.convert(model).converted] == ["0", "1", "2"]
    kinds = (fastcaps.compat.DigitCaps, fastcaps.compat.RoutingCapsules, fastcaps.compat.batch_averaged.DigitCaps)
    assert tuple(map(type, model)) == kinds
