"""The gallery of examples/your_own_routing.py: each routing against its formula over stored votes."""

from __future__ import annotations

import importlib
import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from oracle_routings import squash
from stored_votes import Stored, seen
from torch import Tensor
from torch.nn import functional as F

from fastcaps import Votes, Window

EXAMPLE = Path(__file__).parents[1] / "examples/your_own_routing.py"
PAGE = Path(__file__).parents[1] / "docs/routings/your-own.md"
B, N, M, C, D, E = 2, 2, 3, 2, 3, 5
K = C * E
Both = tuple[Any, Any]  # what the gallery returns, and what the formula does: a tensor or a tuple


@pytest.fixture(scope="module")
def gallery() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:  # a module: Dynamo looks for it by its name
        patch.syspath_prepend(EXAMPLE.parent)
        yield importlib.import_module(EXAMPLE.stem)


def leaf(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


class Scene:
    """A set of 7 children, or a grid with windows of 3 by 3, stride 2, padding 1; ``leaves`` get gradients."""

    def __init__(self, on_grid: bool) -> None:
        self.on_grid = on_grid
        places, count = ((N, 5, 4), 9 * N) if on_grid else ((7,), 7)
        self.children, self.weight = leaf(B, *places, C, D), leaf(count, M, D, E)
        self.activations = torch.rand(B, *places, dtype=torch.float64, requires_grad=True)
        self.leaves = [self.children, self.weight]
        self.window = Window(3, stride=2, padding=1) if on_grid else None
        self.votes = Votes(self.children, self.weight, None, self.window)

    def seen(self, values: Tensor) -> Tensor:
        """What windows see of values [B, N, H, W, ...]: [B, Ho, Wo, I, ...], 0 in padding."""
        return values if self.window is None else seen(values, self.window)

    @property
    def v(self) -> Tensor:
        """The votes, [B, *grid, I, M, K], 0 in padding."""
        return Stored(self.children, self.weight, None, self.window).votes.flatten(-2)

    @property
    def gate(self) -> Tensor:
        return self.seen(self.activations)[..., None]

    def bias(self) -> tuple[Tensor, Tensor]:
        """A bias of parents as the gallery takes it, and as [M, K]."""
        self.leaves.append(leaf(M, *([1, 1] if self.on_grid else []), C, E))
        return self.leaves[-1], self.leaves[-1].view(M, K)

    def layer(self, kind: Any) -> Any:
        grid = {"kernel_size": 3, "stride": 2, "padding": 1} if self.on_grid else {}
        layer = kind(N if self.on_grid else 7, M, C * D, K, pose=C, dtype=torch.float64, **grid).double()
        for parameter in layer.parameters():
            torch.nn.init.normal_(parameter)
        self.weight, self.leaves = layer.weight, [self.children, *layer.parameters()]
        return layer


def total(r: Tensor, v: Tensor) -> Tensor:
    return (r[..., None] * v).sum(-3)


def agreement(s: Tensor, v: Tensor) -> Tensor:
    return (s.unsqueeze(-3) * v).sum(-1)


def cosine(g: Any, scene: Scene) -> Both:
    (bias, flat), v = scene.bias(), scene.v
    logits = torch.zeros_like(v[..., 0])
    for _ in range(3):
        s = total(logits.softmax(-1), v) + flat
        logits = logits + F.cosine_similarity(s.unsqueeze(-3), v, dim=-1)
    return g.cosine_routing(scene.votes, bias), squash(s)


def top_k(logits: Tensor) -> Tensor:
    kept = logits.exp() * (logits.argsort(-1).argsort(-1) > 0)  # two of three
    return kept / kept.sum(-1, keepdim=True)


def sparsemax(logits: Tensor) -> Tensor:
    low, high = logits.detach().amin(-1, keepdim=True) - 1, logits.detach().amax(-1, keepdim=True)
    for _ in range(80):  # the threshold, by bisection
        middle = (low + high) / 2
        above = (logits.detach() - middle).clamp(min=0).sum(-1, keepdim=True) > 1
        low, high = middle.where(above, low), high.where(above, middle)
    support = (logits.detach() > high).double()
    return support * (logits - ((support * logits).sum(-1, keepdim=True) - 1) / support.sum(-1, keepdim=True))


def sinkhorn(logits: Tensor) -> Tensor:
    shares = logits.exp()
    for _ in range(5):
        shares = shares / shares.sum(-2, keepdim=True)
        shares = shares / shares.sum(-1, keepdim=True)
    return shares


def competing(compete: Callable[[Tensor], Tensor]) -> Callable[[Any, Scene], Both]:
    def both(g: Any, scene: Scene) -> Both:
        v, logits = scene.v, 0.0
        s = squash(v.sum(-3) / M)
        for _ in range(2):
            logits = logits + agreement(s, v)
            s = squash(total(compete(logits), v))
        return g.agreement_routing(scene.votes, getattr(g, compete.__name__)), s

    return both


def batch_averaged(g: Any, scene: Scene) -> Both:
    v = scene.v
    logits = torch.zeros_like(v[:1, ..., 0])
    for _ in range(3):
        s = squash(total(logits.softmax(-2), v))
        logits = logits + agreement(s, v).mean(0, keepdim=True)
    return g.batch_averaged_routing(scene.votes), s


def deepcaps(g: Any, scene: Scene) -> Both:
    (bias, flat), v, votes, over = scene.bias(), scene.v, scene.votes, [2]
    if scene.on_grid:  # a convolution, the same for all child types
        kernel = leaf(M * K, C * D, 3, 3)
        scene.leaves[1] = kernel

        def convolved(first: int, last: int) -> Tensor:
            maps = scene.children[:, first:last].flatten(-2).movedim(-1, 2).flatten(0, 1)
            made = F.conv2d(maps, kernel, padding=1).unflatten(0, (B, -1)).unflatten(2, (M, C, E))
            return made.movedim((-2, -1), (1, 2))

        v, votes, over = convolved(0, N).flatten(-2), Votes.in_blocks(convolved, N, block=1), [1, 2, 4]
    logits = torch.zeros_like(v[..., 0])
    for _ in range(3):
        s = squash(total(logits.exp() / logits.exp().sum(over, keepdim=True), v) + flat)
        logits = logits + agreement(s, v)
    return g.deepcaps_routing(votes, bias), s


def em(g: Any, scene: Scene) -> Both:
    beta_u, beta_a, many = leaf(), leaf(), scene.activations[0].numel()
    scene.leaves += [scene.activations, beta_u, beta_a]
    ids = scene.seen(torch.arange(1, many + 1).view(1, *scene.activations.shape[1:]))[0]  # 0 in padding
    owns = F.one_hot(ids, many + 1)[..., 1:].bool()[..., None]  # [*grid, I, children, 1]
    v, gate = scene.v, scene.gate
    logits = torch.zeros_like(v[..., 0])
    for iteration in range(3):
        every = logits.unsqueeze(-2).exp() * owns  # [B, *grid, I, children, M]
        r = gate * (every / every.sum((*range(1, every.dim() - 2), -1), keepdim=True)).sum(-2)
        n = r.sum(-2)[..., None]
        mean = total(r, v) / n
        variance = total(r, (v - mean.unsqueeze(-3)).square()) / n + 1e-6
        cost = ((beta_u + variance.sqrt().log()) * n).sum(-1)
        a = (0.01 * (1 - 0.95 ** (iteration + 1)) * (beta_a - cost)).sigmoid()
        gaussian = torch.distributions.Normal(mean.unsqueeze(-3), variance.sqrt().unsqueeze(-3))
        logits = a.log().unsqueeze(-2) + gaussian.log_prob(v).sum(-1)
        logits = logits - logits.detach().amax()
    return g.em_routing(scene.votes, scene.activations, beta_u, beta_a), (mean, a)


def normed(x: Tensor, parents: int) -> Tensor:
    over = [k for k in range(x.dim()) if k != parents % x.dim()]
    return (x - x.mean(over, keepdim=True)) / (x.var(over, unbiased=False, keepdim=True) + 1e-5).sqrt()


def variational(g: Any, scene: Scene) -> Both:
    layer = scene.layer(g.VariationalBayesRouting)
    scene.leaves.append(scene.activations)
    v = scene.v
    r = torch.full_like(v[..., 0], 1 / M)
    for _ in range(3):
        w = scene.gate * r
        n = w.sum(-2)[..., None]  # [B, *grid, M, 1]
        alpha, kappa, nu = 1 + n, 1 + n, K + 1 + n
        mu = total(w, v) / n
        mean = n * mu / kappa
        inverse_psi = 1 + total(w, (v - mu.unsqueeze(-3)).square()) + n / kappa * mu.square()
        log_pi = (alpha.digamma() - alpha.sum(-2, keepdim=True).digamma())[..., 0]
        log_det = sum(((nu[..., 0] - d) / 2).digamma() for d in range(K)) + K * math.log(2) - inverse_psi.log().sum(-1)
        far = agreement(nu / inverse_psi, (v - mean.unsqueeze(-3)).square())
        log_p = (log_det - K * math.log(2 * math.pi) - K / kappa[..., 0]) / 2
        r = ((log_pi + log_p).unsqueeze(-2) - far / 2).softmax(-1)
    entropy = K / 2 * math.log(2 * math.pi * math.e) - log_det / 2
    beta_a, beta_u = torch.randn(2, M, dtype=torch.float64)  # the authors' parameters, which BatchNorm cancels
    a = beta_a - (log_pi.exp() * entropy + beta_u)
    return layer(scene.children.flatten(-2), scene.activations), (normed(mean, -2), normed(a, -1).sigmoid())


def self_routing(g: Any, scene: Scene) -> Both:
    layer = scene.layer(g.SelfRouting)
    scene.leaves.append(scene.activations)
    poses = scene.seen(scene.children.flatten(-2))
    logits = torch.einsum("...id,imd->...im", poses, layer.router[..., 0]) + layer.router_bias[..., 0, 0]
    shares = scene.gate * logits.softmax(-1)
    each = shares.sum(-2)
    formula = total(shares / each.unsqueeze(-2), scene.v), each / scene.gate.sum(-2)
    return layer(scene.children.flatten(-2), scene.activations), formula


def self_attention(g: Any, scene: Scene) -> Both:
    layer = scene.layer(g.SelfAttentionRouting)
    v = scene.v
    pairs = torch.einsum("...imk,...jmk->...ijm", v, v) / math.sqrt(K)
    s = total(pairs.sum(-2).softmax(-1) + layer.prior, v)
    length = s.square().sum(-1, keepdim=True).sqrt()
    return layer(scene.children.flatten(-2)), (1 - 1 / length.exp()) * s / length


def slots(g: Any, scene: Scene) -> Both:
    layer, inputs, teacher = g.SlotAttention(M, K).double(), leaf(B, 7, K), torch.randint(M, (B, 7))
    scene.leaves = [inputs, *layer.parameters()]
    x = layer.norm_inputs(inputs)
    k, v, state = layer.to_k(x), layer.to_v(x), layer.start.expand(B, -1, -1)
    for _ in range(3):
        logits = k @ layer.to_q(layer.norm_slots(state)).mT / math.sqrt(K)
        share = logits.softmax(-1) + 1e-8
        found = (share / share.sum(1, keepdim=True)).mT @ v
        state = torch.stack([layer.gru(found[:, m], state[:, m]) for m in range(M)], 1)
        state = state + layer.mlp(layer.norm_mlp(state))
    loss = -logits.log_softmax(-1).gather(-1, teacher[..., None]).mean()
    ours, last = layer(inputs)
    return (ours, F.cross_entropy(last.mT, teacher)), (state, loss)


LOOPS = (cosine, batch_averaged, deepcaps, em, variational, self_routing, self_attention, slots)
ROUTINGS = {each.__name__: each for each in LOOPS}
ROUTINGS |= {compete.__name__: competing(compete) for compete in (top_k, sparsemax, sinkhorn)}
CASES = [(name, grid) for name in ROUTINGS for grid in (False, True) if not (grid and name in ("sinkhorn", "slots"))]


@pytest.mark.parametrize(("name", "on_grid"), CASES)
def test_a_routing_is_its_formula_over_stored_votes(gallery: Any, name: str, on_grid: bool) -> None:
    torch.manual_seed(3)
    scene = Scene(on_grid)
    ours, formula = (x if isinstance(x, tuple) else (x,) for x in ROUTINGS[name](gallery, scene))
    formula = tuple(x.movedim(3, 1) if on_grid else x for x in formula)
    ours = tuple(x.flatten(-2) if x.dim() > y.dim() else x for x, y in zip(ours, formula, strict=True))
    heads = [torch.randn(x.shape, dtype=torch.float64) for x in formula]
    found = [(*results, *torch.autograd.grad(results, scene.leaves, heads)) for results in (ours, formula)]
    for mine, theirs in zip(*found, strict=True):
        assert theirs.abs().max() > 0 and mine.dtype == torch.float64
        torch.testing.assert_close(mine, theirs, rtol=1e-8, atol=1e-9)


def test_the_page_shows_the_code_of_the_example() -> None:
    blocks = re.findall(
        r"^```python\n((?:def|class) .*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE
    )
    assert blocks and all(block in EXAMPLE.read_text(encoding="utf-8") for block in blocks)


def test_windows_that_compete_compile(gallery: Any) -> None:
    def run(children: Tensor, activations: Tensor) -> Tensor:
        return gallery.em_routing(Votes(children, weight, window=Window(3, padding=1)), activations, 0.1, 0.2).poses

    weight, given = torch.randn(18, M, D, E), (torch.randn(B, N, 5, 4, C, D), torch.rand(B, N, 5, 4))
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*given), run(*given))


def test_a_layer_of_ones_own_checks_its_activations(gallery: Any) -> None:
    with pytest.raises(ValueError, match=r"activations must have shape \[B, I\] = \[2, 7\], got \[2, 8\]"):
        gallery.SelfRouting(7, M, 4, 4)(torch.randn(2, 7, 4), torch.rand(2, 8))


@pytest.mark.slow
def test_the_new_routing_learns(gallery: Any) -> None:
    datasets = pytest.importorskip("sklearn.datasets")
    pixels, labels = map(torch.tensor, datasets.load_digits(return_X_y=True))
    images = F.interpolate(pixels.float().view(-1, 1, 8, 8) / 8 - 1, 28)
    parts = [torch.utils.data.TensorDataset(images[k::5], labels[k::5]) for k in range(5)]
    assert gallery.train(torch.utils.data.ConcatDataset(parts[1:]), parts[0], epochs=3) > 0.9
