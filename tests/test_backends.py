"""Which backend runs: listing, forcing, explaining, the environment, and life without the native library."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from suite import native_only, python
from test_errors import right

import fastcaps
from fastcaps import backends, libraries
from fastcaps.functional import inverted_attention_routing

NAMED = (None, "reference", "cpu")


def test_listing_and_names() -> None:
    entries = backends.listing()
    assert tuple(entry.name for entry in entries) == backends.NAMES == ("cuda", "triton", "cpu", "reference")
    assert entries[3].available and [str(entry).split()[0] for entry in entries] == list(backends.NAMES)


def test_a_triton_that_cannot_compile_the_kernels_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pytest.importorskip("triton"), "__version__", "3.5.1")
    found = libraries.triton_kernels.__wrapped__("verbs")
    assert found == (None, "it needs Triton 3.6 or later (torch 2.10 brings it), got 3.5.1")


@pytest.mark.parametrize(("name", "device"), [("cuda", "cpu"), ("triton", "cpu"), ("cpu", "meta")])
@pytest.mark.parametrize("with_parents", [True, False])
def test_a_forced_backend_never_falls_back(name: str, device: str, with_parents: bool) -> None:
    """Nor to torch's own product, which computes a first iteration."""
    arguments = {key: tensor.to(device) for key, tensor in right().items() if with_parents or key != "parents"}
    # on a machine with a GPU the reason is that the tensors are not there
    refused = pytest.raises(fastcaps.BackendError, match=f"{name!r} is forced and cannot take this")
    with fastcaps.backend(name), refused:
        inverted_attention_routing(**arguments)
    assert backends.forced() is None


def test_the_environment_forces_a_backend_and_a_level(native_library: Path) -> None:
    """A level that cannot be had refuses calls on the CPU, and no others."""
    script = """if True:
        import torch, fastcaps
        assert fastcaps.backends.forced() == "reference"
        fastcaps.backends._forced.default = None
        tensors = [torch.randn(s) for s in ((3, 40, 4, 4), (40, 10, 4, 4), (3, 10, 4, 4))]
        routing = fastcaps.functional.inverted_attention_routing
        try:
            routing(*tensors)
        except fastcaps.BackendError as error:
            assert "FASTCAPS_CPU_CAPABILITY='sse9'" in str(error) and "forced" not in str(error), error
        else:
            raise SystemExit("a call on the CPU fell back")
        with fastcaps.backend("reference"):
            routing(*tensors)
        assert fastcaps.backends.forced() is None
        routing(*(tensor.to("meta") for tensor in tensors))  # as on a GPU: no business of the CPU's
    """
    done = python(script, FASTCAPS_BACKEND="reference", FASTCAPS_CPU_CAPABILITY="sse9")
    assert done.returncode == 0, done.stderr
    with pytest.raises(ValueError, match="must be one of cuda, triton, cpu, reference, got 'gpu'"):
        fastcaps.backend("gpu")


def test_the_reference_serves_an_op_that_a_library_has_no_kernels_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """As it is while an op is being written: its name is not taken for another's."""
    has, children = torch._C._dispatch_has_kernel_for_dispatch_key, torch.randn(2, 5, 2, 3)
    monkeypatch.setattr(
        torch._C, "_dispatch_has_kernel_for_dispatch_key", lambda op, key: "pooling" not in op and has(op, key)
    )
    monkeypatch.setattr(backends, "_cpu_problem", backends._cpu_problem.__wrapped__)
    monkeypatch.setattr(backends, "chosen", backends.chosen.__wrapped__)
    with fastcaps.backend("reference"):
        wanted = fastcaps.functional.routing_pool(children)
    assert torch.equal(fastcaps.functional.routing_pool(children), wanted)
    explained = fastcaps.explain(fastcaps.functional.routing_pool, children)
    assert explained.backend == "reference"
    if libraries.library("cpu").problem == "":
        assert "no fastcaps_cpu::pooling_routing" in explained.reasons["cpu"]

    monkeypatch.setattr(libraries, "triton_kernels", lambda stem="attention": (None, f"no kernels of {stem}"))
    monkeypatch.setattr(backends, "_triton_problem", lambda: "")
    call = backends.Call.of("pooling", (children.to("meta"), None, None, None, 1, ()))
    there = call._replace(device=torch.device("cpu" if backends._interprets() else "cuda"))
    assert backends.refusal("triton", there) == "no kernels of pooling"


# ---- blocks in tasks and threads -------------------------------------------------------------------------------------

