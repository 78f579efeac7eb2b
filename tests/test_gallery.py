"""The gallery of examples/your_own_routing.py: each routing against its paper's formula over stored votes."""

from __future__ import annotations

import math
import runpy
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fastcaps import Votes, Window

ROOT = Path(__file__).parents[1]
B, N, M, C, D, E = 2, 2, 3, 2, 3, 5
K = C * E
WINDOW = Window(3, stride=2, padding=1)
Results = tuple[Tensor, ...]


@pytest.fixture(scope="module")
def gallery() -> SimpleNamespace:
    return SimpleNamespace(**runpy.run_path(str(ROOT / "examples/your_own_routing.py")))


def leaf(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


def seen(values: Tensor, on_grid: bool) -> Tensor:
    """What windows of 3 by 3, stride 2, padding 1, see of values [B, N, H, W, ...]: [B, Ho, Wo, 9 N, ...]."""
    if not on_grid:
        return values
    high, wide = values.shape[2:4]
    padded = F.pad(values.movedim((2, 3), (-2, -1)), (1, 1, 1, 1)).movedim((-2, -1), (2, 3))
    rows = []
    for y in range(0, high, 2):
        places = [padded[:, :, y : y + 3, x : x + 3].movedim(1, 3).flatten(1, 3) for x in range(0, wide, 2)]
        rows.append(torch.stack(places, 1))
    return torch.stack(rows, 1)


class Scene:
    """Leaves of a call, a set or a grid, and its votes, stored: ``v``, [B, *grid, I, M, K], 0 in padding."""

    def __init__(self, on_grid: bool) -> None:
        self.on_grid = on_grid
        places, self.count = ((N, 5, 4), 9 * N) if on_grid else ((7,), 7)
        self.children, self.weight = leaf(B, *places, C, D), leaf(self.count, M, D, E)
        self.activations = torch.rand(B, *places, dtype=torch.float64, requires_grad=True)
        self.leaves = [self.children, self.weight]
        self.votes = Votes(self.children, self.weight, None, WINDOW if on_grid else None)

    @property
    def v(self) -> Tensor:
        return torch.einsum("...icd,imde->...imce", seen(self.children, self.on_grid), self.weight).flatten(-2)

    @property
    def gate(self) -> Tensor:
        return seen(self.activations, self.on_grid)[..., None]

    def bias(self) -> tuple[Tensor, Tensor]:
        """A bias of parents as the gallery takes it, and as [M, K]."""
        self.leaves.append(leaf(M, *([1, 1] if self.on_grid else []), C, E))
        return self.leaves[-1], self.leaves[-1].view(M, K)

    def layer(self, kind: Any, **options: Any) -> Any:
        grid = {"kernel_size": 3, "stride": 2, "padding": 1} if self.on_grid else {}
        layer = kind(N if self.on_grid else 7, M, C * D, K, pose=C, dtype=torch.float64, **grid, **options).double()
        for parameter in layer.parameters():
            torch.nn.init.normal_(parameter)
        self.weight = layer.weight
        self.leaves = [self.children, *layer.parameters()]
        return layer


def squash(s: Tensor) -> Tensor:
    squares = s.square().sum(-1, keepdim=True)
    return squares / (1 + squares) * s / squares.sqrt()


def total(r: Tensor, v: Tensor) -> Tensor:
    return (r[..., None] * v).sum(-3)


def parents_of(s: Tensor) -> Tensor:
    """[B, *grid, M, ...] as [B, M, *grid, ...]."""
    return s.movedim(-2, 1)


def scalars_of(a: Tensor) -> Tensor:
    return a.movedim(-1, 1)


# ---- each routing: ours, the formula over stored votes ---------------------------------------------------------------

Pair = tuple[Callable[[], Any], Callable[[], Any]]


def cosine(g: Any, scene: Scene) -> Pair:
    bias, flat = scene.bias()

    def formula() -> Tensor:
        v = scene.v
        logits = torch.zeros_like(v[..., 0])
        for _ in range(2):
            s = total(logits.softmax(-1), v) + flat
            logits = logits + F.cosine_similarity(s.unsqueeze(-3), v, dim=-1)
        return parents_of(squash(total(logits.softmax(-1), v) + flat))

    return lambda: g.cosine_routing(scene.votes, bias).flatten(-2), formula


def sparsemax(logits: Tensor) -> Tensor:
    low, high = logits.detach().amin(-1, keepdim=True) - 1, logits.detach().amax(-1, keepdim=True)
    for _ in range(80):  # the threshold, by bisection
        middle = (low + high) / 2
        above = (logits.detach() - middle).clamp(min=0).sum(-1, keepdim=True) > 1
        low, high = middle.where(above, low), high.where(above, middle)
    support = (logits.detach() > high).double()
    return support * (logits - ((support * logits).sum(-1, keepdim=True) - 1) / support.sum(-1, keepdim=True))


def top_2(logits: Tensor) -> Tensor:
    kept = logits.exp() * (logits.argsort(-1).argsort(-1) > 0)  # of three
    return kept / kept.sum(-1, keepdim=True)


def sinkhorn(logits: Tensor) -> Tensor:
    kernel = logits.exp()
    for _ in range(5):
        kernel = kernel / kernel.sum(-2, keepdim=True)
        kernel = kernel / kernel.sum(-1, keepdim=True)
    return kernel


def competing(name: str, compete: Callable[[Tensor], Tensor]) -> Callable[[Any, Scene], Pair]:
    def made(g: Any, scene: Scene) -> Pair:
        def formula() -> Tensor:
            v = scene.v
            logits = torch.zeros_like(v[..., 0])
            s = squash(total(logits + 1 / M, v))
            for _ in range(2):
                logits = logits + (s.unsqueeze(-3) * v).sum(-1)
                s = squash(total(compete(logits), v))
            return parents_of(s)

        return lambda: g.agreement_routing(scene.votes, getattr(g, name)).flatten(-2), formula

    return made


def batch_averaged(g: Any, scene: Scene) -> Pair:
    def formula() -> Tensor:
        v = scene.v
        logits = torch.zeros_like(v[:1, ..., 0])
        for _ in range(2):
            s = squash(total(logits.softmax(-2), v))
            logits = logits + (s.unsqueeze(-3) * v).sum(-1).mean(0, keepdim=True)
        return parents_of(squash(total(logits.softmax(-2), v)))

    return lambda: g.batch_averaged_routing(scene.votes).flatten(-2), formula


def deepcaps(g: Any, scene: Scene) -> Pair:
    bias, flat = scene.bias()
    kernel = leaf(M * K, C * D, 3, 3)
    scene.leaves[:2] = [scene.children, kernel] if scene.on_grid else scene.leaves[:2]

    def convolved(first: int, last: int) -> Tensor:  # one kernel for all child types
        maps = scene.children[:, first:last].flatten(-2).movedim(-1, 2).flatten(0, 1)
        made = F.conv2d(maps, kernel, padding=1).unflatten(0, (B, -1)).unflatten(2, (M, C, E))
        return made.movedim((-2, -1), (1, 2))

    def formula() -> Tensor:
        v = convolved(0, N).flatten(-2) if scene.on_grid else scene.v
        logits = torch.zeros_like(v[..., 0])
        for iteration in range(3):
            shares = logits.exp()
            over = (1, 2, 4) if scene.on_grid else 2
            s = squash(total(shares / shares.sum(over, keepdim=True), v) + flat)
            logits = logits + (s.unsqueeze(-3) * v).sum(-1) * (iteration < 2)
        return parents_of(s)

    votes = Votes.in_blocks(convolved, N, block=1) if scene.on_grid else scene.votes
    return lambda: g.deepcaps_routing(votes, bias).flatten(-2), formula


def em(g: Any, scene: Scene) -> Pair:
    beta_u, beta_a = leaf(), leaf()
    scene.leaves += [scene.activations, beta_u, beta_a]
    many = scene.activations[0].numel()
    ids = torch.arange(1, many + 1).view(1, *scene.activations.shape[1:])
    ids = seen(ids, scene.on_grid)[0]  # [*grid, I], 0 in padding
    owns = F.one_hot(ids, many + 1)[..., 1:].bool()[..., None]  # [*grid, I, children, 1]

    def formula() -> Results:
        v, gate = scene.v, scene.gate
        logits = torch.zeros_like(v[..., 0])
        for iteration in range(3):
            heat = 0.01 * (1 - 0.95 ** (iteration + 1))
            every = logits.unsqueeze(-2).exp() * owns  # [B, *grid, I, children, M]
            r = gate * (every / every.sum((*range(1, every.dim() - 2), -1), keepdim=True)).sum(-2)
            n = r.sum(-2)[..., None]
            mean = total(r, v) / n
            variance = total(r, (v - mean.unsqueeze(-3)).square()) / n + 1e-6
            cost = ((beta_u + variance.sqrt().log()) * n).sum(-1)
            a = (heat * (beta_a - cost)).sigmoid()
            gaussian = torch.distributions.Normal(mean.unsqueeze(-3), variance.sqrt().unsqueeze(-3))
            logits = a.log().unsqueeze(-2) + gaussian.log_prob(v).sum(-1)
            logits = logits - logits.detach().amax()
        return parents_of(mean), scalars_of(a)

    def ours() -> Results:
        poses, a = g.em_routing(scene.votes, scene.activations, beta_u, beta_a)
        return poses.flatten(-2), a

    return ours, formula


def variational(g: Any, scene: Scene) -> Pair:
    layer = scene.layer(g.VariationalBayesRouting)
    scene.leaves.append(scene.activations)

    def normed(x: Tensor) -> Tensor:  # [B, M, ...]
        over = [k for k in range(x.dim()) if k != 1]
        return (x - x.mean(over, keepdim=True)) / (x.var(over, unbiased=False, keepdim=True) + 1e-5).sqrt()

    def formula() -> Results:
        v, gate = scene.v, scene.gate
        r = torch.full_like(v[..., 0], 1 / M)
        for iteration in range(3):
            w = gate * r
            n = w.sum(-2)[..., None]  # [B, *grid, M, 1]
            alpha, kappa, nu = 1 + n, 1 + n, K + 1 + n
            mu = total(w, v) / n
            mean = n * mu / kappa
            inverse_psi = 1 + total(w, (v - mu.unsqueeze(-3)).square()) + n / kappa * mu.square()
            log_pi = (alpha.digamma() - alpha.sum(-2, keepdim=True).digamma())[..., 0]
            log_det = sum(((nu[..., 0] - d) / 2).digamma() for d in range(K)) + K * math.log(2)
            log_det = log_det - inverse_psi.log().sum(-1)
            if iteration < 2:
                far = (nu / inverse_psi).unsqueeze(-3) * (v - mean.unsqueeze(-3)).square()
                log_p = (log_det - K * math.log(2 * math.pi) - K / kappa[..., 0]) / 2
                r = ((log_pi + log_p).unsqueeze(-2) - far.sum(-1) / 2).softmax(-1)
        entropy = K / 2 * math.log(2 * math.pi * math.e) - log_det / 2
        beta_a, beta_u = torch.randn(2, M, dtype=torch.float64)  # BatchNorm cancels them
        a = beta_a - (log_pi.exp() * entropy + beta_u)
        return normed(parents_of(mean)), normed(scalars_of(a)).sigmoid()

    return lambda: layer(scene.children.flatten(-2), scene.activations), formula


def self_routing(g: Any, scene: Scene) -> Pair:
    layer = scene.layer(g.SelfRouting)
    scene.leaves.append(scene.activations)

    def formula() -> Results:
        poses = seen(scene.children.flatten(-2), scene.on_grid)
        logits = torch.einsum("...id,imd->...im", poses, layer.router[..., 0]) + layer.router_bias[..., 0, 0]
        shares = scene.gate * logits.softmax(-1)
        each = shares.sum(-2)
        return (
            parents_of(total(shares / each.unsqueeze(-2), scene.v)),
            scalars_of(each / scene.gate.sum(-2)),
        )

    return lambda: layer(scene.children.flatten(-2), scene.activations), formula


def self_attention(g: Any, scene: Scene) -> Pair:
    layer = scene.layer(g.SelfAttentionRouting)

    def formula() -> Tensor:
        v = scene.v
        pairs = torch.einsum("...imk,...jmk->...ijm", v, v) / math.sqrt(K)
        s = total(pairs.sum(-2).softmax(-1) + layer.prior, v)
        length = s.square().sum(-1, keepdim=True).sqrt()
        return parents_of((1 - 1 / length.exp()) * s / length)

    return lambda: layer(scene.children.flatten(-2)), formula


def slots(g: Any, scene: Scene) -> Pair:
    layer, inputs = g.SlotAttention(M, K).double(), leaf(B, 7, K)
    scene.leaves = [inputs, *layer.parameters()]
    teacher = torch.randint(M, (B, 7))

    def formula() -> Results:
        x = layer.norm_inputs(inputs)
        k, v, state = layer.to_k(x), layer.to_v(x), layer.start.expand(B, -1, -1)
        for _ in range(3):
            logits = k @ layer.to_q(layer.norm_slots(state)).mT / math.sqrt(K)
            share = logits.softmax(-1) + 1e-8
            found = (share / share.sum(1, keepdim=True)).mT @ v
            state = torch.stack([layer.gru(found[:, m], state[:, m]) for m in range(M)], 1)
            state = state + layer.mlp(layer.norm_mlp(state))
        return state, -logits.log_softmax(-1).gather(-1, teacher[..., None]).mean()

    def ours() -> Results:
        state, logits = layer(inputs)
        return state, F.cross_entropy(logits.mT, teacher)

    return ours, formula


def cosine_top_k(g: Any, scene: Scene) -> Pair:
    layer = scene.layer(g.CosineTopK)

    def formula() -> Tensor:
        v = scene.v
        s = total(torch.full_like(v[..., 0], 1 / M), v)
        for _ in range(2):
            s = total(top_2(8 * F.cosine_similarity(s.unsqueeze(-3), v, dim=-1)), v)
        return parents_of(squash(s))

    return lambda: layer(scene.children.flatten(-2)), formula


COMPETITIONS = {"top_k": top_2, "sparsemax": sparsemax, "sinkhorn": sinkhorn}
ROUTINGS: dict[str, Callable[[Any, Scene], Pair]] = {
    "cosine": cosine,
    **{name: competing(name, compete) for name, compete in COMPETITIONS.items()},
    **{each.__name__: each for each in (batch_averaged, deepcaps, em, variational, self_routing, self_attention)},
    **{each.__name__: each for each in (slots, cosine_top_k)},
}
ONLY_SETS = ("sinkhorn", "slots")


@pytest.mark.parametrize(
    ("name", "on_grid"),
    [(name, on_grid) for name in ROUTINGS for on_grid in (False, True) if not (on_grid and name in ONLY_SETS)],
)
def test_a_routing_is_its_papers_formula_over_stored_votes(gallery: SimpleNamespace, name: str, on_grid: bool) -> None:
    torch.manual_seed(3)
    scene = Scene(on_grid)
    found = []
    for run in ROUTINGS[name](gallery, scene):
        results = run()
        results = (results,) if isinstance(results, Tensor) else tuple(results)
        torch.manual_seed(4)
        loss = sum((result * torch.randn(result.shape, dtype=torch.float64)).sum() for result in results)
        found.append((*results, *torch.autograd.grad(loss, scene.leaves)))
    for ours, formula in zip(*found, strict=True):
        assert formula.abs().max() > 0 and ours.dtype == torch.float64
        torch.testing.assert_close(ours, formula, rtol=1e-8, atol=1e-9)
