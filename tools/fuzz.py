"""Calls drawn at random, of the public functions and of the raw ops, right and wrong: ``make soak``.

    PYTHONPATH=tests python -m tools.fuzz --minutes 5           # seed after seed, on every instruction set
    PYTHONPATH=tests python -m tools.fuzz --seed 17 --shrink    # a failing call of one seed, as small as it goes

A right call is held to the rule of ``fastcaps._testing.judge`` against the reference, must have the same bits on any
number of threads, and NaN or infinity must not leave its sample. A wrong one is refused, or as right as any other.
Hypothesis draws, and shrinks what fails; the same seed draws the same calls. With ``--minutes`` each seed has its own
process, whose tensors end at guard pages (``tests/guard_pages.c``): an access beyond ends it, and the report names the
seed. One more build of the library has such pages behind its scratch memory too.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
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
from fastcaps import backends
from fastcaps._testing.judge import Bar, largest
from fastcaps.functional import Window
from fastcaps.rules import Rule
from fastcaps.votes import SET_WINDOW
from tools.native import LEVELS, ROOT, guarded, guarded_library

THREADS = (1, 2, 3, 7)
MOST = 1 << 19  # multiply-adds of a call
OWN_POSES = ((4, 4, 4), (6, 6, 6), (8, 8, 8), (1, 8, 16), (1, 16, 16), (1, 64, 64), (1, 64, 2), (1, 2, 2), (1, 8, 8))

# ---- what is drawn ---------------------------------------------------------------------------------------------------


@st.composite
def case(draw: st.DrawFn, routing: Routing, peaked: bool = False) -> Case:
    """Draw a call as the tests do, then with odd and usual poses, and few or many positions, children and parents.

    ``peaked``: with peaked coefficients and many children, which share what they can.
    """
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
    if peaked:
        shared = st.sampled_from(("1M", "11"))
        one = replace(one, window=SET_WINDOW, grid=(1, 1), types=draw(st.sampled_from((31, 33, 64, 70))), size=30.0,
                      groups=draw(st.sampled_from(("one", "own"))), bias=draw(shared), betas=draw(shared),
                      batch=1 + one.batch % 2, parents=min(one.parents, 17), gate=draw(st.sampled_from((None, "some"))),
                      dtype=torch.float32, start=False)  # fmt: skip
    hypothesis.assume(one.products <= MOST)
    return one


def _rearranged(draw: st.DrawFn, given: dict[str, Any]) -> dict[str, Any]:
    """Return arguments of which each tensor lies in memory in its own way."""
    layouts = st.sampled_from([LAYOUTS[name] for name in LAYOUTS if name != "expanded"])
    return {n: draw(layouts)(v) if isinstance(v, Tensor) and v.dim() else v for n, v in given.items()}


def _bits(results: dict[str, Tensor]) -> dict[str, bytes]:
    copies = {n: x.clone(memory_format=torch.contiguous_format) for n, x in results.items()}
    return {n: x.flatten().view(torch.uint8).numpy().tobytes() for n, x in copies.items()}


def _hold(bar: Bar, found: dict[str, Tensor], what: Any, logsumexp: Tensor | None = None) -> None:
    """Hold results to twice what the rule allows, an estimate above which some of thousands of calls lie; and besides
    to the last place of pooling's log-sum-exp, from which its shares are made again."""
    share = 0.0 if logsumexp is None else bar.rounding.epsilon * largest(logsumexp)
    said = bar.judge(found, share)
    close = said.errors and all(error <= 2 * said.allowed[n] for n, error in said.errors.items())
    assert not said.complaints or close, f"{said.complaints}: {what!r}"


def _same_bits(run: Callable[[], dict[str, Tensor]], threads: int, what: Any) -> dict[str, Tensor]:
    torch.set_num_threads(1)
    alone = run()
    torch.set_num_threads(threads)
    assert _bits(run()) == _bits(alone), f"{threads} threads give other bits: {what!r}"
    return alone


# ---- kinds of calls --------------------------------------------------------------------------------------------------

ROUTING, SEED = st.sampled_from(ROUTINGS), st.integers(0, 99)


def op(draw: st.DrawFn, peaked: bool = False) -> None:
    """Results and every gradient of an op, through autograd."""
    routing = draw(ROUTING)
    one = draw(case(routing, peaked))
    call = routing.call(one, draw(SEED))
    call = replace(call, given=_rearranged(draw, call.given), grads=_rearranged(draw, call.grads))
    found = _same_bits(lambda: call.training(Call.by_op), draw(st.sampled_from(THREADS)), one)
    _hold(call.bar(), found, one, found.get("logsumexp"))


