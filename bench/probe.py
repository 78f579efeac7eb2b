"""What a process of the GPU's map does: it makes a row's call, checks it on a slice, times and counts it.

A row takes about half a second: alternatives that take longer to compile than to run are measured by themselves
(:mod:`bench.gpu`). Without a GPU it uses the host's clock and counts nothing, so that the tests can run it.
"""

from __future__ import annotations

import ctypes
import gc
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from bench import sweep
from bench.alternatives import OURS, build, is_compiled, runner
from bench.gate import SAME, Gate
from bench.judge import largest, largest_error
from bench.timing import quantiles
from bench.workload import PRECISIONS, Case, Inputs, Workload, is_batched, size_of
from bench.workloads import find
from fastcaps import backends, libraries

Call = Callable[[], dict[str, torch.Tensor]]
TRITON = f"{OURS}-triton"  # this package by its Triton kernels, whatever else it has

WARM = 0.04  # seconds that a row's timed calls take together; as many again with a cold cache, and in a graph
CALLS = (3, 60)  # timed calls: at least, at most
LONG = 0.02  # seconds of a call to whose time a cold cache adds nothing
SMALL = 5e-4  # seconds below which a call is always timed in a replayed graph, too
IN_GRAPH = 8  # calls of a graph
FLUSH = 2**28  # bytes that a write between two calls leaves in the second-level cache instead of the call's inputs
DRAWS = 3  # that a gate may make: each takes as long as a reference in float64
HOPPER = (132, 227 << 10)  # multiprocessors, and a block's shared memory: to list schedules without a GPU
KERNELS = 12  # that a row names, of those that take longest


class Clock:
    """Times calls on one device: between two events, or by the host's clock on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.on_gpu = device, device.type == "cuda"

    def wait(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize(self.device)

    @cached_property
    def _dirt(self) -> torch.Tensor:
        return torch.empty(FLUSH if self.on_gpu else 2**20, dtype=torch.int8, device=self.device)

    def one(self, call: Callable[[], Any], calls: int = 1) -> float:
        """Return the seconds of some calls in a row, from when the device is idle."""
        self.wait()
        if not self.on_gpu:
            start = time.perf_counter()
            for _ in range(calls):
                call()
            return (time.perf_counter() - start) / calls
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(calls):
            call()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3 / calls

    def samples(self, call: Callable[[], Any], estimate: float, cold: bool = False) -> list[float]:
        """Return the seconds of single calls, queued behind each other; ``cold``: each behind a write that empties the
        second-level cache. Where a call takes less than its launches, these show."""
        count = int(min(max(WARM / max(estimate, 1e-9), CALLS[0]), CALLS[1]))
        if not self.on_gpu:
            return [self.one(call) for _ in range(count)]
        pairs = [tuple(torch.cuda.Event(enable_timing=True) for _ in range(2)) for _ in range(count)]
        self.wait()
        for begin, end in pairs:
            if cold:
                self._dirt.zero_()
            begin.record()
            call()
            end.record()
        self.wait()
        return [begin.elapsed_time(end) / 1e3 for begin, end in pairs]

    def host(self, call: Callable[[], Any]) -> float:
        """Return the median of the seconds that a call keeps the host, the device being idle before."""
        taken = []
        for _ in range(15):
            self.wait()
            start = time.perf_counter()
            call()
            taken.append(time.perf_counter() - start)
        return quantiles(taken)["median"]

    def graph(self, call: Callable[[], Any]) -> dict[str, Any]:
        """Return quantiles of a call's share of a CUDA graph that holds several, or why it ``failed``."""
        graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.Stream()
        try:
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                call()
            torch.cuda.current_stream().wait_stream(stream)
            with torch.cuda.graph(graph):
                for _ in range(IN_GRAPH):
                    call()
            estimate = self.one(graph.replay, 3)
            found = quantiles([each / IN_GRAPH for each in self.samples(graph.replay, estimate)])
        except Exception as error:
            found = {"failed": f"{type(error).__name__}: {str(error).partition(chr(10))[0][:200]}"}
            with suppress(Exception):
                torch.cuda.synchronize(self.device)
        finally:
            del graph
        return found


