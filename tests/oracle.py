"""The routing procedures as plain Python loops over Python floats: no tensor operation, nothing vectorised.

Slow, and short enough to be compared with the paper line by line. ``fastcaps/reference`` is tested against it.
"""

from __future__ import annotations

import math
from itertools import product
from typing import Any


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


def attention_pass(
    children: Any,
    weight: Any,
    query: Any,
    bias: Any,
    gate: Any,
    norm_weight: Any,
    norm_bias: Any,
    scale: float,
    eps: float,
    normalize: bool,
    window: Any,
) -> tuple[dict[tuple[int, ...], float], dict[tuple[int, ...], float], dict[tuple[int, ...], float]]:
    """The op's sums, on nested lists in op layout.

    Returns parents and sums by (b, y, x, m, c, e) and coefficients by (b, y, x, i, m); absent children have none.
    """
    kh, kw, sh, sw, ph, pw, dh, dw = window
    height, width, types = len(children[0]), len(children[0][0]), len(children[0][0][0])
    rows, depth = len(children[0][0][0][0]), len(children[0][0][0][0][0])
    groups, many, columns = len(weight), len(weight[0]), len(weight[0][0][0])
    parents, sums, coefficients = {}, {}, {}
    for b in range(len(children)):
        y = 0
        while y * sh + (kh - 1) * dh < height + 2 * ph:
            x = 0
            while x * sw + (kw - 1) * dw < width + 2 * pw:
                total = [[[0.0] * columns for _ in range(rows)] for _ in range(many)]
                for ky, kx, n in product(range(kh), range(kw), range(types)):
                    above, left = y * sh - ph + ky * dh, x * sw - pw + kx * dw
                    if not (0 <= above < height and 0 <= left < width):
                        continue  # no child there
                    i = (ky * kw + kx) * types + n
                    pose = children[b][above][left][n]
                    votes = []
                    for m in range(many):
                        matrix = weight[i % groups][m]
                        vote = [
                            [sum(pose[c][d] * matrix[d][e] for d in range(depth)) for e in range(columns)]
                            for c in range(rows)
                        ]
                        if bias is not None:
                            offset = bias[i if len(bias) > 1 else 0]
                            offset = offset[m if len(offset) > 1 else 0]
                            vote = [[vote[c][e] + offset[c][e] for e in range(columns)] for c in range(rows)]
                        votes.append(vote)
                    if query is None:
                        share = [1.0 / many] * many
                    else:
                        share = softmax(
                            [
                                scale
                                * sum(
                                    query[b][y][x][m][c][e] * votes[m][c][e]
                                    for c, e in product(range(rows), range(columns))
                                )
                                for m in range(many)
                            ]
                        )
                    g = 1.0 if gate is None else gate[b][above][left][n]
                    for m in range(many):
                        coefficients[b, y, x, i, m] = share[m]
                        for c, e in product(range(rows), range(columns)):
                            total[m][c][e] += g * share[m] * votes[m][c][e]
                for m in range(many):
                    flat = [total[m][c][e] for c, e in product(range(rows), range(columns))]
                    done = layer_norm(flat, norm_weight, norm_bias, eps) if normalize else flat
                    for k, (c, e) in enumerate(product(range(rows), range(columns))):
                        sums[b, y, x, m, c, e] = flat[k]
                        parents[b, y, x, m, c, e] = done[k]
                x += 1
            y += 1
    return parents, sums, coefficients
