"""Calls drawn at random, of the public functions and of the raw ops, right and wrong.

    PYTHONPATH=tests python -m tools.fuzz --seed 17 --shrink    # a failing call of one seed, as small as it goes
    PYTHONPATH=tests python -m tools.fuzz --minutes 30          # seed after seed: make soak

A right call is held to the rule of ``bench.judge`` against the reference, must have the same bits on any
number of threads, and NaN or infinity must not leave its sample. A raw op refuses wrong arguments, or returns the
reference's shapes. Hypothesis draws, and shrinks what fails; the same seed draws the same calls.

With ``--minutes`` each seed has its own process, on every instruction set that is built and on a build with guard pages
behind its scratch memory. Tensors end at guard pages too (``tests/guard_pages.c``): an access beyond ends the process.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import features
import hypothesis
import torch
from cases import LAYOUTS, Case
from hypothesis import strategies as st
from registry import ROUTINGS, BackwardCall, Call, Routing
from suite import random_cases
from torch import Tensor

import fastcaps
from bench.judge import Bar, largest
from fastcaps import backends, libraries
from fastcaps.functional import Window
from fastcaps.rules import Rule
from fastcaps.votes import SET_WINDOW
from tools.native import LEVELS, ROOT, guarded, guarded_library

MOST = 1 << 19  # multiply-adds of a call
OWN_POSES = ((4, 4, 4), (6, 6, 6), (8, 8, 8), (1, 8, 16), (1, 16, 16), (1, 64, 64), (1, 64, 2), (1, 2, 2), (1, 8, 8))
ROUTING, SEED = st.sampled_from(ROUTINGS), st.integers(0, 99)
THREADS = st.sampled_from((1, 2, 3, 7))


@st.composite
def case(draw: st.DrawFn, routing: Routing) -> Case:
    """Draw a call as the tests do, then with odd and usual poses, and few or many positions, children and parents."""
    one = draw(random_cases(routing))
    numbers = st.sampled_from((1, 1, 2, 2, 3, 4, 5, 6, 7, 8, 9, 13, 16, 17))
    pose = draw(st.one_of(st.sampled_from(OWN_POSES), st.tuples(numbers, numbers, numbers)))
    if one.rule == Rule.LAYER_NORM and pose[0] * pose[2] == 1:
        pose = (1, pose[1], 2)
    if one.groups == "none":
        pose = (pose[0], pose[1], pose[1])
    parents = draw(st.sampled_from((1, 2, 3, 5, 8, 16, 17, 33, 64, 65, 70)))
    one = replace(one, pose=pose, layout=Case.layout, parents=parents)
    if draw(st.booleans()):
        types = draw(st.sampled_from((1, 2, 3, 5, 7, 8, 9, 16, 17, 31, 33, 64, 70)))
        batch = draw(st.sampled_from((0, 1, 1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 33)))
        groups = st.sampled_from([g for g in range(1, types + 1) if types % g == 0])
        one = replace(one, window=SET_WINDOW, grid=(1, 1), types=types, batch=batch,
                      groups=draw(groups) if isinstance(one.groups, int) else one.groups)  # fmt: skip
    hypothesis.assume(one.products <= MOST)
    return one


def _rearranged(draw: st.DrawFn, given: dict[str, Any]) -> dict[str, Any]:
    """Return arguments of which each tensor lies in memory in its own way."""
    layouts = st.sampled_from([LAYOUTS[name] for name in LAYOUTS if name != "expanded"])
    return {n: draw(layouts)(v) if isinstance(v, Tensor) and v.dim() else v for n, v in given.items()}


def _bits(results: dict[str, Tensor]) -> dict[str, bytes]:
    return {n: x.contiguous().flatten().view(torch.uint8).numpy().tobytes() for n, x in results.items()}


def _hold(bar: Bar, found: dict[str, Tensor], what: Any, logsumexp: Tensor | None = None) -> None:
    """Hold results to twice what the rule allows, an estimate above which some of thousands of calls lie; and besides
    to the last place of pooling's log-sum-exp, from which its shares are made again."""
    said = bar.judge(found, 0.0 if logsumexp is None else bar.rounding.epsilon * largest(logsumexp))
    close = said.errors and all(error <= 2 * said.allowed[n] for n, error in said.errors.items())
    assert not said.complaints or close, f"{said.complaints}: {what!r}"


