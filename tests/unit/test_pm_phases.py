"""From the GPU's clock to the report: PM samples of a script become the counters of its phases."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from cupti_stand_in import Gpu, install
from scripted import DEVICE, UUID, Ran, Script, samples, trace_of
from test_pm import CLOCK, DRAM, OCCUPANCY, READ, SM, TENSOR, WRITE, Sink, constant, rate
from traces import MS, START_NS

from phaseprof.analyzers.report import build_report
from phaseprof.clock import Clock
from phaseprof.collectors.pm import DeviceRun, PmPlan
from phaseprof.metrics import Metric
from phaseprof.trace.meta import ClockPair

VALUES = {
    Metric.SM_ACTIVE: {"prefill": 0.96, "decode": 0.41},
    Metric.TENSOR_ACTIVE: {"prefill": 0.79, "decode": 0.06},
    Metric.DRAM_ACTIVE: {"prefill": 0.21, "decode": 0.83},
}


def passes() -> list[Ran]:
    """A prefill of 37 ms and twenty decode steps of 6 ms, twelve times, with a pause between."""
    found = []
    at = 20.0 * MS
    for _ in range(12):
        found.append(Ran(at, at + 37 * MS, "prefill", 0.0))
        at += 37 * MS
        for _ in range(20):
            found.append(Ran(at + 0.2 * MS, at + 6 * MS, "decode", 0.0))
            at += 6 * MS
        at += 45 * MS
    return found


class HereSink(Sink):
    """Its clock puts the host's time at which sampling begins at the start of the run."""

    begun_ns = 0

    @property
    def clock(self) -> Clock:
        return Clock(ClockPair(START_NS, self.begun_ns))

    def sampling_of(self, key: str) -> bool:
        return key == UUID


def percent_of(metric: Metric, begun_ns: int) -> Callable[[int, int], float]:
    """What CUPTI shows of a metric over an interval of the host's clock."""
    script = Script([replace(ran, value=VALUES[metric][ran.phase]) for ran in passes()])
    return lambda begin, end: 100.0 * script.mean(begin - begun_ns, end - begun_ns)


def test_phases_of_a_few_milliseconds_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Gpu({}, drift=3e-5)
    begun_ns = gpu.host_ns
    gpu.metrics = {
        SM: percent_of(Metric.SM_ACTIVE, begun_ns),
        TENSOR: percent_of(Metric.TENSOR_ACTIVE, begun_ns),
        DRAM: percent_of(Metric.DRAM_ACTIVE, begun_ns),
        OCCUPANCY: constant(30.0),
        CLOCK: rate(1.98e9),
        READ: rate(1e12),
        WRITE: rate(1e11),
    }
    install(gpu, monkeypatch)
    sink = HereSink()
    sink.begun_ns = begun_ns
    end_ns = begun_ns + round(passes()[-1].end)

    def wait(step_s: float) -> bool:
        gpu.wait(step_s)
        return gpu.host_ns >= end_ns

    DeviceRun(DEVICE, sink, PmPlan(), wait, gpu.monotonic_ns).run()
    assert sink.notes == []
    rows = [
        row
        for metric in Metric
        for row in samples(
            [(s.start_ns - START_NS, s.end_ns - START_NS, s.value) for s in sink.of(metric)],
            metric,
            source="pm",
        )
    ]
    report = build_report(trace_of(passes(), rows))
    for phase in ("prefill", "decode"):
        counters = report.phases[phase].counters
        assert counters is not None
        for metric, figure in (
            (Metric.SM_ACTIVE, counters.sm_active),
            (Metric.TENSOR_ACTIVE, counters.tensor_active),
            (Metric.DRAM_ACTIVE, counters.dram_active),
        ):
            assert figure is not None
            assert figure.source == "pm"
            assert figure.sure == pytest.approx(VALUES[metric][phase], abs=0.02), (phase, metric)
