"""Every formula of csrc/algebra, in float and in double: against longer numbers, derivatives against autograd."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from suite import drawn
from torch import Tensor

LONG = np.longdouble
TINY, LEAST = {"float32": 2.0**-23, "float64": 2.0**-52}, {"float32": 2.0**-149, "float64": 2.0**-1074}
every_type = pytest.mark.parametrize("name", list(TINY))
ordinary = st.floats(-4.0, 4.0).map(lambda x: float(np.float32(x)))  # exact in both types
positive = st.floats(2.0**-10, 8.0, width=32)
weights = st.floats(0.0, 1.0, width=32)
seeds = st.integers(0, 2**32 - 1)


def close(found: Any, exact: Any, terms: Any, name: str, ulps: float = 8) -> None:
    """Assert that each value errs by a few roundings of its largest term."""
    error, largest = np.abs(np.asarray(found, LONG) - np.asarray(exact, LONG)), np.abs(np.asarray(terms, LONG)).max()
    assert bool((error <= ulps * (TINY[name] * largest + LEAST[name])).all()), (found, exact)


# ---- functions of one number -----------------------------------------------------------------------------------------


@every_type
@drawn(60)
@given(x=st.floats(-80.0, 80.0, width=32), positive=st.floats(2.0**-100, 2.0**100, width=32))
def test_functions(native: ModuleType, name: str, x: float, positive: float) -> None:
    formulas, long = getattr(native, name), LONG(positive)
    close(formulas.sqrt(positive), np.sqrt(long), np.sqrt(long), name)
    close(formulas.log(positive), np.log(long), [1, np.log(long)], name)
    close(formulas.log_sigmoid(x), -np.logaddexp(LONG(0), -LONG(x)), np.logaddexp(LONG(0), -LONG(x)), name)
    close(formulas.inverse_or_zero(positive), 1 / long, 1 / long, name)
    close(formulas.inverse_length(positive), 1 / np.sqrt(long), 1 / np.sqrt(long), name)
    close(formulas.squash_factor(positive), long / (1 + long * long), long / (1 + long * long), name)
    close(formulas.precision(positive), 1 / (2 * long), 1 / (2 * long), name)
    close(formulas.log_sigma(positive), np.log(long) / 2, [1, np.log(long)], name)


@every_type
def test_functions_at_their_edges(native: ModuleType, name: str) -> None:
    """What a parent without children, a zero vector or an overflow makes."""
    formulas, huge = getattr(native, name), {"float32": 3e38, "float64": 1e308}[name]
    for function in ("inverse_or_zero", "inverse_length", "precision", "log_sigma", "squash_factor"):
        assert getattr(formulas, function)(0.0) == 0.0, function
    assert formulas.log_sigmoid(-1e4) == -1e4 and formulas.log_sigmoid(1e4) == 0.0
    close(formulas.squash_factor(huge), 1 / LONG(huge), 1 / LONG(huge), name)
    assert formulas.squash_factor(1.0) == 0.5
    assert np.isnan([formulas.inverse_or_zero(np.nan), formulas.squash_factor(np.nan), formulas.log(-1.0)]).all()


# ---- poses -----------------------------------------------------------------------------------------------------------

poses = st.lists(ordinary, min_size=1, max_size=12)


@every_type
@drawn(60)
@given(pose=poses, size=st.sampled_from([1e-30, 1e-3, 1.0, 1e15, 1e37]))
def test_length_squash_and_unit(native: ModuleType, name: str, pose: list[float], size: float) -> None:
    """Of any length: neither a square overflows nor one vanishes."""
    formulas, long = getattr(native, name), LONG(1) * np.asarray(pose, np.float32) * np.float32(size)
    long = np.where(np.abs(long) < 1e-36, 0, long)  # no denormal numbers
    given, exact = [float(x) for x in long], np.sqrt((long * long).sum())
    close(formulas.length(given), exact, exact, name, ulps=16)
    factor = exact / (1 + exact * exact)
    close(formulas.squash(given), long * factor, exact * factor, name, ulps=16)
    close(formulas.unit(given), long / exact if exact else long, 1, name, ulps=16)


def test_lengths_that_are_not_finite(native: ModuleType) -> None:
    for formulas in (native.float32, native.float64):
        assert formulas.length([1.0, -np.inf]) == np.inf and np.isnan(formulas.length([1.0, np.nan]))
        assert formulas.unit([0.0, 0.0]) == formulas.squash([0.0, 0.0]) == [0.0, 0.0]
        assert formulas.length([]) == 0.0


def standard(x: Tensor, eps: float) -> Tensor:
    return (x - x.mean()) / (x.var(correction=0) + eps).sqrt()


@drawn(40)
@given(count=st.integers(2, 20), eps=st.sampled_from([1e-5, 0.3]), affine=st.booleans(), seed=seeds)
def test_layer_norm_and_its_gradients(native: ModuleType, count: int, eps: float, affine: bool, seed: int) -> None:
    """Both forms of it against autograd, in double; what is added to a gradient of weight and bias that is there."""
    formulas, draw = native.float64, torch.Generator().manual_seed(seed)
    pose, weight, bias, dy, before, also = torch.randn(6, count, dtype=torch.float64, generator=draw)
    leaves = [tensor.clone().requires_grad_() for tensor in (pose, weight, bias)]
    given = (weight.tolist(), bias.tolist()) if affine else ([], [])
    normal = standard(leaves[0], eps)
    exact = normal * leaves[1] + leaves[2] if affine else normal
    grads = torch.autograd.grad(exact, leaves, dy, materialize_grads=True)

    def same(found: Any, wanted: Tensor) -> None:
        torch.testing.assert_close(torch.tensor(found, dtype=torch.float64), wanted.detach(), rtol=1e-9, atol=1e-9)

    same(formulas.layer_norm(pose.tolist(), eps, *given), exact)
    dpose, dweight, dbias = formulas.layer_norm_backward(
        pose.tolist(), eps, given[0], dy.tolist(), before.tolist(), also.tolist()
    )
    same(dpose, grads[0])
    same(dweight, before + (grads[1] if affine else dy * normal))
    same(dbias, also + dy)
    assert formulas.layer_norm_backward(pose.tolist(), eps, given[0], dy.tolist(), [], [])[0] == dpose
    found, rstd = formulas.standardise(pose.tolist(), eps)
    same(found, normal)
    same(rstd, 1 / (pose.var(correction=0) + eps).sqrt())
    inner = (dy * weight if affine else dy).tolist()
    same(formulas.standardise_backward(inner, rstd, found), grads[0])


@drawn(40)
@given(count=st.integers(2, 20), mean=st.sampled_from([0.0, 100.0, -3000.0]), seed=seeds)
def test_a_float_layer_norm_of_values_far_from_zero(native: ModuleType, count: int, mean: float, seed: int) -> None:
    """Centred differences sum to 0 in their own precision, which the backward needs."""
    pose = np.random.default_rng(seed).standard_normal(count).astype(np.float32) + np.float32(mean)
    long = pose.astype(LONG)
    exact = (long - long.mean()) / np.sqrt(long.var() + LONG(np.float32(1e-5)))
    for found in (native.float32.layer_norm(pose, 1e-5, [], []), native.float32.standardise(pose, 1e-5)[0]):
        close(found, exact, np.abs(exact).max() * max(1, abs(mean) / count / max(long.std(), 0.01)), "float32", ulps=16)
        assert abs(np.asarray(found, LONG).sum()) <= count * 2.0**-22 * np.abs(exact).max()


# ---- moments ---------------------------------------------------------------------------------------------------------


@every_type
@drawn(40)
@given(
    count=st.integers(1, 30), split=st.integers(0, 30), base=ordinary, eps=st.sampled_from([0.0, 1e-5, 0.5]), seed=seeds
)
def test_moments_one_by_one_and_joined(
    native: ModuleType, name: str, count: int, split: int, base: float, eps: float, seed: int
) -> None:
    """Counts, means and variances of weighted votes, added one after another to two parts, which are joined."""
    formulas, draw = getattr(native, name), np.random.default_rng(seed)
    eps = float(np.float32(eps))
    votes = (draw.standard_normal(count) + base).astype(np.float32).astype(LONG)
    weight = (draw.random(count) * (draw.random(count) > 0.3)).astype(np.float32).astype(LONG)
    parts = []
    for part in (slice(0, split), slice(split, None)):
        n, moments = 0.0, (0.0, 0.0)
        for vote, w in zip(votes[part].tolist(), weight[part].tolist(), strict=True):
            moved = w * formulas.inverse_or_zero(n + w)
            moments = formulas.add(vote - base, moved, moved * n, *moments)
            n += w
        parts.append((n, *moments))
    (n, mean, square), (more, other_mean, other_square) = parts
    fraction = more * formulas.inverse_or_zero(n + more)
    mean, square = formulas.join(other_mean, other_square, fraction, fraction * n, mean, square)
    total = n + more
    mean, variance = formulas.finish(base, total, eps, formulas.inverse_or_zero(total + eps), mean, square)
    exact = weight.sum()
    exact_mean = (weight * votes).sum() / (exact + eps) if exact else LONG(0)
    exact_variance = (weight * (votes - exact_mean) ** 2).sum() / (exact + eps) if exact else LONG(0)
    size = 1 + np.abs(votes).max()
    close(mean, exact_mean, size, name, ulps=4 * count + 8)
    close(variance, exact_variance, size * size, name, ulps=4 * count + 8)


@every_type
@drawn(30)
@given(a=ordinary, b=ordinary, c=ordinary, d=ordinary, e=ordinary)
def test_a_mean_may_be_more_precise_than_a_vote(
    native: ModuleType, name: str, a: float, b: float, c: float, d: float, e: float
) -> None:
    formulas = getattr(native, name)
    a, b, c, d, e = (LONG(x) for x in (a, b, c, d, e))
    close(formulas.em_score(a, b, c, d, e), a * (b - (c + d) * e), [a * b, a * c * e, a * d * e], name)
    close(formulas.distance(a, b), b * a * a, b * a * a, name)
    close(formulas.gaussian_gain(a, b, c), (a + b * c) * c, [a * c, b * c * c], name)


# ---- derivatives of whole routings, for one position -----------------------------------------------------------------


class Draw:
    """Votes ``[I, M, K]``, gates ``[I]`` and what a pass is given for them, in double."""

    def __init__(self, seed: int, children: int, parents: int, values: int) -> None:
        draw = torch.Generator().manual_seed(seed)
        self.normal: Callable[..., Tensor] = lambda *shape: torch.randn(*shape, dtype=torch.float64, generator=draw)
        self.votes = self.normal(children, parents, values).requires_grad_()
        self.gate = torch.rand(children, dtype=torch.float64, generator=draw)
        self.gate[::3] = 0.0
        self.query = self.normal(parents, values).requires_grad_()
        self.dsums = self.normal(parents, values)

    def gradients(self, loss: Tensor) -> tuple[Tensor, Tensor]:
        first, second = torch.autograd.grad(loss, [self.votes, self.query], materialize_grads=True)
        return first, second


def each(function: Callable[..., float], *tensors: Tensor) -> Tensor:
    """A formula of numbers, for every element of tensors."""
    whole = torch.broadcast_tensors(*tensors)
    numbers = zip(*(tensor.detach().flatten().tolist() for tensor in whole), strict=True)
    return torch.tensor([function(*one) for one in numbers], dtype=torch.float64).view(whole[0].shape)


def same(found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found, wanted.detach(), rtol=1e-9, atol=1e-9)


sizes = {"children": st.integers(1, 5), "parents": st.integers(1, 4), "values": st.integers(1, 4), "seed": seeds}


@drawn(20)
@given(scale=st.sampled_from([0.5, -0.7, 0.0]), **sizes)
def test_attention(native: ModuleType, scale: float, **shape: int) -> None:
    x, formulas = Draw(**shape), native.float64
    shares = (scale * (x.query * x.votes).sum(-1)).softmax(-1)
    dvotes, dquery = x.gradients((x.dsums * (x.gate[:, None, None] * shares[..., None] * x.votes).sum(0)).sum())
    gain = (x.dsums * x.votes).sum(-1)
    weight, scaled = x.gate[:, None] * shares, torch.tensor(scale, dtype=torch.float64)
    da = each(formulas.attention_dlogit, weight, gain, (shares * gain).sum(-1, True), scaled)
    same(each(formulas.attention_dvote, weight[..., None], x.dsums, da[..., None], x.query), dvotes)
    same((da[..., None] * x.votes).sum(0), dquery)


@drawn(20)
@given(scale=st.sampled_from([0.5, -0.7, 0.0]), normalize=st.booleans(), **sizes)
def test_pooling(native: ModuleType, scale: float, normalize: bool, **shape: int) -> None:
    x, formulas = Draw(**shape), native.float64
    if not x.gate.any():
        return
    keys = x.votes / x.votes.norm(dim=-1, keepdim=True) if normalize else x.votes
    along = (x.query * keys).sum(-1)
    shares = x.gate[:, None] * (scale * along).exp()
    shares = shares / shares.sum(0)
    sums = (shares[..., None] * x.votes).sum(0)
    dvotes, dquery = x.gradients((x.dsums * sums).sum())
    inverse = each(formulas.inverse_length, (x.votes**2).sum(-1)) if normalize else torch.ones_like(along)
    c = scale * shares * (x.dsums * (x.votes - sums)).sum(-1) * inverse
    d = c * along * inverse if normalize else torch.zeros_like(along)
    first, last = c[..., None], d[..., None]
    same(each(formulas.pooling_dvote, shares[..., None], x.dsums, first, x.query, last, x.votes), dvotes)
    same((first * x.votes).sum(0), dquery)


@drawn(20)
@given(eps=st.sampled_from([1e-3, 0.3]), **sizes)
def test_gaussian(native: ModuleType, eps: float, **shape: int) -> None:
    """The gradient of counts, means and variances by votes and by the given means."""
    x, formulas = Draw(**shape), native.float64
    variance, log_weight = x.normal(*x.query.shape).exp(), x.normal(x.query.shape[0])
    dn, dmeans, dvariances = x.normal(x.query.shape[0]), x.normal(*x.query.shape), x.normal(*x.query.shape)
    precision = each(formulas.precision, variance)
    from_mean = x.votes - x.query
    distance = (from_mean**2 / (2 * variance)).sum(-1)
    same(each(formulas.distance, from_mean, precision).sum(-1), distance)
    shares = (log_weight - distance).softmax(-1)
    w = x.gate[:, None] * shares
    whole = w.sum(0)[:, None] + eps
    means = (w[..., None] * x.votes).sum(0) / whole
    variances = (w[..., None] * (x.votes - means) ** 2).sum(0) / whole
    dvotes, dmean = x.gradients((dn * w.sum(0)).sum() + (dmeans * means).sum() + (dvariances * variances).sum())
    d, s = x.votes - means, dvariances / whole
    rest = (w[..., None] * d).sum(0)
    u = (dmeans - 2 * rest * s) / whole
    # what of dL/dw no vote changes: of n, and of the sums over n + eps
    constant = dn - (s * variances).sum(-1)
    gain = each(formulas.gaussian_gain, u, s, d).sum(-1) + constant
    da = w * (gain - (shares * gain).sum(-1, True))
    found = each(formulas.gaussian_dvote, w[..., None], u, s, d, da[..., None], precision, from_mean)
    same(found, dvotes)
    same((2 * da[..., None] * precision * from_mean).sum(0), dmean)
