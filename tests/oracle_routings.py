"""The papers' iterative routings, and the passes they are made of, over the stored votes of one position.

Everything is float64 and written as the papers write it: densities are densities, nothing is done in logs. A child that
is not there is not among the votes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Seen(NamedTuple):
    """The children that a position sees: their numbers i, their gates ``[I]`` and votes ``[I, M, K]``, poses flat."""

    index: list[int]
    gates: Tensor
    votes: Tensor


def positions(
    children: Tensor, weight: Any, bias: Any, gate: Any, window: Sequence[int], parents: int = 1
) -> Iterator[tuple[tuple[int, int, int], Seen]]:
    """Yield every output position (b, y, x) with the children that it sees, of tensors in op layout."""
    kh, kw, sh, sw, ph, pw, dh, dw = window
    batch, height, width, types, rows, depth = children.shape
    parents, columns = (parents, depth) if weight is None else (weight.shape[1], weight.shape[3])
    sizes = ((height + 2 * ph - (kh - 1) * dh - 1) // sh + 1, (width + 2 * pw - (kw - 1) * dw - 1) // sw + 1)
    for b, y, x in product(range(batch), *map(range, sizes)):
        index, gates, votes = [], [], [children.new_zeros(0, parents, rows, columns)]
        for ky, kx, n in product(range(kh), range(kw), range(types)):
            place = (b, y * sh - ph + ky * dh, x * sw - pw + kx * dw, n)
            there = 0 <= place[1] < height and 0 <= place[2] < width
            if there and (gate is None or gate[place] != 0):  # a gate of 0: a child that is not there
                i = (ky * kw + kx) * types + n
                pose = children[place].expand(parents, -1, -1)
                every = pose if weight is None else pose @ weight[i % len(weight)]
                offset = 0.0 if bias is None else bias[i if len(bias) > 1 else 0]
                index.append(i)
                gates.append(1.0 if gate is None else float(gate[place]))
                votes.append((every + offset)[None])
        yield (b, y, x), Seen(index, children.new_tensor(gates), torch.cat(votes).flatten(2))


def unit(vectors: Tensor) -> Tensor:
    size = vectors.square().sum(-1, keepdim=True).sqrt()
    return vectors / size.masked_fill(size == 0, 1.0)


def squash(vectors: Tensor, eps: float = 0.0) -> Tensor:
    square = vectors.square().sum(-1, keepdim=True)
    return square / (1 + square) * vectors / (square + eps).sqrt().masked_fill(square == 0, 1.0)


def layer_norm(vectors: Tensor, weight: Any = None, bias: Any = None, eps: float = 1e-5) -> Tensor:
    centred = vectors - vectors.mean(-1, keepdim=True)
    variance = centred.square().mean(-1, keepdim=True) + eps
    normal = centred / variance.sqrt().masked_fill(variance == 0, 1.0)  # equal values become 0
    normal = normal if weight is None else normal * weight
    return normal if bias is None else normal + bias


def total(shares: Tensor, votes: Tensor) -> Tensor:
    return (shares[..., None] * votes).sum(0)


def agreement(votes: Tensor, query: Tensor | None) -> Tensor:
    return votes.new_zeros(votes.shape[:2]) if query is None else (votes * query).sum(-1)


# ---- passes ----------------------------------------------------------------------------------------------------------


def attend(seen: Seen, query: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    """All parents of the attention pass: the sums, and the shares of the children seen."""
    shares = (scale * agreement(seen.votes, query)).softmax(1)
    return total(seen.gates[:, None] * shares, seen.votes), shares


def pool(seen: Seen, query: Tensor | None, scale: float, normalize: bool) -> tuple[Tensor, Tensor, Tensor]:
    """All parents of the pooling pass: the sums, the log-sum-exps, the shares of the children seen."""
    keys = unit(seen.votes) if normalize else seen.votes
    exponentials = seen.gates[:, None] * (scale * agreement(keys, query)).exp()
    shares = exponentials / exponentials.sum(0)
    return total(shares, seen.votes), exponentials.sum(0).log(), shares


def moments(weights: Tensor, votes: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """The sum of the weights, and the weighted mean and variance of every number, both divided by the sum + eps."""
    divisor = weights.sum(0) + eps
    parts = weights / divisor.masked_fill(divisor == 0, math.inf)
    mean = total(parts, votes)
    return weights.sum(0), mean, total(parts, (votes - mean).square())


def _at(given: Any, name: str, place: tuple[int, int, int]) -> Any:
    """Return an argument at one position, poses flat."""
    return None if given[name] is None else given[name][place].flatten(1 if given[name].dim() > 4 else 0)


def attention_routing(given: Any, seen: Seen, place: tuple[int, int, int]) -> dict[str, Any]:
    """One position of the op, all iterations. Rules: 0 LayerNorm, 1 none, 2 squash."""
    rule, query, history = given["rule"], _at(given, "query", place), []
    for _ in range(given["iterations"]):
        sums, _ = attend(seen, query, given["scale"])
        history.append(sums)
        parents = sums if rule == 1 else squash(sums)
        if rule == 0:
            parents = layer_norm(sums, given["norm_weight"], given["norm_bias"], given["eps"])
        query = parents if rule != 2 or query is None else query + parents
    return {"parents": parents, "sums": torch.stack(history)}


def pooling_routing(given: Any, seen: Seen, place: tuple[int, int, int]) -> dict[str, Any]:
    """One position of the op, all iterations. Rules: 2 squash, 3 unit vectors."""
    rule, query, history, logs = given["rule"], _at(given, "query", place), [], []
    for _ in range(given["iterations"]):
        sums, log, _ = pool(seen, query, given["scale"], given["normalize"])
        history.append(sums)
        logs.append(log)
        step = squash(sums) if rule == 2 else unit(sums)
        query = step if query is None else query + step
    parents = squash(sums) if rule == 2 else sums
    return {"parents": parents, "sums": torch.stack(history), "logsumexp": torch.stack(logs)}


def gaussian_routing(given: Any, seen: Seen, place: tuple[int, int, int]) -> dict[str, Any]:
    """One position of the op, all iterations. Rules: 4 EM, 5 Heinsen, 6 k-means."""
    rule, eps, votes, gates = given["rule"], given["eps"], seen.votes, seen.gates[:, None]
    mean, variance, log_weight = (_at(given, name, place) for name in ("mean", "variance", "log_weight"))
    history: dict[str, list[Tensor]] = {f"all_{name}": [] for name in ("counts", "means", "variances", "scores")}
    for temperature in given["temperatures"]:
        logits = votes.new_zeros(votes.shape[:2]) if log_weight is None else log_weight.expand(votes.shape[:2])
        if mean is not None:  # ln p of a vote but for a constant of the parent; without a variance that of k-means
            squares = (votes - mean).square()
            # a variance of 0: no child chose the parent, and eps is 0
            far = squares if variance is None else (squares / (2 * variance)).where(variance > 0, 0.0)
            logits = logits - far.sum(-1)
        used = gates * logits.softmax(1)
        counts, mean, narrow = moments(used, votes, eps)
        variance = narrow + eps
        log_sigma = variance.sqrt().log().where(variance > 0, 0.0).sum(-1)
        use, ignore = given["beta_use"], given["beta_ignore"]
        if rule == 4:
            scores = temperature * (ignore - (votes.shape[2] * use + log_sigma) * counts)
        else:
            use, ignore = (beta[seen.index] if len(beta) > 1 else beta for beta in (use, ignore))
            scores = (use * used - ignore * (gates - used)).sum(0)
        for name, value in zip(history, (counts, mean, narrow, scores), strict=True):
            history[name].append(value)
        log_weight = torch.nn.functional.logsigmoid(scores)
        last = {"scores": scores, "means": mean, "variances": variance}
        if rule == 6:
            variance = None
        else:
            log_weight = log_weight - log_sigma
    return {name: torch.stack(values) for name, values in history.items()} | last


# ---- the papers' procedures ------------------------------------------------------------------------------------------


def dynamic(
    seen: Seen, iterations: int, compete: str = "parents", leaky: bool = False, prior: Any = None, eps: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Procedure 1 of Sabour et al. 2017, "ROUTING"; returns v_j and the last c_ij.

    ``compete="children"``: the softmax runs over i, as in many published codes. ``leaky``: a child may also choose none
    of the parents, whose log-prior stays 0. ``prior``: b_ij at the start. ``eps``: under the root of squash.
    """
    votes, gate = seen.votes, seen.gates[:, None]
    b = agreement(votes, None) if prior is None else prior
    for _ in range(iterations):
        if compete == "children":
            c = (b + gate.log()).softmax(0)
        else:
            c = torch.cat([torch.zeros_like(gate), b], 1).softmax(1)[:, 1:] if leaky else b.softmax(1)
        v = squash(total(c if compete == "children" else gate * c, votes), eps)
        b = b + agreement(votes, v)
    return v, c


