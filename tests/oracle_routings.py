"""The papers' iterative routings, and the passes they are made of, as plain Python loops over Python floats.

Votes come as ``votes[i][m]``, flat lists of numbers; a child that is not there is not in the list.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import product
from typing import Any, NamedTuple

Vector = list[float]
Votes = list[list[Vector]]


def softmax(numbers: list[float]) -> list[float]:
    largest = max(numbers)
    exponentials = [math.exp(number - largest) for number in numbers]
    total = sum(exponentials)
    return [number / total for number in exponentials]


def layer_norm(numbers: list[float], weight: list[float] | None, bias: list[float] | None, eps: float) -> list[float]:
    mean = sum(numbers) / len(numbers)
    variance = sum((number - mean) ** 2 for number in numbers) / len(numbers)
    normal = [(number - mean) / math.sqrt(variance + eps) for number in numbers]
    if weight is not None:
        normal = [a * b for a, b in zip(normal, weight, strict=True)]
    if bias is not None:
        normal = [a + b for a, b in zip(normal, bias, strict=True)]
    return normal


def procedure_1(poses: Any, last_poses: Any, matrices: Any, eps: float = 1e-5) -> list[list[float]]:
    """Procedure 1 of Tsai et al. 2020 as printed, for vector poses: no scale, v_ij = W_ij p_i.

    ``poses[i][d]``, ``last_poses[j][e]``, ``matrices[i][j][e][d]``; returns the new ``poses[j][e]``.
    """
    lower, upper = range(len(poses)), range(len(last_poses))
    votes = {
        (i, j): [sum(w * p for w, p in zip(row, poses[i], strict=True)) for row in matrices[i][j]]
        for i, j in product(lower, upper)
    }
    agreement = {
        (i, j): sum(p * v for p, v in zip(last_poses[j], votes[i, j], strict=True)) for i, j in product(lower, upper)
    }
    routing = [softmax([agreement[i, j] for j in upper]) for i in lower]
    result = []
    for j in upper:
        pose = [sum(routing[i][j] * votes[i, j][e] for i in lower) for e in range(len(last_poses[j]))]
        result.append(layer_norm(pose, None, None, eps))
    return result


def dot(a: Vector, b: Vector) -> float:
    return sum(x * y for x, y in zip(a, b, strict=True))


def norm(vector: Vector) -> Vector:
    size = math.sqrt(dot(vector, vector))
    return [x / size if size else 0.0 for x in vector]


def squash(vector: Vector, eps: float = 0.0) -> Vector:
    square = dot(vector, vector)
    return [square / (1 + square) * x / math.sqrt(square + eps) if square else 0.0 for x in vector]


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x >= 0 else math.exp(x) / (1 + math.exp(x))


def weighted_sum(weights: list[float], vectors: list[Vector]) -> Vector:
    return [sum(w * x for w, x in zip(weights, column, strict=True)) for column in zip(*vectors, strict=True)]


class Child(NamedTuple):
    index: int
    gate: float
    votes: list[Vector]


def positions(
    children: Any, weight: Any, bias: Any, gate: Any, window: Any, parents: int = 1
) -> Iterator[tuple[tuple[int, int, int], list[Child]]]:
    """Yield every output position (b, y, x) with the children that it sees, on nested lists in op layout."""
    kh, kw, sh, sw, ph, pw, dh, dw = window
    for b, grid in enumerate(children):
        height, width, types = len(grid), len(grid[0]), len(grid[0][0])
        rows = (height + 2 * ph - (kh - 1) * dh - 1) // sh + 1
        columns = (width + 2 * pw - (kw - 1) * dw - 1) // sw + 1
        for y, x in product(range(rows), range(columns)):
            seen = []
            for ky, kx, n in product(range(kh), range(kw), range(types)):
                above, left = y * sh - ph + ky * dh, x * sw - pw + kx * dw
                there = 0 <= above < height and 0 <= left < width
                if there and (gate is None or gate[b][above][left][n] != 0):  # a gate of 0: a child that is not there
                    i = (ky * kw + kx) * types + n
                    votes = child_votes(grid[above][left][n], i, weight, bias, parents)
                    seen.append(Child(i, 1.0 if gate is None else gate[b][above][left][n], votes))
            yield (b, y, x), seen


def child_votes(pose: Any, i: int, weight: Any, bias: Any, parents: int) -> list[Vector]:
    """``P W + bias`` for every parent, flat; without weights ``P + bias``."""
    result = []
    for m in range(parents if weight is None else len(weight[0])):
        matrix = None if weight is None else weight[i % len(weight)][m]
        vote = [row if matrix is None else weighted_sum(row, matrix) for row in pose]
        if bias is not None:
            offset = bias[i if len(bias) > 1 else 0]
            offset = offset[m if len(offset) > 1 else 0]
            vote = [[a + b for a, b in zip(*rows, strict=True)] for rows in zip(vote, offset, strict=True)]
        result.append([number for row in vote for number in row])
    return result


def pool(
    seen: list[Child], m: int, query: Vector | None, scale: float, normalize: bool
) -> tuple[Vector, float, list[float]]:
    """One parent of the pooling pass: the sum, the log-sum-exp, the shares of the children seen."""
    logits = []
    for child in seen:
        vote = child.votes[m]
        logits.append(0.0 if query is None else scale * dot(query, norm(vote) if normalize else vote))
    exponentials = [child.gate * math.exp(logit) for child, logit in zip(seen, logits, strict=True)]
    total = sum(exponentials)
    if total == 0:
        return [0.0] * (len(seen[0].votes[0]) if seen else 1), -math.inf, [0.0] * len(seen)
    shares = [e / total for e in exponentials]
    return weighted_sum(shares, [child.votes[m] for child in seen]), math.log(total), shares


class Explained(NamedTuple):
    counts: list[float]
    means: list[Vector]
    variances: list[Vector]
    evidence: list[float]
    shares: list[list[float]]


def explain(
    seen: list[Child],
    parents: int,
    mean: list[Vector] | None,
    variance: list[Vector] | None,
    log_weight: list[float] | None,
    beta_use: Any,
    beta_ignore: Any,
    eps: float,
) -> Explained:
    """All parents of one position of the Gaussian pass."""
    size = len(seen[0].votes[0]) if seen else 1
    shares = []
    for child in seen:
        logits = []
        for m in range(parents):
            logit = 0.0 if log_weight is None else log_weight[m]
            if mean is not None:
                for k in range(size):
                    square = (child.votes[m][k] - mean[m][k]) ** 2
                    if variance is None or variance[m][k] != 0:  # else nobody chose the parent, and eps is 0
                        logit -= square if variance is None else square / (2 * variance[m][k])
            logits.append(logit)
        shares.append(softmax(logits))

    def beta(table: Any, i: int, m: int) -> float:
        row = table[i if len(table) > 1 else 0]
        return row[m if len(row) > 1 else 0]

    counts, means, variances, evidence = [], [], [], []
    for m in range(parents):
        used = [child.gate * share[m] for child, share in zip(seen, shares, strict=True)]
        count = sum(used)
        divisor = count + eps if count + eps else math.inf
        centre = [sum(u * c.votes[m][k] for u, c in zip(used, seen, strict=True)) / divisor for k in range(size)]
        counts.append(count)
        means.append(centre)
        variances.append(
            [
                sum(u * (c.votes[m][k] - centre[k]) ** 2 for u, c in zip(used, seen, strict=True)) / divisor
                for k in range(size)
            ]
        )
        if beta_use is not None:
            evidence.append(
                sum(
                    beta(beta_use, c.index, m) * u - beta(beta_ignore, c.index, m) * (c.gate - u)
                    for u, c in zip(used, seen, strict=True)
                )
            )
    return Explained(counts, means, variances, evidence, shares)


def attend(
    seen: list[Child], parents: int, query: list[Vector] | None, scale: float
) -> tuple[list[Vector], list[list[float]]]:
    """All parents of one position of the attention pass: the sums, and the shares of the children seen."""
    shares = []
    for child in seen:
        logits = [0.0 if query is None else scale * dot(query[m], child.votes[m]) for m in range(parents)]
        shares.append(softmax(logits))
    size = len(seen[0].votes[0]) if seen else 1
    sums = [
        [
            sum(child.gate * share[m] * child.votes[m][k] for child, share in zip(seen, shares, strict=True))
            for k in range(size)
        ]
        for m in range(parents)
    ]
    return sums, shares


def _at(given: Any, name: str, place: tuple[int, int, int]) -> Any:
    """Return an argument's numbers for one position, poses flat."""
    if given[name] is None:
        return None
    b, y, x = place
    return [[n for row in m for n in row] if isinstance(m, list) else m for m in given[name][b][y][x]]


