"""The networks of Li et al. (2018): their sums by hand, their layers, Table 3's switches, a step of training each."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from stand_ins import refusals
from torch import Tensor

from fastcaps.losses import margin_loss
from fastcaps_lab import models
from fastcaps_lab.encapnet import CapConv2d, EncapNet, FeedbackAgreement, cap_conv, networks

pytestmark = pytest.mark.usefixtures("one_thread")
NAMES = [name for name in models.names() if isinstance(models.config(name), networks.FeedbackConfig)]
PLAIN = [name for name in NAMES if "encapnet" not in name]
FEW: dict[str, Any] = {"li-encapnet-v2": {"layers": (2, 1, 3, 2)}, "li-encapnet-v3": {"layers": (1, 2, 2, 2)}}


def small(name: str, **changes: Any) -> EncapNet:
    """Return a network that differs from its full size in widths, depth and image alone."""
    options: dict[str, Any] = {"image_size": 16, **FEW.get(name, {})}
    if name in PLAIN:
        config = models.config(name)
        options["stem"] = tuple((max(1, width // 16), stride) for width, stride in config.stem)
        options["stages"] = tuple((width // 16, blocks, stride) for width, blocks, stride in config.stages)
    else:
        options["types"] = 2
    return models.create(name, **{**options, **changes})


def count(name: str, **overrides: Any) -> int:
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in models.create(name, **overrides).parameters())


def test_parameters_by_hand() -> None:
    """As the paper's layers add up to; Table 1's CNNs are 24.44 and 146.88 Mb."""
    sums = {"none": 1_743_680, "own": 36_474_944, "other": 36_474_944, "both": 36_544_064}
    assert {each: count("li-encapnet-v1", coefficients=each) for each in sums} == sums
    master = 9 * (3 * 32 + 32 * 64 + 64 * 128 + 128 * 256) + 3 * (32 + 64 + 128 + 256)  # of four convolutions
    master += 9 * 32 * 8 * 16 + 512 + 1024 + 16 * 512 * 10
    aide = 49 * 256 * 512 + 512 + 2048 + 2 * (2 * 32 * 16 * 9) + 64
    wanted = {
        "li-encapnet-master": sums["none"], "li-encapnet-v2": 176_330_752, "li-encapnet-v3": 179_709_952,
        "li-encapnet-six-master": master, "li-encapnet-six": master + aide, "li-cnn-same": 1_575_690,
        "li-resnet18": 11_156_810,
    }  # fmt: skip
    assert {name: count(name) for name in wanted} == wanted
    assert 6 < count("li-cnn-large") / wanted["li-cnn-same"] < 6.3


def test_maps_are_table_2s() -> None:
    found: list[tuple[int, ...]] = []
    with torch.device("meta"):
        net = models.create("li-encapnet-v1").eval()
        for layer in (net.stem, *net.layers):
            layer.register_forward_hook(
                lambda _, __, out: found.append(tuple((out if isinstance(out, Tensor) else out[1]).shape))
            )
        assert net(torch.empty(2, 3, 32, 32)).shape == (2, 10)
    assert found == [(2, 32, 32, 32), (2, 64, 32, 32), (2, 128, 16, 16), (2, 256, 8, 8), (2, 512, 4, 4)]
    kinds = [(layer.kernel_size, layer.stride, layer.skip) for layer in net.modules() if isinstance(layer, CapConv2d)]
    plain = (1, 1, False)
    assert kinds == [(3, 1, True), *3 * [plain], *3 * [(3, 2, True), *3 * [plain]]]


@pytest.mark.parametrize("skip", ["none", "I", "II", "both"])
def test_what_a_module_skips(skip: str) -> None:
    module = networks.EncapModule(2, 1, 3, 3, 2, "own", skip).double().eval()
    capsules = torch.randn(2, 2, 5, 4, dtype=torch.float64)
    first = module.first
    summed = first.combine(capsules)
    if skip in ("I", "both"):
        summed = summed + first.shortcut(capsules)
    below = cap_conv.rectified_squash(first.norm(summed), 2).flatten(1, 2)
    middle, last = module.rest
    wanted = last(middle(below), below if skip in ("II", "both") else None)
    got, found = module(capsules)
    torch.testing.assert_close((got, found), (below, wanted))


@pytest.mark.parametrize("name", NAMES)
def test_every_network_learns_a_step(name: str) -> None:
    net = small(name, feedback="one" if name != "li-encapnet-v3" else "two", image_size=(11, 26), in_channels=2)
    before = {name: p.clone() for name, p in net.named_parameters() if not name.startswith("feedback")}
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    logits, feedback = net(torch.randn(4, 2, 11, 26), return_feedback=True)
    loss = margin_loss(logits, torch.arange(4)) + 10 * feedback
    loss.backward()
    optimizer.step()
    after = dict(net.named_parameters())
    kept = [key for key in before if torch.equal(before[key], after[key])]
    assert loss.isfinite() and all(key.endswith("bias") for key in kept)  # which a BatchNorm takes away again
    net.eval()
    for batch in (0, 1, 3):
        assert net(torch.randn(batch, 2, 11, 26)).shape == (batch, models.config(name).classes)


def units_of(name: str, **options: Any) -> list[FeedbackAgreement]:
    return [module for module in small(name, **options).modules() if isinstance(module, FeedbackAgreement)]


@pytest.mark.parametrize("name, types", [("li-encapnet-v1", 2), ("li-resnet18", None)])
def test_the_switches_of_table_3(name: str, types: int | None) -> None:
    switches = {"divergence": "kl", "bias_fix": False, "through_plan": True, "critic": False, "cost": "l2"}
    for option, value in {**switches, "generator": "vanilla"}.items():
        units = units_of(name, feedback="two", **{option: value})
        assert [unit.stride for unit in units] == [1, 1, 2, 1, 2, 1, 2, 1]
        for unit in units:
            assert unit.types == (None if option == "generator" else types)
            assert (unit.critic is None) == (option == "critic")
            if option not in ("generator", "critic"):
                assert getattr(unit if option == "divergence" else unit.sinkhorn, option) == value
    assert [unit.stride for unit in units_of(name, feedback="one")] == [1, 2, 2, 2] and not units_of(name)


def test_feedback_is_of_training_alone() -> None:
    net = small("li-encapnet-v1", feedback="two")
    images = torch.randn(2, 3, 16, 16)
    before, (first, end) = net.stem(images), net.layers[0](net.stem(images))
    units = net.feedback[0]
    of_first = units[0](end, before) + units[1](end, first)
    for other in net.feedback[1:]:
        del other[:]
    _, feedback = net(images, return_feedback=True)
    torch.testing.assert_close(feedback, of_first)
    logits, feedback = net.eval()(images, return_feedback=True)
    assert feedback.item() == 0 and torch.equal(logits, net(images))


test_errors_name_the_argument = refusals(
    (ValueError, r"images must be \[B, 3, 16, 16\], got \[1, 3, 16, 15\]",
     lambda: small("li-encapnet-six")(torch.ones(1, 3, 16, 15))),
    (ValueError, "coefficients must be one of 'own', 'other'", lambda: small("li-encapnet-v1", coefficients="x")),
)  # fmt: skip