def counted(call: Callable[[], Any]) -> dict[str, Any]:
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
    """Makes, checks and times rows on one device, in this process. ``most`` is the largest batch."""

    def __init__(self, device: str, most: int) -> None:
        self.device, self.most = torch.device(device), most
        self.clock = Clock(self.device)
        self._made: tuple[Any, ...] = ()  # workload, batch and precision of the inputs, and they themselves
        self._gates: dict[tuple[Any, ...], Gate] = {}

    def describe(self) -> dict[str, Any]:
        """Return the device, and its ``rates``: ``copy`` in bytes a second, read and written, and the operations a
        second of a large product by precision, with random numbers, on which a device's clock depends."""
        about: dict[str, Any] = {"cuda": torch.version.cuda, "backend": self.first_backend()}
        if self.clock.on_gpu:
            found = torch.cuda.get_device_properties(self.device)
            about |= {"device": found.name, "capability": f"{found.major}.{found.minor}", "memory": found.total_memory}
        count, size = (2**30, 8192) if self.clock.on_gpu else (2**22, 256)
        source = torch.randn(count // 4, device=self.device)
        target = torch.empty_like(source)
        rates = {"copy": 2 * count / self._median(partial(target.copy_, source))}
        for name, precision in PRECISIONS.items():
            left, right = (torch.randn(size, size, device=self.device).to(precision.dtype) for _ in range(2))
            precision.use()
            rates[name] = 2 * size**3 / self._median(partial(torch.mm, left, right))
        return about | {"rates": rates}

    def first_backend(self) -> str:
        """Return which backend calls on the device go to."""
        names = [entry.name for entry in backends.listing() if entry.available]
        return names[0] if self.clock.on_gpu else next(name for name in names if name in ("cpu", "reference"))

    def _median(self, call: Callable[[], Any]) -> float:
        estimate = min(self.clock.one(call) for _ in range(2))
        return quantiles(self.clock.samples(call, estimate))["median"]

    def _inputs(self, work: Workload, batch: int, precision: str) -> Inputs:
        """Return a row's inputs: the first samples of those at the largest batch, so that results are alike."""
        most = max(batch, work.batch if work.copies > 1 else self.most)
        wanted = work.name, most, precision
        if self._made[:3] != wanted:
            self._made = ()
            self.clean()
            made = work.inputs(most, self.device).to(self.device)  # a routing may make a constant on the CPU
            self._made = (*wanted, made.to(PRECISIONS[precision].dtype))
        inputs: Inputs = self._made[3].each(lambda _, tensor: tensor.detach())
        return inputs if batch == most else inputs.samples(slice(0, batch))

    def _gate(self, keeps: bool) -> Gate:
        """Return the gate of the inputs that were made last; ``keeps`` the others', as long as the process lives."""
        name, most, precision, inputs = self._made
        if (name, most, precision) not in self._gates:
            if not keeps:
                self._gates.clear()
            work = find(name)
            work = replace(work, checked=2 if work.copies == 1 else None)
            inputs = self._without_others(work, inputs)
            gate = self._gates[name, most, precision] = Gate(work, inputs, PRECISIONS[precision].tf32)
            gate.most_draws = DRAWS
        return self._gates[name, most, precision]

    def clean(self) -> None:
        gc.collect()
        if self.clock.on_gpu:
            torch.cuda.empty_cache()

    def prepare(self, name: str, batch: int, training: bool, precision: str, how: str = OURS) -> dict[str, Any]:
        """Make a row's call, which is compiled here if it is, and check it: ``errors``, ``allowed``, ``complaint``."""
        work = find(name)
        PRECISIONS[precision].use()
        if is_compiled(how):
            torch._dynamo.reset()
        inputs = self._inputs(work, batch, precision)
        run = build(OURS if how == TRITON else how, work, batch=batch)
        if how == TRITON:
            run = backends.backend("triton")(run)  # type: ignore[operator]
        self._case, self._how = Case(work, batch, training, precision), how
        found = self._checked(inputs, run)
        self._call = runner(run, inputs, training)
        if is_compiled(how):
            self._call()  # compiled for inputs with these gradients
            self.clean()  # what this process need not keep, others need
        return found

    def time(self) -> dict[str, Any]:
        """Return the figures of the call that was prepared last: ``warm``, ``cold``, ``graph`` (quantiles of seconds),
        ``host``, ``memory``, and what :func:`counted` finds."""
        call = self._call
        estimate = min(self.clock.one(call), self.clock.one(call, 2))
        row: dict[str, Any] = {"warm": quantiles(self.clock.samples(call, estimate))}
        if estimate < LONG:
            row["cold"] = quantiles(self.clock.samples(call, estimate, cold=True))
        if self.clock.on_gpu:
            row |= self._on_gpu(call, estimate, counts=self._how in (OURS, TRITON))
        return row

    def row(self, *what: Any) -> dict[str, Any]:
        """Prepare and time a row."""
        return self.prepare(*what) | self.time()

    def variants(self, name: str, batch: int, training: bool, precision: str) -> list[str]:
        """Prepare a row, and return the settings of FASTCAPS_SCHEDULE that its pass can be tried with."""
        self.prepare(name, batch, training, precision)
        self._wanted = {result: one.clone() for result, one in self._call().items()}
        work, dtype = find(name), PRECISIONS[precision].dtype
        grid, window = work.grid or (1, 1), work.window
        sizes = (
            *(batch, *grid, work.types, work.rows, work.columns_in, *(work.output_grid or (1, 1)), work.parents),
            *(work.columns_out, work.matrices, *(window.spec if window else (1, 1, 1, 1, 0, 0, 1, 1))),
        )
        element = (torch.float32, torch.float64, torch.bfloat16, torch.float16).index(dtype)
        limits = HOPPER
        if self.clock.on_gpu:
            about = torch.cuda.get_device_properties(self.device)
            limits = about.multi_processor_count, about.shared_memory_per_block_optin
        given = self._made[3].arguments
        bias = 0 if "bias" not in given else 1 if given["bias"].shape[0] == 1 else 2
        options = backends.ALLOW_TF32 if PRECISIONS[precision].tf32 else 0
        facts = (int(training), element, bias, int("parents" in given), work.routing.iterations, options, *limits)
        in_c = ((ctypes.c_int64 * len(numbers))(*numbers) for numbers in (sizes, facts))
        if training or libraries.library("cuda").ask("fastcaps_cuda_routing_refusal", work.routing.subject, *in_c):
            facts = (*facts[:4], 1, *facts[5:])  # a launch has one iteration
        return sweep.variants(not training, work.routing.subject, sizes, facts)

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
            estimate = min(self.clock.one(self._call), self.clock.one(self._call, 2))
            return {"warm": quantiles(self.clock.samples(self._call, estimate)), "complaint": complaint}

    def _on_gpu(self, call: Call, estimate: float, counts: bool) -> dict[str, Any]:
        found: dict[str, Any] = {}
        self.clock.wait()
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        results = size_of(call().values())
        self.clock.wait()
        growth = torch.cuda.max_memory_allocated(self.device) - before
        found["memory"] = {"peak": growth, "results": results, "beyond": max(0, growth - results)}
        if counts:
            found["host"] = self.clock.host(call)
            try:
                found |= counted(call)
            except Exception as error:  # a profiler that another one keeps out, say: the times stand without
                found["uncounted"] = f"{type(error).__name__}: {error}"[:200]
        launches_show = "busy" in found and found["busy"] < 0.8 * estimate
        if launches_show or estimate < SMALL:
            found["graph"] = self.clock.graph(call)
        return found

    def _checked(self, inputs: Inputs, run: Any) -> dict[str, Any]:
        """Hold a call to the gate on the first and the last sample of the largest batch; at a smaller one, what has a
        batch on the first."""
        own = self._how in (OURS, TRITON)
        gate, share = self._gate(keeps=own), 0.0 if own else max(SAME, PRECISIONS[self._case.precision].epsilon)
        if self._case.batch == self._made[1]:
            found = runner(run, self._without_others(gate.workload, inputs), self._case.training)()
            errors, allowed, complaints = gate.judge(found, share)
        else:
            found = {n: x[:1] for n, x in runner(run, inputs, self._case.training)().items() if is_batched(n)}
            errors = {name: largest_error(one, gate.exact[name][:1]) for name, one in found.items()}
            allowed = {name: gate.allowed(name) + share * largest(gate.exact[name][:1]) for name in found}
            late = [name for name, error in errors.items() if not error <= allowed[name]]
            complaints = [f"{name} errs by {errors[name]:.3g}, allowed {allowed[name]:.3g}" for name in late]
        return {"errors": errors, "allowed": allowed, "complaint": "; ".join(complaints)}

    @staticmethod
    def _without_others(work: Workload, inputs: Inputs) -> Inputs:
        """Return inputs with cotangents of 0 for the samples that are not checked."""
        samples = work.samples_checked(inputs.children.shape[0])
        if samples is None:
            return inputs
        grads = {}
        for name, grad in inputs.grads.items():
            grads[name] = torch.zeros_like(grad)
            grads[name][[*samples]] = grad[[*samples]]
        return replace(inputs, grads=grads)
