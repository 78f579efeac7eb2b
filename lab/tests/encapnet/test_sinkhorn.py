"""The Sinkhorn divergence and the feedback unit: the paper's iterations as loops, every switch of Table 3."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from stand_ins import refusals
from torch import Tensor, nn

from fastcaps.functional import squash
from fastcaps_lab.encapnet import FeedbackAgreement, SinkhornDivergence

pytestmark = pytest.mark.usefixtures("one_thread")


def cost(kind: str, one: list[float], other: list[float]) -> float:
    if kind == "l2":
        return math.dist(one, other)
    lengths = math.hypot(*one) * math.hypot(*other)
    return 1 - sum(p * q for p, q in zip(one, other, strict=True)) / lengths if lengths else 1.0


def transport(kind: str, eps: float, iterations: int, x: Tensor, y: Tensor) -> float:
    """Sinkhorn's iterations of the paper, number by number, without logarithms."""
    costs = [[cost(kind, one, other) for other in y.flatten(1).tolist()] for one in x.flatten(1).tolist()]
    n, m = len(x), len(y)
    kernel = [[math.exp(-c / eps) for c in row] for row in costs]
    a, b = [1.0] * n, [1.0] * m
    for _ in range(iterations):
        a = [1 / n / sum(kernel[i][j] * b[j] for j in range(m)) for i in range(n)]
        b = [1 / m / sum(kernel[i][j] * a[i] for i in range(n)) for j in range(m)]
    return sum(a[i] * kernel[i][j] * b[j] * costs[i][j] for i in range(n) for j in range(m))