def shared(draw: st.DrawFn) -> None:
    """The same with peaked coefficients, of which gradients of what children share are small sums of large terms."""
    op(draw, peaked=True)


def backward(draw: st.DrawFn) -> None:
    """The backward op of several iterations, of which any gradients may be wanted."""
    routing = draw(ROUTING)
    one = draw(case(routing))
    seed, wanted = draw(SEED), draw(st.integers(0, (1 << len(routing.gradients)) - 1))
    whole = routing.backward_call(one, seed).given["needs"]
    call = routing.backward_call(one, seed, whole & wanted & ((1 << len(routing.gradients)) - 1))
    call = BackwardCall(routing, _rearranged(draw, call.given))
    found = _same_bits(lambda: call.results(routing.backward_op), draw(st.sampled_from(THREADS)), one)
    bar = call.bar()
    kept = {n: found[n] for n in bar.exact if n in found}
    _hold(bar, kept, (one, bin(call.given["needs"])), call.given.get("logsumexp"))


def broken(draw: st.DrawFn) -> None:
    """NaN or infinity in one sample: others keep their bits, and NaN breaks no pose that the reference has whole.

    Within a pose NaN may spread: a kernel joins its values sooner. What an infinity does to its own sample is not
    defined: votes are relative to a parent's mean, and then some of them are NaN.
    """
    routing = draw(ROUTING)
    one = draw(case(routing))
    hypothesis.assume(one.batch > 1)
    call = routing.call(one, draw(SEED))
    names = [n for n in ("children", "gate", *routing.state) if isinstance(call.given[n], Tensor)]
    name = draw(st.sampled_from([*names, *(f"grad of {n}" for n in call.grads)]))
    number = draw(st.sampled_from((torch.nan, torch.inf, -torch.inf)))
    sample, at = draw(st.integers(0, one.batch - 1)), draw(st.integers(0, 1 << 20))

    parts = {"given": dict(call.given), "grads": dict(call.grads)}
    part, key = parts["grads" if name.startswith("grad of ") else "given"], name.removeprefix("grad of ")
    part[key] = part[key].clone()
    flat = part[key][sample].view(-1)
    flat[at % flat.numel()] = number
    spoilt = replace(call, **parts)
    clean, other = call.training(Call.by_op), spoilt.training(Call.by_op)
    rest = [b for b in range(one.batch) if b != sample]
    what = f"{name} of sample {sample} is {number} (at {at}): {one!r}"
    lead = {*routing.results, *(f"d{n}" for n in ("children", "gate", *routing.state))}  # their samples come first
    for result, value in ((n, x) for n, x in clean.items() if n in lead):
        assert _bits({result: value[rest]}) == _bits({result: other[result][rest]}), f"{result} of others moved: {what}"
    if number == number:
        return
    with backends.backend("reference"):
        wide = spoilt.having([None if t is None else t.double() for t in spoilt.tensors]).training(Call.by_op)
    for result in ("dchildren", "dweight"):
        if result in wide:
            torn, allowed = ((~found[result].isfinite()).flatten(-2).any(-1) for found in (other, wide))
            assert not (torn & ~allowed).any(), f"{result} is not finite in poses that the reference has whole: {what}"


def _spoil(draw: st.DrawFn, given: dict[str, Any], names: list[str]) -> tuple[dict[str, Any], str]:
    """Return arguments one of which is wrong, or odd, and which."""
    name = draw(st.sampled_from(names))
    value = given[name]
    k = draw(st.integers(0, max(value.dim() - 1 if isinstance(value, Tensor) else 5, 0)))
    if isinstance(value, Tensor):
        long = value.dim() > 0 and value.shape[k] > 0
        changes = [
            lambda: value.unsqueeze(k),
            lambda: value.select(k, 0) if long else value[None],
            lambda: value.narrow(k, 0, 0) if value.dim() else value[None],
            lambda: value.repeat_interleave(2, k) if value.dim() else value[None],
            lambda: value.narrow(k, 0, 1) if long else value[None],
            lambda: value.transpose(0, -1) if value.dim() else value[None],
            lambda: value.double() if value.dtype != torch.float64 else value.float(),
            *(partial(value.to, kind) for kind in (torch.half, torch.long, torch.complex64, "meta")),
            lambda: None,
        ]
    else:
        odd: list[Any] = [torch.zeros(1), -1, "odd"]
        if isinstance(value, bool):
            odd = [None]
        elif isinstance(value, int):
            odd = [-1, 0, value + 1, -(1 << 62)]
        elif isinstance(value, float):
            odd = [float("nan"), float("inf"), -1.0]
        elif isinstance(value, (list, tuple)):
            k = min(k, max(len(value) - 1, 0))
            numbers = [[*value[:k], wrong, *value[k + 1 :]] for wrong in (-1, 0, 1 << 33, (1 << 62) + 1)]
            odd = [value[:k] + value[k + 1 :], [*value, 1], *numbers]
        changes = [lambda one=one: one for one in odd]
    which = draw(st.integers(0, len(changes) - 1))
    return {**given, name: changes[which]()}, f"{name}, change {which}"


