"""Heinsen's layer under its own name, against the same procedure with stored votes; checkpoints."""

from __future__ import annotations

import copy
import inspect
import pickle

import nn_plain_routings
import pytest
import torch

from fastcaps.compat.heinsen_routing import GenerativeMatrixRouting

CASES = {
    "fixed": {"n_inp": 6, "n_out": 3, "d_cov": 2, "d_inp": 3, "d_out": 4},
    "variable": {"n_inp": -1, "n_out": 3, "d_cov": 2, "d_inp": 3, "d_out": 4},
    "skm": {"n_inp": 6, "n_out": 3, "d_cov": 2, "d_inp": 3, "d_out": 4, "p_model": "skm"},
    "single-beta": {"n_inp": 6, "n_out": 2, "d_cov": 1, "d_inp": 3, "d_out": 4, "single_beta": True},
    "one-turn": {"n_inp": 6, "n_out": 3, "d_cov": 2, "d_inp": 3, "d_out": 4, "n_iters": 1},
    "eps": {"n_inp": -1, "n_out": 3, "d_cov": 2, "d_inp": 3, "d_out": 4, "eps": 1e-2, "n_iters": 4},
}


def pair(name: str, **changes):
    """Our layer and the plain one with the same random parameters, in float64."""
    torch.manual_seed(0)
    plain = nn_plain_routings.GenerativeMatrixRouting(**CASES[name]).double()
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.copy_(torch.randn_like(parameter))
    ours = GenerativeMatrixRouting(**CASES[name], **changes).double()
    ours.load_state_dict(plain.state_dict())
    return ours, plain


def draw(name: str, *lead: int, count: int = 6) -> tuple[torch.Tensor, torch.Tensor]:
    case = CASES[name]
    poses = torch.randn(*lead, count, case["d_cov"], case["d_inp"], dtype=torch.float64)
    return torch.randn(*lead, count, dtype=torch.float64), poses


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("lead", [(2,), (), (2, 3)], ids=str)
def test_results_and_gradients(name: str, lead: tuple[int, ...]) -> None:
    ours, plain = pair(name)
    scores, poses = (tensor.requires_grad_() for tensor in draw(name, *lead))
    wanted = plain(scores, poses)
    results = [ours(scores, poses), [wanted[key] for key in ("a_out", "mu_out", "sig2_out")]]
    gradients = []
    for found, layer in zip(results, (ours, plain), strict=True):
        loss = sum((t * torch.linspace(-1, 1, t.numel(), dtype=t.dtype).view(t.shape)).sum() for t in found)
        gradients.append(torch.autograd.grad(loss, [scores, poses, *layer.parameters()]))
    for got, want in zip(results[0], results[1], strict=True):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-10)
    for got, want in zip(*gradients, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("name", CASES)
def test_the_dict(name: str) -> None:
    ours, plain = pair(name, return_dict=True)
    scores, poses = draw(name, 2)
    found, wanted = ours(scores, poses), plain(scores, poses)
    assert set(found) == {"V", "log_p", "R", "D_use", "D_ign", "a_out", "mu_out", "sig2_out"}
    for key, want in wanted.items():
        if want is not None:  # there is no log_p after one turn
            torch.testing.assert_close(found[key], want, rtol=1e-9, atol=1e-10)


def test_any_number_of_children_and_masks() -> None:
    ours, plain = pair("variable")
    for count in (1, 4, 11):
        scores, poses = draw("variable", 2, count=count)
        torch.testing.assert_close(ours(scores, poses)[1], plain(scores, poses)["mu_out"])
    scores, poses = draw("variable", 2)
    few = ours(scores[:, :4], poses[:, :4])
    scores[:, 4:], poses[:, 4:] = -torch.inf, torch.nan
    for got, want in zip(ours(scores, poses), few, strict=True):
        torch.testing.assert_close(got, want)


def test_signature_initialisation_and_state_are_the_authors() -> None:
    names = ["n_inp", "n_out", "d_cov", "d_inp", "d_out"]
    names += ["n_iters", "single_beta", "p_model", "eps", "return_dict"]
    signature = inspect.signature(GenerativeMatrixRouting).parameters
    assert list(signature) == names
    assert [signature[name].default for name in names[5:]] == [3, False, "gaussian", 1e-5, False]
    assert list(inspect.signature(GenerativeMatrixRouting.forward).parameters) == ["self", "a_inp", "mu_inp"]
    torch.manual_seed(3)
    layer = GenerativeMatrixRouting(6, 3, 2, 4, 5)
    torch.manual_seed(3)
    assert torch.equal(layer.W, torch.empty(6, 3, 4, 5).normal_() / 4)
    assert layer.B.shape == (6, 3, 2, 5) and layer.beta_use.shape == layer.beta_ign.shape == (6, 3)
    assert list(layer.state_dict()) == ["W", "B", "beta_use", "beta_ign", "CONST_one"]
    shared = GenerativeMatrixRouting(-1, 3, 2, 4, 5, single_beta=True)
    assert shared.beta_ign is shared.beta_use and shared.W.shape == (1, 3, 4, 5)
    assert set(shared.state_dict()) == set(layer.state_dict())
    wanted = "n_inp=-1, n_out=3, d_cov=2, d_inp=4, d_out=5, n_iters=3, single_beta=True, p_model=gaussian, eps=1e-05"
    assert repr(shared) == f"GenerativeMatrixRouting({wanted}, return_dict=False)"


@pytest.mark.parametrize("name", ["variable", "skm"])
def test_copies_compiled_and_autocast(name: str) -> None:
    ours, _ = pair(name)
    given = draw(name, 2)
    wanted = ours(*given)
    torch._dynamo.reset()
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    for copied in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours)), compiled):
        for got, want in zip(copied(*given), wanted, strict=True):
            torch.testing.assert_close(got, want)
    single = ours.float()
    with torch.autocast("cpu", torch.bfloat16):
        found = single(*(tensor.float() for tensor in given))
    assert all(result.isfinite().all() for result in found)
    sum(result.float().sum() for result in found).backward()
    assert all(parameter.grad.isfinite().all() for parameter in single.parameters())


def test_wrong_arguments_are_named() -> None:
    for wrong, message in (
        ({"n_inp": 0}, "n_inp must be an int >= 1"),
        ({"n_out": 1}, "n_out must be at least 2"),
        ({"p_model": "kmeans"}, "p_model must be one of 'gaussian', 'skm'"),
    ):
        with pytest.raises(ValueError, match=message):
            GenerativeMatrixRouting(**{**CASES["fixed"], **wrong})
    layer = GenerativeMatrixRouting(**CASES["fixed"])
    with pytest.raises(ValueError, match=r"mu_inp must be \[2, 6, 2, 3\] with a_inp \[2, 6\], got \[2, 6, 3, 2\]"):
        layer(torch.randn(2, 6), torch.randn(2, 6, 3, 2))
    with pytest.raises(ValueError, match=r"a_inp must be \[\.\.\., 6\], got \[2, 5\]"):
        layer(torch.randn(2, 5), torch.randn(2, 5, 2, 3))
    with pytest.raises(TypeError, match="a_inp must be a tensor"):
        layer(None, torch.randn(2, 6, 2, 3))
