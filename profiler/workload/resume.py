"""Go on with a run that was interrupted: what its trace holds already, and whether it is a run of the same thing."""

from __future__ import annotations

import contextlib
import os
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass, field
from pathlib import Path

from phaseprof.errors import TraceError, UsageError
from phaseprof.process import this_host
from phaseprof.records import CallKind
from phaseprof.trace.meta import ProcessMeta
from phaseprof.trace.reader import Trace, open_trace
from phaseprof.workload.plan import Cell, WorkloadPlan
from phaseprof.workload.rounds import Rounds

_AS_BEFORE = "Give the options of the run that is to go on, or another folder with -o."

#: Facts of a run that must be the same, and what people call them.
_NAMES: Mapping[str, str] = {
    "engine": "engine",
    "model": "model",
    "parameters": "number of parameters",
    "device": "device",
    "dtype": "dtype",
    "threads": "threads",
    "prompt_tokens": "prompt tokens",
    "new_tokens": "new tokens",
    "batch": "batch sizes",
    "warmup": "warm-up calls",
    "seed": "seed",
    "cache_implementation": "cache",
    "attn": "attention implementation",
    "max_batched_tokens": "tokens of a step",
    "prefix_caching": "prefix caching",
    "draft_tokens": "drafted tokens",
    "tensor_parallel": "tensor-parallel ranks",
    "note": "weights",
}


@dataclass(frozen=True, slots=True)
class Progressed:
    """What earlier runs have done of a plan.

    Attributes:
        calls: Numbers of the counted calls of each cell that are whole in the trace.
        looked: (prompt tokens, batch) of the calls whose kernels were looked at.
        spent_s: Seconds of the counted calls.
    """

    calls: Mapping[Cell, Set[int]] = field(default_factory=dict)
    looked: Set[tuple[int, int]] = frozenset()
    spent_s: float = 0.0

    def rounds(self, plan: WorkloadPlan) -> Rounds:
        """What is left of the counted calls."""
        return Rounds(
            plan.cells,
            plan.repeats,
            plan.least_s,
            done=self.calls,
            spent_s=self.spent_s,
            seed=plan.seed,
        )

    def unseen(self, plan: WorkloadPlan) -> Iterator[Cell]:
        """A cell of each length of prompt and batch size whose kernels were not looked at."""
        seen = set(self.looked)
        for cell in plan.cells:
            if (cell.prompt_tokens, cell.batch) not in seen:
                seen.add((cell.prompt_tokens, cell.batch))
                yield cell

    def to_warm(self, plan: WorkloadPlan) -> tuple[Cell, ...]:
        """The cells to warm up: those of which calls are left, or else those whose kernels are."""
        return self.rounds(plan).cells or tuple(self.unseen(plan))

    def is_whole(self, plan: WorkloadPlan) -> bool:
        """Whether nothing is left to do."""
        return not self.rounds(plan).cells and not any(True for _ in self.unseen(plan))

    def told(self, plan: WorkloadPlan) -> str:
        """What an earlier run has done, and what there is still to do."""
        made = sum(len(numbers) for numbers in self.calls.values())
        planned = self.rounds(plan).planned
        left = "nothing is left to run" if self.is_whole(plan) else f"{planned} are left"
        return f"the trace has {made} of these calls; {left}"


#: Nothing was done yet.
FRESH = Progressed()


def progressed(folder: Path, facts: Mapping[str, object]) -> Progressed:
    """What the trace in a folder holds of a run; `FRESH` where there is no trace yet.

    Args:
        folder: The trace's.
        facts: Of the run that is to go on, as far as they are known; see `check_same`.

    Raises:
        UsageError: If the folder has another run, or a run that still goes on.
        TraceError: If what lies there is no trace, or cannot be read.
    """
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return FRESH
    trace = open_trace(folder)
    before = _workload(trace, folder)
    check_same(folder, before, facts)
    for meta in trace.metas:
        _check_ended(folder, meta)
    return _done(trace)


def check_same(folder: Path, before: Mapping[str, object], facts: Mapping[str, object]) -> None:
    """Check the facts of a run against those that its trace has. More repeats may be asked for than before.

    Raises:
        UsageError: If one differs. Those that ``facts`` does not name are not compared.
    """
    for name, called in _NAMES.items():
        if name in facts and _plain(before.get(name)) != _plain(facts[name]):
            raise UsageError(
                f"The trace {folder} is of another run: {called} {_said(before.get(name))} there, "
                f"{_said(facts[name])} here.",
                _AS_BEFORE,
            )


def check_devices(folder: Path) -> None:
    """Check that all processes of a trace ran on devices of one kind, where an engine shows its devices when it runs.

    Raises:
        UsageError: If they did not.
    """
    found = {
        device.key: device.name for meta in open_trace(folder).metas for device in meta.devices
    }
    if len(found) > 1:
        raise UsageError(
            f"The trace {folder} is of another run: the devices or their settings differ "
            f"({', '.join(sorted(set(found.values())))}).",
            _AS_BEFORE,
        )


def _workload(trace: Trace, folder: Path) -> Mapping[str, object]:
    found = [meta.workload for meta in trace.metas if meta.workload]
    if not found:
        raise TraceError(
            f"The trace {folder} is none that `phaseprof profile` wrote: there is nothing to go on with.",
            "Give another folder with -o.",
        )
    # Every part of a run has the same, and tells of more of them where a repeat was asked for later.
    return found[0]


def _check_ended(folder: Path, meta: ProcessMeta) -> None:
    here = this_host().token
    if not here or meta.host_token != here:
        return
    if meta.pid == os.getpid():
        raise UsageError(
            f"The trace {folder} has parts of a process with the same number, {meta.pid}, as this one.",
            "Run the command again.",
        )
    if meta.complete:
        return
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(meta.pid, 0)
        raise UsageError(
            f"Process {meta.pid} still writes the trace {folder}.", "End it, or wait until it ends."
        )


def _done(trace: Trace) -> Progressed:
    first_tokens = _first_tokens(trace)
    calls: dict[Cell, set[int]] = {}
    looked: set[tuple[int, int]] = set()
    spent_ns = 0
    for row in trace.calls.to_pylist():
        prompt, new, batch = (row[name] for name in ("prompt_tokens", "new_tokens", "sequences"))
        start_ns, end_ns = row["start_ns"], row["end_ns"]
        if row["kind"] == CallKind.LOOK:
            looked.add((prompt, batch))
        inside = bisect_right(first_tokens, end_ns) - bisect_left(first_tokens, start_ns)
        # A kill may have taken the end of a call with it.
        if row["kind"] == CallKind.COUNTED and inside == batch:
            calls.setdefault(Cell(prompt, new, batch), set()).add(row["repeat"])
            spent_ns += end_ns - start_ns
    return Progressed(calls, looked, spent_ns / 1e9)


def _first_tokens(trace: Trace) -> list[int]:
    """When the requests that ended had their first tokens, in order."""
    columns = [
        trace.requests.column(name).to_pylist() for name in ("first_token_ns", "finished_ns")
    ]
    return sorted(
        first for first, finished in zip(*columns, strict=True) if None not in (first, finished)
    )


def _plain(value: object) -> object:
    """As JSON gives it back."""
    return list(value) if isinstance(value, tuple) else value


def _said(value: object) -> str:
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value))
    return "the default" if value is None else str(value)
