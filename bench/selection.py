"""Which rows a run measures, and against what: the same for pytest and for ``fastcaps bench``."""

from __future__ import annotations

from collections.abc import Sequence

from bench import device
from bench.alternatives import ALTERNATIVES, is_compiled
from bench.runner import Case
from bench.workloads import QUICK, WORKLOADS, find

__all__ = ["alternatives", "cases"]


def cases(
    names: Sequence[str],
    quick: bool,
    on: str = "cpu",
    batches: Sequence[int] = (),
    precisions: Sequence[str] = (),
) -> list[Case]:
    """Return the rows of some workloads, or, where none are named, of the quick ones or of all.

    Raises ValueError for a name that no workload has.
    """
    workloads = [find(name) for name in names or (QUICK if quick else WORKLOADS)]
    if on == "cuda":
        return device.cases(workloads, batches, precisions)
    usual = {one.name: QUICK.get(one.name, (1,))[:1] if quick else one.batches for one in workloads}
    wanted = {name: batches or some for name, some in usual.items()}
    return [Case(one, batch, mode) for one in workloads for batch in wanted[one.name] for mode in (False, True)]


def alternatives(eager: bool) -> list[str]:
    """Return the alternatives that take part; ``eager`` leaves out those of torch.compile."""
    return [name for name in ALTERNATIVES if not (eager and is_compiled(name))]