def _same_bits(run: Callable[[], dict[str, Tensor]], threads: int, what: Any) -> dict[str, Tensor]:
    torch.set_num_threads(1)
    alone = run()
    torch.set_num_threads(threads)
    assert _bits(run()) == _bits(alone), f"{threads} threads give other bits: {what!r}"
    return alone


# ---- kinds of calls --------------------------------------------------------------------------------------------------


def op(draw: st.DrawFn) -> None:
    """Results and every gradient of an op, through autograd."""
    routing = draw(ROUTING)
    one = draw(case(routing))
    call = routing.call(one, draw(SEED))
    call = replace(call, given=_rearranged(draw, call.given), grads=_rearranged(draw, call.grads))
    found = _same_bits(lambda: call.training(Call.by_op), draw(THREADS), one)
    _hold(call.bar(), found, one, found.get("logsumexp"))


def backward(draw: st.DrawFn) -> None:
    """The backward op of several iterations, of which any gradients may be wanted."""
    routing = draw(ROUTING)
    one, seed = draw(case(routing)), draw(SEED)
    wanted = draw(st.integers(0, (1 << len(routing.gradients)) - 1))
    wanted &= routing.backward_call(one, seed).given["needs"]
    call = BackwardCall(routing, _rearranged(draw, routing.backward_call(one, seed, wanted).given))
    found = _same_bits(lambda: call.results(routing.backward_op), draw(THREADS), one)
    bar = call.bar()
    kept = {n: found[n] for n in bar.exact if n in found}
    _hold(bar, kept, (one, bin(wanted)), call.given.get("logsumexp"))


def broken(draw: st.DrawFn) -> None:
    """NaN or infinity in one sample: others keep their bits, and NaN breaks no pose that the reference has whole.

    Within a pose NaN may spread: a kernel joins its values sooner. What an infinity does to its own sample is not
    defined: votes are relative to a parent's mean, and then some of them are NaN.
    """
    routing = draw(ROUTING)
    one = draw(case(routing))
    hypothesis.assume(one.batch > 1)
    call = routing.call(one, draw(SEED))
    parts = {"given": dict(call.given), "grads": dict(call.grads)}
    leading = ("children", "gate", *routing.state)  # their samples come first
    names = [("given", n) for n in leading if isinstance(call.given[n], Tensor)] + [("grads", n) for n in call.grads]
    part, key = draw(st.sampled_from(names))
    number = draw(st.sampled_from((torch.nan, torch.inf, -torch.inf)))
    sample, at = draw(st.integers(0, one.batch - 1)), draw(st.integers(0, 1 << 20))
    parts[part][key] = parts[part][key].clone()
    flat = parts[part][key][sample].view(-1)
    flat[at % flat.numel()] = number
    spoilt = replace(call, **parts)
    clean, other = call.training(Call.by_op), spoilt.training(Call.by_op)
    rest = [b for b in range(one.batch) if b != sample]
    what = f"{part} {key} of sample {sample} is {number} (at {at}): {one!r}"
    for result in clean.keys() & {*routing.results, *(f"d{n}" for n in leading)}:
        both = [_bits({result: found[result][rest]}) for found in (clean, other)]
        assert both[0] == both[1], f"{result} of others moved: {what}"
    if number == number:
        return
    with backends.backend("reference"):
        wide = spoilt.having([None if t is None else t.double() for t in spoilt.tensors]).training(Call.by_op)
    for result in wide.keys() & {"dchildren", "dweight"}:
        torn, allowed = ((~found[result].isfinite()).flatten(-2).any(-1) for found in (other, wide))
        assert not (torn & ~allowed).any(), f"{result} is not finite in poses that the reference has whole: {what}"