@pytest.mark.parametrize("sizes", [(3, 5, 4), (1, 1, 1), (1, 4, 2)], ids=str)
@pytest.mark.parametrize("kind", ["cosine", "l2"])
def test_the_divergence_is_the_procedure(kind: str, sizes: tuple[int, int, int]) -> None:
    n, m, d = sizes
    x, y = torch.randn(n, d, 2, dtype=torch.float64), torch.randn(m, d, 2, dtype=torch.float64)
    for eps, iterations in ((1.0, 10), (0.2, 3), (5.0, 1)):
        given = kind, eps, iterations
        plain = transport(*given, x, y)
        found = SinkhornDivergence(kind, eps=eps, iterations=iterations, bias_fix=False)(x, y)
        assert found.item() == pytest.approx(plain, rel=1e-10)
        found = SinkhornDivergence(kind, eps=eps, iterations=iterations)(x, y)
        wanted = 2 * plain - transport(*given, x, x) - transport(*given, y, y)
        assert found.item() == pytest.approx(wanted, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("kind", ["cosine", "l2"])
def test_the_plan_is_a_constant_unless_the_gradient_flows_through(kind: str) -> None:
    x, y = (torch.randn(n, 3, dtype=torch.float64, requires_grad=True) for n in (4, 2))
    through = SinkhornDivergence(kind, iterations=3, through_plan=True)
    assert torch.autograd.gradcheck(through, (x, y))
    stopped = SinkhornDivergence(kind, iterations=3)
    assert torch.equal(stopped(x, y), through(x, y))
    (grad,) = torch.autograd.grad(stopped(x, y), x)
    by_hand = sum(times * (stopped.plan(stopped.costs(p, q)).detach() * stopped.costs(p, q)).sum()
                  for times, p, q in ((2, x, y), (-1, x, x)))  # fmt: skip
    torch.testing.assert_close(grad, torch.autograd.grad(by_hand, x)[0])
    assert not torch.allclose(grad, torch.autograd.grad(through(x, y), x)[0])


@pytest.mark.parametrize("kind", ["cosine", "l2"])
def test_zero_vectors_equal_vectors_empty_sets_and_nan(kind: str) -> None:
    x = torch.tensor([[0.0, 0.0], [1.0, 2.0], [1.0, 2.0]], requires_grad=True)
    divergence = SinkhornDivergence(kind, through_plan=True)
    (grad,) = torch.autograd.grad(divergence(x, x.detach()), x)
    assert grad.isfinite().all()
    assert divergence(x[:0], x[:0]).item() == 0
    assert divergence(x, x * torch.tensor([1.0, torch.nan])).isnan()
    x, y = torch.randn(5, 8).bfloat16(), torch.randn(5, 8).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        found = divergence(x, y)
    assert found.dtype == torch.float32 and torch.equal(found, divergence(x.float(), y.float()))


SWITCHES: dict[str, dict[str, Any]] = {
    "ot": {},
    "kl": {"divergence": "kl"},
    "no bias fix": {"bias_fix": False},
    "through the plan": {"through_plan": True},
    "no critic": {"critic": False},
    "vanilla generator": {"types": None},
    "l2": {"cost": "l2"},
}


def by_hand(unit: FeedbackAgreement, higher: Tensor, lower: Tensor) -> Tensor:
    """The unit's loss, from its parameters, by torch's own functions and the loops above."""

    def normal(norm: nn.BatchNorm2d, x: Tensor) -> Tensor:
        return F.batch_norm(x, None, None, norm.weight, norm.bias, training=True, eps=norm.eps).relu()

    generator, odd = unit.generator, [n % 2 for n in lower.shape[2:]]
    extra = [0, 0] if unit.stride == 1 else [1 - n for n in odd]
    x = F.conv_transpose2d(higher, generator.weight, generator.bias, unit.stride, 1, extra, unit.types or 1)
    x = normal(unit.norm, x)
    if unit.types is not None:
        x = squash(x.unflatten(1, (unit.types, -1)), 2).flatten(1, 2)
    y = lower
    if unit.critic is not None:
        for conv, norm in ((unit.critic[0], unit.critic[1]), (unit.critic[3], unit.critic[4])):
            x, y = (normal(norm, F.conv2d(z, conv.weight, conv.bias, 2, 1)) for z in (x, y))
    if unit.divergence == "kl":
        p, q = y.flatten(1).softmax(1), x.flatten(1).softmax(1)
        return (p * (p / q).log()).sum() / len(p)
    sinkhorn = unit.sinkhorn
    given = sinkhorn.cost, sinkhorn.eps, sinkhorn.iterations
    found = transport(*given, x, y)
    if sinkhorn.bias_fix:
        found = 2 * found - transport(*given, x, x) - transport(*given, y, y)
    return torch.tensor(found, dtype=torch.float64)


@pytest.mark.parametrize("stride, size", [(1, (9, 7)), (2, (9, 10))])
@pytest.mark.parametrize("switch", SWITCHES)
def test_the_unit_and_every_switch(switch: str, stride: int, size: tuple[int, int]) -> None:
    unit = FeedbackAgreement(12, 9, **{"types": 3, "stride": stride, **SWITCHES[switch]}).double()
    with torch.no_grad():
        for parameter in unit.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    small = [-(-n // stride) for n in size]
    higher = torch.randn(4, 12, *small, dtype=torch.float64, requires_grad=True)
    lower = torch.rand(4, 9, *size, dtype=torch.float64, requires_grad=True)
    found = unit(higher, lower)
    torch.testing.assert_close(found, by_hand(unit, higher, lower).detach(), atol=1e-10, rtol=1e-9)
    found.backward()
    assert (higher.grad != 0).any() and (lower.grad != 0).any()
    assert all(parameter.grad is not None for parameter in unit.parameters())
    assert unit.eval()(higher, lower).item() == 0


test_errors_name_the_argument = refusals(
    (ValueError, "eps must be above 0", lambda: SinkhornDivergence(eps=0)),
    (ValueError, "cost must be one of 'cosine', 'l2', got 'l1'", lambda: SinkhornDivergence("l1")),
    (ValueError, "stride must be 1 or 2, got 3", lambda: FeedbackAgreement(4, 4, stride=3)),
    (ValueError, r"requested an output size of .*\[3, 5\]",
     lambda: FeedbackAgreement(4, 4, stride=2)(torch.ones(1, 4, 2, 2), torch.ones(1, 4, 3, 5))),
)  # fmt: skip
