"""What a process of the benchmark does with a row: it makes the call, checks it, times it, and measures its memory.

On the CPU all contenders of a row take turns in one process (:meth:`Probe.compare`). On a GPU a row takes about half a
second (:meth:`Probe.row`), and alternatives, which take longer to compile than to run, are measured by themselves.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from bench import sweep
from bench.alternatives import OURS, TRITON, build, is_compiled, runner
from bench.gate import SAME, Gate, without_others
from bench.judge import largest, largest_error
from bench.process import words
from bench.timing import KEEPING, Call, Clock, Plan, peak_growth, quantiles, set_allocator, take_turns
from bench.workload import PRECISIONS, Case, Inputs, size_of
from fastcaps import backends

LONG = 0.02  # seconds of a call to whose time a cold cache adds nothing
SMALL = 5e-4  # seconds below which a call is always timed in a replayed graph, too
KERNELS = 12  # that a row names, of those that take longest


def counted(call: Call) -> dict[str, Any]:
    """Return what torch's profiler sees of one call: ``launches`` (kernels, copies, fills), ``busy``, the device's
    seconds, and the ``kernels`` that take longest, each with its launches and seconds; nothing if it sees none."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        call()
        torch.cuda.synchronize()
    kernels: dict[str, list[float]] = {}
    for event in seen.profiler.kineto_results.events():
        if event.device_type() == torch.autograd.DeviceType.CUDA and not event.name().startswith("Context Sync"):
            entry = kernels.setdefault(event.name()[:160], [0, 0.0])
            entry[0] += 1
            entry[1] += event.duration_ns() / 1e9
    if not kernels:
        return {}
    longest = sorted(([name, *entry] for name, entry in kernels.items()), key=lambda one: -one[2])
    launches, busy = (sum(entry[k] for entry in kernels.values()) for k in range(2))
    return {"launches": int(launches), "busy": busy, "kernels": longest[:KERNELS]}