def _odd(value: Any, k: int) -> list[Any]:
    """Return what a wrong or odd argument may be in the place of a right one; ``k`` is the axis or entry that errs."""
    if isinstance(value, Tensor):
        whole = value if value.dim() else value[None]
        k %= whole.dim()
        shapes = [whole.unsqueeze(k), whole.narrow(k, 0, 0), whole.narrow(k, 0, min(1, whole.shape[k])),
                  whole.repeat_interleave(2, k), whole.transpose(0, -1)]  # fmt: skip
        kinds = (torch.double, torch.float, torch.half, torch.long, torch.complex64, "meta")
        return [*shapes, *(value.to(kind) for kind in kinds if kind != value.dtype), None]
    if isinstance(value, (list, tuple)):
        k %= max(len(value), 1)
        wrong = [[*value[:k], number, *value[k + 1 :]] for number in (-1, 0, 1 << 33, (1 << 62) + 1)]
        return [[*value[:k], *value[k + 1 :]], [*value, 1], *wrong]
    if isinstance(value, bool):
        return [None]
    if isinstance(value, int):
        return [-1, 0, value + 1, -(1 << 62)]
    return [float("nan"), float("inf"), -1.0] if isinstance(value, float) else [torch.zeros(1), -1, "odd"]


def _told(run: Callable[[], Any], what: str) -> Any:
    """Return results, or None where an error refuses the call; any other end is a failure."""
    try:
        return run()
    except (RuntimeError, ValueError, TypeError, NotImplementedError, fastcaps.BackendError) as error:
        assert "INTERNAL ASSERT" not in str(error), f"{error}: {what}"
        return None


def wrong(draw: st.DrawFn) -> None:
    """A raw op with one argument that is wrong or odd: refused, or with results of the reference's shapes."""
    routing = draw(ROUTING)
    one, going = draw(case(routing)), draw(st.booleans())
    call: Any = routing.call(one, draw(SEED)) if going else routing.backward_call(one, draw(SEED))
    name = draw(st.sampled_from(list(call.given)))
    odd = _odd(call.given[name], draw(st.integers(0, 5)))
    which = draw(st.integers(0, len(odd) - 1))
    given = {**call.given, name: odd[which]}
    raw = routing.name if going else f"{routing.name}_backward"
    what = f"{raw}, {name}, change {which}: {one!r}"
    results = _told(lambda: getattr(torch.ops.fastcaps_cpu, raw).default(*given.values(), 0), what)
    if results is None:
        return
    with fastcaps.backend("reference"):
        reference = routing.op if going else routing.backward_op
        arguments = replace(call, given=given).arguments if going else given.values
        wanted = _told(lambda: reference(*arguments()), what)
    assert wanted is None or len(results) <= len(wanted), what
    for one_result, other in zip(results, wanted or (), strict=False):
        assert one_result.shape == other.shape, f"{list(one_result.shape)}, wanted {list(other.shape)}: {what}"


def public(draw: st.DrawFn) -> None:
    """A public function and its gradients, against the reference."""
    row, small = draw(st.sampled_from(features.ROUTINGS)), st.integers(1, 5)
    window = Window(draw(st.integers(1, 3)), draw(st.integers(1, 2)), draw(st.integers(0, 1)))
    grid = draw(st.sampled_from(((), (3, 3), (4, 5))))
    dtype = draw(st.sampled_from((torch.float32, torch.float64, torch.bfloat16)))
    parents = row.settings.get("parents", draw(small))  # of votes without matrices a fixed number
    sizes = {"types": draw(small), "grid": grid, "parents": parents, "pose": tuple(draw(small) for _ in range(3))}
    given: dict[str, Any] = row.tensors(window if grid else None, dtype, draw(small), draw(SEED), **sizes)
    for name in ("gate", "parents", *(["bias"] if row.child != "scores" else [])):  # which may be left out
        if name in given and draw(st.booleans()):
            del given[name]
    if "weight" in given and draw(st.booleans()):
        given["weight"] = given["weight"][:1]
    if "norm_weight" in row.leaves and sizes["pose"][0] * sizes["pose"][2] == 1:  # its own mean
        given = {name: tensor for name, tensor in given.items() if not name.startswith("norm")} | {"normalize": False}
    given = {**row.settings, **given, **({"window": window} if grid else {})}
    names = [n for n, v in given.items() if isinstance(v, Tensor)]

    def training(tensors: Any, name: str = "reference") -> dict[str, Tensor]:
        leaves = {n: t.detach().requires_grad_() for n, t in zip(names, tensors, strict=True)}
        with backends.backend(name):
            made = row.function(**{**given, **leaves})
            results = [made] if isinstance(made, Tensor) else list(made)
            found = features.with_gradients({f"result {k}": r for k, r in enumerate(results)}, leaves)
        return {name: x.detach() for name, x in found.items()}

    tensors = [given[n] for n in names]
    what = f"{row.function.__name__}: { {n: list(v.shape) if isinstance(v, Tensor) else v for n, v in given.items()} }"
    _hold(Bar(training, tensors), training(tensors, "cpu"), what)


