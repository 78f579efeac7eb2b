"""The kinds of routing that a workload can be: a class each, with inputs, cost, and iterations over votes.

Everything of this package is reached here, by its public functions alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.folded import votes_in
from bench.votes import Layout, seen, squash, summed, unpadded
from bench.workload import Draw, Routing, Workload
from fastcaps import functional

_LAYER_NORM_EPS, _EM_EPS, _HEINSEN_EPS = 1e-5, 1e-8, 1e-5  # what the public functions use where nothing is said


@dataclass(frozen=True)
class AttentionPass(Routing):
    """One pass in which parents compete (Tsai et al. 2020), LayerNorm included."""

    uniform: bool = False  # a pass without parents: r = 1 / M
    normalize: bool = True  # whether LayerNorm over the C * E numbers of a parent, with affine, ends the pass

    function: ClassVar[Callable[..., Any]] = functional.inverted_attention_routing
    subject: ClassVar[str] = "attention"

    makes_votes = property(lambda self: not self.uniform)

    def arguments(self, work: Workload, draw: Draw) -> dict[str, Tensor]:
        """Draw children and parents from N(0, 1), as LayerNorm leaves them; weights N(0, M / (D I)), as the authors
        initialise; an affine near (1, 0)."""
        made = {"children": draw.children(work.rows, work.columns_in)}
        made["weight"] = draw.weight((work.parents / (work.columns_in * work.children)) ** 0.5)
        if not self.uniform:
            made["parents"] = draw.parents(work.rows, work.columns_out)
        if self.normalize:
            made["norm_weight"] = 1 + 0.1 * draw.normal(work.pose)
            made["norm_bias"] = 0.1 * draw.normal(work.pose)
        return made

    def settings(self, work: Workload) -> dict[str, Any]:
        return {"window": work.window, "normalize": self.normalize}

    def route(self, work: Workload, layout: Layout, copies: int, **given: Tensor) -> tuple[Tensor, ...]:
        """Run the pass; a uniform one as one matmul with the inner dimension I * D."""
        poses, weight = seen(given["children"], work), given["weight"]
        if self.uniform:
            sums = summed(poses, weight) / work.parents
        else:
            asked = unpadded(given["parents"], work).flatten(0, 2)  # [P, M, C, E]
            query = layout.place(asked * work.pose**-0.5, "pmce").contiguous()
            sums = layout.back(votes_in(layout, poses, weight).attend(query), "pmce")
        if self.normalize:
            affine = given["norm_weight"], given["norm_bias"], _LAYER_NORM_EPS
            sums = F.layer_norm(sums.flatten(2), [work.pose], *affine).view(sums.shape)
        return (sums,)


@dataclass(frozen=True)
class DynamicRouting(Routing):
    """Dynamic routing (Sabour et al. 2017): agreement with the parents' squashed sums adds up."""

    iterations: int = 3
    as_published: bool = False  # whether the matrices lie as in DenseCapsule and its copies, [M, I, E, D]

    function: ClassVar[Callable[..., Any]] = functional.dynamic_routing
    subject: ClassVar[str] = "attention"

    def arguments(self, work: Workload, draw: Draw) -> dict[str, Tensor]:
        """Draw children that are shorter than 1, as squashing leaves them, and weights that make votes of some length,
        so that children come to differ in whom they agree with."""
        weight = draw.weight(1.0)
        if self.as_published:
            weight = weight.permute(1, 0, 3, 2).contiguous().permute(1, 0, 3, 2)
        return {"children": squash(draw.children(work.rows, work.columns_in), (-2, -1)), "weight": weight}

    def route(self, work: Workload, layout: Layout, copies: int, **given: Tensor) -> tuple[Tensor, ...]:
        votes = votes_in(layout, seen(given["children"], work), given["weight"])
        parents = query = squash(votes.mean() * (work.children / work.parents), layout.pose)
        for iteration in range(1, self.iterations):
            parents = squash(votes.attend(query), layout.pose)
            if iteration + 1 < self.iterations:
                query = query + parents
        return (layout.back(parents, "pmce"),)


