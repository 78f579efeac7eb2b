"""One run of the benchmark: its processes, the machine, and the entries that it writes down, row by row."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench import record
from bench.alternatives import ALTERNATIVES, OURS, STORED, is_compiled, suited
from bench.figures import number
from bench.probe import Probe
from bench.process import Remote, WorkerError
from bench.record import Entry
from bench.timing import BUSY, FULL, QUICK, WIDE, Plan
from bench.workload import Case

STARTS, PATIENCE = 120.0, 900.0  # seconds until a process is given up: while it starts, and while it works
FITS = 0.6  # share of the machine's memory that a process may use on the CPU


class Run:
    """A run of ``seconds``, of which ``kind`` ("bench" of a CPU, "gpu") names the files. Raises WorkerError if the
    device cannot be used. ``most`` is the largest batch on a GPU."""

    def __init__(
        self, results: Path, kind: str, device: str, threads: int, seconds: float, most: int = 0, plan: Plan = FULL
    ) -> None:  # fmt: skip
        self.results, self.kind, self.device, self.threads, self.most = results, kind, device, threads, most
        self.plan, self.until = plan, time.monotonic() + seconds
        self.entries: list[Entry] = []
        self.file: Path | None = None
        self.remotes: dict[str, Remote] = {}
        self.machine = record.describe(threads) | {"kind": "quick" if plan is QUICK else "full"}
        self.machine |= self.remote(OURS).call(STARTS, "describe")

    @property
    def left(self) -> float:
        """The seconds that are left."""
        return self.until - time.monotonic()

    def remote(self, name: str, **options: Any) -> Remote:
        """Return a process by its name; ``options`` are those of :class:`Remote` where it does not exist yet."""
        if name not in self.remotes:
            limit = None if self.device == "cuda" else FITS * record.describe_memory()
            self.remotes[name] = Remote(self.threads, Probe, self.device, self.most, memory=limit, **options)
        return self.remotes[name]

    def answer(self, name: str, seconds: float, *what: Any) -> Any:
        """Return a process's answer, or why it ``failed``."""
        try:
            return self.remote(name).call(min(seconds, max(1.0, self.left)), *what)
        except WorkerError as error:
            return {"failed": str(error)}

    def add(self, case: Case, how: str, found: Entry) -> Entry:
        """Keep an entry, and write all of them: what is killed keeps its rows."""
        self.entries.append({**dict(zip(record.CALL, case.key, strict=True)), "how": how, **found})
        self.file = record.write(self.results, self.machine, self.entries, self.kind)
        return self.entries[-1]

    def compare(self, case: Case, names: Sequence[str]) -> dict[str, Entry]:
        """Time ours and alternatives in turns in one process on the CPU, and keep an entry of each; nothing is kept
        where the time is up. A process that dies of compiled code begins again, with safer options, then without it."""
        load, others = os.getloadavg()[0], suited(names, case.workload, case.batch)
        eager = [name for name in others if not is_compiled(name)]
        found: dict[str, Entry] = {}
        for some, safe in ((others, False), (others, True), (eager, True)):
            if self.left <= 0:
                return {}
            found = self.answer(OURS, PATIENCE, "compare", case, [OURS, *some], self.plan, safe)
            if "failed" not in found:
                if safe:
                    found |= {name: {"failed": "the process died"} for name in others if name not in found}
                    notes = {"note": "the process died; run again without vectorised loop tails"}
                    found = {name: entry | (notes if is_compiled(name) else {}) for name, entry in found.items()}
                break
        else:
            if self.left <= 0:
                return {}
            found = {OURS: found}
        if self.plan is not QUICK and case.batch == case.workload.batch and "warm" in found[OURS]:
            large = case.workload.votes_bytes(case.batch) >= 2**30
            for name in (OURS, *[STORED] * (not large)):
                self.remote("fresh").close()
                memory = self.answer("fresh", PATIENCE, "memory", case, name)
                found[name] = found.get(name, {}) | ({"memory": memory} if "failed" not in memory else {})
            self.remote("fresh").close()
        complete = tuple(names) == ALTERNATIVES
        common = {"load": load, "complete": complete and "warm" in found[OURS], "doubts": self._doubts(found, load)}
        return {name: self.add(case, name, common | entry) for name, entry in found.items()}

    def _doubts(self, found: dict[str, Entry], load: float) -> list[str]:
        """Return why a row's figures are doubtful: what else ran beside it shows in them."""
        timed = {name: entry["warm"] for name, entry in found.items() if "warm" in entry}
        rivals = sorted((name for name in timed if name != OURS), key=lambda name: timed[name]["median"])
        said = []
        for name in (OURS, *rivals[:1]) if timed else ():
            spread = (timed[name]["p80"] - timed[name]["p20"]) / timed[name]["median"]
            if spread > WIDE:
                said.append(f"the middle 60 % of {name}'s calls lie {spread:.0%} apart")
        if load > BUSY * self.machine["cores"]:
            said.append(f"the load average was {load:.1f} on {self.machine['cores']} cores")
        return said

    def close(self) -> None:
        for remote in self.remotes.values():
            remote.close()


def line(entry: Entry) -> str:
    """Return an entry in one line."""
    place = "{:<21} {:>4} {:<8.7}{:<5}{:<22}".format(*(entry[name] for name in (*record.CALL, "how")))
    if "failed" in entry:
        return f"{place} failed: {entry['failed']}"
    times = {name: entry[name].get("median") for name in ("warm", "cold", "graph") if name in entry}
    said = " ".join(f"{name} {number(1e3 * one)}" if one else f"{name} failed" for name, one in times.items()) + " ms"
    if "launches" in entry:
        said += f", {1e3 * entry['busy']:.3f} ms of {entry['launches']} launches, host {1e6 * entry['host']:.0f} us"
    return f"{place} {said}" + f", WRONG: {entry['complaint']}" * bool(entry.get("complaint"))
