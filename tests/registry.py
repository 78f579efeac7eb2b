"""All routings: one row each, over which every suite iterates.

A row: a case's arguments, one iteration of the oracle, the step between iterations, results with gradients, the cases.
A new routing adds a row; ``test_registry`` compares the rows with the registered ops. Nothing here needs pytest.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import case_rows
import oracle_routings as loops
import torch
from cases import TEMPERATURES, Case
from torch import Tensor

import fastcaps
from bench.judge import Bar
from fastcaps import ops, reference
from fastcaps.reference.gaussian import next_log_weight
from fastcaps.rules import DETACH, Rule
from fastcaps.vectors import unit
from fastcaps.votes import VoteInputs

POSE = (-2, -1)
VOTES = VoteInputs._fields
Given = dict[str, Any]


def votes_of(given: Given) -> VoteInputs:
    """Return what the votes of a call are made of."""
    return VoteInputs(*(given[name] for name in VOTES))


# ---- arguments beside the votes, in the order of the schemas, and the oracle's loop over iterations ------------------


def _attention_rest(case: Case, seed: int) -> Given:
    draw, numbers = case.generator(seed + 100), case.pose[0] * case.pose[2]
    affine = case.affine and case.rule == Rule.LAYER_NORM
    return {
        "query": draw(*case.poses) if case.start else None,
        "norm_weight": draw(numbers, size=0.5, shift=1.0) if affine else None,
        "norm_bias": draw(numbers) if affine else None,
        "scale": case.factor,
        "eps": case.eps,
        "rule": int(case.rule),
        "iterations": case.iterations,
    }


def _attention_next(given: Given, results: Given, state: Given) -> Given:
    query, parents = state["query"], results["parents"]
    return {"query": query + parents if given["rule"] == Rule.SQUASH and query is not None else parents}


def _pooling_rest(case: Case, seed: int) -> Given:
    return {
        "query": case.generator(seed + 100)(*case.poses) if case.start else None,
        "scale": case.factor,
        "normalize": case.normalize,
        "rule": int(case.rule),
        "iterations": case.iterations,
    }


def _pooling_next(given: Given, results: Given, state: Given) -> Given:
    query, parents = state["query"], results["parents"]
    wide = torch.promote_types(parents.dtype, torch.float32)
    step = parents if given["rule"] == Rule.SQUASH else unit(parents.to(wide), POSE).to(parents.dtype)
    return {"query": step if query is None else query + step}


def _gaussian_rest(case: Case, seed: int) -> Given:
    draw, wide = case.generator(seed + 100), {"dtype": case.wide}
    mean = variance = log_weight = None
    if case.start:
        mean = draw(*case.poses, **wide)
        if case.rule != Rule.KMEANS:  # as wide as a pose is long: no child is quite sure of its parent
            variance = draw(*case.poses, size=0.5, **wide).exp() * (case.pose[0] * case.pose[2])
        log_weight = draw(*case.numbers, **wide) if case.log_weight else None
    if case.rule == Rule.EM:
        betas = [draw(case.parents, **wide) for _ in range(2)]
    else:
        betas = [case.table(case.betas, draw, size=0.3, **wide) for _ in range(2)]
    return {
        "mean": mean,
        "variance": variance,
        "log_weight": log_weight,
        "beta_use": betas[0],
        "beta_ignore": betas[1],
        "temperatures": [TEMPERATURES[iteration % len(TEMPERATURES)] for iteration in range(case.iterations)],
        "rule": int(case.rule),
        "eps": case.eps,
    }


def _gaussian_next(given: Given, results: Given, state: Given) -> Given:
    scores, means, variances, rule = *(results[name] for name in ("scores", "means", "variances")), given["rule"]
    log_weight = next_log_weight(scores, variances, rule)
    return {"mean": means, "variance": None if rule == Rule.KMEANS else variances, "log_weight": log_weight}


@dataclass(frozen=True, eq=False)
class Routing:
    """One routing op and its backward: what the border (:class:`fastcaps.ops.Routing`) does not say of them itself."""

    border: ops.Routing  # what the functions call, which defines the op and its backward
    table: case_rows.Table  # its cases
    rest: Callable[[Case, int], Given]  # the arguments beside the votes
    following: Callable[[Given, Given, Given], Given]  # the next iteration's state, from the results and state of one
    loop: Callable[..., Given]  # all iterations of one position over its stored votes
    folds: bool = False  # whether matrices may act on the parents, on the CPU
    rounds: bool = False  # whether there are kernels for tensor cores, on a GPU
    rounded: tuple[str, ...] = ()  # the history that has the dtype of the children
    absent: Mapping[Rule, tuple[str, ...]] = field(default_factory=dict)  # what a backward is not given, by rule

    def __str__(self) -> str:
        return self.stem

    def __getattr__(self, name: str) -> Any:
        """Return what the border says: stem, name, op, backward_op, state, competing, wide."""
        return getattr(self.border, name)

    # the results that have a gradient; all others are the history: iterations lead
    results = property(lambda self: self.border.finals)
    # the names of all results that a backend makes, in order; coefficients come last
    outputs = property(lambda self: tuple(returned.name for returned in self.op._schema.returns)[:-1])
    # the gradients that lead the arguments of the backward, and the names of its results in the order of ``needs``
    grads = property(lambda self: tuple(self.border.heads))
    gradients = property(lambda self: tuple(returned.name for returned in self.backward_op._schema.returns))
    # the op's arguments that the backward takes beside votes and state
    fixed = property(lambda self: [n for n in self.border.Rest._fields if n not in (*self.state, *self.saved)])
    # the arguments that act through the coefficients alone, and have no gradient where those are constants; none: they
    # never are
    by_shares = property(lambda self: self.border.constant)
    # the calls that every backend must get right: a few in which each factor has each value, and named ones
    cases = property(lambda self: (*self.table.covering[0], *self.table.named, *self.table.lanes))
    # many more, in which all pairs of values occur: for tests that may take long
    pairs = property(lambda self: self.table.covering[1])
    # what may lie between two iterations
    rules = property(lambda self: {fields["rule"] for fields in self.table.rules.values()})

    @property
    def saved(self) -> dict[str, str]:
        """Which of the history the backward takes, by the names of the results."""
        whole = {name: name for name in self.border.history} | {n.removeprefix("all_"): n for n in self.border.history}
        return {name: whole[name] for name in self.border.Rest._fields if name in whole}

    def make(self, name: str, **fields: Any) -> Case:
        """Return a case of the rule that most have."""
        return self.table.make(name, **fields)

    def case(self, name: str) -> Case:
        return next(case for case in self.cases if case.name == name)

    def call(self, case: Case, seed: int = 0) -> Call:
        """Return the case as a call, its tensors arranged as it says."""
        given = {**case.votes(seed), **self.rest(case, seed)}
        given = {n: case.arranged(v) if isinstance(v, Tensor) else v for n, v in given.items()}
        draw = case.generator(seed + 200)
        shapes = {"scores": case.numbers}
        dtype = case.wide if self.wide else case.dtype
        grads = {n: case.arranged(draw(*shapes.get(n, case.poses), dtype=dtype)) for n in self.results}
        return Call(self, given, grads, case.detach and bool(self.by_shares))

    def iteration(self, given: Given, k: int, state: Given, detach: bool = False) -> tuple[Given, Given]:
        """Return the results of iteration k of the reference by name, and what the next iteration is given."""
        one = {**given, **state, "iterations": 1, "temperatures": given.get("temperatures", ())[k : k + 1]}
        arguments = [one[name] for name in given if name not in VOTES]
        flags = [detach] if self.by_shares else []
        found = getattr(reference, self.name)(votes_of(given), *arguments, *flags)
        results = dict(zip(self.outputs, found, strict=True))
        return results, self.following(given, results, state)

    def backward_call(
        self,
        case: Case,
        seed: int = 0,
        needs: int | None = None,
        forward: Callable[[Call], Given] | None = None,
    ) -> BackwardCall:
        """Return ``case.iterations`` iterations of the backward over the same votes, each with other parents.

        The first iteration has no state if the case has no ``start``. By default all gradients are computed that
        iterations can share, and with one iteration those of its state as well. ``forward`` makes the results that an
        iteration saves for its backward; by default the reference does.
        """
        given = self.call(case, seed).given
        iterations: list[Given] = []
        for iteration in range(case.iterations):
            state = self.rest(case, seed + 7 * iteration)
            current = {n: None if iteration == 0 and not case.start else state[n] for n in self.state}
            if forward:
                results = forward(Call(self, {**given, **current, "iterations": 1}, {}))
            else:
                results, _ = self.iteration(given, 0, current)
            iterations.append({**current, **{n: results[kept][0] for n, kept in self.saved.items()}})
        draw, shapes = case.generator(seed + 300), {"grad_counts": case.numbers, "grad_evidence": case.numbers}
        full: Given = {n: draw(case.iterations, *shapes.get(n, case.poses), dtype=case.wide) for n in self.grads}
        full.update({n: given[n] for n in VOTES})
        for name in (*self.state, *self.saved):
            each = [one[name] for one in iterations if one[name] is not None]
            full[name] = torch.stack(each).detach() if each else None
        full.update({n: given[n] for n in self.fixed})
        full.update(dict.fromkeys(self.absent.get(case.rule, ())))
        if needs is None:
            there = {**given, "beta_use": full.get("beta_use"), "beta_ignore": full.get("beta_ignore")}
            wanted = [
                there[n[1:]] is not None and (case.iterations == 1 or n[1:] not in self.state) for n in self.gradients
            ]
            needs = sum(1 << k for k, want in enumerate(wanted) if want)
        names = [argument.name for argument in self.backward_op._schema.arguments]
        full["needs"] = needs | (DETACH if case.detach and self.by_shares else 0)
        full = {n: case.arranged(v) if isinstance(v, Tensor) else v for n, v in full.items()}
        return BackwardCall(self, {n: full[n] for n in names})

    @cache  # noqa: B019 -- rows live as long as the process
    def bar(self, case: Case, seed: int = 0, tf32: bool = False, training: bool = True) -> Bar:
        """Return what results, and with ``training`` the gradients, of a case may err."""
        return self.call(case, seed).bar(tf32, training)

    @cache  # noqa: B019
    def backward_bar(self, case: Case, seed: int = 0, tf32: bool = False) -> Bar:
        """Return what the backward's gradients of a case may err."""
        return self.backward_call(case, seed).bar(tf32)