Block = Callable[[Any], AbstractContextManager[None]]
each_setting = pytest.mark.parametrize(
    ("block", "now", "values"),
    [
        (fastcaps.backend, backends.forced, ("reference", "cpu", None)),
        (backends.tf32x3, lambda: backends.settings()[1], (True, False, False)),
    ],
    ids=["backend", "tf32x3"],
)


@each_setting
def test_blocks_of_tasks_are_their_own(block: Block, now: Any, values: Any) -> None:
    async def inside(value: Any, count: int) -> list[Any]:
        seen = []
        with block(value):
            for _ in range(count):
                await asyncio.sleep(0)
                seen.append(now())
        return [*seen, now()]

    async def both() -> list[list[Any]]:
        found = await asyncio.gather(inside(values[0], 3), inside(values[1], 5))
        with block(values[0]):
            assert await asyncio.create_task(inside(values[1], 1)) == [values[1], values[0]]
        return list(found)

    assert asyncio.run(both()) == [[values[0]] * 3 + [values[2]], [values[1]] * 5 + [values[2]]]
    assert now() == values[2]


def test_compiled_code_asks_again_where_a_block_begins_or_ends() -> None:
    @torch.compile(backend="eager", fullgraph=True)
    def run(x: torch.Tensor) -> torch.Tensor:
        return x + NAMED.index(backends.forced())

    x, found = torch.zeros(1), []
    for name in (None, "reference", None, "cpu", "reference"):
        with nullcontext() if name is None else fastcaps.backend(name):
            found.append(NAMED[int(run(x))])
    assert found == [None, "reference", None, "cpu", "reference"]
    for outer, inner in (("cpu", "reference"), ("reference", "cpu")):
        with fastcaps.backend(outer), fastcaps.backend(inner):
            assert NAMED[int(run(x))] == inner


@pytest.mark.parametrize("made_by", ["cpu", "reference"])
def test_a_backward_runs_what_its_forward_was_forced_to(made_by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Be it in another block, or in another thread: those of autograd run the backwards of a GPU."""
    if not backends.native_serves():
        pytest.skip("no native library here")
    children, weight = torch.randn(2, 3, 2, 2, requires_grad=True), torch.randn(3, 5, 2, 2)
    with fastcaps.backend(made_by):
        found = fastcaps.functional.dynamic_routing(children, weight)
    ran = []
    on_cpu, chosen = backends.on_cpu, backends.chosen

    def asked(name: str | None, *rest: Any) -> str:
        ran.append(chosen(name, *rest))
        return ran[-1]

    monkeypatch.setattr(backends, "on_cpu", lambda *call: on_cpu(*call) and not ran.append("cpu"))
    monkeypatch.setattr(backends, "chosen", asked)
    other = "reference" if made_by == "cpu" else "cpu"
    with fastcaps.backend(other):
        thread = threading.Thread(target=lambda: found.square().sum().backward())
        thread.start()
        thread.join()
    assert set(ran) == {made_by} and children.grad is not None
    assert backends.forced() is None


def test_a_block_that_another_context_ends_is_over() -> None:
    """An asynchronous generator that is left early ends its block in a task of its own."""

    async def generator() -> AsyncIterator[None]:
        with fastcaps.backend("reference"):
            yield

    async def after() -> str | None:
        async for _ in generator():
            break
        await asyncio.sleep(0.01)  # the generator ends
        thread = threading.Thread(target=other.__enter__)  # while some block is open, contexts are asked
        thread.start()
        thread.join()
        return backends.forced()

    other = fastcaps.backend("cpu")
    assert asyncio.run(after()) is None
    other.__exit__(None, None, None)
    outer, inner = fastcaps.backend("reference"), fastcaps.backend("cpu")
    outer.__enter__(), inner.__enter__(), outer.__exit__(None, None, None)
    assert backends.forced() == "cpu"  # blocks may end in any order
    inner.__exit__(None, None, None)
    assert backends.forced() is None


@native_only
def test_a_library_of_another_processor_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "native_capability", lambda: None)
    monkeypatch.delenv("FASTCAPS_CPU_CAPABILITY", raising=False)
    said = backends._cpu_problem.__wrapped__("attention")
    assert "which this processor lacks" in said and "FASTCAPS_LEVELS=all" in said
    monkeypatch.setenv("FASTCAPS_CPU_CAPABILITY", "avx9")
    assert "'avx9' is not a level" in backends._cpu_problem.__wrapped__("attention")