@dataclass(frozen=True)
class InterestRouting(DynamicRouting):
    """Dynamic routing of poses themselves, without matrices, from random logits (Li et al. 2019, MIND)."""

    makes_votes: ClassVar[bool] = False

    def arguments(self, work: Workload, draw: Draw) -> dict[str, Tensor]:
        """Draw children from N(0, 1), and the logits of each child and parent."""
        return {"children": draw.children(work.rows, work.columns_in), "prior": draw.normal(work.types, work.parents)}

    def settings(self, work: Workload) -> dict[str, Any]:
        return super().settings(work) | {"weight": None, "parents": work.parents}

    def route(self, work: Workload, layout: Layout, copies: int, **given: Tensor) -> tuple[Tensor, ...]:
        """Run the iterations by two products each, children last in the softmax's tensor, so that it is vectorised."""
        poses = seen(given["children"], work).flatten(2).transpose(0, 1).contiguous()  # [P, I, C * E]
        logits, query = given["prior"].mT.unsqueeze(0), torch.zeros_like(poses[:, :1])
        for _ in range(self.iterations):
            shares = torch.softmax(logits + query @ poses.mT, 1)
            parents = squash((shares @ poses).unsqueeze(2), (-2, -1)).squeeze(2)
            query = query + parents
        return (parents.unflatten(-1, (work.rows, work.columns_out)),)