def _as_set(name: str, value: Any, place: int = 0) -> Any:
    """Return an argument without the two dimensions of a grid, which children and gate have behind the batch, other
    tensors at ``place``; 0 says that they have none."""
    place = 1 if name in ("children", "gate") else place
    return value.squeeze(place).squeeze(place) if place and isinstance(value, Tensor) else value


@dataclass(frozen=True)
class Call:
    """One call of a routing's op: its arguments by name, in order, and gradients of the results that have some."""

    routing: Routing
    given: Given
    grads: dict[str, Tensor]
    detach: bool = False

    # the names of the tensors that are given, and all tensors that the results and gradients depend on
    names = property(lambda self: [name for name, value in self.given.items() if isinstance(value, Tensor)])
    tensors = property(lambda self: [*(self.given[name] for name in self.names), *self.grads.values()])

    @property
    def iterations(self) -> int:
        """How many iterations it has."""
        return int(self.given["iterations"] if "iterations" in self.given else len(self.given["temperatures"]))

    def having(self, tensors: Sequence[Tensor | None]) -> Call:
        """Return this call with other tensors."""
        count = len(self.names)
        given = {**self.given, **dict(zip(self.names, tensors[:count], strict=True))}
        return Call(self.routing, given, dict(zip(self.grads, tensors[count:], strict=True)), self.detach)

    def as_set(self) -> Call:
        """Return this call, on a grid of one position, as one on a set."""
        given = {n: _as_set(n, x, 1) if n in self.routing.state else _as_set(n, x) for n, x in self.given.items()}
        return Call(self.routing, given, {n: _as_set(n, x, 1) for n, x in self.grads.items()}, self.detach)

    def arguments(self, coefficients: bool = False) -> list[Any]:
        """Return the arguments of the op."""
        flags = [self.detach, coefficients] if self.routing.by_shares else [coefficients]
        return [*self.given.values(), *flags]

    def forward(self, run: Callable[..., Sequence[Tensor]], options: int = 0) -> dict[str, Tensor]:
        """Return the results of a backend's forward by name."""
        found = run(*self.given.values(), options)
        return dict(zip(self.routing.outputs, (one.detach() for one in found), strict=True))

    def by_op(self) -> dict[str, Tensor]:
        """Return the results of the op, whatever serves it."""
        return dict(zip(self.routing.outputs, self.routing.op(*self.arguments()), strict=False))

    def by_loop(self) -> dict[str, Tensor]:
        """Return the results of the oracle: a loop of iterations of the reference, differentiable."""
        state = {name: self.given[name] for name in self.routing.state}
        history: list[Given] = []
        for iteration in range(self.iterations):
            results, state = self.routing.iteration(self.given, iteration, state, self.detach)
            history.append(results)
        last = history[-1]
        return {
            name: last[name]
            if name in self.routing.results
            else torch.cat([results[name].detach() for results in history])
            for name in last
        }

    def training(self, results: Callable[[Call], dict[str, Tensor]]) -> dict[str, Tensor]:
        """Return results and the gradients of all tensors given; ``results`` takes this call with leaves."""
        count = len(self.names)
        leaves = [tensor.detach().requires_grad_() for tensor in self.tensors[:count]]
        found = results(self.having([*leaves, *self.grads.values()]))
        pairs = [(found[name], grad) for name, grad in self.grads.items() if found[name].requires_grad]
        gradients = torch.autograd.grad(
            [result for result, _ in pairs], leaves, [grad for _, grad in pairs], materialize_grads=True
        )
        done = {name: result.detach() for name, result in found.items()}
        for name, leaf, gradient in zip(self.names, leaves, gradients, strict=True):
            assert gradient.shape == leaf.shape and gradient.dtype == leaf.dtype, name
            done[f"d{name}"] = gradient
        return done

    def bar(self, tf32: bool = False, training: bool = True) -> Bar:
        """Return what results, and gradients if wanted, may err.

        The exact ones are autograd's through the loop of the reference. So are eager's, but if iterations keep what was
        rounded to the dtype of the children: autograd would repeat such a rounding on its way back, and cancel it.
        There eager is the op itself by the reference, with the explicit formulas of its backward.
        """

        def by_loop(tensors: Sequence[Tensor | None]) -> dict[str, Tensor]:
            call = self.having(tensors)
            return call.training(Call.by_loop) if training else {n: r.detach() for n, r in call.by_loop().items()}

        def by_formulas(tensors: Sequence[Tensor | None]) -> dict[str, Tensor]:
            with fastcaps.backend("reference"):
                return self.having(tensors).training(Call.by_op)

        rounds = bool(self.routing.rounded) or (self.iterations > 1 and not self.routing.wide)
        return Bar(by_loop, self.tensors, [by_formulas] if training and rounds else [], tf32)


