"""What was recorded against the bands that a healthy GPU lies in. Pure: reads a folder of results, measures nothing.

Where the bands come from is said with each of them; benchmarks/README.md has the list for people.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PASSED, FAILED, NOT_RUN = "pass", "FAIL", "not run"


@dataclass(frozen=True, slots=True)
class Check:
    """One line.

    Attributes:
        name: What is compared.
        verdict: `PASSED`, `FAILED` or `NOT_RUN`.
        found: The figure, or why there is none.
        band: What it should be.
    """

    name: str
    verdict: str
    found: str
    band: str


@dataclass(frozen=True, slots=True)
class Case:
    """The results of one case.

    Attributes:
        name: ``eager-counters-b1``.
        report: As `phaseprof report --json`.
        log: What the step wrote down of it.
        passes, kernels, samples: Rows of the tables; empty where there is none.
    """

    name: str
    report: Mapping[str, Any]
    log: Mapping[str, Any]
    passes: list[dict[str, Any]] = field(default_factory=list)
    kernels: list[dict[str, Any]] = field(default_factory=list)
    samples: list[dict[str, Any]] = field(default_factory=list)

    @property
    def on_gpu(self) -> bool:
        """Whether its model ran on a CUDA device."""
        return bool((self.report.get("device") or {}).get("kind") == "cuda")

    def phase(self, name: str) -> Mapping[str, Any]:
        """The figures of a phase; empty if there was none."""
        found: Mapping[str, Any] = self.report.get("phases", {}).get(name) or {}
        return found


def load(out: Path) -> dict[str, Case]:
    """The cases in a folder."""
    logs: dict[str, Any] = {}
    for path in out.glob("*.json"):
        logs.update(json.loads(path.read_text()).get("cases", {}))
    return {
        path.parent.name: Case(
            path.parent.name,
            json.loads(path.read_text()),
            logs.get(path.parent.name, {}),
            *(
                _rows(path.parent / f"{table}.parquet")
                for table in ("passes", "kernels", "samples")
            ),
        )
        for path in sorted(out.glob("*/report.json"))
    }


def _rows(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    import pyarrow.parquet as pq

    rows: list[dict[str, Any]] = pq.read_table(path).to_pylist()
    return rows


def check(cases: Mapping[str, Case]) -> list[Check]:
    """All checks, those that could not be made included. The bands are those of a GPU: what ran on a CPU is not held
    against them."""
    outputs = list(_outputs(cases))
    cases = {name: case for name, case in cases.items() if case.on_gpu}
    return [
        *outputs,
        *_own_cost(cases),
        *_events_and_kernels(cases),
        *_prefill(cases),
        *_decode(cases),
        *_two_samplers(cases),
        *_bytes(cases),
        *_energy(cases),
    ]


# --- the workload is not changed ------------------------------------------------------------------


def _outputs(cases: Mapping[str, Case]) -> Iterator[Check]:
    """Outputs are identical with and without a session: no band, a promise."""
    differ = [case.name for case in cases.values() if not case.log.get("same_output", False)]
    name = "outputs with and without a session"
    if not cases:
        yield Check(name, NOT_RUN, "no case ran", "identical")
    else:
        found = f"differ in {', '.join(differ)}" if differ else f"identical in {len(cases)} cases"
        yield Check(name, FAILED if differ else PASSED, found, "identical")


def _own_cost(cases: Mapping[str, Case]) -> Iterator[Check]:
    """Time of a generation with the samplers over the time without: 2 % of noise between single runs is usual."""
    for case in _named(cases, "counters"):
        alone, recorded = case.log.get("alone_s"), case.log.get("recorded_s")
        ratio = statistics.median(recorded) / alone if alone and recorded else None
        yield _within(f"time with samplers over time without, {case.name}", ratio, 0.9, 1.05)


# --- times ----------------------------------------------------------------------------------------


def _events_and_kernels(cases: Mapping[str, Case]) -> Iterator[Check]:
    """From a pass's first kernel to its last, over its time by events. Events may hold the launch of the first kernel;
    kernels of a pass lie between its events."""
    found = False
    for case in _named(cases, "kernels"):
        found = True
        for phase, least in (("prefill", 0.90), ("decode", 0.80)):
            name = f"kernel time over event time, {phase}, {case.name}"
            yield _within(name, _median(_extents(case, phase)), least, 1.05)
    if not found:
        yield Check("kernel time over event time", NOT_RUN, "no case ran", "0.80 to 1.05")


def _extents(case: Case, phase: str) -> Iterator[float]:
    spans: dict[int, tuple[int, int]] = {}
    for kernel in case.kernels:
        pass_id = kernel["pass_id"]
        if pass_id is not None:
            begin, end = spans.get(pass_id, (kernel["start_ns"], kernel["end_ns"]))
            spans[pass_id] = (min(begin, kernel["start_ns"]), max(end, kernel["end_ns"]))
    for row in case.passes:
        span = spans.get(row["pass_id"])
        if span is not None and row["phase"] == phase and row["device_ns"]:
            yield (span[1] - span[0]) / row["device_ns"]


# --- bounds ---------------------------------------------------------------------------------------


def _prefill(cases: Mapping[str, Case]) -> Iterator[Check]:
    """Prefill of 2048 tokens is compute-bound; a GPU sustains 55 % of its measured matmul roof or more there."""
    for case in _or_none(_named(cases, "eager-counters"), "eager-counters-b1"):
        figures = case.phase("prefill")
        yield _one_of(f"bound of prefill, {case.name}", figures.get("bound"), ("compute",))
        yield _within(f"MFU of prefill, {case.name}", figures.get("mfu"), 0.55, 1.05)


def _decode(cases: Mapping[str, Case]) -> Iterator[Check]:
    """At batch 1: bandwidth-bound when it is compiled (70 to 90 % of bandwidth under CUDA graphs), else held up by the
    host (20 to 45 % of the floor: arXiv 2605.30571 saw 27 % on H100)."""
    eager = cases.get("eager-counters-b1", _NOTHING)
    compiled = cases.get("compiled-counters-b1", _NOTHING)
    figures = eager.phase("decode")
    names = ("overhead", "overhead or latency")
    yield _one_of("bound of eager decode at batch 1", figures.get("bound"), names)
    yield _within("share of the floor, eager decode at batch 1", figures.get("explained"), 0.1, 0.5)
    figures = compiled.phase("decode")
    yield _one_of("bound of compiled decode at batch 1", figures.get("bound"), ("bandwidth",))
    yield _within("MBU of compiled decode at batch 1", figures.get("mbu"), 0.6, 1.05)
    slow, fast = _step_ms(eager), _step_ms(compiled)
    ratio = slow / fast if slow and fast else None
    yield _within("eager over compiled, a decode step at batch 1", ratio, 1.1, 20.0)


def _step_ms(case: Case) -> float | None:
    figures = case.phase("decode")
    passes = figures.get("passes")
    return figures["span_ms"] / passes if passes else None


# --- counters -------------------------------------------------------------------------------------

_SHARES = ("sm_active", "tensor_active", "dram_active")


def _two_samplers(cases: Mapping[str, Case]) -> Iterator[Check]:
    """What was solved from windows of 100 ms, against samples of 200 µs of the same workload: within 5 points."""
    solved_case = cases.get("eager-counters-b1", _NOTHING)
    sampled_case = cases.get("pm-pm-b1", _NOTHING)
    for phase in ("prefill", "decode"):
        counters = solved_case.phase(phase).get("counters") or {}
        for metric in _SHARES:
            name = f"{metric} of {phase}, solved less sampled"
            solved = _sure(counters.get(metric))
            sampled = mean_of(sampled_case, f"{metric}_share", phase)
            difference = None if solved is None or sampled is None else solved - sampled
            why = "nothing was sampled at 200 µs" if sampled is None else _why(counters.get(metric))
            yield _within(name, difference, -0.05, 0.05, why)


def _bytes(cases: Mapping[str, Case]) -> Iterator[Check]:
    """Bytes that the model had to move in decode, against bytes that DRAM moved."""
    name = "DRAM bytes/s of decode, measured over modelled"
    found = False
    for case in (*_named(cases, "pm-pm"), *_named(cases, "compiled-counters")):
        figures = case.phase("decode")
        modelled = figures.get("gb_per_s")
        read = mean_of(case, "dram_read_bytes_per_s", "decode")
        write = mean_of(case, "dram_write_bytes_per_s", "decode")
        measured = None if read is None or write is None else (read + write) / 1e9
        if measured is None:
            solved = _sure((figures.get("counters") or {}).get("dram_bytes_per_s"))
            measured = None if solved is None else solved / 1e9
        if measured is not None and modelled:
            found = True
            yield _within(f"{name}, {case.name}", measured / modelled, 0.9, 1.25)
    if not found:
        yield Check(name, NOT_RUN, "DRAM was not measured", "0.90 to 1.25")


def _energy(cases: Mapping[str, Case]) -> Iterator[Check]:
    """A board at work takes more than idle and not more than its limit."""
    for case in _or_none(_named(cases, "counters"), "eager-counters-b1"):
        figure = (case.phase("decode").get("counters") or {}).get("power_w")
        why = _why(figure)
        yield _within(f"power in decode, {case.name}, W", _sure(figure), 60.0, 1200.0, why)


def mean_of(case: Case, metric: str, phase: str) -> float | None:
    """The mean of a counter of PM sampling over the windows that lie in passes of a phase, weighted by their length.

    A pass has the device from its launch, or the end of the pass before it, for its time by events.
    """
    spans = []
    free_ns = 0
    for row in sorted(case.passes, key=lambda row: row["start_ns"]):
        if row["device_ns"] is None:
            continue
        begin = max(row["start_ns"], free_ns)
        free_ns = begin + row["device_ns"]
        if row["phase"] == phase and row["warmup"] is None:
            spans.append((begin, free_ns))
    windows = sorted(
        (row["start_ns"], row["end_ns"], row["value"])
        for row in case.samples
        if row["source"] == "pm" and row["metric"] == metric
    )
    total = weight = 0.0
    at = 0
    for begin, end, value in windows:
        while at < len(spans) and spans[at][1] < end:
            at += 1
        if at < len(spans) and spans[at][0] <= begin and end <= spans[at][1]:
            total += value * (end - begin)
            weight += end - begin
    return total / weight if weight else None


# --- lines ----------------------------------------------------------------------------------------

_NOTHING = Case("", {}, {})


def _named(cases: Mapping[str, Case], part: str) -> Iterator[Case]:
    return (case for name, case in sorted(cases.items()) if part in name)


def _or_none(cases: Iterable[Case], name: str) -> Iterator[Case]:
    """The cases, or one without figures, so that its lines say that it did not run."""
    found = False
    for case in cases:
        found = True
        yield case
    if not found:
        yield Case(name, {}, {})


def _within(name: str, value: float | None, least: float, most: float, why: str = "") -> Check:
    band = f"{least:.2f} to {most:.2f}" if most < 100 else f"{least:.0f} to {most:.0f}"
    if value is None:
        return Check(name, NOT_RUN, why or "no figure", band)
    verdict = PASSED if least <= value <= most else FAILED
    return Check(name, verdict, f"{value:.3f}" if most < 100 else f"{value:.0f}", band)


def _one_of(name: str, value: str | None, allowed: tuple[str, ...]) -> Check:
    band = " or ".join(allowed)
    if value is None:
        return Check(name, NOT_RUN, "no figure", band)
    return Check(name, PASSED if value in allowed else FAILED, value, band)


def _sure(figure: Mapping[str, Any] | None) -> float | None:
    if not figure or figure.get("state") != "sure":
        return None
    value: float | None = figure.get("value")
    return value


def _why(figure: Mapping[str, Any] | None) -> str:
    return "not sampled" if not figure else str(figure.get("reason") or "no figure")


def _median(values: Iterable[float]) -> float | None:
    found = list(values)
    return statistics.median(found) if found else None
