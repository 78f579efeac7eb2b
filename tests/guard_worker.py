"""Run the CPU's ops on many shapes, forward and backward: a program for ``test_guard_pages.py``."""

from __future__ import annotations

import faulthandler
import itertools
import random
import sys

import torch
from torch import Tensor

import fastcaps  # noqa: F401  (loads the library)

OPS = torch.ops.fastcaps
WINDOWS = (((1, 1), (1, 1, 1, 1, 0, 0, 1, 1)), ((4, 3), (3, 2, 1, 2, 1, 0, 1, 1)))
FACTORS = {
    "batch": (1, 2, 5, 17),
    "types": (1, 3, 8, 64),
    "parents": (1, 2, 10, 33),
    "pose": ((1, 1, 1), (4, 4, 4), (1, 8, 16), (2, 3, 2)),
    "groups": ("own", "types", 1),
    "bias": (None, "one", "each"),
    "gate": (False, True),
    "turns": (1, 3),
    "grid": WINDOWS,
    "dtype": (torch.float32, torch.float64, torch.bfloat16),
}


def attention(votes: list[Tensor | None], shape: tuple[int, ...], window: list[int], turns: int) -> None:
    """All turns of a routing, and the gradients of all of them."""
    children, weight, bias, gate = votes
    wide = torch.promote_types(children.dtype, torch.float32)
    _, sums = OPS.attention_routing(
        children, weight, None, bias, gate, None, None, 1.0, 1e-5, True, 0, turns, False, window
    )
    grads = torch.ones(turns, *shape, dtype=children.dtype)
    queries = sums[:-1].to(children.dtype) if turns > 1 else None
    given = (children, weight, queries, bias, gate, None, sums.to(wide), 1.0, 1e-5, True, window, 127)
    OPS.attention_turns_backward(grads, None, *given)
    if turns > 1:
        OPS.attention_pass_backward(grads[0], None, children, weight, queries[0], *given[3:6], sums[0], *given[7:])


def pooling(votes: list[Tensor | None], shape: tuple[int, ...], window: list[int], turns: int) -> None:
    """All turns of a routing, and the gradients of all of them."""
    children, weight, bias, gate = votes
    alone = shape[-1] == children.shape[-1] and (turns > 1 or shape[3] == 1)
    for matrices in (weight, None) if alone else (weight,):
        _, sums, logs = OPS.pooling_routing(
            children, matrices, bias, gate, 1.0, True, shape[3], 0, turns, False, window
        )
        queries = sums[:-1] if turns > 1 else None
        given = (children, matrices, queries, bias, gate, sums, logs, 1.0, True, window, 31)
        OPS.pooling_turns_backward(torch.ones_like(sums), None, *given)
        if turns > 1:
            OPS.pooling_pass_backward(
                torch.ones_like(sums[0]), None, children, matrices, queries[0], bias, gate, sums[1], logs[1], *given[7:]
            )


def gaussian(votes: list[Tensor | None], shape: tuple[int, ...], window: list[int], turns: int) -> None:
    """All turns of a routing, and the gradients of all of them."""
    children, weight, bias, gate = votes
    wide = torch.promote_types(children.dtype, torch.float32)
    betas = torch.ones(2, 1, shape[3], dtype=wide)
    schedule = [0.01] * turns
    found = OPS.gaussian_routing(children, weight, bias, gate, *betas, schedule, 1, 1e-3, window)
    counts, means, variances, scores = found[3:]
    state = (means[:-1], variances[:-1] + 1e-3, scores[:-1]) if turns > 1 else (None, None, None)
    grads = (torch.ones_like(counts), means, variances, counts)
    given = (children, weight, *state, bias, gate, *betas, counts, means, variances, 1e-3, window, 511)
    OPS.gaussian_turns_backward(*grads, *given)
    if turns > 1:
        last = [x[0] for x in state]
        saved = [x[1] for x in (counts, means, variances)]
        OPS.gaussian_pass_backward(
            *(x[1] for x in grads), children, weight, *last, bias, gate, *betas, *saved, *given[12:]
        )


def run(case: dict[str, object]) -> None:
    """Run every op on one case."""
    (height, width), window = case["grid"]
    kh, kw, sh, sw, ph, pw, dh, dw = window
    rows, depth, columns = case["pose"]
    types, parents, batch, dtype = case["types"], case["parents"], case["batch"], case["dtype"]
    count = kh * kw * types
    groups = {"own": count, "types": types}.get(case["groups"], 1)
    ho, wo = (height + 2 * ph - dh * (kh - 1) - 1) // sh + 1, (width + 2 * pw - dw * (kw - 1) - 1) // sw + 1
    generator = torch.Generator().manual_seed(0)

    def draw(*size: int) -> Tensor:
        return torch.randn(size, generator=generator).to(dtype)

    bias = {"one": (1, 1), "each": (count, parents)}.get(case["bias"])
    votes = [
        draw(batch, height, width, types, rows, depth),
        draw(groups, parents, depth, columns),
        None if bias is None else draw(*bias, rows, columns),
        draw(batch, height, width, types).sigmoid() if case["gate"] else None,
    ]
    for op in (attention, pooling, gaussian):
        op(votes, (batch, ho, wo, parents, rows, columns), list(window), case["turns"])


def cases(count: int) -> list[dict[str, object]]:
    """Return cases drawn by chance, always the same, and all that have one parent and shared weights."""
    rows = [dict(zip(FACTORS, row, strict=True)) for row in itertools.product(*FACTORS.values())]
    chosen = random.Random(0).sample(rows, count)
    plain = {"bias": None, "gate": False, "dtype": torch.float32, "parents": 1, "groups": 1}
    return chosen + [row for row in rows if all(row[name] == value for name, value in plain.items())]


if __name__ == "__main__":
    faulthandler.enable()
    torch.set_num_threads(1)
    for case in cases(int(sys.argv[1])):
        print(case, flush=True)
        run(case)