def added(query: list[Vector] | None, step: list[Vector]) -> list[Vector]:
    return (
        step
        if query is None
        else [[a + b for a, b in zip(q, s, strict=True)] for q, s in zip(query, step, strict=True)]
    )


def attention_routing(given: Any, seen: list[Child], place: tuple[int, int, int], size: int) -> dict[str, Any]:
    """One position of the op, all turns. Rules: 0 LayerNorm, 1 none, 2 squash; an empty position has sums of 0."""
    many, rule, query, history = given["parents"], given["rule"], _at(given, "query", place), []
    parents: list[Vector] = []
    for _ in range(given["iterations"]):
        sums, _ = attend(seen, many, query, given["scale"])
        sums = [s if seen else [0.0] * size for s in sums]
        history.append(sums)
        if rule == 0:
            parents = [layer_norm(s, given["norm_weight"], given["norm_bias"], given["eps"]) for s in sums]
        else:
            parents = [squash(s) for s in sums] if rule == 2 else sums
        query = added(query, parents) if rule == 2 else parents
    return {"parents": parents, "sums": history}


def pooling_routing(given: Any, seen: list[Child], place: tuple[int, int, int], size: int) -> dict[str, Any]:
    """One position of the op, all turns. Rules: 2 squash, 3 unit vectors."""
    many, rule, query = given["parents"], given["rule"], _at(given, "query", place)
    history, logs, sums = [], [], []
    for _ in range(given["iterations"]):
        each = [
            pool(seen, m, None if query is None else query[m], given["scale"], given["normalize"]) for m in range(many)
        ]
        sums = [s if seen else [0.0] * size for s, _, _ in each]
        history.append(sums)
        logs.append([log for _, log, _ in each])
        query = added(query, [squash(s) if rule == 2 else norm(s) for s in sums])
    return {"parents": [squash(s) for s in sums] if rule == 2 else sums, "sums": history, "logsumexp": logs}