def _told(run: Callable[[], Any], what: Any) -> tuple[Any, str]:
    """Return results, or the one line that refuses; any other end is a failure."""
    try:
        return run(), ""
    except (RuntimeError, ValueError, TypeError, NotImplementedError, fastcaps.BackendError) as error:
        said = str(error)
        assert "INTERNAL ASSERT" not in said, f"{said}: {what}"
        return None, f"{type(error).__name__}: {said}"


def wrong(draw: st.DrawFn) -> None:
    """A raw op with one argument that is wrong or odd: refused, or as right as any other call."""
    routing = draw(ROUTING)
    one = draw(case(routing))
    going = draw(st.booleans())
    call: Any = routing.call(one, draw(SEED)) if going else routing.backward_call(one, draw(SEED))
    given, what = _spoil(draw, call.given, list(call.given))
    name = routing.name if going else f"{routing.name}_backward"
    what = f"{name}, {what}: {one!r}"
    results, said = _told(lambda: getattr(torch.ops.fastcaps_cpu, name).default(*given.values(), 0), what)
    if said:
        return
    op = routing.op if going else routing.backward_op
    with fastcaps.backend("reference"):
        arguments = replace(call, given=given).arguments if going else given.values
        wanted, refused = _told(lambda: op(*arguments()), what)
    assert refused or len(results) <= len(wanted), what
    for one_result, other in zip(results, wanted or (), strict=False):
        assert one_result.shape == other.shape, f"{list(one_result.shape)}, wanted {list(other.shape)}: {what}"


@st.composite
def function(draw: st.DrawFn) -> tuple[Callable[..., Any], dict[str, Any]]:
    """Draw a public function and right arguments of it."""
    row = draw(st.sampled_from(features.ROUTINGS))
    small = st.integers(1, 5)
    window = Window(draw(st.integers(1, 3)), draw(st.integers(1, 2)), draw(st.integers(0, 1)))
    grid = draw(st.sampled_from(((), (3, 3), (4, 5))))
    dtype = draw(st.sampled_from((torch.float32, torch.float64, torch.bfloat16)))
    sizes = {"types": draw(small), "grid": grid, "parents": draw(small), "pose": tuple(draw(small) for _ in range(3))}
    given: dict[str, Any] = row.tensors(window if grid else None, dtype, draw(small), draw(SEED), **sizes)
    for name in ("gate", "parents", *(["bias"] if row.child != "scores" else [])):  # which may be left out
        if name in given and draw(st.booleans()):
            del given[name]
    if "weight" in given and draw(st.booleans()):
        given["weight"] = given["weight"][:1]
    if "norm_weight" in row.leaves and sizes["pose"][0] * sizes["pose"][2] == 1:  # its own mean
        given = {name: tensor for name, tensor in given.items() if not name.startswith("norm")} | {"normalize": False}
    return row.function, {**row.settings, **given, **({"window": window} if grid else {})}


def public(draw: st.DrawFn) -> None:
    """A public function and its gradients, against the reference."""
    run, given = draw(function())
    names = [n for n, v in given.items() if isinstance(v, Tensor)]

    def training(tensors: Any, name: str = "reference") -> dict[str, Tensor]:
        leaves = {n: t.detach().requires_grad_() for n, t in zip(names, tensors, strict=True)}
        with backends.backend(name):
            made = run(**{**given, **leaves})
            results = [made] if isinstance(made, Tensor) else list(made)
            found = features.with_gradients({f"result {k}": r for k, r in enumerate(results)}, leaves)
        return {name: x.detach() for name, x in found.items()}

    tensors = [given[n] for n in names]
    what = f"{run.__name__}: { {n: list(v.shape) if isinstance(v, Tensor) else v for n, v in given.items()} }"
    _hold(Bar(training, tensors), training(tensors, "cpu"), what)