@dataclass(frozen=True)
class BackwardCall:
    """One call of a routing's backward: its arguments by name, in order."""

    routing: Routing
    given: Given

    def as_set(self) -> BackwardCall:
        """Return this call, on a grid of one position, as one on a set."""
        stacks = set(self.given) - {"weight", "bias", "norm_weight", "beta_use", "beta_ignore"}
        given = {n: _as_set(n, x, 2) if n in stacks else x for n, x in self.given.items()}
        return BackwardCall(self.routing, given)

    def results(self, run: Callable[..., Sequence[Tensor]], *options: int) -> dict[str, Tensor]:
        """Return the gradients that a backward makes, by name; what is not there is left out.

        A backend's own takes ``options`` at the end, the op does not.
        """
        found = run(*self.given.values(), *options)
        return {n: one for n, one in zip(self.routing.gradients, found, strict=True) if one.shape != (0,)}

    def by_reference(self) -> list[Tensor]:
        """Return the sum over iterations of the reference's backward."""
        border = self.routing.border
        heads, rest = ([self.given[n] for n in names] for names in (self.routing.grads, border.Rest._fields))
        return border._reference_backward(heads, votes_of(self.given), border.Rest(*rest), self.given["needs"])

    def bar(self, tf32: bool = False) -> Bar:
        """Return what the gradients may err."""
        names = [name for name, value in self.given.items() if isinstance(value, Tensor)]
        first = ["children", *(name for name in names if name != "children")]

        def run(tensors: Sequence[Tensor | None]) -> dict[str, Tensor]:
            other = BackwardCall(self.routing, {**self.given, **dict(zip(first, tensors, strict=True))})
            return other.results(lambda *_: other.by_reference())

        return Bar(run, [self.given[name] for name in first], tf32=tf32)