def gaussian_routing(given: Any, seen: list[Child], place: tuple[int, int, int], size: int) -> dict[str, Any]:
    """One position of the op, all turns. Rules: 4 EM, 5 Heinsen, 6 k-means."""
    many, rule, eps = given["parents"], given["rule"], given["eps"]
    mean, variance, log_weight = (_at(given, name, place) for name in ("mean", "variance", "log_weight"))
    use, ignore = given["beta_use"], given["beta_ignore"]
    history = ("all_counts", "all_means", "all_variances", "all_scores")
    found: dict[str, Any] = {name: [] for name in history}
    scores: list[float] = []
    for temperature in given["temperatures"]:
        betas = (None, None) if rule == 4 else (use, ignore)
        one = explain(seen, many, mean, variance, log_weight, *betas, eps)
        mean, narrow = ([v if seen else [0.0] * size for v in vectors] for vectors in (one.means, one.variances))
        variance = [[v + eps for v in vector] for vector in narrow]
        log_sigma = [sum(math.log(math.sqrt(v)) for v in vector if v != 0) for vector in variance]
        if rule == 4:
            costs = [(size * use[m] + log_sigma[m]) * one.counts[m] for m in range(many)]
            scores = [temperature * (ignore[m] - costs[m]) for m in range(many)]
        else:
            scores = one.evidence
        for name, value in zip(history, (one.counts, mean, narrow, scores), strict=True):
            found[name].append(value)
        log_weight = [min(score, 0.0) - math.log1p(math.exp(-abs(score))) for score in scores]  # ln sigmoid
        found.update(scores=scores, means=mean, variances=variance)
        if rule == 6:
            variance = None
        else:
            log_weight = [w - s for w, s in zip(log_weight, log_sigma, strict=True)]
    return found