def misused(draw: st.DrawFn) -> None:
    """A public function with one argument that is wrong or odd: one line that refuses, or results."""
    run, given = draw(function())
    given, what = _spoil(draw, given, list(given))
    what = f"{run.__name__}, {what}"
    _, said = _told(lambda: run(**given), what)
    assert "\n" not in said, f"more than one line: {said}: {what}"


KINDS = {kind.__name__: kind for kind in (op, shared, backward, broken, wrong, public, misused)}


# ---- seeds -----------------------------------------------------------------------------------------------------------


def run_seed(seed: int, kinds: Iterable[str], count: int, shrink: bool = False) -> bool:
    """Run the calls of a seed and print how many there were and what went wrong; return whether all is well."""
    counted: list[str] = []
    well = True
    settings = hypothesis.settings(
        max_examples=count, deadline=None, database=None, report_multiple_bugs=False,
        suppress_health_check=list(hypothesis.HealthCheck),
        phases=[phase for phase in hypothesis.Phase if shrink or phase != hypothesis.Phase.shrink],
    )  # fmt: skip
    for kind in kinds:

        @hypothesis.seed(seed)
        @settings
        @hypothesis.given(data=st.data())
        def test(data: st.DataObject) -> None:
            KINDS[kind](data.draw)  # noqa: B023 (it runs before the next kind)
            counted.append(kind)  # noqa: B023

        print("kind", seed, kind, flush=True)
        try:
            test()
        except Exception as error:
            print(f"WRONG {kind}: {type(error).__name__}: {' '.join(str(error).split())[:1500]}", flush=True)
            well = False
    print(f"calls {len(counted)}", flush=True)
    return well


# ---- many seeds ------------------------------------------------------------------------------------------------------


def _process(setting: dict[str, str], *arguments: str) -> tuple[int, str]:
    """Run Python in the checkout with more variables; return its exit status and all that it said."""
    variables = {**os.environ, "PYTHONPATH": str(ROOT / "tests"), **setting}
    command = [sys.executable, "-W", "ignore", *arguments]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    try:
        done = subprocess.run(command, env=variables, timeout=900, cwd=ROOT, **streams)  # type: ignore[call-overload]
    except subprocess.TimeoutExpired:
        return 1, "WRONG: it does not come to an end"
    return done.returncode, done.stdout


def soak(minutes: float, first: int, count: int) -> int:
    """Run seed after seed, instruction set after instruction set; print what failed."""
    asked = "from fastcaps import backends; print(backends.native_capability())"  # another where it cannot run
    settings = [{"FASTCAPS_CPU_CAPABILITY": level} for level in LEVELS]
    settings = [one for one in settings if _process(one, "-c", asked)[1].strip() in one.values()]
    if guard := guarded(ROOT / "build"):
        settings.append({"FASTCAPS_CPU_LIBRARY": str(guarded_library(ROOT / "build" / "guards"))})
    begin, seed, calls, failures = time.monotonic(), first, 0, 0
    while time.monotonic() < begin + 60 * minutes:
        setting, fuzz = settings[seed % len(settings)], ("-m", "tools.fuzz", "--seed", str(seed), "--count", str(count))
        ended, said = _process({**setting, **guard}, *fuzz)
        calls += sum(map(int, re.findall(r"^calls (\d+)", said, re.MULTILINE)))
        wrong = re.findall("^WRONG.*", said, re.MULTILINE)
        if ended and not wrong:
            wrong = [f"ended with {ended}: {' '.join(said.split())[-800:]}"]
        for line in wrong:
            variables = " ".join(f"{name}={value}" for name, value in setting.items())
            print(f"{variables} PYTHONPATH=tests python {' '.join(fuzz)}: {line}", flush=True)
        failures += len(wrong)
        seed += 1
    taken = f"{(time.monotonic() - begin) / 60:.0f} min, seeds {first} to {seed - 1}"
    print(f"{taken}: {calls} calls, {failures} failures")
    return 1 if failures else 0


def main(arguments: Iterable[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Calls drawn at random, held to the rule of fastcaps._testing.judge.")
    parser.add_argument("--seed", type=int, default=0, help="with --minutes the first")
    parser.add_argument("--count", type=int, default=15, help="calls of each kind")
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=list(KINDS))
    parser.add_argument("--shrink", action="store_true", help="make a failing call as small as it goes")
    parser.add_argument("--minutes", type=float, help="run seed after seed for so long, each in a process of its own")
    given = parser.parse_args(None if arguments is None else list(arguments))
    if given.minutes:
        return soak(given.minutes, given.seed, given.count)
    return 0 if run_seed(given.seed, given.kinds, given.count, given.shrink) else 1


if __name__ == "__main__":
    sys.exit(main())