@dataclass(frozen=True)
class EMRouting(Routing):
    """EM routing (Hinton et al. 2018): parents' activations say how well they explain the children."""

    iterations: int = 3
    coordinates: bool = False  # each child's place on a square grid is added to its votes: a bias that is not learned

    function: ClassVar[Callable[..., Any]] = functional.em_routing
    results: ClassVar[tuple[str, ...]] = ("poses", "activations")
    fixed: ClassVar[tuple[str, ...]] = ("bias",)
    subject: ClassVar[str] = "gaussian"

    def arguments(self, work: Workload, draw: Draw) -> dict[str, Tensor]:
        """Draw poses from N(0, 1), weights that keep that scale, activations between 0 and 1, betas near 1."""
        made = {
            "children": draw.children(work.rows, work.columns_in),
            "activations": draw.children().sigmoid(),
            "weight": draw.weight(work.columns_in**-0.5),
            "beta_u": 1 + 0.1 * draw.normal(work.parents),
            "beta_a": 1 + 0.1 * draw.normal(work.parents),
        }
        if self.coordinates:
            side = round((work.children // work.matrices) ** 0.5)
            places = (torch.arange(side) + 0.5) / side
            bias = torch.zeros(side, side, work.matrices, 1, work.rows, work.columns_out)
            bias[..., 0, -2], bias[..., 0, -1] = places.view(side, 1, 1, 1), places.view(side, 1, 1)
            made["bias"] = bias.flatten(0, 2)
        return made

    def route(self, work: Workload, layout: Layout, copies: int, **given: Tensor) -> tuple[Tensor, ...]:
        """Run the iterations with the customary schedule 0.01 (1 - 0.95^(t + 1))."""
        votes = votes_in(layout, seen(given["children"], work), given["weight"], given.get("bias"))
        gates = layout.place(seen(given["activations"], work), "ip")
        use, wanted = layout.place(given["beta_u"], "m"), layout.place(given["beta_a"], "m")
        log_weight = None
        for iteration in range(self.iterations):
            counts, means, variances = votes.moments(gates, _EM_EPS, log_weight)
            log_sigma = 0.5 * variances.log().sum(layout.pose, keepdim=True)
            score = 0.01 * (1 - 0.95 ** (iteration + 1)) * (wanted - (work.pose * use + log_sigma) * counts)
            if iteration + 1 < self.iterations:
                log_weight = F.logsigmoid(score) - log_sigma
        return layout.back(means, "pmce"), layout.back(score.sigmoid(), "pm")


@dataclass(frozen=True)
class HeinsenRouting(Routing):
    """Heinsen's routing (2019): Gaussian parents' scores are what using the children is worth."""

    iterations: int = 3
    # Of a text, if not 0: every token has so many children, and sentences are of different lengths. The children behind
    # a sentence's end have a score of -∞: they are not there.
    layers: int = 0

    function: ClassVar[Callable[..., Any]] = functional.heinsen_routing
    results: ClassVar[tuple[str, ...]] = ("poses", "scores", "variances")
    subject: ClassVar[str] = "gaussian"

    def arguments(self, work: Workload, draw: Draw) -> dict[str, Tensor]:
        """Draw poses and scores from N(0, 1), weights that keep that scale, and betas that keep the sum over all
        children near 1."""
        betas = (work.matrices if work.matrices > 1 else 1, work.parents)
        scores = draw.children()
        if self.layers:
            tokens = work.types // self.layers
            drawn = {"generator": draw.generator, "device": draw.device}
            lengths = torch.randint(tokens // 2, tokens + 1, (draw.batch, 1), **drawn)
            token = torch.arange(work.types, device=draw.device) // self.layers
            scores = scores.masked_fill(token >= lengths, -torch.inf)
        return {
            "children": draw.children(work.rows, work.columns_in),
            "scores": scores,
            "weight": draw.weight(work.columns_in**-0.5),
            "bias": 0.1 * draw.normal(*betas, work.rows, work.columns_out),
            "beta_use": draw.normal(*betas) * (2 / work.children),
            "beta_ignore": draw.normal(*betas) * (2 / work.children),
        }

    def route(self, work: Workload, layout: Layout, copies: int, **given: Tensor) -> tuple[Tensor, ...]:
        """All sums over children are linear in the gates, so that a gate ``copies``
        times as large is so many children."""
        votes = votes_in(layout, seen(given["children"], work), given["weight"], given["bias"])
        gates = layout.place(seen(given["scores"], work).sigmoid(), "ip") * copies
        use, ignore = layout.place(given["beta_use"], "im"), layout.place(given["beta_ignore"], "im")
        log_weight = None
        for iteration in range(self.iterations):
            _, means, variances, score = votes.moments(gates, _HEINSEN_EPS, log_weight, (use, ignore))
            if iteration + 1 < self.iterations:
                log_weight = F.logsigmoid(score) - 0.5 * variances.log().sum(layout.pose, keepdim=True)
        return layout.back(means, "pmce"), layout.back(score, "pm"), layout.back(variances, "pmce")


@dataclass(frozen=True)
class RoutingPool(Routing):
    """Routing pooling (Zhao & Huang 2019), and the sum that follows: children compete for every parent."""

    iterations: int = 3  # that find the coefficients
    sharpness: float = 0.5  # λ

    function: ClassVar[Callable[..., Any]] = functional.routing_pool
    subject: ClassVar[str] = "pooling"
    makes_votes: ClassVar[bool] = False

    def arguments(self, work: Workload, draw: Draw) -> dict[str, Tensor]:
        """Draw poses that are nowhere negative, as a ReLU leaves them."""
        return {"children": draw.children(work.rows, work.columns_in).relu()}

    def settings(self, work: Workload) -> dict[str, Any]:
        return super().settings(work) | {"sharpness": self.sharpness}

    def route(self, work: Workload, layout: Layout, copies: int, **given: Tensor) -> tuple[Tensor, ...]:
        """Run the iterations by two products each: children of length 1 are keys, the children are values."""
        values = seen(given["children"], work).flatten(2).transpose(0, 1).contiguous()  # [P, I, C * E]
        lengths = torch.linalg.vector_norm(values, dim=-1, keepdim=True)
        keys = values / lengths.masked_fill(lengths == 0, torch.inf)  # F.normalize would give 10^12 times its gradient
        sums = values.mean(1, keepdim=True)
        query = torch.zeros_like(sums)
        for _ in range(self.iterations):
            query = query + sums / sums.square().sum(-1, keepdim=True).sqrt()
            sums = torch.softmax(query * self.sharpness @ keys.mT, -1) @ values
        return (sums.unflatten(-1, (work.rows, work.columns_out)),)