class Probe:
    """Makes, checks and times rows on one device, in this process. ``most`` is the largest batch of a run on a GPU."""

    def __init__(self, device: str, most: int = 0) -> None:
        self.device, self.most = torch.device(device), most
        self.clock = Clock(self.device)
        self._made: tuple[Any, ...] = ()  # workload, batch and precision of the inputs, and they themselves
        self._gates: dict[tuple[Any, ...], Gate] = {}
        if not self.clock.on_gpu:
            set_allocator(KEEPING)

    def describe(self) -> dict[str, Any]:
        """Return the backend and, of a GPU, the device and its ``rates``: ``copy`` in bytes a second, read and written,
        and the operations a second of a large product by precision, with random numbers, on which its clock depends."""
        about: dict[str, Any] = {"backend": self.first_backend()}
        if self.clock.on_gpu:
            found = torch.cuda.get_device_properties(self.device)
            about |= {"device": found.name, "capability": f"{found.major}.{found.minor}", "memory": found.total_memory}
            about["rates"] = self._rates()
        return about

    def _rates(self) -> dict[str, float]:
        source = torch.randn(2**28, device=self.device)
        rates = {"copy": 2 * source.nbytes / self._median(partial(torch.empty_like(source).copy_, source))}
        for name, precision in PRECISIONS.items():
            left, right = (torch.randn(8192, 8192, device=self.device).to(precision.dtype) for _ in range(2))
            precision.use()
            rates[name] = 2 * 8192**3 / self._median(partial(torch.mm, left, right))
        return rates

    def first_backend(self) -> str:
        """Return which backend calls on the device go to."""
        names = [entry.name for entry in backends.listing() if entry.available]
        return names[0] if self.clock.on_gpu else next(name for name in names if name in ("cpu", "reference"))

    def _median(self, call: Call) -> float:
        call()
        return quantiles(self.clock.samples(call))["median"]

    def clean(self) -> None:
        gc.collect()
        if self.clock.on_gpu:
            torch.cuda.empty_cache()

    # ---- checked calls -----------------------------------------------------------------------------------------------

    def _inputs(self, case: Case) -> Inputs:
        """Return a row's inputs: samples of those at the largest batch, so that one gate serves several batches."""
        work, precision = case.workload, case.precision
        most = max(case.batch, work.batch if work.copies > 1 else self.most)
        if self._made[:3] != (work.name, most, precision):
            self._made = ()
            self.clean()
            made = work.inputs(most, self.device).to(self.device)  # a routing may make a constant on the CPU
            self._made = (work.name, most, precision, made.to(PRECISIONS[precision].dtype))
        inputs: Inputs = self._made[3].first_and_last(case.batch)
        return inputs

    def _gate(self, case: Case, inputs: Inputs, keeps: bool) -> Gate:
        """Return a row's gate; ``keeps`` the others', as long as the process lives."""
        wanted = case.workload.name, self._made[1], case.precision, min(case.batch, 2)
        if wanted not in self._gates:
            if not keeps:
                self._gates.clear()
            self._gates[wanted] = Gate(case.workload, inputs, PRECISIONS[case.precision].tf32)
        return self._gates[wanted]

    def prepare(self, case: Case, how: str = OURS, safe: bool = False) -> dict[str, Any]:
        """Make a row's call (compile it) and check it. Returns ``errors``, ``allowed`` and ``complaint``."""
        precision, ours = PRECISIONS[case.precision], how in (OURS, TRITON)
        precision.use()
        if is_compiled(how):
            torch._dynamo.reset()
        inputs, run = self._inputs(case), build(how, case.workload, case.batch, safe)
        gate = self._gate(case, inputs, keeps=ours and self.clock.on_gpu)
        found = runner(run, without_others(inputs), case.training)()
        verdict = gate.judge(found, 0.0 if ours else max(SAME, precision.epsilon))
        self._case, self._how, self._call = case, how, runner(run, inputs, case.training)
        if is_compiled(how):
            self._call()  # compiled for inputs with these gradients
            self.clean()  # what this process need not keep, others need
        return {"errors": verdict.errors, "allowed": verdict.allowed, "complaint": "; ".join(verdict.complaints)}

    def time(self) -> dict[str, Any]:
        """Return the figures of the call that was prepared last: ``warm``, ``cold``, ``graph`` (quantiles of seconds),
        ``host``, ``memory``, and what :func:`counted` finds."""
        self._call()
        row: dict[str, Any] = {"warm": quantiles(self.clock.samples(self._call))}
        if row["warm"]["median"] < LONG:
            row["cold"] = quantiles(self.clock.samples(self._call, cold=True))
        if self.clock.on_gpu:
            row |= self._on_gpu(self._call, row["warm"]["median"])
        return row

    def row(self, case: Case, how: str) -> dict[str, Any]:
        """Prepare and time a row."""
        return self.prepare(case, how) | self.time()

    def _on_gpu(self, call: Call, took: float) -> dict[str, Any]:
        self.clock.wait()
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        results = size_of(call().values())
        self.clock.wait()
        growth = torch.cuda.max_memory_allocated(self.device) - before
        found: dict[str, Any] = {"memory": {"peak": growth, "results": results, "beyond": max(0, growth - results)}}
        if self._how in (OURS, TRITON):
            found["host"] = self.clock.host(call)
            try:
                found |= counted(call)
            except Exception as error:  # a profiler that another one keeps out, say: the times remain
                found["uncounted"] = words(error)
        if found.get("busy", took) < 0.8 * took or took < SMALL:  # launches show
            found["graph"] = self.clock.graph(call)
        return found

    # ---- on the CPU: contenders in turns, and memory -----------------------------------------------------------------

    def compare(self, case: Case, names: Sequence[str], plan: Plan, safe: bool) -> dict[str, dict[str, Any]]:
        """Check all contenders, then time those that are right in turns; return an entry of each. ``safe``: compiled
        ones without vectorised loop tails, with which those are built again, too, whose results are wrong."""
        entries: dict[str, dict[str, Any]] = {}
        calls = {}
        for name in names:
            try:
                entry = self.prepare(case, name, safe)
                if entry["complaint"] and is_compiled(name) and not safe:
                    entry = self.prepare(case, name, True) | {"note": "wrong result; run again"}
            except Exception as error:
                entry = {"failed": words(error)}
            entries[name] = entry
            if not entry.get("complaint", "failed"):
                calls[name] = self._call
            elif name == OURS:
                return entries
        for name, times in take_turns(calls, plan).items():
            entries[name]["warm"] = times
        return entries

    def memory(self, case: Case, how: str) -> dict[str, int]:
        """Return the bytes of one call on the CPU, in a process that ought to be fresh: ``peak`` growth of resident
        memory, ``results`` that were returned, and the rest, ``beyond``."""
        work = case.workload
        size = {"grid": work.grid and (work.kernel_size, work.kernel_size), "groups": work.groups and 1, "copies": 1}
        small = replace(work, batches=(1,), types=1, parents=min(2, work.parents), **size)
        runner(build(how, small, 1), small.inputs(1), case.training)()  # has code loaded, and threads started
        call = runner(build(how, work, case.batch), work.inputs(case.batch), case.training)
        growth, found = peak_growth(call)
        results = size_of(found.values())
        return {"peak": growth, "results": results, "beyond": max(0, growth - results)}

    # ---- schedules of a build for experiments ------------------------------------------------------------------------

    def variants(self, case: Case) -> list[str]:
        """Prepare a row, and return the settings of FASTCAPS_SCHEDULE that its pass can be tried with."""
        self.prepare(case)
        self._wanted = {result: one.clone() for result, one in self._call().items()}
        limits = sweep.HOPPER
        if self.clock.on_gpu:
            about = torch.cuda.get_device_properties(self.device)
            limits = about.multi_processor_count, about.shared_memory_per_block_optin
        return sweep.of_case(case, self._made[3].arguments, limits)

    def setting(self, setting: str) -> dict[str, Any]:
        """Return the quantiles of the prepared call under a setting, and a ``complaint`` if its results are not the
        default's; or why it ``failed``."""
        with sweep.scheduled(setting):
            try:
                found = self._call()
            except RuntimeError as error:  # this call cannot have the setting
                return {"failed": str(error).partition("\n")[0][:300]}
            apart = max(largest_error(one, self._wanted[name]) / max(largest(self._wanted[name]), 1e-30)
                        for name, one in found.items())  # fmt: skip
            limit = max(SAME, 4 * PRECISIONS[self._case.precision].epsilon)
            complaint = "" if apart <= limit else f"its results are {apart:.2g} from the default's"
            return {"warm": quantiles(self.clock.samples(self._call)), "complaint": complaint}