def dynamic(
    votes: Votes,
    iterations: int,
    compete: str = "parents",
    leaky: bool = False,
    prior: list[list[float]] | None = None,
    eps: float = 0.0,
    gates: list[float] | None = None,
) -> tuple[list[Vector], list[list[float]]]:
    """Procedure 1 of Sabour et al. 2017, "ROUTING"; returns v_j and the last c_ij.

    ``compete="children"``: the softmax runs over i, as in many published codes. ``leaky``: a child may also choose none
    of the parents, whose log-prior stays 0. ``prior``: b_ij at the start. ``eps``: under the root of squash. ``gates``:
    how much each child counts.
    """
    lower, upper = range(len(votes)), range(len(votes[0]))
    gate = gates or [1.0 for _ in lower]
    b = [[0.0 for _ in upper] if prior is None else list(prior[i]) for i in lower]
    v: list[Vector] = []
    c: list[list[float]] = []
    for _ in range(iterations):
        if compete == "children":
            columns = [softmax([b[i][j] + math.log(gate[i]) for i in lower]) for j in upper]
            c = [[columns[j][i] for j in upper] for i in lower]
        elif leaky:
            c = [softmax([0.0, *b[i]])[1:] for i in lower]
        else:
            c = [softmax(b[i]) for i in lower]
        counted = [1.0 for _ in lower] if compete == "children" else gate
        s = [weighted_sum([counted[i] * c[i][j] for i in lower], [votes[i][j] for i in lower]) for j in upper]
        v = [squash(s[j], eps) for j in upper]
        for i, j in product(lower, upper):
            b[i][j] += dot(votes[i][j], v[j])
    return v, c


def vector_normed(votes: Votes, iterations: int, sharpness: float) -> list[Vector]:
    """Algorithm 1 of Zhao & Huang 2019, "Vector-Normed Dynamic Routing", for each parent; without an activation."""
    result = []
    for j in range(len(votes[0])):
        u = [child[j] for child in votes]
        keys = [norm(x) for x in u]
        b = [0.0 for _ in u]
        c = softmax(b)
        for _ in range(iterations):
            v = norm(weighted_sum(c, u))
            b = [b_i + dot(key, v) for b_i, key in zip(b, keys, strict=True)]
            c = softmax([sharpness * b_i for b_i in b])
        result.append(weighted_sum(c, u))
    return result


