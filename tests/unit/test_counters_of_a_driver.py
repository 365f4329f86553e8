"""From a scripted driver to the report: real collectors sample a timeline of phases, and its script comes back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from random import Random

import pytest
from nvml_standin import Standin, standin
from scripted import DEVICE, ON_GPU, Ran, generate_loop, trace_of
from traces import MS, START_NS, model, roofs

from phaseprof.analyzers.counters.counter_results import CounterFigure
from phaseprof.analyzers.report import build_report
from phaseprof.analyzers.results import Report
from phaseprof.cli.render.terminal import render
from phaseprof.clock import Clock
from phaseprof.collectors import gpm, gpm_probe
from phaseprof.collectors.gpm import gpm_collector
from phaseprof.collectors.gpm_probe import Look, look
from phaseprof.collectors.nvml_samples import NvmlSampler
from phaseprof.collectors.sampling import SamplingTask
from phaseprof.errors import NotMeasured
from phaseprof.records import Kernel, Sample
from phaseprof.trace.meta import ClockPair, CollectorCost

UUID = "GPU-33cccccc-0000-0000-0000-000000000000"
H200 = replace(DEVICE, name="NVIDIA H200", uuid=UUID)

#: What the device does in each phase, and in the time between passes.
STATES = {
    "prefill": {"sm": 0.93, "occupancy": 0.28, "tensor": 0.74, "dram": 0.24, "power": 655},
    "decode": {"sm": 0.61, "occupancy": 0.17, "tensor": 0.08, "dram": 0.83, "power": 440},
    "idle": {"sm": 0.05, "occupancy": 0.01, "tensor": 0.0, "dram": 0.02, "power": 300},
}


def script(passes: Sequence[Ran], *more: str) -> str:
    """The passes as the stand-in takes them."""
    lines = ["clock set", "origin 0", f'device 0 name="NVIDIA H200" uuid={UUID}', *more]
    for name, shows in STATES.items():
        pairs = " ".join(f"{key}={value}" for key, value in shows.items())
        lines.append(
            f"state {name} {pairs} sm_clock=1755 memory_clock=3201 temperature=61 "
            f"used_mib=70000 throttle={4 if name == 'prefill' else 0}"
        )
    at = 0
    for ran in passes:
        start, end = round(ran.start), round(ran.end)
        if start > at:
            lines.append(f"run 0 idle {start - at}ns")
        lines.append(f"run 0 {ran.phase} {end - start}ns")
        at = end
    return "\n".join(lines) + "\n"


class ScriptClock(Clock):
    """The time of the script, from the start of the run."""

    def __init__(self) -> None:
        super().__init__(ClockPair(unix_ns=0, monotonic_ns=0))
        object.__setattr__(self, "at_ns", 0)

    def now_unix_ns(self) -> int:
        return START_NS + int(vars(self)["at_ns"])


class Sink:
    def __init__(self) -> None:
        self.clock: Clock = ScriptClock()
        self.rows: list[Sample] = []
        self.notes: list[NotMeasured] = []

    def put_samples(self, rows: Sequence[Sample]) -> None:
        self.rows += rows

    def put_kernels(self, rows: Sequence[Kernel]) -> None: ...

    def note(self, what: NotMeasured) -> None:
        self.notes.append(what)

    def spent(self, cost: CollectorCost) -> None: ...

    def sampling_of(self, key: str) -> bool:
        return True


class Here:
    """Looks for GPM in this process, whose clock is that of the script."""

    def __init__(self, uuid: str) -> None:
        self.uuid = uuid

    def answer(self) -> Look | None:
        return look(self.uuid)

    def end(self) -> None: ...


def sampled(library: Standin, until_ns: float) -> Sink:
    """Sample with both collectors every 100 ms of the script, a little late each time."""
    sink = Sink()
    task = SamplingTask(gpm_collector(), H200, sink)
    nvml = NvmlSampler(H200, sink)
    random = Random(4)
    task.step(0)
    now = 0.0
    while now < until_ns:
        now += 100 * MS + random.uniform(0.5, 3) * MS
        library.set_time_ns(round(now))
        object.__setattr__(sink.clock, "at_ns", round(now))
        task.step(round(now))
        sink.put_samples(nvml.sample())
    task.end()
    nvml.close()
    return sink


@pytest.fixture
def report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Report:
    monkeypatch.setattr(gpm, "Looking", Here)
    monkeypatch.setattr(gpm_probe, "APART_S", 0.0)
    passes = generate_loop(Random(6), values={"prefill": 0.0, "decode": 0.0}, new=24)
    with standin(script(passes, "noise 0.03"), tmp_path) as library:
        sink = sampled(library, passes[-1].end)
    rows = [{**asdict(row), "rank": 0} for row in sink.rows]
    peak = roofs(H200, flops_per_s=989e12, bytes_per_s=4.8e12, source="datasheet")
    meta = replace(ON_GPU, devices=(H200,), models=(model(device=H200),), ceilings=(peak,))
    return build_report(trace_of(passes, rows, meta))


def test_counters_power_clocks_and_throttling_of_each_phase_come_back(report: Report) -> None:
    for phase in ("prefill", "decode"):
        counters, shows = report.phases[phase].counters, STATES[phase]
        assert counters is not None
        for figure, key in (
            (counters.sm_active, "sm"),
            (counters.sm_occupancy, "occupancy"),
            (counters.tensor_active, "tensor"),
            (counters.dram_active, "dram"),
        ):
            assert value_of(figure) == pytest.approx(shows[key], abs=0.05)
            assert figure is not None and figure.error is not None and figure.error < 0.05
        assert value_of(counters.dram_bytes_per_s) == pytest.approx(shows["dram"] * 4.8e12, rel=0.2)
        assert value_of(counters.power_w) == pytest.approx(shows["power"], rel=0.1)
    decode = report.phases["decode"]
    joules = STATES["decode"]["power"] * decode.span_ms / 1e3 / decode.decode_tokens
    assert decode.counters is not None
    assert value_of(decode.counters.joules_per_token) == pytest.approx(joules, rel=0.1)
    (state,) = report.devices
    assert state.sm_clock_hz is not None and state.sm_clock_hz.median == 1.755e9
    assert state.memory_used_bytes == pytest.approx(70_000 * 2**20)
    assert state.throttle is not None
    assert [each.name for each in state.throttle] == ["software power cap"]
    assert state.energy is not None and state.energy.consistent


def value_of(figure: CounterFigure | None) -> float:
    assert figure is not None and figure.sure is not None, figure
    return figure.sure


def test_the_report_shows_them_and_nothing_of_gpu_utilization(report: Report) -> None:
    text = render(report, width=120)

    for expected in ("counters", "tensor", "J/token", "±", "SM clock 1,755 MHz", "power cap"):
        assert expected in text
    assert "utilization" not in text
