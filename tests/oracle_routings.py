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


def moments(weights: list[float], vectors: list[Vector], eps: float) -> tuple[float, Vector, Vector]:
    """The sum of the weights, and the weighted mean and variance of every number, both divided by the sum + eps."""
    total = sum(weights)
    divisor = total + eps if total + eps else math.inf
    mean = [x / divisor for x in weighted_sum(weights, vectors)]
    squares = [[(x - centre) ** 2 for x, centre in zip(vector, mean, strict=True)] for vector in vectors]
    return total, mean, [x / divisor for x in weighted_sum(weights, squares)]


def log_likelihood(vote: Vector, mean: Vector, variance: Vector | None) -> float:
    """ln p of a vote but for a constant of the parent; without a variance that of k-means."""
    if variance is None:
        return -sum((x - m) ** 2 for x, m in zip(vote, mean, strict=True))
    # a variance of 0: nobody chose the parent, and eps is 0
    return -sum((x - m) ** 2 / (2 * v) for x, m, v in zip(vote, mean, variance, strict=True) if v)


def evidence(seen: list[Child], m: int, used: list[float], beta_use: Any, beta_ignore: Any) -> float:
    """What children bring to a parent's score; a table of betas may have one row or column for all."""

    def beta(table: Any, i: int) -> float:
        row = table[i if len(table) > 1 else 0]
        return row[m if len(row) > 1 else 0]

    return sum(
        beta(beta_use, c.index) * u - beta(beta_ignore, c.index) * (c.gate - u) for u, c in zip(used, seen, strict=True)
    )


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
    """One position of the op, all iterations. Rules: 0 LayerNorm, 1 none, 2 squash; an empty position has sums of 0."""
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
    """One position of the op, all iterations. Rules: 2 squash, 3 unit vectors."""
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
    """One position of the op, all iterations. Rules: 4 EM, 5 Heinsen, 6 k-means."""
    many, rule, eps = range(given["parents"]), given["rule"], given["eps"]
    mean, variance, log_weight = (_at(given, name, place) for name in ("mean", "variance", "log_weight"))
    use, ignore = given["beta_use"], given["beta_ignore"]
    found: dict[str, Any] = {name: [] for name in ("all_counts", "all_means", "all_variances", "all_scores")}
    for temperature in given["temperatures"]:
        shares = []
        for child in seen:
            logits = [0.0 if log_weight is None else log_weight[m] for m in many]
            if mean is not None:
                near = [log_likelihood(child.votes[m], mean[m], variance and variance[m]) for m in many]
                logits = [a + b for a, b in zip(logits, near, strict=True)]
            shares.append(softmax(logits))
        used = [[child.gate * share[m] for child, share in zip(seen, shares, strict=True)] for m in many]
        each = [moments(used[m], [c.votes[m] for c in seen], eps) for m in many]
        counts = [count for count, _, _ in each]
        mean, narrow = ([one[k] if seen else [0.0] * size for one in each] for k in (1, 2))
        variance = [[v + eps for v in vector] for vector in narrow]
        log_sigma = [sum(math.log(math.sqrt(v)) for v in vector if v != 0) for vector in variance]
        if rule == 4:
            costs = [(size * use[m] + log_sigma[m]) * counts[m] for m in many]
            scores = [temperature * (ignore[m] - costs[m]) for m in many]
        else:
            scores = [evidence(seen, m, used[m], use, ignore) for m in many]
        for name, value in zip(found, (counts, mean, narrow, scores), strict=False):
            found[name].append(value)
        log_weight = [min(score, 0.0) - math.log1p(math.exp(-abs(score))) for score in scores]  # ln sigmoid
        last = {"scores": scores, "means": mean, "variances": variance}
        if rule == 6:
            variance = None
        else:
            log_weight = [w - s for w, s in zip(log_weight, log_sigma, strict=True)]
    return found | last


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


def posterior(a: list[float], votes: list[Vector], mu: list[Vector], square: list[Vector] | None) -> list[float]:
    """The E-step of one child: R_ij, from Gaussians' densities, or exp(-|V_ij - mu_j|^2) without variances."""
    p = []
    for j, vote in enumerate(votes):
        density = 1.0
        for h, x in enumerate(vote):
            if square is None:
                density *= math.exp(-((x - mu[j][h]) ** 2))
            else:
                root = math.sqrt(2 * math.pi * square[j][h])
                density *= math.exp(-((x - mu[j][h]) ** 2) / (2 * square[j][h])) / root
        p.append(a[j] * density)
    return [p_j / sum(p) for p_j in p]


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

    One iteration for each inverse temperature. ``eps`` is where the package has it: beside sum_i R_ij, under which the
    moments are divided, and in the variances; the paper has none. The E-step after the last M-step is left out: nothing
    reads it. ``first``: R_ij of the first iteration where it is not 1 / M. ``normalize``: what the sigmoid takes is
    normalised over j before lambda (Li et al. 2018, appendix A).
    """
    lower, upper = range(len(votes)), range(len(votes[0]))
    responsibility = [[1 / len(votes[0]) if first is None else first for _ in upper] for _ in lower]
    mu: list[Vector] = []
    square: list[Vector] = []
    a: list[float] = []
    for iteration, inverse_temperature in enumerate(inverse_temperatures):
        if iteration:  # E-step
            responsibility = [posterior(a, votes[i], mu, square) for i in lower]
        r = [[responsibility[i][j] * activations[i] for i in lower] for j in upper]  # M-step
        total, mu, square = zip(*(moments(r[j], [vote[j] for vote in votes], eps) for j in upper), strict=True)
        square = [[x + eps for x in vector] for vector in square]
        cost = [sum((beta_u[j] + math.log(math.sqrt(x))) * total[j] for x in square[j]) for j in upper]
        benefit = [beta_a[j] - cost[j] for j in upper]
        if normalize:
            benefit = layer_norm(benefit, None, None, 1e-5)
        a = [sigmoid(inverse_temperature * each) for each in benefit]
    return list(mu), a, responsibility


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
    rows = [i if len(beta_use) > 1 else 0 for i in lower]
    a: list[float] = []
    mu: list[Vector] = []
    square: list[Vector] = []
    r = [[1 / len(votes[0]) for _ in upper] for _ in lower]
    for iteration in range(iterations):
        if iteration:  # E-step
            likely = [sigmoid(score) for score in a]
            r = [posterior(likely, votes[i], mu, square if model == "gaussian" else None) for i in lower]
        use = [[sigmoid(scores[i]) * r[i][j] for i in lower] for j in upper]  # D-step
        ignore = [[sigmoid(scores[i]) - use[j][i] for i in lower] for j in upper]
        a = [
            sum(beta_use[rows[i]][j] * use[j][i] - beta_ignore[rows[i]][j] * ignore[j][i] for i in lower) for j in upper
        ]  # M-step
        _, mu, square = zip(*(moments(use[j], [vote[j] for vote in votes], eps) for j in upper), strict=True)
        square = [[x + eps for x in vector] for vector in square]
    return a, list(mu), list(square), r