def em(
    votes: Votes,
    activations: list[float],
    beta_u: list[float],
    beta_a: list[float],
    inverse_temperatures: list[float],
    eps: float = 0.0,
    first: float | None = None,
    normalize: bool = False,
) -> tuple[list[Vector], list[float], list[list[float]]]:
    """Procedure 1 of Hinton et al. 2018, "EM ROUTING"; returns the poses mu_j, activations a_j and the last R_ij.

    One turn for each inverse temperature. ``eps`` stands where the package has it: beside sum_i R_ij, under which the
    moments are divided, and in the variances; the paper has none. The E-step after the last M-step is left out: nothing
    reads it. ``first``: R_ij of the first iteration where it is not 1 / M. ``normalize``: what the sigmoid takes is
    normalised over j before lambda (Li et al. 2018, appendix A).
    """
    lower, upper = range(len(votes)), range(len(votes[0]))
    size = range(len(votes[0][0]))
    responsibility = [[1 / len(votes[0]) if first is None else first for _ in upper] for _ in lower]
    mu: list[Vector] = []
    square: list[Vector] = []
    a: list[float] = []
    for turn, inverse_temperature in enumerate(inverse_temperatures):
        if turn:  # E-step
            for i in lower:
                p = []
                for j in upper:
                    density = 1.0
                    for h in size:
                        exponent = -((votes[i][j][h] - mu[j][h]) ** 2) / (2 * square[j][h])
                        density *= math.exp(exponent) / math.sqrt(2 * math.pi * square[j][h])
                    p.append(a[j] * density)
                responsibility[i] = [p_j / sum(p) for p_j in p]
        mu, square, benefit = [], [], []
        for j in upper:  # M-step
            r = [responsibility[i][j] * activations[i] for i in lower]
            total = sum(r)
            mu.append([sum(r[i] * votes[i][j][h] for i in lower) / (total + eps) for h in size])
            square.append(
                [sum(r[i] * (votes[i][j][h] - mu[j][h]) ** 2 for i in lower) / (total + eps) + eps for h in size]
            )
            cost = sum((beta_u[j] + math.log(math.sqrt(square[j][h]))) * total for h in size)
            benefit.append(beta_a[j] - cost)
        if normalize:
            benefit = layer_norm(benefit, None, None, 1e-5)
        a = [sigmoid(inverse_temperature * each) for each in benefit]
    return mu, a, responsibility


def heinsen(
    votes: Votes,
    scores: list[float],
    beta_use: list[list[float]],
    beta_ignore: list[list[float]],
    iterations: int,
    model: str = "gaussian",
    eps: float = 1e-5,
) -> tuple[list[float], list[Vector], list[Vector], list[list[float]]]:
    """Algorithm 1 of Heinsen 2019; returns scores a_j, means mu_j, variances sigma_j^2 and the last R_ij.

    ``eps`` as in the author's code. ``model="kmeans"``: the density is exp(-|V_ij - mu_j|^2). A table of betas with one
    row serves any number of inputs.
    """
    lower, upper = range(len(votes)), range(len(votes[0]))
    size = range(len(votes[0][0]))
    a: list[float] = []
    mu: list[Vector] = []
    square: list[Vector] = []
    r = [[1 / len(votes[0]) for _ in upper] for _ in lower]
    for turn in range(iterations):
        for i in lower:
            if turn:  # E-step
                p = []
                for j in upper:
                    if model == "gaussian":
                        p_ij = 1 / math.sqrt(math.prod(2 * math.pi * square[j][h] for h in size))
                        p_ij *= math.exp(-sum((votes[i][j][h] - mu[j][h]) ** 2 / (2 * square[j][h]) for h in size))
                    else:
                        p_ij = math.exp(-sum((votes[i][j][h] - mu[j][h]) ** 2 for h in size))
                    p.append(sigmoid(a[j]) * p_ij)
                r[i] = [p_ij / sum(p) for p_ij in p]
        use = [[sigmoid(scores[i]) * r[i][j] for j in upper] for i in lower]  # D-step
        ignore = [[sigmoid(scores[i]) - use[i][j] for j in upper] for i in lower]
        a, mu, square = [], [], []
        for j in upper:  # M-step
            rows = [i if len(beta_use) > 1 else 0 for i in lower]
            benefit = sum(beta_use[rows[i]][j] * use[i][j] for i in lower)
            cost = sum(beta_ignore[rows[i]][j] * ignore[i][j] for i in lower)
            total = sum(use[i][j] for i in lower) + eps
            a.append(benefit - cost)
            mu.append([sum(use[i][j] * votes[i][j][h] for i in lower) / total for h in size])
            square.append(
                [sum(use[i][j] * (votes[i][j][h] - mu[j][h]) ** 2 for i in lower) / total + eps for h in size]
            )
    return a, mu, square, r