def vector_normed(seen: Seen, iterations: int, sharpness: float) -> tuple[Tensor, Tensor]:
    """Algorithm 1 of Zhao & Huang 2019, "Vector-Normed Dynamic Routing", without activation; returns v_j, c_ij."""
    keys = unit(seen.votes)
    b = agreement(keys, None)
    for _ in range(iterations):
        c = (sharpness * b + seen.gates[:, None].log()).softmax(0)
        b = b + agreement(keys, unit(total(c, seen.votes)))
    c = (sharpness * b + seen.gates[:, None].log()).softmax(0)
    return total(c, seen.votes), c


def posterior(a: Tensor, votes: Tensor, mu: Tensor, square: Tensor | None) -> Tensor:
    """The E-step: R_ij, from Gaussians' densities, or exp(-|V_ij - mu_j|^2) without variances."""
    squares = (votes - mu).square()
    density = (-squares).exp() if square is None else (-squares / (2 * square)).exp() / (2 * math.pi * square).sqrt()
    p = a * density.prod(-1)
    return p / p.sum(1, keepdim=True)


def em(
    seen: Seen, beta_u: Tensor, beta_a: Tensor, inverse_temperatures: list[float], eps: float = 0.0,
    first: float | None = None, normalize: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Procedure 1 of Hinton et al. 2018, "EM ROUTING"; returns the poses mu_j, activations a_j and the last R_ij.

    One iteration for each inverse temperature. ``eps`` is where the package has it: beside sum_i R_ij, under which the
    moments are divided, and in the variances; the paper has none. The E-step after the last M-step is left out: nothing
    reads it. ``first``: R_ij of the first iteration where it is not 1 / M. ``normalize``: what the sigmoid takes is
    normalised over j before lambda (Li et al. 2018, appendix A).
    """
    votes = seen.votes
    r = torch.full_like(votes[..., 0], 1 / votes.shape[1] if first is None else first)
    a = mu = square = votes  # of the iteration before, from the second on
    for iteration, inverse_temperature in enumerate(inverse_temperatures):
        if iteration:  # E-step
            r = posterior(a, votes, mu, square)
        count, mu, square = moments(r * seen.gates[:, None], votes, eps)  # M-step
        square = square + eps
        benefit = beta_a - ((beta_u[:, None] + square.sqrt().log()) * count[:, None]).sum(-1)
        a = (inverse_temperature * (layer_norm(benefit) if normalize else benefit)).sigmoid()
    return mu, a, r


def heinsen(
    seen: Seen, beta_use: Tensor, beta_ignore: Tensor, iterations: int, model: str = "gaussian", eps: float = 1e-5
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Algorithm 1 of Heinsen 2019; returns means mu_j, scores a_j, variances sigma_j^2 and the last R_ij.

    The gates of the children are their scores. ``eps`` as in the author's code. ``model="kmeans"``: the density is
    exp(-|V_ij - mu_j|^2). A table of betas with one row serves any number of inputs.
    """
    votes, data = seen.votes, seen.gates.sigmoid()[:, None]
    use, ignore = (beta[seen.index] if len(beta) > 1 else beta for beta in (beta_use, beta_ignore))
    r = torch.full_like(votes[..., 0], 1 / votes.shape[1])
    a = mu = square = votes  # of the iteration before, from the second on
    for iteration in range(iterations):
        if iteration:  # E-step
            r = posterior(a.sigmoid(), votes, mu, square if model == "gaussian" else None)
        used = data * r  # D-step
        a = (use * used - ignore * (data - used)).sum(0)  # M-step
        _, mu, square = moments(used, votes, eps)
        square = square + eps
    return mu, a, square, r
