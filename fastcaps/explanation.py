"""What :func:`fastcaps.explain` answers: which backend runs a call, by which kernel, and why not the others."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fastcaps import backends, dispatch, libraries
from fastcaps.geometry import geometry_of

__all__ = ["Explanation", "Explanations", "explain_call"]


@dataclass(frozen=True)
class Explanation:
    """What a routing call would run on, and why not on the backends before it.

    Attributes
    ----------
    backend
        The name of the backend that runs, ``"torch"`` for the library's own convolution or matmul, or None if a forced
        backend cannot take the call.
    how
        One sentence about what runs.
    reasons
        For every backend that does not run, why not.
    forward, backward
        The kernel of each half and how it cuts the call, as the backend tells it; empty where there is nothing to tell.
    call
        The call in one line: sizes, dtype, device.
    """

    backend: str | None
    how: str
    reasons: dict[str, str]
    forward: str = ""
    backward: str = ""
    call: str = ""

    def __str__(self) -> str:
        lines = [f"{self.backend or 'nothing'}: {self.how}"]
        lines += [f"  call: {self.call}"] if self.call else []
        lines += [f"  forward: {self.forward}"] if self.forward else []
        lines += [f"  backward: {self.backward}"] if self.backward else []
        return "\n".join([*lines, *(f"  not {name}: {reason}" for name, reason in self.reasons.items())])


class Explanations(tuple[Explanation, ...]):
    """The explanations of a module's routing calls, in the order in which it makes them."""

    def __str__(self) -> str:
        return "\n".join(f"[{k}] {one}" for k, one in enumerate(self))


def _plan(
    name: str,
    stem: str,
    children: Tensor,
    weight: Tensor | None,
    geometry: tuple[int, ...],
    dtype: torch.dtype,
    backward: bool,
) -> str:
    """Return what a backend says of its kernel and cut, in one line."""
    device = children.device
    numbers = (ctypes.c_int64 * len(geometry))(*geometry)
    if name == "cpu":
        wide = int(dtype == torch.float64)
        return libraries.library("cpu").ask("fastcaps_cpu_plan", stem, numbers, int(backward), wide) or ""
    if name == "cuda":
        machine: Any = torch.cuda.get_device_properties(device)
        size, shared = machine.multi_processor_count, machine.shared_memory_per_block_optin
        how = (int(backward), dispatch.options(), int(dtype != torch.float32))
        asked = "fastcaps_cuda_plan" if stem == "attention" else f"fastcaps_cuda_{stem}_plan"
        return libraries.library("cuda").ask(asked, numbers, *how, size, shared) or ""
    if name == "triton":
        kernels: Any = libraries.triton_kernels(stem)[0]
        how_many = {} if weight is not None else {"parents": geometry[8]}
        tf32 = backends.tf32_allowed()
        call = (children.to(dtype), weight, geometry[11:])
        return str(kernels.plan_call(*call, backward=backward, allow_tf32=tf32, **how_many))
    return ""


def _describe(geometry: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> str:
    batch, height, width, types, rows, depth, ho, wo, many, columns, groups, kh, kw = geometry[:13]
    where = f"{types} children" if height * width * kh * kw == 1 else f"{height}x{width} x {types} children"
    seen = "" if kh * kw == 1 else f" by {kh}x{kw} windows"
    to = f"{many} parents" if ho * wo == 1 else f"{ho}x{wo} x {many} parents"
    return (
        f"batch {batch}, {where} of {rows}x{depth}{seen} to {to} of {rows}x{columns}, {groups} weight groups, "
        f"{str(dtype).removeprefix('torch.')} on {device}"
    )


def explain_call(
    children: Tensor,
    weight: Tensor | None,
    window: Sequence[int],
    dtype: torch.dtype,
    with_parents: bool,
    library_first: bool,
    stem: str = "attention",
    parents: int = 1,
) -> Explanation:
    """Explain one call.

    Parameters
    ----------
    children, weight, window
        As the op takes them.
    dtype
        In which it runs: the children's, or autocast's.
    with_parents
        False for a first iteration.
    library_first
        Whether such an iteration is left to torch's convolution or matmul.
    stem
        The pass: ``"attention"``, ``"pooling"`` or ``"gaussian"``.
    parents
        M, where there is no weight.
    """
    device = children.device
    geometry = geometry_of(children, weight, window, parents)
    pose, many = (geometry[4], geometry[5], geometry[9]), geometry[8]
    call = _describe(geometry, device, dtype)
    refusals = {name: backends.refusal(name, device, dtype, pose, many, stem) for name in backends.NAMES}
    chosen = backends.forced()
    if chosen is not None and refusals[chosen] is not None:
        reasons = {name: refusals[name] or f"{chosen!r} is forced" for name in (chosen, *backends.NAMES)}
        return Explanation(None, f"backend {chosen!r} is forced and cannot take this call", reasons, call=call)
    if not with_parents and chosen != "reference" and library_first:
        why = "without parents every share is 1 / M, and the library's convolution or matmul is the kernel"
        return Explanation("torch", why, {name: refusals[name] or why for name in backends.NAMES}, call=call)
    runs = chosen or next(name for name in backends.NAMES if refusals[name] is None)
    how = "forced" if chosen else next(entry.detail for entry in backends.listing() if entry.name == runs)
    after = f"{chosen!r} is forced" if chosen else f"{runs} comes first"
    reasons = {name: reason or after for name, reason in refusals.items() if name != runs}
    forward, backward = (_plan(runs, stem, children, weight, geometry, dtype, half) for half in (False, True))
    return Explanation(runs, how, reasons, forward, backward, call)