ATTENTION = Routing(
    ops.attention_routing, case_rows.ATTENTION, _attention_rest, _attention_next, loops.attention_routing,
    folds=True, rounds=True, absent={Rule.PLAIN: ("sums",), Rule.SQUASH: ("sums",)},
)  # fmt: skip
POOLING = Routing(
    ops.pooling_routing, case_rows.POOLING, _pooling_rest, _pooling_next, loops.pooling_routing, rounded=("sums",)
)
GAUSSIAN = Routing(
    ops.gaussian_routing, case_rows.GAUSSIAN, _gaussian_rest, _gaussian_next, loops.gaussian_routing,
    absent={Rule.EM: ("beta_use", "beta_ignore", "grad_evidence")},
)  # fmt: skip
ROUTINGS = (ATTENTION, POOLING, GAUSSIAN)


def routing_of(name: str) -> Routing:
    """Return the row of an op's name or stem."""
    return next(routing for routing in ROUTINGS if name in (routing.name, routing.stem))


def gpu_cases(routing: Routing, pairs: bool = False) -> list[Case]:
    """Return a routing's cases in the dtypes of a GPU; those for the CPU's lanes are among the many of all ``pairs``.

    Without those that take a CPU too long.
    """
    lanes = routing.table.lanes
    cases = [*routing.pairs, *lanes] if pairs else [case for case in routing.cases if case not in lanes]
    kept = [case for case in cases if case.products < 6e5 and not case.name.endswith("-float64")]
    return [replace(c, dtype=torch.float32) if c.dtype == torch.float64 else c for c in kept]


def every_case(keep: Callable[[Case], bool] = lambda case: True, pairs: bool = False) -> list[tuple[Routing, Case]]:
    """Return the cases of all routings, or those that one wants; or the many of all ``pairs``."""
    return [(one, case) for one in ROUTINGS for case in (one.pairs if pairs else one.cases) if keep(case)]