KINDS = {kind.__name__: kind for kind in (op, backward, broken, wrong, public)}

# ---- seeds -----------------------------------------------------------------------------------------------------------


def run_seed(seed: int, kinds: Iterable[str], count: int, shrink: bool = False) -> bool:
    """Run the calls of a seed and print what went wrong; return whether all is well."""
    well = True
    settings = hypothesis.settings(
        max_examples=count, deadline=None, database=None, report_multiple_bugs=False,
        suppress_health_check=list(hypothesis.HealthCheck),
        phases=[phase for phase in hypothesis.Phase if shrink or phase != hypothesis.Phase.shrink],
    )  # fmt: skip
    for kind in kinds:
        test = hypothesis.given(st.data())(lambda data: KINDS[kind](data.draw))  # noqa: B023 (runs before the next)
        print("kind", seed, kind, flush=True)
        try:
            hypothesis.seed(seed)(settings(test))()
        except Exception as error:
            print(f"WRONG {kind}: {type(error).__name__}: {' '.join(str(error).split())[:1500]}", flush=True)
            well = False
    return well


def soak(minutes: float, seed: int, count: int) -> int:
    """Run seed after seed, build after build, each in a new process; print and count those that fail."""
    built = libraries.library("cpu").ask("fastcaps_capabilities_built") or ""
    levels = LEVELS[: LEVELS.index(backends.native_capability() or "default") + 1]
    settings = [{"FASTCAPS_CPU_CAPABILITY": level} for level in levels if level in built]
    if guard := guarded(ROOT / "build"):
        settings.append({"FASTCAPS_CPU_LIBRARY": str(guarded_library(ROOT / "build" / "guards"))})
    end, first, failures = time.monotonic() + 60 * minutes, seed, 0
    while time.monotonic() < end:
        setting, command = settings[seed % len(settings)], ["-m", "tools.fuzz", f"--seed={seed}", f"--count={count}"]
        try:
            done = subprocess.run([sys.executable, "-W", "ignore", *command], env={**os.environ, **setting, **guard},
                                  capture_output=True, text=True, timeout=900, cwd=ROOT)  # fmt: skip
            status, said = done.returncode, done.stdout + done.stderr
        except subprocess.TimeoutExpired as error:
            status, said = 1, f"{error}"
        if status:
            failures += 1
            lines = [line for line in said.splitlines() if line.startswith("WRONG")] or said.splitlines()[-20:]
            print(setting, "python", *command, f"ends with {status}:", *lines, sep="\n  ", flush=True)
        seed += 1
    print(f"seeds {first} to {seed - 1}: {failures} failed")
    return failures


def main(arguments: Iterable[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Calls drawn at random, held to the rule of bench.judge.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=15, help="calls of each kind")
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=list(KINDS))
    parser.add_argument("--shrink", action="store_true", help="make a failing call as small as it goes")
    parser.add_argument("--minutes", type=float, help="for so long, seed after seed from the first one")
    given = parser.parse_args(None if arguments is None else list(arguments))
    if given.minutes:
        return 1 if soak(given.minutes, given.seed, given.count) else 0
    return 0 if run_seed(given.seed, given.kinds, given.count, given.shrink) else 1


if __name__ == "__main__":
    sys.exit(main())
